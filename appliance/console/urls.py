from django.urls import URLPattern, URLResolver, path

from appliance.console import views

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.live, name="console_live"),
    path("tuning/", views.tuning, name="console_tuning"),
    path("tuning/replay/", views.tuning_replay, name="console_tuning_replay"),
    path("requests/<str:request_id>/kill/", views.kill, name="console_kill"),
]
