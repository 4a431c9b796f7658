from django.urls import URLPattern, URLResolver, path

from appliance.capacity import views

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.capacity, name="capacity"),
    path("start/", views.start, name="capacity_start"),
    path("<int:run_id>/stop/", views.stop, name="capacity_stop"),
    path("<int:run_id>/status/", views.status, name="capacity_status"),
    path("<int:run_id>/figures.csv", views.export, {"kind": "csv"}, name="capacity_csv"),
    path("<int:run_id>/figures.json", views.export, {"kind": "json"}, name="capacity_json"),
]
