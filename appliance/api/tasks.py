import logging

from celery import shared_task

from appliance.api.stored_responses import responses_expire

logger = logging.getLogger(__name__)


@shared_task
def expire_responses() -> None:
    """Delete stored responses that are past their time. May run at any time and twice."""
    if num_deleted := responses_expire():
        logger.info("deleted %s stored responses that were past their time", num_deleted)
