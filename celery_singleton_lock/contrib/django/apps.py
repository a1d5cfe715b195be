"""The name of the app, which Django looks up here."""

from django.apps import AppConfig


class LocksConfig(AppConfig):
    """The app; without it, its label would be `django`."""

    name = "celery_singleton_lock.contrib.django"
    label = "celery_singleton_lock"
    verbose_name = "Celery"
