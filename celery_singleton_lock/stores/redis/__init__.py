"""Locks in Redis or Valkey, and the form in which each command is sent.

`Store.request` sends a script: the first try goes straight to `Connections.call`, which takes a connection, whose
`Link.exchange` sends and reads. If that brings no reply, `Part.persist` repeats `Connections.run`, which also sends the
text of a script that the server lacks, and waits for replicas.
"""

from contextlib import suppress

Input = tuple[str, bytes]
"""A key, and the packed command that runs a script on this key, and perhaps on others of its slot."""


def _packed(words: tuple[str, ...]) -> bytes:
    # A host name or a label may have bytes that are no UTF-8.
    encoded = [word.encode(errors="backslashreplace") for word in words]
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded]))


_pack = _packed
# hiredis packs several times faster than Python.
with suppress(ImportError):
    from hiredis import pack_command as _pack  # type: ignore[assignment]


def packed(*words: str) -> bytes:
    try:
        return _pack(words)
    except UnicodeEncodeError:
        return _packed(words)
