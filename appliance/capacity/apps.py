from django.apps import AppConfig


class CapacityConfig(AppConfig):
    name = "appliance.capacity"
    label = "capacity"
    default_auto_field = "django.db.models.BigAutoField"
