"""All websocket routes."""

from appliance.chat.websocket_urls import urlpatterns as chat_patterns
from appliance.console.websocket_urls import urlpatterns as console_patterns

urlpatterns = [*chat_patterns, *console_patterns]
