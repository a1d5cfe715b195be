"""Access to a page that we serve ourselves."""

import base64
import binascii
import hmac
from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

# A probe has no password, and its answer is only a yes or a no.
_FOR_ALL = "/healthz"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def with_password(application: Application, password: str) -> Application:
    """Ask for the password. The name that comes with it is not checked, and is logged as the name of the person."""

    def asked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        user, given = _credentials_in(environ.get("HTTP_AUTHORIZATION", ""))
        if environ.get("PATH_INFO") == _FOR_ALL:
            return application(environ, start_response)
        if not hmac.compare_digest(given.encode(), password.encode()):
            challenge = ("WWW-Authenticate", 'Basic realm="singleton locks", charset="UTF-8"')
            return _refuse(start_response, "401 Unauthorized", "A password is needed.\n", challenge)
        return application({**environ, "REMOTE_USER": user}, start_response)

    return asked


def for_this_machine(application: Application, address: str) -> Application:
    """Answer only to names of this machine, because a foreign page can let its own name lead to us."""
    names = _LOOPBACK | {address, f"[{address}]"}

    def asked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if _name_in(environ.get("HTTP_HOST", "")) not in names:
            return _refuse(start_response, "421 Misdirected Request", "Ask for localhost, or set a password.\n")
        return application(environ, start_response)

    return asked


def _refuse(start_response: Any, status: str, why: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    body = why.encode()
    usual = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response(status, [*usual, ("Cache-Control", "no-store"), *headers])
    return [body]


def _credentials_in(header: str) -> tuple[str, str]:
    kind, _, encoded = header.partition(" ")
    try:
        text = base64.b64decode(encoded.strip(), validate=True).decode() if kind.lower() == "basic" else ""
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    user, _, password = text.partition(":")
    return user, password


def _name_in(host: str) -> str:
    """The name in a `Host` header, without the port."""
    return (host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower()
