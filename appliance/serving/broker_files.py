"""What the embedded Celery broker keeps in the data folder."""

import json
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def broker_mend(control_folder: Path) -> None:
    """Remove broken tables of the broker; the worker writes them anew when it starts.

    A full disk, or a kill between opening and writing, leaves one empty. No worker could start on
    it again, also when there is room.
    """
    for table in control_folder.glob("*.exchange"):
        try:
            json.loads(table.read_bytes())
        except ValueError:
            logger.warning("the broker's file %s is broken; it is made anew", table.name)
            table.unlink(missing_ok=True)
