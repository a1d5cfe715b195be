"""The page and its answers for programs, on Flask."""

import hashlib
import hmac
import socket
from urllib.parse import urlsplit

from celery import Celery
from flask import Flask, Response, abort, jsonify, redirect, render_template, request, send_from_directory, url_for
from flask.sessions import SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from flask_wtf.csrf import CSRFProtect
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.options import setting
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.redis.inventory import Inventory
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
_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="singleton locks", charset="UTF-8"'}


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
        # The same in each process that serves the page, and slow to compute, so nobody guesses a URL's password from
        # it. Where the URLs have none it can be guessed; then the cookie is only as good as the browser, which sends
        # and sets no cookie of ours for a foreign site.
        known = [app.main, app.conf.broker_url, app.conf.result_backend, setting(app, "singleton_lock_url")]
        secret = hashlib.scrypt(repr(known).encode(), salt=b"singleton_lock", n=2**14, r=8, p=1, dklen=40)
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
        for path, view in {
            "/": self.page,
            "/page.css": self.style,
            "/locks.json": self.locks_json,
            "/metrics": self.metrics,
            "/healthz": self.healthz,
        }.items():
            self.add_url_rule(path, view_func=view)
        if allow_break:
            self.add_url_rule("/break", view_func=self.break_lock, methods=["POST"])

    def _check_visitor(self) -> ResponseReturnValue | None:
        if self._hosts is not None and _name_in(request.environ.get("HTTP_HOST", "")) not in self._hosts:
            return "Ask for localhost, or set a password.\n", 421, _TEXT
        # A probe has no password, and its answer is only a yes or a no.
        if self._password is not None and request.path != "/healthz":
            given = (request.authorization and request.authorization.password) or ""
            if not hmac.compare_digest(given.encode(), self._password.encode()):
                return "A password is needed.\n", 401, {**_TEXT, **_CHALLENGE}
        # A page on another port of this host could set our cookie, and so know the token in it.
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        is_ours = site == "same-origin" if site else origin is None or urlsplit(origin).netloc == request.host
        if request.method == "POST" and not is_ours:
            abort(403, "The form does not come from this page.")
        return None

    def page(self) -> ResponseReturnValue:
        facts = contents(self._looks, request.args.get("name", ""))
        refresh = request.args.get("refresh", type=int)
        options = {
            "refresh": None if refresh is None else max(2, min(3600, refresh)),
            "allow_break": self._allow_break,
            "result": RESULTS.get(request.args.get("said", "")),
        }
        return render_template("page.html", **facts, **options), 503 if "problem" in facts else 200

    def style(self) -> Response:
        return send_from_directory(self.root_path, "page.css")

    def locks_json(self) -> ResponseReturnValue:
        """What `list --json` writes."""
        try:
            return jsonify([row.as_json() for row in self._looks.matching(request.args.get("name", ""))])
        except (StoreError, ConfigurationError) as error:
            return jsonify(problem=str(error)), 503

    def metrics(self) -> ResponseReturnValue:
        try:
            rows, seconds = self._looks.look()
        except (StoreError, ConfigurationError):
            # The store's user may have no right to walk the keys; the counters are shown all the same.
            rows, seconds = None, 0.0
        return exposition(self._celery, rows, seconds), {"Content-Type": CONTENT_TYPE}

    def healthz(self) -> ResponseReturnValue:
        try:
            Inventory(store_of(self._celery)).now()
        except (StoreError, ConfigurationError):
            # No address, because the client may be a stranger.
            return "the store cannot be asked\n", 503, _TEXT
        return "ok\n", _TEXT

    def break_lock(self) -> ResponseReturnValue:
        # Who it is, as far as the server has found out.
        given = request.authorization.username if request.authorization else None
        user = request.environ.get("REMOTE_USER") or given or "somebody"
        form = request.form
        try:
            result = self._looks.break_by_button(form.get("key", ""), form.get("holder"), user, request.remote_addr)
        except StoreError as error:
            abort(503, str(error))
        except ConfigurationError as error:
            abort(400, str(error))
        return redirect(url_for("page", said=result, name=form.get("name") or None), 303)

    def server(self, host: str, port: int) -> BaseWSGIServer:
        """A server of the page, which listens already.

        Raises:
            OSError: It cannot listen there. Werkzeug alone would print that, and end the process.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as listener:
            return make_server(host, port, self, threaded=True, request_handler=_Client, fd=listener.fileno())


def _with_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response


def _name_in(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
