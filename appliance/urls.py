"""All HTTP routes, one include an app. What is outside the log-in says so in its own view."""

from django.urls import include, path, re_path

from appliance.api.urls import unknown_address

handler500 = "appliance.serving.views.page_failed"

urlpatterns = [
    path("", include("appliance.serving.urls")),
    path("", include("appliance.accounts.urls")),
    path("", include("appliance.account_page.urls")),
    path("", include("appliance.api.urls")),
    path("", include("appliance.api.page_urls")),
    path("", include("appliance.console.api_urls")),
    re_path(r"^api(/.*)?$", unknown_address),
    path("console/capacity/", include("appliance.capacity.urls")),
    path("console/", include("appliance.console.urls")),
    path("", include("appliance.chat.urls")),
]
