from django.urls import URLPattern, path

from appliance.chat.consumers import ChatConsumer

urlpatterns: list[URLPattern] = [path("ws/chat/", ChatConsumer.as_asgi())]
