"""How the last change, download or import of a model ended, for as long as it is news."""

import time
from collections.abc import Mapping
from typing import Any

from appliance.serving.model_jobs import ModelJob

# A success is no news after this; a failure is, until it is hidden or another model was loaded.
DONE_SHOWN_S = 600.0

_swap_hidden: float | None = None


def swap_hide(swap: Mapping[str, Any] | None) -> None:
    """Show no more how this change of the model ended."""
    global _swap_hidden
    _swap_hidden = swap["began_at"] if swap else None


def swap_error(swap: Mapping[str, Any] | None) -> str:
    """Why the last change of the model failed; empty when it did not or that is no news."""
    if not swap or swap["stage"] != "failed" or swap["began_at"] == _swap_hidden:
        return ""
    return str(swap["error"])


def job_shown(job: ModelJob | None, swap: Mapping[str, Any] | None) -> ModelJob | None:
    """The ended job if it is news."""
    if job is None or job.ended_at is None:
        return None
    if job.state != "failed":
        return job if time.time() - job.ended_at < DONE_SHOWN_S else None
    served_since = swap and swap["stage"] == "done" and swap["began_at"] > job.ended_at
    return None if served_since else job
