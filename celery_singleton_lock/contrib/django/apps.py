"""The name of the app, which Django looks up here."""

from django.apps import AppConfig
from django.core.checks import register


class LocksConfig(AppConfig):
    """The app; without it, its label would be `django`."""

    name = "celery_singleton_lock.contrib.django"
    label = "celery_singleton_lock"
    verbose_name = "Celery"

    def ready(self) -> None:
        """Let `manage.py check` look at the locks."""
        from celery_singleton_lock.contrib.django.checks import check_locks, check_store  # noqa: PLC0415 (after the apps)

        register(check_locks, "celery")
        register(check_store, "celery", deploy=True)
