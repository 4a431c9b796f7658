"""Conversations and their messages. All changes go through `services`."""

import uuid
from dataclasses import dataclass

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

TITLE_CHARS = 120


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Words of a message that were searched, with some around them."""

    message_id: int
    before: str
    found: str
    after: str


class Conversation(models.Model):
    """One chat of one user. `deleted_at` hides it at once and lets the user take that back."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="conversations"
    )
    title = models.CharField(max_length=TITLE_CHARS)
    pinned = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    # The last message, not the last rename: the list is ordered by it.
    updated_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True, blank=True)

    # No column: where a search found its words in the messages.
    excerpt: "Excerpt | None" = None

    class Meta:
        indexes = [models.Index(fields=["owner", "deleted_at", "-updated_at"])]

    def __str__(self) -> str:
        return f"conversation {self.id}"


class Role(models.TextChoices):
    USER = "user"
    ASSISTANT = "assistant"


class MessageState(models.TextChoices):
    COMPLETE = "complete"
    # Being written by a generation of this process; anything else that says so is an orphan.
    STREAMING = "streaming"
    # The server ended it: shutdown, crash, or an admin.
    INTERRUPTED = "interrupted"
    # The owner ended it.
    STOPPED = "stopped"
    # The model failed after the answer began.
    ERROR = "error"


class Message(models.Model):
    """One turn. An answer keeps what it cost and how fast it came."""

    conversation = models.ForeignKey(
        Conversation, on_delete=models.CASCADE, related_name="messages"
    )
    position = models.PositiveIntegerField()
    role = models.CharField(max_length=9, choices=Role)
    content = models.TextField(blank=True)
    state = models.CharField(max_length=11, choices=MessageState, default=MessageState.COMPLETE)
    # Chosen by the browser for each message it sends, so that sending twice starts one answer.
    client_id = models.CharField(max_length=64, blank=True)
    # Taken out of the conversation by "Answer again" or an edit: kept, not shown, not sent.
    superseded = models.BooleanField(default=False)
    prompt_tokens = models.PositiveIntegerField(null=True, blank=True)
    cached_tokens = models.PositiveIntegerField(null=True, blank=True)
    completion_tokens = models.PositiveIntegerField(null=True, blank=True)
    ttft_s = models.FloatField(null=True, blank=True)
    duration_s = models.FloatField(null=True, blank=True)
    finish_reason = models.CharField(max_length=16, blank=True)
    # Text for people.
    error = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    # When its newest writing began: later than it was created for one that was gone on with.
    begun_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["conversation", "position"], name="chat_message_position"
            ),
            models.UniqueConstraint(
                fields=["conversation", "client_id"],
                condition=~Q(client_id=""),
                name="chat_message_client_id",
            ),
        ]
        indexes = [
            models.Index(fields=["client_id"]),
            models.Index(
                fields=["conversation"],
                condition=Q(state=MessageState.STREAMING),
                name="chat_message_streaming",
            ),
        ]

    def __str__(self) -> str:
        return f"message {self.pk} of {self.conversation_id}"


class TeamInstructions(models.Model):
    """A version of what admins put before every chat; the newest holds."""

    text = models.TextField(blank=True)
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    # Kept when the account is gone.
    changed_by_name = models.CharField(max_length=150)
    at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"version {self.pk} of the team's instructions"
