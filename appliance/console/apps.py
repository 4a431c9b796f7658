from django.apps import AppConfig


class ConsoleConfig(AppConfig):
    name = "appliance.console"
    label = "console"
    default_auto_field = "django.db.models.BigAutoField"
