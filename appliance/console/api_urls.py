from django.urls import URLPattern, URLResolver, path

from appliance.console import api

urlpatterns: list[URLPattern | URLResolver] = [path("api/engine", api.engine, name="api_engine")]
