"""Django's `AppConfig`, and the checks of `manage.py check`."""

from contextvars import ContextVar
from typing import Any

import click
from celery import Celery, _state
from celery.app import app_or_default
from celery.concurrency import get_implementation
from django.apps import AppConfig
from django.core import checks

from celery_singleton_lock.checks import faults_of, faults_with, kind_of, never_awaited, without_base
from celery_singleton_lock.definition.settings import open_store
from celery_singleton_lock.errors import ConfigurationError

_imports: ContextVar[bool] = ContextVar("singleton_imports", default=False)


class LocksConfig(AppConfig):
    name = "celery_singleton_lock.contrib.django"
    label = "celery_singleton_lock"  # otherwise `django`
    verbose_name = "Celery"

    def ready(self) -> None:
        checks.register(check_locks, "celery")


def why_no_app(app: Celery) -> str | None:
    """A fault if *app* is the default app that Celery makes, and not the project's."""
    if app is not _state.default_app or app.main != "default":
        return None
    return (
        "this process has no Celery app: import the project's app in its __init__.py, "
        "`from .celery import app as celery_app`"
    )


def check_locks(**_: Any) -> list[checks.CheckMessage]:
    """Report what would end a worker, without a request to the store."""
    # Celery runs Django's checks when it imports tasks, so this check would recurse without `_imports`. In commands of
    # Celery it is not needed, because workers and beats check locks themselves.
    if _imports.get() or click.get_current_context(silent=True) is not None:
        return []
    app = app_or_default()
    if why := why_no_app(app):
        return [checks.Error(why, id="celery_singleton_lock.E001")]
    _imports.set(True)
    try:
        app.loader.import_default_modules()
    finally:
        _imports.set(False)
    faults = faults_of(app)
    try:
        open_store(app).close()
    except ConfigurationError as error:
        faults.append(str(error))
    found = list[checks.CheckMessage]()
    found += [checks.Error(fault, id="celery_singleton_lock.E002") for fault in dict.fromkeys(faults)]
    found += [checks.Warning(text, id="celery_singleton_lock.W001") for text in without_base(app)]
    found += [checks.Warning(text, id="celery_singleton_lock.W004") for text in never_awaited(app)]
    if app.conf.task_always_eager:
        return found
    # A worker may be started with another pool.
    hint = f"This concerns workers with the pool {app.conf.worker_pool!r}."
    pool = kind_of(get_implementation(app.conf.worker_pool))
    of_pool = set(faults_with(app, pool, app.amqp.queues)) - set(faults)
    return found + [checks.Warning(text, hint=hint, id="celery_singleton_lock.W002") for text in sorted(of_pool)]
