from django.urls import URLPattern, URLResolver, path, re_path

from appliance.console import (
    views,
    views_exposure,
    views_history,
    views_keys,
    views_models,
    views_quotas,
    views_services,
    views_usage,
    views_weights,
)

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.live, name="console_live"),
    path("load/", views.load, name="console_load"),
    path("tuning/", views.tuning, name="console_tuning"),
    path("tuning/replay/", views.tuning_replay, name="console_tuning_replay"),
    path("tuning/weights/", views_weights.weights_set, name="console_weights"),
    re_path(
        r"^tuning/weights/(?P<row_id>[0-9]{1,18})/clear/$",
        views_weights.weights_clear,
        name="console_weights_clear",
    ),
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
    path("models/", views_models.models, name="console_models"),
    path("models/progress/", views_models.models_progress, name="console_models_progress"),
    path("models/load/", views_models.models_load, name="console_models_load"),
    path("models/get/", views_models.models_get, name="console_models_get"),
    path("models/import/", views_models.models_import, name="console_models_import"),
    path("models/forget/", views_models.models_forget, name="console_models_forget"),
    path("models/stop/", views_models.models_stop, name="console_models_stop"),
    path("models/delete/", views_models.models_delete, name="console_models_delete"),
    path("quotas/", views_quotas.quotas, name="console_quotas"),
    re_path(
        r"^quotas/(?P<rule_id>[0-9]{1,18})/delete/$",
        views_quotas.quota_rule_delete,
        name="console_quota_rule_delete",
    ),
    path("keys/", views_keys.keys, name="console_keys"),
    path("keys/rules/", views_keys.keys_rules, name="console_keys_rules"),
    re_path(r"^keys/(?P<key_id>[0-9]{1,18})/$", views_keys.key, name="console_key"),
    re_path(
        r"^keys/(?P<key_id>[0-9]{1,18})/revoke/$",
        views_keys.key_revoke,
        name="console_key_revoke",
    ),
    path("service-accounts/", views_services.services, name="console_services"),
    re_path(
        r"^service-accounts/(?P<user_id>[0-9]{1,18})/$",
        views_services.service,
        name="console_service",
    ),
    path("usage/", views_usage.usage, name="console_usage"),
    path("usage/usage.csv", views_usage.usage_download, name="console_usage_csv"),
    path("history/", views_history.history, name="console_history"),
]
