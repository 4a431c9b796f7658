from django.urls import URLPattern, URLResolver, path, re_path

from appliance.console import views, views_exposure

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.live, name="console_live"),
    path("tuning/", views.tuning, name="console_tuning"),
    path("tuning/replay/", views.tuning_replay, name="console_tuning_replay"),
    path("requests/<str:request_id>/kill/", views.kill, name="console_kill"),
    path("exposure/", views_exposure.exposure, name="console_exposure"),
    re_path(
        r"^exposure/save/(?P<part>callers|address)/$",
        views_exposure.exposure_save,
        name="console_exposure_save",
    ),
    re_path(
        r"^exposure/trial/(?P<how>keep|take-back)/$",
        views_exposure.exposure_trial_end,
        name="console_exposure_trial",
    ),
    re_path(
        r"^exposure/back/(?P<record_id>[0-9]{1,18})/$",
        views_exposure.exposure_back,
        name="console_exposure_back",
    ),
]
