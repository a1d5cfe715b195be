from tests.frameworks.django_shop.celery import app as celery_app

__all__ = ["celery_app"]
