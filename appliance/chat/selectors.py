"""What pages and sockets show: wire forms of rows, and the grouped list of conversations."""

import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta

from django.utils import timezone

from appliance.accounts.models import User
from appliance.chat.excerpts import excerpts
from appliance.chat.models import Conversation, Message, MessageState
from appliance.chat.protocol import ConversationData, MessageData, QuotaData, ServerMessage
from appliance.chat.services import (
    conversation_search,
    message_by_client_id,
    messages_shown,
    search_words,
)
from appliance.quotas.selectors import quota_status

LIST_STEP = 100


@dataclass(slots=True)
class ConversationList:
    """The sidebar: titled groups in order, and whether there is more."""

    groups: list[tuple[str, list[Conversation]]] = field(default_factory=list)
    query: str = ""
    total: int = 0
    next_limit: int | None = None
    running: Collection[uuid.UUID] = ()


def conversation_list(
    owner: User, *, query: str = "", limit: int = LIST_STEP, running: Collection[uuid.UUID] = ()
) -> ConversationList:
    query = search_words(query)
    found = list(conversation_search(owner, query)[: limit + 1])
    shown = ConversationList(query=query, running=running)
    if query:
        shown.total = conversation_search(owner, "").count()
    if len(found) > limit:
        shown.next_limit = limit + LIST_STEP
        found = found[:limit]
    if query:
        shown.groups = [("Found", found)] if found else []
        in_text = excerpts(found, query)
        for conversation in found:
            conversation.excerpt = in_text.get(conversation.pk)
        return shown
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    groups: dict[str, list[Conversation]] = {
        name: [] for name in ("Pinned", "Today", "Last 7 days", "Older")
    }
    for conversation in found:
        if conversation.pinned:
            groups["Pinned"].append(conversation)
        elif conversation.updated_at >= midnight:
            groups["Today"].append(conversation)
        elif conversation.updated_at >= midnight - timedelta(days=7):
            groups["Last 7 days"].append(conversation)
        else:
            groups["Older"].append(conversation)
    shown.groups = [(name, members) for name, members in groups.items() if members]
    return shown


def conversation_data(conversation: Conversation) -> ConversationData:
    return {
        "id": str(conversation.pk),
        "title": conversation.title,
        "pinned": conversation.pinned,
    }


def message_data(message: Message) -> MessageData:
    """The wire form. The text of an answer being written comes as numbered deltas instead."""
    return {
        "id": message.pk,
        "conversation_id": str(message.conversation_id),
        "position": message.position,
        "role": message.role,
        "content": "" if message.state == MessageState.STREAMING else message.content,
        "state": message.state,
        "client_id": message.client_id,
        "prompt_tokens": message.prompt_tokens,
        "cached_tokens": message.cached_tokens,
        "completion_tokens": message.completion_tokens,
        "ttft_s": message.ttft_s,
        "duration_s": message.duration_s,
        "finish_reason": message.finish_reason,
        "error": message.error,
    }


def messages_saved(
    conversation_id: uuid.UUID, after_position: int, running: bool
) -> list[ServerMessage]:
    """The messages after a position, for a browser that may have missed them."""
    saved: list[ServerMessage] = []
    follows = -1
    for message in messages_shown(conversation_id, running=running):
        if message.position > after_position:
            data = message_data(message)
            saved.append({"type": "message.saved", "message": data, "follows": follows})
        follows = message.position
    return saved


def sent_before(owner_id: int, client_id: str) -> list[ServerMessage]:
    """What a browser missed that sends the message `client_id` again; empty if it is new."""
    sent = message_by_client_id(owner_id, client_id)
    if sent is None:
        return []
    created: ServerMessage = {
        "type": "conversation.created",
        "conversation": conversation_data(sent.conversation),
        "client_id": client_id,
    }
    return [created, *messages_saved(sent.conversation_id, sent.position - 1, running=True)]


def quota_data(user: User) -> QuotaData:
    status = quota_status(user)
    return {
        "window": status.window,
        "limit_tokens": status.limit_tokens,
        "used_tokens": status.used_tokens,
        "left_tokens": status.left_tokens,
        "resets_at": status.resets_at.isoformat(),
    }
