"""The locks in Django's admin, and a task class for projects in Django.

`INSTALLED_APPS += ["celery_singleton_lock.contrib.django"]` adds a page to the admin. The project must import its
Celery app when it starts.
"""

from celery.contrib.django.task import DjangoTask

from celery_singleton_lock import SingletonTask

__all__ = ["SingletonDjangoTask"]


class SingletonDjangoTask(SingletonTask, DjangoTask):
    """A `SingletonTask` with `delay_on_commit` and `apply_async_on_commit`, for `@shared_task(base=...)`."""

    abstract = True
