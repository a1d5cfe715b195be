"""The page and its answers for programs, on Flask."""

import hmac
import socket
from urllib.parse import urlsplit

from celery import Celery
from flask import Flask, Response, jsonify, render_template, request
from flask.typing import ResponseReturnValue
from prometheus_client import generate_latest
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.web.metrics import CONTENT_TYPE, Metrics
from celery_singleton_lock.web.page import Observer, is_meant, page_context, why

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="singleton locks", charset="UTF-8"'}


class _Client(WSGIRequestHandler):
    """Does not log requests, and drops a silent client."""

    timeout = 10

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


class Site(Flask):
    """The locks of an app, for a browser, a program, and a probe.

    Visitors need the *password*, if there is one, and any user name. Requests for other *hosts* are refused: without
    that, another site can read the page by DNS rebinding.
    """

    def __init__(self, app: Celery, *, password: str | None = None, hosts: frozenset[str] | None = None) -> None:
        super().__init__(__name__, template_folder=".")
        self._password = password
        self._hosts = hosts
        self._observer = Observer(app)
        self.before_request(self._check_visitor)
        self.after_request(_with_headers)
        self.get("/")(self.page)
        self.get("/locks.json")(self.locks_json)
        self.get("/metrics")(self.metrics)
        self.get("/healthz")(self.healthz)

    def _check_visitor(self) -> ResponseReturnValue | None:
        if self._hosts is not None and _name_in(request.environ.get("HTTP_HOST", "")) not in self._hosts:
            return "Ask for localhost, or set a password.\n", 421, _TEXT
        # A probe has no password, and learns little more than a yes or a no.
        if self._password is not None and request.path != "/healthz":
            given = (request.authorization and request.authorization.password) or ""
            if not hmac.compare_digest(given.encode(), self._password.encode()):
                return "A password is needed.\n", 401, {**_TEXT, **_CHALLENGE}
        return None

    def page(self) -> ResponseReturnValue:
        context = page_context(self._observer, request.args.get("name", ""))
        refresh = request.args.get("refresh", type=int)
        seconds = None if refresh is None else max(2, min(3600, refresh))
        return render_template("page.html", **context, refresh=seconds), 503 if "problem" in context else 200

    def locks_json(self) -> ResponseReturnValue:
        try:
            name = request.args.get("name", "")
            return jsonify([row.as_json() for row in self._observer.locks.result().rows if is_meant(row.name, name)])
        except (StoreError, ConfigurationError) as error:
            return jsonify(problem=self._observer.told(error)), 503

    def metrics(self) -> ResponseReturnValue:
        return generate_latest(Metrics(self._observer)), {"Content-Type": CONTENT_TYPE}

    def healthz(self) -> ResponseReturnValue:
        trouble = self._observer.problem()
        if trouble is not None:
            return f"runs cannot lock: {why(trouble)}\n", 503, _TEXT
        return "ok\n", _TEXT

    def server(self, host: str, port: int) -> BaseWSGIServer:
        """A server of the page that listens already; raises `OSError` if it cannot listen."""
        # If Werkzeug opened the socket, it would print the error and end the process.
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
