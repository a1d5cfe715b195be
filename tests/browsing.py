"""Requests to a WSGI application without a network, checked against the standard."""

import io
from dataclasses import dataclass
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: str


class Visitor:
    def __init__(self, application: Any) -> None:
        self._application = validator(application)

    def get(self, path: str = "/", query: str = "") -> Reply:
        return self.ask("GET", path, query)

    def ask(self, method: str, path: str, query: str = "") -> Reply:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_HOST": "127.0.0.1:8765",
            "wsgi.input": io.BytesIO(),
        }
        setup_testing_defaults(environ)
        began: list[Any] = []
        parts = self._application(environ, lambda status, headers, *_: began.append((status, headers)))
        try:
            text = b"".join(parts).decode()
        finally:
            parts.close()
        ((status, headers),) = began
        return Reply(int(status.split()[0]), dict(headers), text)
