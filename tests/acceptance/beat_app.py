from celery.schedules import crontab

from tests.acceptance.app import app, collect

app.conf.update(
    singleton_beat_ttl=3,
    beat_schedule={
        "every-two-seconds": {"task": collect.name, "schedule": 2.0, "args": ([],)},
        "every-minute": {"task": collect.name, "schedule": crontab(), "args": ([],)},
    },
)
