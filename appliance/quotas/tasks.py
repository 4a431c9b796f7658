import logging

from celery import shared_task

from appliance.quotas.rollup import usage_roll_up
from appliance.quotas.services import quota_heal

logger = logging.getLogger(__name__)


@shared_task
def heal_reservations() -> None:
    """Give back tokens that a crashed server still holds. May run at any time and twice."""
    if healed := quota_heal():
        logger.info("gave back the tokens of %s generations that never ended", healed)


@shared_task
def roll_up_usage() -> None:
    """Add the ledger up by hour and day. May run at any time and twice; catches up by itself."""
    if rebuilt := usage_roll_up():
        logger.debug("added up %s hours and days of the ledger", rebuilt)
