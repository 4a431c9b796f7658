"""A conversation as a Markdown file."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from django.utils import timezone

from appliance.chat.models import Conversation, Message, MessageState, Role

FILE_NAME_CHARS = 80
# What some system does not take in the name of a file.
_NOT_IN_NAMES = re.compile(r'[\\/:*?"<>|\s]+')
# Names of devices, which Windows takes for no file.
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")
_MARKS = re.compile(r"([\\`*_{}\[\]<>#|&!~])")
_STATE_WORDS = {
    MessageState.STREAMING: "This answer was still being written.",
    MessageState.STOPPED: "This answer was stopped here.",
    MessageState.INTERRUPTED: "The server ended this answer here.",
    MessageState.ERROR: "This answer broke off here.",
}


def markdown_of(conversation: Conversation, messages: Sequence[Message]) -> str:
    """Its messages in order, as they were written: they are Markdown already."""
    at = timezone.localtime()
    parts = [f"# {_plain(conversation.title)}", f"*Saved on {at:%Y-%m-%d at %H:%M}*"]
    for message in messages:
        parts.append("---")
        parts.append("**You**" if message.role == Role.USER else "**Answer**")
        parts += _body(message)
    return "\n\n".join(parts) + "\n"


def _body(message: Message) -> Iterable[str]:
    # A block of code that was cut off would swallow what follows.
    text = message.content.strip("\n")
    if text.strip():
        yield text + _closing_fence(text)
    if words := _STATE_WORDS.get(MessageState(message.state)):
        yield f"*{words}*"
    elif message.finish_reason == "length":
        yield "*This answer reached its longest length.*"


def _closing_fence(text: str) -> str:
    fence = ""
    for line in text.splitlines():
        found = re.match(r" {0,3}(`{3,}|~{3,})(.*)$", line)
        if found is None:
            continue
        mark, rest = found[1], found[2]
        if not fence:
            # Backticks behind it make it code within a line.
            fence = "" if mark[0] == "`" and "`" in rest else mark
        elif mark[0] == fence[0] and len(mark) >= len(fence) and not rest.strip():
            fence = ""
    return f"\n{fence}" if fence else ""


def file_name(title: str) -> str:
    """A name that every system takes: no path, no control or direction marks, not too long."""
    shown = "".join(" " if unicodedata.category(char)[0] == "C" else char for char in title)
    name = _NOT_IN_NAMES.sub(" ", shown).strip(" .")[:FILE_NAME_CHARS].strip(" .")
    if not name or _DEVICES.match(name):
        name = f"chat {name}".strip()
    return f"{name}.md"


def _plain(title: str) -> str:
    """`title` as text that no Markdown reader takes for more."""
    return _MARKS.sub(r"\\\1", title)
