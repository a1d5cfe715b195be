import os

from sqlalchemy_celery_beat.schedulers import DatabaseScheduler

from celery_singleton_lock.beat import SingletonSchedulerMixin
from tests.acceptance.beat_app import app

app.conf.beat_dburi = f"sqlite:///{os.environ['TEST_DATABASE']}"


class Scheduler(SingletonSchedulerMixin, DatabaseScheduler):
    """As the documentation tells to mix it."""
