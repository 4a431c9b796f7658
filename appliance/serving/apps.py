from django.apps import AppConfig


class ServingConfig(AppConfig):
    """Builds no engine: `ready` runs for every command. `manage.py serve` does."""

    name = "appliance.serving"
    label = "serving"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from appliance.serving import checks  # noqa: F401 - registers them
