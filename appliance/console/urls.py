from django.urls import URLPattern, URLResolver, path

from appliance.console import views

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.live, name="console_live"),
    path("requests/<str:request_id>/kill/", views.kill, name="console_kill"),
]
