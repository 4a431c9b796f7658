"""The team's instructions: what admins put before every chat, whoever writes it.

Every change is a row, the newest holds. They go to the engine as the server's own prompt, whose
blocks all members share; they are sent only while the loaded model has room for them.
"""

import logging
from collections.abc import Sequence

from django.db import transaction

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.chat.models import TeamInstructions
from appliance.errors import BadRequest, Conflict, NotFound
from appliance.serving.booking import in_db_thread
from appliance.serving.gateway import get_backend
from appliance.serving.types import Caller, GenerationRequest, ModelInfo

logger = logging.getLogger(__name__)

MAX_CHARS = 100_000
# The rest of the context is for the chat itself.
CONTEXT_SHARE = 4
VERSIONS_KEPT = 50
_NAMED_CHARS = 80

# What was counted last: the text and the model as it was then -> tokens.
_counted: dict[tuple[object, ...], int | None] = {}


# ---- what holds


def instructions_now() -> TeamInstructions | None:
    """The newest version, which may be empty; None before the first. Blocking."""
    return TeamInstructions.objects.order_by("-pk").first()


def instructions_text() -> str:
    """Blocking."""
    now = instructions_now()
    return now.text if now is not None else ""


def instructions_versions() -> Sequence[TeamInstructions]:
    """The newest first. Blocking."""
    return list(TeamInstructions.objects.order_by("-pk")[:VERSIONS_KEPT])


async def instructions_in_force() -> str | None:
    """What goes before an answer that is begun now. Raises EngineUnavailable."""
    text = await in_db_thread(instructions_text)
    if not text:
        return None
    num_tokens = await instructions_tokens(text)
    model = get_backend().model
    if model is not None and instructions_fit(num_tokens, model):
        return text
    logger.warning("the team's instructions are left out: the loaded model has no room for them")
    return None


def instructions_shown(model: ModelInfo | None) -> str:
    """For members: what holds, as far as is known without asking the model. Blocking."""
    text = instructions_text()
    if model is None:
        return text
    num_tokens = _counted.get(_key(text, model), 0)
    return text if instructions_fit(num_tokens, model) else ""


# ---- how long they are


def instructions_limit(model: ModelInfo) -> int:
    return model.context_tokens // CONTEXT_SHARE


def instructions_fit(num_tokens: int | None, model: ModelInfo) -> bool:
    return num_tokens is not None and num_tokens <= instructions_limit(model)


async def instructions_tokens(text: str) -> int | None:
    """Tokens of the shortest chat with `text` before it; None where the model cannot take it.

    Counted once a text and model. Event loop. Raises EngineUnavailable.
    """
    backend = get_backend()
    model = backend.model
    key = _key(text, model)
    if key not in _counted:
        try:
            prepared = await backend.prepare(
                GenerationRequest(
                    caller=Caller(user_id=0, username="", source="chat"),
                    messages=[{"role": "user", "content": "a"}],
                    server_prompt=text,
                )
            )
            num_tokens = prepared.prompt_tokens
        except BadRequest as exc:
            logger.info("the team's instructions cannot be used: %s", exc.message)
            num_tokens = None
        _counted.clear()
        _counted[key] = num_tokens
    return _counted[key]


def _key(text: str, model: ModelInfo | None) -> tuple[object, ...]:
    if model is None:
        return (text,)
    return (text, model.name, model.loaded_at, model.context_tokens)


# ---- changes


async def instructions_check(text: str) -> str:
    """`text` as it is kept, if the loaded model has room for it.

    Raises:
        BadRequest: too long, with the numbers.
        EngineUnavailable: no model to count its tokens.
    """
    text = text.replace("\r\n", "\n").replace("\x00", "").strip()
    if not text:
        return ""
    if len(text) > MAX_CHARS:
        raise BadRequest(
            f"This has {len(text):,} characters; at most {MAX_CHARS:,} are allowed. Shorten it."
        )
    num_tokens = await instructions_tokens(text)
    model = get_backend().model
    if model is None or instructions_fit(num_tokens, model):
        return text
    limit = f"{instructions_limit(model):,} of the {model.context_tokens:,} tokens that it reads"
    many = "far too many" if num_tokens is None else f"{num_tokens:,}"
    raise BadRequest(
        f"This has {many} tokens for {model.name}; at most {limit} may be used, so that there is "
        "room for the chats. Shorten it."
    )


def instructions_save(text: str, by: User, *, if_version: int) -> bool:
    """Make `text`, which was checked, hold from the next answer on. Blocking.

    Returns whether it is another text than before. Raises Conflict when `if_version` is not the
    newest version's (0 before the first).
    """
    with transaction.atomic():
        now = instructions_now()
        if if_version != (now.pk if now is not None else 0):
            who = now.changed_by_name if now is not None else "Somebody"
            raise Conflict(
                f"{who} changed the instructions meanwhile. Below is what you wrote; compare it "
                "with the newest version, then save again."
            )
        if text == (now.text if now is not None else ""):
            return False
        TeamInstructions.objects.create(text=text, changed_by=by, changed_by_name=by.username)
        old = TeamInstructions.objects.order_by("-pk").values_list("pk", flat=True)
        TeamInstructions.objects.filter(pk__in=list(old[VERSIONS_KEPT:])).delete()
        act_done(by, "chat.instructions", named(text), text=text)
    return True


def instructions_version(version_id: int) -> TeamInstructions:
    """Blocking. Raises NotFound."""
    found = TeamInstructions.objects.filter(pk=version_id).first()
    if found is None:
        raise NotFound("This version is not kept any more.")
    return found


def named(text: str) -> str:
    """The start of `text` in one line."""
    line = " ".join(text.split())
    if not line:
        return "none"
    return f"“{line}”" if len(line) <= _NAMED_CHARS else f"“{line[:_NAMED_CHARS].rstrip()}…”"
