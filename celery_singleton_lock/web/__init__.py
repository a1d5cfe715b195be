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
    `/healthz` says whether the store answers. It asks the store, and no worker; it frees no lock, and shows no
    arguments and no tokens. Everybody who reaches it may read it, so mount it behind an access control, as
    `celery -A proj singleton web` does. The extra `[web]` is needed.

    Arguments:
        app: The app.
        options: The options of `Site`, for the command.

    Raises:
        ConfigurationError: The extra is not installed.
    """
    try:
        from celery_singleton_lock.web.site import Site  # noqa: PLC0415 (only the page needs Flask)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the page and the metrics need {error.name}: pip install 'celery-singleton-lock[web]'"
        ) from error
    return Site(app, **options)
