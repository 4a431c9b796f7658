"""Every change to conversations and messages. What is not the caller's own does not exist.

Called on database threads. A foreign, deleted or unknown id raises the same NotFound.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from django.db import transaction
from django.db.models import Max, Q, QuerySet
from django.utils import timezone

from appliance.accounts.models import User
from appliance.chat.models import TITLE_CHARS, Conversation, Message, MessageState, Role
from appliance.errors import BadRequest, Conflict, NotFound

SEARCH_CHARS = 200
INTERRUPTED_TEXT = "The server stopped while it was writing."
PROCESS_STARTED = timezone.now()
# A row that nobody writes any more; far longer than the gap between its start and its first check.
ORPHAN_AFTER = timedelta(minutes=5)


# ---- conversations


def conversation_get(
    owner_id: int, conversation_id: uuid.UUID, *, deleted: bool = False
) -> Conversation:
    """Raises NotFound unless it is this owner's and (not) deleted, as asked."""
    found = Conversation.objects.filter(
        pk=conversation_id, owner_id=owner_id, deleted_at__isnull=not deleted
    ).first()
    if found is None:
        raise NotFound("This chat does not exist, or it was deleted.", param="conversation_id")
    return found


def conversation_create(
    owner: User, first_text: str, *, conversation_id: uuid.UUID | None = None
) -> Conversation:
    """A new conversation, named by the start of its first message."""
    return Conversation.objects.create(
        id=conversation_id or uuid.uuid4(),
        owner=owner,
        title=title_from(first_text),
        updated_at=timezone.now(),
    )


def title_from(text: str) -> str:
    """The first line with words in it, cut at a word near 60 characters."""
    line = next((part.strip() for part in text.splitlines() if part.strip()), "New chat")
    line = " ".join(line.split())
    if len(line) <= 60:
        return line
    cut = line[:60]
    return (cut.rsplit(" ", 1)[0] if " " in cut[20:] else cut) + "…"


def conversation_rename(owner: User, conversation_id: uuid.UUID, title: str) -> Conversation:
    title = " ".join(title.replace("\x00", "").split())
    if not title:
        raise BadRequest("A chat needs a name. Write at least one character.", param="title")
    if len(title) > TITLE_CHARS:
        raise BadRequest(
            f"The name has {len(title)} characters; at most {TITLE_CHARS} are allowed.",
            param="title",
        )
    conversation = conversation_get(owner.pk, conversation_id)
    conversation.title = title
    conversation.save(update_fields=["title"])
    return conversation


def conversation_pin(owner: User, conversation_id: uuid.UUID, pinned: bool) -> Conversation:
    conversation = conversation_get(owner.pk, conversation_id)
    conversation.pinned = pinned
    conversation.save(update_fields=["pinned"])
    return conversation


def conversation_delete(owner: User, conversation_id: uuid.UUID) -> Conversation:
    """Hide it. `conversation_restore` brings it back."""
    conversation = conversation_get(owner.pk, conversation_id)
    conversation.deleted_at = timezone.now()
    conversation.save(update_fields=["deleted_at"])
    return conversation


def conversation_restore(owner: User, conversation_id: uuid.UUID) -> Conversation:
    conversation = conversation_get(owner.pk, conversation_id, deleted=True)
    conversation.deleted_at = None
    conversation.save(update_fields=["deleted_at"])
    return conversation


def search_words(query: str) -> str:
    """What is searched of what was typed."""
    return query.replace("\x00", "").strip()[:SEARCH_CHARS]


def conversation_search(owner: User, query: str) -> QuerySet[Conversation]:
    """The owner's conversations, latest first; with a query those whose title or text has it."""
    found = Conversation.objects.filter(owner=owner, deleted_at=None).order_by("-updated_at")
    query = search_words(query)
    if not query:
        return found
    in_text = Message.objects.filter(
        conversation__owner=owner, superseded=False, content__icontains=query
    )
    return found.filter(Q(title__icontains=query) | Q(pk__in=in_text.values("conversation_id")))


