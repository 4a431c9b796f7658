from django.apps import AppConfig


class ConsoleConfig(AppConfig):
    name = "appliance.console"
    label = "console"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from appliance.accounts.acts import acts_listen
        from appliance.console.audit import act_record
        from appliance.serving.gateway import gateway_when_serving

        acts_listen(act_record)
        gateway_when_serving(keep_history)


def keep_history() -> None:
    """Watch the engine from the start on, so that the first page opened has the last minutes."""
    from appliance.console.feed import current_feed

    current_feed().start()
