"""The responses that `/v1/responses` keeps: each user's own, for a while, up to a bound.

Blocking; call from a database thread. Another user's response is the same as none.
"""

import logging
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import orjson
from django.db import DatabaseError, transaction
from django.utils import timezone

from appliance.api.models import StoredResponse
from appliance.api.responses import Item
from appliance.errors import BadRequest, NotFound

logger = logging.getLogger(__name__)

Fields = dict[str, Any]

KEPT_DAYS = 30
# Of one user; past either the oldest go.
MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024
# Responses that one conversation may go back through.
MAX_CHAIN = 200
# OpenAI's bounds of one page of items.
MAX_PAGE = 100


def response_store(owner_id: int, items: Sequence[Fields], answer: Fields) -> bool:
    """Keep one response, and let the owner's oldest go where there are too many.

    False when the database does not take it: the answer itself is whole, and is still given.
    """
    size = len(orjson.dumps([*items, answer]))
    try:
        with transaction.atomic():
            StoredResponse.objects.create(
                id=answer["id"],
                owner_id=owner_id,
                previous_id=answer["previous_response_id"] or "",
                size=size,
                items=items,
                answer=answer,
            )
            _prune(owner_id)
    except DatabaseError as exc:
        logger.error("response %s was not stored: %s", answer["id"], exc)
        return False
    return True


def _prune(owner_id: int) -> None:
    kept, num_bytes, surplus = 0, 0, []
    newest_first = StoredResponse.objects.filter(owner_id=owner_id).order_by("-created_at", "-id")
    for response_id, size in newest_first.values_list("id", "size"):
        kept, num_bytes = kept + 1, num_bytes + size
        # The newest stays however long it is.
        if kept > 1 and (kept > MAX_RESPONSES or num_bytes > MAX_BYTES):
            surplus.append(response_id)
    if surplus:
        StoredResponse.objects.filter(id__in=surplus).delete()


def response_get(owner_id: int, response_id: str) -> StoredResponse:
    """Raises NotFound."""
    # SQLite and PostgreSQL differ in what they do with a NUL in a text.
    found = None
    if "\0" not in response_id:
        found = StoredResponse.objects.filter(
            owner_id=owner_id, id=response_id, created_at__gt=_oldest()
        ).first()
    if found is None:
        raise NotFound(
            f"There is no response {response_id[:80]!r}. Responses are kept for {KEPT_DAYS} days, "
            f"the newest {MAX_RESPONSES} of each user."
        )
    return found


def response_delete(owner_id: int, response_id: str) -> None:
    """Raises NotFound."""
    response_get(owner_id, response_id).delete()


def response_context(owner_id: int, response_id: str) -> list[Item]:
    """All items of the conversation up to and with this response, oldest first.

    Raises BadRequest when it, or one before it, is not kept any more.
    """
    chain: list[StoredResponse] = []
    next_id = response_id
    while next_id:
        if len(chain) == MAX_CHAIN:
            raise BadRequest(
                f"This conversation goes back through more than {MAX_CHAIN} responses. Begin a "
                "new one, and send what matters in input.",
                param="previous_response_id",
            )
        try:
            chain.append(response_get(owner_id, next_id))
        except NotFound as exc:
            text = exc.message if not chain else f"A part of this conversation is gone: {exc}"
            raise BadRequest(text, param="previous_response_id") from exc
        next_id = chain[-1].previous_id
    return [
        Item.model_validate(item)
        for stored in reversed(chain)
        for item in (*stored.items, *stored.answer["output"])
    ]


def items_page(items: Sequence[Fields], *, limit: str, order: str, after: str | None) -> Fields:
    """One page of a response's input items, in OpenAI's form. Raises BadRequest."""
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise BadRequest(f"limit must be 1 to {MAX_PAGE}.", param="limit")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    found = list(items if order == "asc" else reversed(items))
    if after is not None:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise BadRequest("after names no item of this response.", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > len(page),
    }


def input_items(given: str | Sequence[Item]) -> list[Fields]:
    """The input as items of OpenAI's form, each with an id."""
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    return [_item(item) for item in given]


def _item(item: Item) -> Fields:
    fields = item.model_dump(exclude_none=True)
    kind = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
    fields["id"] = f"{kind.get(item.type, 'item')}_{uuid.uuid4().hex}"
    fields["status"] = "completed"
    if isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": item.content}]
    for part in fields.get("content", ()):
        if part["type"] == "output_text":
            part["annotations"] = []
    return fields


def responses_expire() -> int:
    """Delete what is past its time; returns how many. May run at any time and twice."""
    num_deleted, _ = StoredResponse.objects.filter(created_at__lte=_oldest()).delete()
    return num_deleted


def _oldest() -> datetime:
    return timezone.now() - timedelta(days=KEPT_DAYS)
