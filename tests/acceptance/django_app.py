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
    # The command for the database: `make`, or an attribute of an entry that is set and saved, as in the admin.
    what, name, value = sys.argv[1:]
    if what == "make":
        call_command("migrate", verbosity=0)
        every, _ = IntervalSchedule.objects.get_or_create(every=int(value), period=IntervalSchedule.SECONDS)
        PeriodicTask.objects.create(name=name, task="tests.acceptance.app.collect", args="[[]]", interval=every)
    else:
        entry = PeriodicTask.objects.get(name=name)
        setattr(entry, what, value == "True")
        entry.save()
