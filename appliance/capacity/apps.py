from django.apps import AppConfig


class CapacityConfig(AppConfig):
    name = "appliance.capacity"
    label = "capacity"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # A shared task is sent by the app that exists in the process: without ours, to nowhere.
        from appliance import celery  # noqa: F401
