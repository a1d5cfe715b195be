"""Requests to a WSGI application without a network, checked against the standard."""

import io
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: str

    def token(self) -> str:
        """That of the forms in the page."""
        return str(re.findall(r'name="csrf-token" content="([^"]+)"', self.body)[0])

    def cookie(self) -> str:
        return self.headers["Set-Cookie"].partition(";")[0]


class Visitor:
    """Somebody with a browser, though one who can lie."""

    def __init__(self, application: Any, **environ: str) -> None:
        self._application, self._environ = validator(application), environ

    def get(self, path: str = "/", query: str = "", **environ: Any) -> Reply:
        return self.ask("GET", path, query, **environ)

    def send(self, path: str, form: dict[str, str] | str, **environ: Any) -> Reply:
        body = (form if isinstance(form, str) else urlencode(form)).encode()
        kind = {"CONTENT_TYPE": "application/x-www-form-urlencoded", "CONTENT_LENGTH": str(len(body))}
        return self.ask("POST", path, body=body, **{**kind, **environ})

    def ask(self, method: str, path: str, query: str = "", body: bytes = b"", **given: Any) -> Reply:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": path,
            "QUERY_STRING": query,
        }
        environ |= {"wsgi.input": io.BytesIO(body), "HTTP_HOST": "127.0.0.1:8765", "REMOTE_ADDR": "10.0.0.7"}
        environ |= self._environ | given
        environ = {name: value for name, value in environ.items() if value is not None}
        setup_testing_defaults(environ)
        began: list[Any] = []
        parts = self._application(environ, lambda status, headers, *_: began.append((status, headers)))
        try:
            text = b"".join(parts).decode()
        finally:
            parts.close()
        ((status, headers),) = began
        return Reply(int(status.split()[0]), dict(headers), text)
