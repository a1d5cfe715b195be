"""The page and its answers for programs, on Flask."""

import hashlib
import hmac
import socket
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
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.web.metrics import CONTENT_TYPE, exposition
from celery_singleton_lock.web.page import RESULTS, Looks, contents

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
        self._looks = Looks(app)
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

    def page(self) -> ResponseReturnValue:
        """A page for people."""
        facts = contents(self._looks, request.args.get("name", ""))
        refresh = request.args.get("refresh", type=int)
        options = {
            "refresh": None if refresh is None else max(2, min(3600, refresh)),
            "allow_break": self._allow_break,
            "result": RESULTS.get(request.args.get("said", "")),
        }
        return render_template("page.html", **facts, **options), 503 if "problem" in facts else 200

    def style(self) -> Response:
        """Its style."""
        return send_from_directory(self.root_path, "page.css")

    def locks_json(self) -> ResponseReturnValue:
        """What `list --json` writes."""
        try:
            rows = self._looks.matching(request.args.get("name", ""))
        except (StoreError, ConfigurationError) as error:
            return jsonify(problem=str(error)), 503
        return jsonify([row.as_json() for row in rows])

    def metrics(self) -> Response:
        """What Prometheus scrapes."""
        try:
            rows, seconds = self._looks.look()
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
        # Who it is, as far as the server has found out.
        given = request.authorization.username if request.authorization else None
        user = request.environ.get("REMOTE_USER") or given or "somebody"
        form = request.form
        try:
            result = self._looks.break_by_button(form.get("key", ""), form.get("holder"), user, request.remote_addr)
        except ConfigurationError as error:
            abort(400, str(error))
        return redirect(url_for("page", said=result, name=form.get("name") or None), 303)


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


def _name_in(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