# ---- messages


def message_append(
    conversation: Conversation,
    role: Role,
    content: str,
    *,
    state: MessageState = MessageState.COMPLETE,
    client_id: str = "",
) -> Message:
    """Add at the end. Call inside a transaction that holds the conversation."""
    last = conversation.messages.aggregate(last=Max("position"))["last"]
    return Message.objects.create(
        conversation=conversation,
        position=0 if last is None else last + 1,
        role=role,
        content=content,
        state=state,
        client_id=client_id,
    )


def messages_shown(conversation_id: uuid.UUID, *, running: bool) -> list[Message]:
    """The messages of a conversation in order.

    Unless an answer is `running` in this process, one that says it is being written was left by a
    server that died: it is marked as interrupted. One that was begun a moment ago is not touched:
    it may have started after the caller asked whether any is running.
    """
    messages = Message.objects.filter(conversation_id=conversation_id, superseded=False)
    if not running:
        begun_before = max(PROCESS_STARTED, timezone.now() - ORPHAN_AFTER)
        messages.filter(state=MessageState.STREAMING, begun_at__lt=begun_before).update(
            state=MessageState.INTERRUPTED, error=INTERRUPTED_TEXT, finish_reason="error"
        )
    return list(messages.order_by("position"))


def message_by_client_id(owner_id: int, client_id: str) -> Message | None:
    return Message.objects.filter(
        client_id=client_id, conversation__owner_id=owner_id, conversation__deleted_at=None
    ).first()


# ---- generations


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What an owner asks for.

    start: an answer to `text`. again: another answer to the last message of the user. edit: an
    answer to `text` in place of the user's message that `message_id` names and of all after it.
    continue: more of the last answer, which `message_id` names.
    """

    kind: Literal["start", "again", "edit", "continue"]
    text: str | None = None
    message_id: int | None = None


@dataclass(frozen=True, slots=True)
class StartedTurn:
    """What one start saved: the user's message, if there is a new one, and the answer's row.

    `follows` is the position of the message before them, -1 without one.
    """

    conversation: Conversation
    user_message: Message | None
    answer: Message
    follows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended; written once."""

    state: MessageState
    content: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    duration_s: float
    error: str = ""


def generation_history(
    owner_id: int, conversation_id: uuid.UUID | None, ask: Ask
) -> list[dict[str, str]]:
    """What the model reads; for `continue` it ends with the answer to go on with.

    Neighbours of one role are joined, for templates that ask for roles to alternate: an answer
    that was stopped before its first word leaves two messages of the user in a row.

    Raises:
        NotFound: no such conversation of this owner.
        Conflict: there is nothing to answer, to replace or to go on with.
    """
    messages: Sequence[Message] = []
    if conversation_id is not None:
        conversation_get(owner_id, conversation_id)
        messages = messages_shown(conversation_id, running=False)
    turns = [(message.role, message.content) for message in _kept(messages, ask) if message.content]
    if ask.text is not None:
        turns.append((Role.USER, ask.text))
    history: list[dict[str, str]] = []
    for role, content in turns:
        if history and history[-1]["role"] == str(role):
            history[-1]["content"] += "\n\n" + content
        else:
            history.append({"role": str(role), "content": content})
    return history


