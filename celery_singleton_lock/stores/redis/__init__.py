"""Locks in Redis or Valkey.

`Store.request` usually tries `Connections.call` first, which sends a packed command on a kept or new connection.
Without a reply, `Part.persist` retries with `Connections.run`, which also loads missing scripts and waits for replicas.
"""

from contextlib import suppress

Input = tuple[str, bytes]
"""A key, and the packed command that runs a script on this key, and perhaps on others of its slot."""


def _packed(words: tuple[str, ...]) -> bytes:
    # A host name or a label may have bytes that are no UTF-8.
    encoded = [word.encode(errors="backslashreplace") for word in words]
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded]))


_pack = _packed
with suppress(ImportError):
    from hiredis import pack_command as _pack  # type: ignore[assignment]


def packed(*words: str) -> bytes:
    try:
        return _pack(words)
    except UnicodeEncodeError:
        return _packed(words)
