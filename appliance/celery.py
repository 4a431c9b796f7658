"""Celery application: background jobs beside the web process, in `<app>/tasks.py`."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "appliance.settings")

app = Celery("blockhouse")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
