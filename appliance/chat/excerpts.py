"""What a search found in the messages of a conversation: the first place, with words around it."""

import uuid
from collections.abc import Iterable

from django.db.models import F, OuterRef, Subquery, Value
from django.db.models.functions import Greatest, Lower, StrIndex, Substr

from appliance.chat.models import Conversation, Excerpt, Message

# Characters shown before the found words, and with all after them.
BEFORE_CHARS = 24
CHARS = 120


def excerpts(conversations: Iterable[Conversation], query: str) -> dict[uuid.UUID, Excerpt]:
    """For those with `query` in a message: the database cuts, so that no long text is read."""
    hits = Message.objects.filter(superseded=False, content__icontains=query)
    first = hits.filter(conversation=OuterRef("pk")).order_by("position").values("pk")[:1]
    ids = Conversation.objects.filter(pk__in=[each.pk for each in conversations]).values_list(
        Subquery(first), flat=True
    )
    rows = (
        Message.objects.filter(pk__in=[pk for pk in ids if pk is not None])
        # As the search compares: what counts as the same letter is the database's to say.
        .annotate(at=StrIndex(Lower("content"), Lower(Value(query))))
        .filter(at__gt=0)
        .annotate(begin=Greatest(F("at") - BEFORE_CHARS, Value(1)))
        .annotate(cut=Substr("content", F("begin"), CHARS))
        .values_list("conversation_id", "pk", "at", "begin", "cut")
    )
    found = {}
    for conversation_id, pk, at, begin, cut in rows:
        start, end = at - begin, at - begin + len(query)
        before = cut[:start]
        if begin > 1:
            # Not from the middle of a word.
            before = "…" + (before.partition(" ")[2] or before)
        found[conversation_id] = Excerpt(pk, before, cut[start:end], cut[end:])
    return found
