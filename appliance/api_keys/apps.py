from django.apps import AppConfig


class ApiKeysConfig(AppConfig):
    name = "appliance.api_keys"
    label = "api_keys"
    default_auto_field = "django.db.models.BigAutoField"
