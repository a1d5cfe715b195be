"""The page and its answers for programs, on Flask."""

import hashlib
import hmac
import socket
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from flask import Flask, Response, abort, jsonify, redirect, render_template, request, send_from_directory, url_for
from flask.sessions import SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from flask_wtf.csrf import CSRFProtect
from werkzeug.exceptions import HTTPException
from werkzeug.serving import WSGIRequestHandler, make_server

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.breaking import ask, meant, preview
from celery_singleton_lock.operations.inventory import OF_ONE_PROCESS, Locks, Row, duration, is_of_one_process, shown
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.web.metrics import CONTENT_TYPE, exposition, totals_of

# After a look at all locks nobody looks again for so many times its duration, so that requests cost the store at most
# a twentieth of its time.
_REST = 20
_REST_AFTER_A_FAILURE = 1.0
_MOST_ROWS = 200
_LONGEST_NAME = 200

_RESULTS = {
    "asked": "Asked to stop. The holder learns of it at its next renewal, within a third of its TTL.",
    "dropped": "The marks are gone.",
    "nothing": "Nothing was done: nobody was there any more.",
    "changed": "Nothing was done: somebody holds the lock now. Check again.",
    "beat": "Nothing was done: this is the leadership of a beat, which has no run to stop.",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer, because then the browser would not say which page a form comes from.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class _Session(SecureCookieSessionInterface):
    """A cookie for the place where the page is mounted."""

    def get_cookie_path(self, app: Flask) -> str:  # noqa: ARG002 (so Flask has it)
        return request.script_root or "/"

    def get_cookie_secure(self, app: Flask) -> bool:  # noqa: ARG002 (so Flask has it)
        return request.is_secure


class _Client(WSGIRequestHandler):
    """One that is silent is not waited for, and no request is logged."""

    timeout = 10

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


class Site(Flask):
    """The locks of an app, for a browser, a program, and a probe.

    Arguments:
        app: The app.
        allow_break: Somebody who sees the page may ask a holder to end.
        password: It is asked for, with any user name.
        hosts: The only names by which the page may be asked for, because a foreign page can let its own name lead here.
    """

    session_interface = _Session()

    def __init__(
        self, app: Celery, *, allow_break: bool, password: str | None = None, hosts: frozenset[str] | None = None
    ) -> None:
        super().__init__(__name__, template_folder=".", static_folder=None)
        self._celery, self._allow_break, self._password, self._hosts = app, allow_break, password, hosts
        self._looking = threading.Lock()
        self._kept: tuple[list[Row], float] | StoreError | None = None
        self._kept_until = 0.0
        secret = _secret_of(app)
        self.config.update(
            SECRET_KEY=secret[:32],
            # A browser sends the cookies of all ports of a host, so the page of each app has a name of its own.
            SESSION_COOKIE_NAME=f"singleton_lock_{secret[32:].hex()}",
            SESSION_COOKIE_SAMESITE="Strict",
            MAX_CONTENT_LENGTH=8192,
            # A page may be left open for as long as its browser is.
            WTF_CSRF_TIME_LIMIT=None,
        )
        self.before_request(self._check_visitor)
        CSRFProtect(self)
        self.after_request(_with_headers)
        self.register_error_handler(HTTPException, _in_plain_text)
        self.register_error_handler(StoreError, _unavailable)
        self.register_error_handler(ConfigurationError, _unavailable)
        self.jinja_env.filters.update(shown=lambda text: shown(str(text)), duration=duration)
        self.add_url_rule("/", view_func=self.page)
        self.add_url_rule("/page.css", view_func=self.style)
        self.add_url_rule("/locks.json", view_func=self.locks_json)
        self.add_url_rule("/metrics", view_func=self.metrics)
        self.add_url_rule("/healthz", view_func=self.healthz)
        if allow_break:
            self.add_url_rule("/break", view_func=self.break_lock, methods=["POST"])

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request, for any SCRIPT_NAME that a proxy sends: two slashes would begin the name of a host."""
        base = str(environ.get("SCRIPT_NAME") or "").strip("/")
        path = environ.get("PATH_INFO") or "/"
        return super().__call__(
            environ | {"SCRIPT_NAME": f"/{base}" if base else "", "PATH_INFO": path}, start_response
        )

    def _check_visitor(self) -> ResponseReturnValue | None:
        if self._hosts is not None and _name_in(request.environ.get("HTTP_HOST", "")) not in self._hosts:
            return "Ask for localhost, or set a password.\n", 421, {"Content-Type": "text/plain; charset=utf-8"}
        # A probe has no password, and its answer is only a yes or a no.
        if self._password is not None and request.path != "/healthz":
            given = (request.authorization and request.authorization.password) or ""
            if not hmac.compare_digest(given.encode(), self._password.encode()):
                challenge = {"WWW-Authenticate": 'Basic realm="singleton locks", charset="UTF-8"'}
                return "A password is needed.\n", 401, {**challenge, "Content-Type": "text/plain; charset=utf-8"}
        # A page on another port of this host could set our cookie, and so know the token in it.
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        is_ours = site == "same-origin" if site else origin is None or urlsplit(origin).netloc == request.host
        if request.method == "POST" and not is_ours:
            abort(403, "The form does not come from this page.")
        return None

    def _look(self) -> tuple[list[Row], float]:
        """All locks, as they are or were a moment ago, and how long it took to look."""
        with self._looking:
            if self._kept is None or clock() >= self._kept_until:
                began_at = clock()
                try:
                    self._kept = Locks(self._celery).rows(), clock() - began_at
                except StoreError as error:
                    self._kept = error
                failed = isinstance(self._kept, StoreError)
                self._kept_until = clock() + (_REST_AFTER_A_FAILURE if failed else _REST * (clock() - began_at))
            if isinstance(self._kept, StoreError):
                raise type(self._kept)(*self._kept.args)
            return self._kept

    def page(self) -> ResponseReturnValue:
        """A page for people."""
        pattern = request.args.get("name", "")[:_LONGEST_NAME]
        refresh = request.args.get("refresh", type=int)
        facts: dict[str, Any] = {
            "name": self._celery.main or "this app",
            "pattern": pattern,
            "refresh": None if refresh is None else max(2, min(3600, refresh)),
            "allow_break": self._allow_break,
            "now": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        }
        try:
            rows = _matching(self._look()[0], pattern)
            store = store_of(self._celery)
        except (StoreError, ConfigurationError) as error:
            address = error.store if isinstance(error, StoreError) else "no store"
            return render_template("page.html", **facts, address=address, problem=str(error)), 503
        totals = totals_of(rows)
        return render_template(
            "page.html",
            **facts,
            address=store.address,
            rows=rows[:_MOST_ROWS],
            more=len(rows) - _MOST_ROWS,
            held={row.key for row in rows if row.state == "held"},
            totals=totals,
            longest=max((total.longest for total in totals), default=0.0),
            result=_RESULTS.get(request.args.get("said", "")),
            alone=OF_ONE_PROCESS if is_of_one_process(store) else None,
        )

    def style(self) -> Response:
        """Its style."""
        return send_from_directory(self.root_path, "page.css")

    def locks_json(self) -> ResponseReturnValue:
        """What `list --json` writes."""
        try:
            rows = _matching(self._look()[0], request.args.get("name", "")[:_LONGEST_NAME])
        except (StoreError, ConfigurationError) as error:
            return jsonify(problem=str(error)), 503
        return jsonify([row.as_json() for row in rows])

    def metrics(self) -> Response:
        """What Prometheus scrapes."""
        try:
            rows, seconds = self._look()
        except (StoreError, ConfigurationError):
            # The store's user may have no right to walk the keys; the counters are shown all the same.
            rows, seconds = None, 0.0
        return Response(exposition(self._celery, rows, seconds), content_type=CONTENT_TYPE)

    def healthz(self) -> ResponseReturnValue:
        """Whether the store answers."""
        text, status = "ok\n", 200
        try:
            store_of(self._celery).now()
        except (StoreError, ConfigurationError):
            # No address, because the client may be a stranger.
            text, status = "the store cannot be asked\n", 503
        return Response(text, status, content_type="text/plain; charset=utf-8")

    def serve(self, listening: socket.socket) -> None:
        """Serve it until Ctrl-C."""
        host, port = listening.getsockname()[:2]
        server = make_server(host, port, self, threaded=True, request_handler=_Client, fd=listening.fileno())
        try:
            server.serve_forever()
        finally:
            server.server_close()

    def break_lock(self) -> ResponseReturnValue:
        """A button of the page."""
        result = self._break(request.form.get("key", ""), request.form.get("holder") or None)
        name = request.form.get("name") or None
        return redirect(url_for("page", said=result, name=name), 303)

    def _break(self, key: str, holder: str | None) -> str:
        """Ask one holder to end, or, without a name, drop the marks of a lock that nobody holds."""
        locks = Locks(self._celery)
        try:
            survey = locks.survey(locks.checked_key(key))
        except ConfigurationError as error:
            abort(400, str(error))
        if any(each.task_name == "celery.beat" for each in survey.holders):
            return "beat"
        if holder is None and meant(survey, None):
            return "changed"
        if not preview(survey, holder).was_there:
            return "nothing"
        broken = ask(locks, survey, holder, _visitor(), force=False)
        # Look again at the next request.
        self._kept_until = 0.0
        return "asked" if broken.asked else "dropped" if broken.dropped else "nothing"


def _secret_of(app: Celery) -> bytes:
    # The same in each process that serves the page, and slow to compute, so nobody guesses a URL's password from it.
    # Where the URLs have none it can be guessed; then the cookie is only as good as the browser, which sends and sets
    # no cookie of ours for a foreign site.
    known = [app.main, app.conf.broker_url, app.conf.result_backend, app.conf.get("singleton_lock_url")]
    return hashlib.scrypt(repr(known).encode(), salt=b"singleton_lock", n=2**14, r=8, p=1, dklen=40)


def _with_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response


def _in_plain_text(error: HTTPException) -> ResponseReturnValue:
    response = error.get_response()
    response.data = f"{error.description}\n"
    response.content_type = "text/plain; charset=utf-8"
    return response


def _unavailable(error: Exception) -> ResponseReturnValue:
    return Response(f"{error}\n", 503, content_type="text/plain; charset=utf-8")


def _matching(rows: Sequence[Row], pattern: str) -> list[Row]:
    """The rows whose lock name matches a glob, or contains a text that is no glob."""
    glob = pattern if set("*?[") & set(pattern) else f"*{pattern}*"
    return [row for row in rows if fnmatchcase(row.name, glob)]


def _name_in(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _visitor() -> str:
    """The person for the log and the result of the run, as far as the server has found out."""
    given = request.authorization.username if request.authorization else None
    user = request.environ.get("REMOTE_USER") or given or "somebody"
    return f"{shown(str(user))[:100]}@{request.remote_addr or 'unknown'}"
