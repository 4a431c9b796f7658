from django.apps import AppConfig


class ExposureConfig(AppConfig):
    name = "appliance.exposure"
    label = "exposure"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from appliance.exposure import checks  # noqa: F401 - registers them
