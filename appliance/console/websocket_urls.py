from django.urls import URLPattern, path

from appliance.console.consumers import ConsoleConsumer

urlpatterns: list[URLPattern] = [path("ws/console/", ConsoleConsumer.as_asgi())]
