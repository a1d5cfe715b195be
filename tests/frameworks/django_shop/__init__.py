"""A shop in Django, with Celery in it as Celery's documentation says, whose imports run once at a time."""

from tests.frameworks.django_shop.celery import app as celery_app

__all__ = ["celery_app"]
