"""Forms that come from our page and from nowhere else.

A foreign page can make a browser send us a form, with all cookies of its user. But that page can read neither our
cookie nor our page, and the browser says where the form comes from.
"""

import hmac
import re
import secrets
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

COOKIE = "singleton_lock_form"
_TOKEN = re.compile(r"[\w-]{43}")
_LONGEST = 8192
_KIND = "application/x-www-form-urlencoded"


class Refused(Exception):
    """The form must not be obeyed.

    Arguments:
        status: The status of the answer.
        why: The reason, in words.
    """

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def token_of(environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """The token of this browser, and the header that makes it keep a new one.

    The browser keeps it, and we do not, so it is valid in each process that serves the page.
    """
    known = _cookie_of(environ)
    if known is not None:
        return known, []
    fresh = secrets.token_urlsafe(32)
    path = str(environ.get("SCRIPT_NAME") or "").rstrip("/") or "/"
    secure = "; Secure" if environ.get("wsgi.url_scheme") == "https" else ""
    # A path may have any bytes of Latin-1, and a header must have no line ends.
    path = path if re.fullmatch(r"[\w/.~%-]+", path, re.ASCII) else "/"
    return fresh, [("Set-Cookie", f"{COOKIE}={fresh}; Path={path}; HttpOnly; SameSite=Strict{secure}")]


def fields_of(environ: dict[str, Any]) -> dict[str, str]:
    """The fields of a form that our page has sent.

    Raises:
        Refused: Our page has not sent it, or it is no form.
    """
    _check_origin(environ)
    fields = _read(environ)
    known = _cookie_of(environ)
    if known is None or not hmac.compare_digest(known.encode(), fields.get("token", "").encode()):
        raise Refused(HTTPStatus.FORBIDDEN, "The form has no valid token: open the page again, and send it from there.")
    return fields


def _check_origin(environ: dict[str, Any]) -> None:
    # Another port of this host is the same site, so `same-site` is not enough.
    said = environ.get("HTTP_SEC_FETCH_SITE")
    origin = environ.get("HTTP_ORIGIN")
    is_ours = said == "same-origin" if said else origin is None or urlsplit(origin).netloc == _host_of(environ)
    if not is_ours:
        raise Refused(HTTPStatus.FORBIDDEN, "The form does not come from this page.")


def _host_of(environ: dict[str, Any]) -> str:
    return str(environ.get("HTTP_HOST") or f"{environ.get('SERVER_NAME')}:{environ.get('SERVER_PORT')}")


def _read(environ: dict[str, Any]) -> dict[str, str]:
    if str(environ.get("CONTENT_TYPE", "")).partition(";")[0].strip().lower() != _KIND:
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Send a form ({_KIND}).")
    length = str(environ.get("CONTENT_LENGTH") or "")
    if not (length.isascii() and length.isdigit()):
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "Say how long the form is.")
    if len(length) > 6 or int(length) > _LONGEST:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The form is longer than {_LONGEST} bytes.")
    text = environ["wsgi.input"].read(int(length)).decode("utf-8", "replace")
    try:
        read = parse_qs(text, max_num_fields=20)
    except ValueError:
        raise Refused(HTTPStatus.BAD_REQUEST, "The form has too many fields.") from None
    return {name: values[-1] for name, values in read.items()}


def _cookie_of(environ: dict[str, Any]) -> str | None:
    try:
        found = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None and _TOKEN.fullmatch(found.value) else None
