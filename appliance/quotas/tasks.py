import logging

from celery import shared_task

from appliance.quotas.services import quota_heal

logger = logging.getLogger(__name__)


@shared_task
def heal_reservations() -> None:
    """Give back tokens that a crashed server still holds. May run at any time and twice."""
    if healed := quota_heal():
        logger.info("gave back the tokens of %s generations that never ended", healed)
