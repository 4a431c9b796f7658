"""What the embedded Celery broker keeps in the data folder."""

import json
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def broker_mend(control_folder: Path, messages_folder: Path) -> None:
    """Remove broken tables and messages of the broker; the worker writes its tables anew.

    A full disk, or a kill between opening and writing, leaves one empty. No worker could start on
    such a table again, also when there is room, and each such message ends one.
    """
    for file in (*control_folder.glob("*.exchange"), *messages_folder.glob("*.msg")):
        try:
            json.loads(file.read_bytes())
        except FileNotFoundError:
            continue
        except ValueError:
            logger.warning("the broker's file %s is broken; it is removed", file.name)
            file.unlink(missing_ok=True)
