"""A page with the locks of an app, and their numbers for Prometheus, as a WSGI application."""

from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError

if TYPE_CHECKING:
    from celery_singleton_lock.web.site import Site

__all__ = ["application"]


def application(app: Celery, **options: Any) -> "Site":
    """A WSGI application with the locks of *app*, to mount in another application, or to serve alone.

    `GET /` is a page for people, `/locks.json` the same for programs, `/metrics` what Prometheus scrapes, and
    `/healthz` says whether runs can lock. It asks no worker, frees no lock, and shows no arguments and no tokens.
    Everybody who reaches it may read it, so mount it behind your sign-in. *options* are those of `Site`.

    Raises:
        ConfigurationError: The extra `[web]` is not installed.
    """
    try:
        from celery_singleton_lock.web.site import Site  # noqa: PLC0415 (Django's admin needs no Flask)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the page and the metrics need {error.name}: pip install 'celery-singleton-lock[web]'"
        ) from error
    return Site(app, **options)
