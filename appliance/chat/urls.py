from django.urls import URLPattern, URLResolver, path

from appliance.chat import views, views_instructions

app_name = "chat"

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.chat, name="new"),
    path("c/<uuid:conversation_id>/", views.chat, name="conversation"),
    path("c/<uuid:conversation_id>/export/", views.export, name="export"),
    path("c/<uuid:conversation_id>/rename/", views.rename, name="rename"),
    path("c/<uuid:conversation_id>/pin/", views.pin, name="pin"),
    path("c/<uuid:conversation_id>/delete/", views.delete, name="delete"),
    path("c/<uuid:conversation_id>/restore/", views.restore, name="restore"),
    path("console/instructions/", views_instructions.instructions, name="instructions"),
    path("chat/list/", views.conversations, name="list"),
    path("chat/state/", views.state, name="state"),
]
