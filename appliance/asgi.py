"""ASGI entry: exposure checks, then for sockets the session, then the routes.

What is under /v1 goes past the middleware for pages: see api.handler.

`get_asgi_application()` sets Django up, so every import that needs models stands below it.
"""

from django.core.asgi import get_asgi_application

http_application = get_asgi_application()

from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402

from appliance.api.handler import ApiHandler, ApiPaths  # noqa: E402
from appliance.exposure.middleware import ExposureMiddleware  # noqa: E402
from appliance.websocket_urls import urlpatterns  # noqa: E402

application = ExposureMiddleware(
    ProtocolTypeRouter(
        {
            "http": ApiPaths(api=ApiHandler(), pages=http_application),
            "websocket": AuthMiddlewareStack(URLRouter(urlpatterns)),
        }
    )
)