def _kept(messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
    """Those of a conversation that stay before the new text. Raises Conflict."""
    if ask.kind == "start":
        return messages
    if ask.kind == "continue":
        last = messages[-1] if messages else None
        if last is None or last.pk != ask.message_id or last.role != Role.ASSISTANT:
            raise Conflict("This is not the last answer of the chat any more. Load the page again.")
        if not last.content or last.finish_reason == "stop":
            raise Conflict("This answer has come to its end. Ask a question to hear more.")
        return messages
    places = [i for i, m in enumerate(messages) if m.role == Role.USER and m.content]
    if not places:
        raise Conflict("There is no message to answer in this chat. Write one first.")
    if ask.kind == "again":
        return messages[: places[-1] + 1]
    place = next((i for i in places if messages[i].pk == ask.message_id), None)
    if place is None:
        raise Conflict("This message is not in the chat any more. Load the page again.")
    return messages[:place]


def generation_start(
    owner: User,
    conversation_id: uuid.UUID,
    ask: Ask,
    *,
    client_id: str,
    is_new: bool,
) -> StartedTurn:
    """Save the user's message and the row of the answer, in one short transaction."""
    with transaction.atomic():
        if is_new:
            conversation = conversation_create(
                owner, ask.text or "", conversation_id=conversation_id
            )
        else:
            conversation_get(owner.pk, conversation_id)
            conversation = Conversation.objects.select_for_update().get(pk=conversation_id)
        follows = _make_room(conversation, ask)
        user_message = None
        if ask.text is not None:
            user_message = message_append(conversation, Role.USER, ask.text, client_id=client_id)
        if ask.kind == "continue":
            answer = _reopen(conversation, ask, client_id)
        else:
            answer = message_append(
                conversation,
                Role.ASSISTANT,
                "",
                state=MessageState.STREAMING,
                client_id="" if ask.text is not None else client_id,
            )
        conversation.updated_at = timezone.now()
        conversation.save(update_fields=["updated_at", "title"])
    return StartedTurn(conversation, user_message, answer, follows)


def _make_room(conversation: Conversation, ask: Ask) -> int:
    """Take out what the new turn replaces; the position of the last message that stays before."""
    if ask.kind == "start":
        last = conversation.messages.filter(superseded=False).aggregate(last=Max("position"))
        return -1 if last["last"] is None else int(last["last"])
    messages = list(conversation.messages.filter(superseded=False).order_by("position"))
    kept = _kept(messages, ask)
    gone = messages[len(kept) :]
    Message.objects.filter(pk__in=[message.pk for message in gone]).update(superseded=True)
    if ask.kind == "edit" and not kept and conversation.title == title_from(gone[0].content):
        conversation.title = title_from(ask.text or "")
    if ask.kind == "continue":
        kept = kept[:-1]
    return kept[-1].position if kept else -1


def _reopen(conversation: Conversation, ask: Ask, client_id: str) -> Message:
    """The answer to go on with, with its text and counts so far."""
    answer = conversation.messages.get(pk=ask.message_id)
    answer.state, answer.error, answer.finish_reason = MessageState.STREAMING, "", ""
    answer.client_id, answer.begun_at = client_id, timezone.now()
    answer.save(update_fields=["state", "error", "finish_reason", "client_id", "begun_at"])
    return answer


def ending_continued(earlier: Message, ending: Ending) -> Ending:
    """The counts of the whole answer, whose `earlier` part was continued until `ending`.

    The waits before the second part are left out of its time, so that its speed stays true.
    """
    if earlier.prompt_tokens is None or earlier.completion_tokens is None:
        # A server that died left no counts: those of the second part hold its text as prompt.
        return ending
    waited_s = ending.duration_s if ending.ttft_s is None else ending.ttft_s
    return replace(
        ending,
        prompt_tokens=earlier.prompt_tokens,
        cached_tokens=earlier.cached_tokens or 0,
        completion_tokens=earlier.completion_tokens + ending.completion_tokens,
        ttft_s=earlier.ttft_s,
        duration_s=(earlier.duration_s or 0.0) + max(0.0, ending.duration_s - waited_s),
    )


def generation_checkpoint(message_id: int, content: str) -> None:
    """Keep the text so far, in case this process dies."""
    Message.objects.filter(pk=message_id, state=MessageState.STREAMING).update(content=content)


def generation_finish(message_id: int, ending: Ending) -> Message | None:
    """Write the answer and what it cost. None when its conversation is gone for good."""
    values: dict[str, Any] = {name: getattr(ending, name) for name in Ending.__slots__}
    # PostgreSQL keeps no NUL, and a model may emit one.
    values["content"] = values["content"].replace("\x00", "�")
    Message.objects.filter(pk=message_id).update(**values)
    return Message.objects.filter(pk=message_id).first()
