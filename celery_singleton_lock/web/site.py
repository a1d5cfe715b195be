"""The page as a WSGI application: its requests and their answers."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlencode

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.breaking import ask, meant, preview
from celery_singleton_lock.operations.inventory import Locks, Row, is_of_one_process
from celery_singleton_lock.operations.words import shown
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.start import lockable
from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.web import metrics
from celery_singleton_lock.web.forms import Refused, fields_of, token_of
from celery_singleton_lock.web.lookout import Lookout
from celery_singleton_lock.web.page import SAID, STYLE_DIGEST, View, page
from celery_singleton_lock.web.search import matching
from celery_singleton_lock.web.totals import totals_of

Environ = dict[str, Any]
StartResponse = Callable[..., Any]

_MAY_LOAD = f"default-src 'none'; style-src 'sha256-{STYLE_DIGEST}'"
HEADERS = (
    ("Content-Security-Policy", f"{_MAY_LOAD}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    # Not no-referrer, because then the browser would not say which page a form comes from.
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_LONGEST_NAME = 200
_REFRESH = (2, 3600)


@dataclass
class Answer:
    """The answer to a request."""

    status: HTTPStatus
    body: str
    kind: str = "text/plain"
    headers: list[tuple[str, str]] = field(default_factory=list)


class Site:
    """The locks of an app, for a browser, a program, and a probe.

    Arguments:
        app: The app.
        allow_break: Somebody who sees the page may ask a holder to end.
    """

    def __init__(self, app: Celery, *, allow_break: bool) -> None:
        self._app = app
        self._allow_break = allow_break
        self._lookout = Lookout(self._locks)
        self._routes: dict[str, dict[str, Callable[[Environ], Answer]]] = {
            "/": {"GET": self._page},
            "/locks.json": {"GET": self._list},
            "/metrics": {"GET": self._metrics},
            "/healthz": {"GET": self._health},
        }
        if allow_break:
            self._routes["/break"] = {"POST": self._break}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        method = environ["REQUEST_METHOD"]
        answer = self._answer(environ, "GET" if method == "HEAD" else method)
        body = answer.body.encode()
        headers = [
            ("Content-Type", f"{answer.kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            *HEADERS,
            *answer.headers,
        ]
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [b"" if method == "HEAD" else body]

    def _answer(self, environ: Environ, method: str) -> Answer:
        by_method = self._routes.get(environ.get("PATH_INFO") or "/")
        if by_method is None:
            return Answer(HTTPStatus.NOT_FOUND, "There is no such page.\n")
        if method not in by_method:
            allowed = ", ".join(["HEAD", *by_method] if "GET" in by_method else by_method)
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, f"Allowed: {allowed}.\n", headers=[("Allow", allowed)])
        return by_method[method](environ)

    def _locks(self) -> Locks:
        return Locks(self._app)

    def _page(self, environ: Environ) -> Answer:
        query = _query_of(environ)
        token, cookies = token_of(environ) if self._allow_break else (None, [])
        pattern = query.get("name", "")[:_LONGEST_NAME]
        facts: dict[str, Any] = {"name": self._app.main or "this app", "base": _base_of(environ), "pattern": pattern}
        facts["refresh"] = _refresh_in(query)
        try:
            seen = self._lookout.look()
            store = store_of(self._app)
            view = View(
                address=store.address,
                is_of_one_process=is_of_one_process(store),
                rows=matching(seen.rows, pattern),
                token=token,
                said=query.get("said"),
                **facts,
            )
        except (StoreError, ConfigurationError) as error:
            address = error.store if isinstance(error, StoreError) else "no store"
            away = View(address=address, problem=str(error), **facts)
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, page(away), "text/html")
        return Answer(HTTPStatus.OK, page(view), "text/html", cookies)

    def _list(self, environ: Environ) -> Answer:
        pattern = _query_of(environ).get("name", "")[:_LONGEST_NAME]
        try:
            rows = matching(self._lookout.look().rows, pattern)
        except (StoreError, ConfigurationError) as error:
            return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"problem": str(error)})
        return _as_json(HTTPStatus.OK, [row.as_json() for row in rows])

    def _metrics(self, environ: Environ) -> Answer:  # noqa: ARG002 (each route takes it)
        try:
            counted = self._locks().counted()
        except (StoreError, ConfigurationError):
            return Answer(HTTPStatus.OK, metrics.of_a_store_that_is_away(), metrics.KIND)
        tasks = lockable(self._app)
        try:
            seen = self._lookout.look()
        except StoreError:
            # If the store's user has no right to walk the keys, for example, the counters are told all the same.
            return Answer(HTTPStatus.OK, metrics.of_a_store(counted, _names_of(tasks), None, 0.0), metrics.KIND)
        totals = totals_of(seen.rows, _label_for(tasks))
        said = metrics.of_a_store(counted, _names_of(tasks), totals, seen.seconds)
        return Answer(HTTPStatus.OK, said, metrics.KIND)

    def _health(self, environ: Environ) -> Answer:  # noqa: ARG002 (each route takes it)
        try:
            store_of(self._app).now()
        except (StoreError, ConfigurationError):
            # No address, because the client may be a stranger.
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, "the store cannot be asked\n")
        return Answer(HTTPStatus.OK, "ok\n")

    def _break(self, environ: Environ) -> Answer:
        try:
            fields = fields_of(environ)
            said = self._ask(fields.get("key", ""), fields.get("holder") or None, _who(environ))
        except Refused as error:
            return Answer(error.status, f"{error}\n")
        except StoreError as error:
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
        except ConfigurationError as error:
            return Answer(HTTPStatus.BAD_REQUEST, f"{error}\n")
        assert said in SAID
        back = urlencode({"said": said, **({"name": fields["name"]} if fields.get("name") else {})})
        return Answer(HTTPStatus.SEE_OTHER, "", headers=[("Location", f"{_base_of(environ)}/?{back}")])

    def _ask(self, key: str, holder: str | None, by: str) -> str:
        """Ask one holder to end, or, without a name, drop the marks of a lock that nobody holds."""
        locks = self._locks()
        survey = locks.survey(locks.checked_key(key))
        if holder is None and meant(survey, None):
            return "changed"
        if not preview(survey, holder).was_there:
            return "nothing"
        broken = ask(locks, survey, holder, by, force=False)
        self._lookout.forget()
        return "asked" if broken.asked else "dropped" if broken.dropped else "nothing"


def _as_json(status: HTTPStatus, facts: Any) -> Answer:
    return Answer(status, json.dumps(facts) + "\n", "application/json")


def _names_of(tasks: list[Any]) -> list[str]:
    return [task.name for task in tasks]


def _label_for(tasks: list[Any]) -> Callable[[Row], str]:
    """The task of a row; a mark does not have it, and a `Lock` has no task."""
    names = {task.lock_name or task.name: task.name for task in reversed(tasks)}

    def label(row: Row) -> str:
        return row.task_name or (names.get(lock_name_of(row.key), "") if row.task_id else "")

    return label


def _base_of(environ: Environ) -> str:
    # A path on this host, for any SCRIPT_NAME that a proxy sends: two slashes would begin the name of another host.
    base = str(environ.get("SCRIPT_NAME") or "").strip("/")
    return f"/{base}" if base else ""


def _query_of(environ: Environ) -> dict[str, str]:
    """The last value of each name."""
    return {name: values[-1] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}


def _refresh_in(query: dict[str, str]) -> int | None:
    text = query.get("refresh", "")
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        return None
    least, most = _REFRESH
    return max(least, min(most, int(text)))


def _who(environ: Environ) -> str:
    """The person for the log and the result of the run, as far as the server has found out."""
    user = shown(str(environ.get("REMOTE_USER") or "somebody"))[:100]
    return f"{user}@{environ.get('REMOTE_ADDR') or 'unknown'}"
