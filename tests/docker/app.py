"""The app of the workers. CELERY_BROKER_URL and CELERY_RESULT_BACKEND are read by Celery itself."""

from celery import Celery

from tests.docker.tasks import SETTINGS

app = Celery("workers", include=["tests.docker.tasks"])
app.conf.update(SETTINGS)
