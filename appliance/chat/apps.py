from django.apps import AppConfig


class ChatConfig(AppConfig):
    name = "appliance.chat"
    label = "chat"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django.contrib.auth.signals import user_logged_out

        from appliance.chat.endings import finish_answers, session_signed_out
        from appliance.serving.gateway import gateway_when_stopping

        user_logged_out.connect(session_signed_out, dispatch_uid="chat-signed-out")
        gateway_when_stopping(finish_answers)
