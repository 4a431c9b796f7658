"""What admins do to the models of this server: every act is written down. Blocking."""

from pathlib import Path

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.errors import BadRequest, EngineUnavailable
from appliance.serving.gateway import get_backend
from appliance.serving.model_jobs import model_jobs
from appliance.serving.model_store import model_delete as store_delete
from appliance.serving.model_swap import model_swap

MAX_NAME = 300
MAX_PATH = 4096


def model_load(name: str, by: User) -> None:
    """Begin to serve this stored model in the place of the loaded one.

    Raises:
        NotFound, BadRequest: there is no such model, or it cannot be served.
        Conflict: another change is under way.
        EngineUnavailable: no engine, or the server stops.
    """
    before = loaded_name()
    model_swap(name)
    act_done(by, "model.load", name, former=before or "")


def model_pull(name: str, by: User) -> None:
    """Begin to fetch a model by its name or repository. Raises BadRequest, Conflict."""
    name = _plain(name, MAX_NAME, "name")
    model_jobs.start("pull", name, [name])
    act_done(by, "model.pull", name)


def model_import(path: str, by: User) -> None:
    """Begin to import a file or folder of this machine. Raises BadRequest, Conflict."""
    path = _plain(path, MAX_PATH, "path")
    if not Path(path).is_absolute():
        raise BadRequest(
            "Give the whole path on the server's machine, beginning with a slash.", param="path"
        )
    model_jobs.start("import", path, [path])
    act_done(by, "model.import", path)


def model_stop(by: User) -> None:
    """End what is being fetched or imported. Raises NotFound."""
    job = model_jobs.job
    model_jobs.stop()
    act_done(by, "model.stop", job.target if job else "")


def model_delete(name: str, by: User) -> None:
    """Raises NotFound, Conflict: it is loaded."""
    store_delete(name)
    act_done(by, "model.delete", name)


def loaded_name() -> str | None:
    try:
        model = get_backend().model
    except EngineUnavailable:
        return None
    return None if model is None else model.name


def _plain(text: str, most: int, param: str) -> str:
    text = text.strip()
    if not text:
        raise BadRequest("Nothing was given.", param=param)
    if len(text) > most or not text.isprintable() or text.startswith("-"):
        raise BadRequest(
            f"{text[:80]!r} cannot be used: at most {most:,} plain characters, and no dash at "
            "first.",
            param=param,
        )
    return text
