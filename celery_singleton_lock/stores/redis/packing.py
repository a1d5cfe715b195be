"""A command as it goes over the wire."""

from collections.abc import Sequence
from typing import Any


def packed(connection: Any, command: tuple[str, ...]) -> Any:
    """*command* as it goes over the wire, in a fraction of the time that redis-py takes."""
    request = pack_command(command)
    # Other types need the encoding of the connection.
    return [request] if request.isascii() else connection.pack_command(*command)


def packed_together(connection: Any, commands: Sequence[Sequence[str]]) -> Any:
    """*commands*, one after the other, likewise."""
    return [b"".join([part for command in commands for part in packed(connection, tuple(command))])]


def _pack_by_hand(command: tuple[str, ...]) -> bytes:
    return (f"*{len(command)}\r\n" + "".join([f"${len(part)}\r\n{part}\r\n" for part in command])).encode()


try:
    import hiredis
except ImportError:
    pack_command: Any = _pack_by_hand
else:
    pack_command = hiredis.pack_command
