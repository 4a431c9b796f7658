from contextlib import suppress

from celery import shared_task
from django.db import DatabaseError

from appliance.serving.worker_watch import worker_sign


@shared_task(ignore_result=True)
def sign_of_life() -> None:
    """Say that the worker works. A database that does not take it is told by the server."""
    with suppress(DatabaseError):
        worker_sign()
