"""A page with the locks of an app, and their numbers for Prometheus, as a WSGI application."""

from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError

if TYPE_CHECKING:
    from celery_singleton_lock.web.site import Site

__all__ = ["application"]


def application(app: Celery, **options: Any) -> "Site":
    """A WSGI application with the locks of *app*, to be mounted where you like, or to be served by itself.

    `GET /` is a page for people, `/locks.json` the same for programs, `/metrics` what Prometheus scrapes, and
    `/healthz` says whether the store answers. It asks the store, and no worker; it frees no lock, and shows no
    arguments and no tokens. It has no access control of its own, so mount it behind one that keeps strangers out;
    `celery -A proj singleton web` does that by itself. It needs the extra `[web]`.

    Arguments:
        app: The app.
        options: Those of `Site`, for the command.

    Raises:
        ConfigurationError: The extra is not installed.
    """
    try:
        from celery_singleton_lock.web.site import Site  # noqa: PLC0415 (only who shows the page needs Flask)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the page and the metrics need {error.name}: pip install 'celery-singleton-lock[web]'"
        ) from error
    return Site(app, **options)
