from django.apps import AppConfig


class ChatConfig(AppConfig):
    name = "appliance.chat"
    label = "chat"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django.contrib.auth.signals import user_logged_out

        from appliance.chat.signed_out import end_session

        user_logged_out.connect(end_session, dispatch_uid="chat-signed-out")
