"""A Django project with a schedule in its database, for the tests of the beat."""

import os
import sys

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["TEST_DATABASE"]}},
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: E402
from django_celery_beat.schedulers import DatabaseScheduler  # noqa: E402

from celery_singleton_lock.beat import SingletonSchedulerMixin  # noqa: E402


class Scheduler(SingletonSchedulerMixin, DatabaseScheduler):
    """As the documentation tells to mix it."""


if __name__ == "__main__":
    call_command("migrate", verbosity=0)
    every, _ = IntervalSchedule.objects.get_or_create(every=2, period=IntervalSchedule.SECONDS)
    PeriodicTask.objects.create(name="every-two-seconds", task=sys.argv[1], args="[[]]", interval=every)
