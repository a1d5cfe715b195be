"""Celery's spellings of what redis-py calls otherwise."""

import ssl
from typing import Any
from urllib.parse import parse_qsl, urlencode

_NAMES = {"virtual_host": "db"}


def in_redis_py(value: Any) -> Any:
    """Celery says CERT_NONE, in settings and in URLs; redis-py says none."""
    is_one = isinstance(value, str) and value in ssl.VerifyMode.__members__
    return value.removeprefix("CERT_").lower() if is_one else value


def url_in_redis_py(url: str) -> str:
    """*url*, in one part or several between semicolons, with the query arguments that redis-py has."""
    return ";".join(map(_part_in_redis_py, url.split(";")))


def _part_in_redis_py(part: str) -> str:
    base, _, query = part.partition("?")
    if "#" in query:
        # Encoded, it would be a part of the last value.
        return part
    arguments = [(_NAMES.get(name, name), in_redis_py(value)) for name, value in parse_qsl(query)]
    return f"{base}?{urlencode(arguments)}" if arguments else part
