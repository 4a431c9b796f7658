"""Pages about the API: behind the sign-in like every page."""

from django.urls import URLPattern, URLResolver, path

from appliance.api import try_page

urlpatterns: list[URLPattern | URLResolver] = [
    path("account/try/", try_page.try_page, name="try_page"),
    path("account/openapi.json", try_page.openapi_download, name="openapi_download"),
]
