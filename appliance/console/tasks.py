from celery import shared_task

from appliance.console.load_history import hours_make, old_rows_delete


@shared_task
def roll_up_load() -> None:
    """Make hours of the plotted minutes, and drop what is too old. May run twice (D06)."""
    hours_make()
    old_rows_delete()
