"""A network that misbehaves on demand: a TCP proxy on the loopback, in front of a real server."""

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

_LONGEST_HELD = 60.0
_BETWEEN_CRUMBS = 0.001
_LINGER_NOT = struct.pack("ii", 1, 0)


class Proxy:
    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._pumps: list[threading.Thread] = []
        self._guard = threading.Lock()
        self._lose: bytes | None = None
        self._lost = threading.Event()
        self._tears = False
        self._held: bytes | None = None
        self._goes_on = threading.Event()
        self.forward()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def forward(self) -> None:
        self._swallows, self._resets, self._crumbles, self._delay = False, False, False, 0.0

    def black_hole(self) -> None:
        self.forward()
        self._swallows = True

    def delay(self, seconds: float) -> None:
        self.forward()
        self._delay = seconds

    def crumble(self) -> None:
        self.forward()
        self._crumbles = True

    def reset(self) -> None:
        self.forward()
        self._resets = True
        self.cut()

    def cut(self) -> None:
        with self._guard:
            connections, self._open = self._open, set()
            pumps, self._pumps = self._pumps, []
        for connection in connections:
            _close(connection, reset=True)
        for pump in pumps:
            # The reset is not sent while a pump still reads from the socket.
            pump.join(5)

    def move(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)

    def lose_reply(self, to: bytes) -> threading.Event:
        """Lose the reply to a request that contains *to*. Return an event that is set once it is lost."""
        self._lost = threading.Event()
        self._lose = to
        return self._lost

    def tear_reply(self, to: bytes) -> threading.Event:
        self._tears = True
        return self.lose_reply(to)

    def hold(self, of: bytes) -> None:
        self._goes_on.clear()
        self._held = of

    def let_go(self) -> None:
        self._held = None
        self._goes_on.set()

    def close(self) -> None:
        self.let_go()
        _close(self._listener)
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._resets:
                    _close(client, reset=True)
                else:
                    self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._upstream, timeout=5)
        except OSError:
            _close(client, reset=True)
            return
        server.settimeout(None)
        with self._guard:
            self._open |= {client, server}
        # The last request, to which the next reply belongs.
        asked: deque[bytes] = deque([b""], maxlen=1)
        for source, target, passes in (
            (client, server, lambda data: self._request(data, asked)),
            (server, client, lambda data: self._reply(asked)),
        ):
            pump = threading.Thread(target=self._pump, args=(source, target, passes), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def _pump(self, source: socket.socket, target: socket.socket, passes: Callable[[bytes], bool]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if passes(data):
                    for part in [data[at : at + 1] for at in range(len(data))] if self._crumbles else [data]:
                        target.sendall(part)
                        if self._crumbles:
                            # Otherwise two bytes could be received at once.
                            time.sleep(_BETWEEN_CRUMBS)
                elif self._tears:
                    self._tears = False
                    target.sendall(data[: len(data) // 2])
                    break
        with self._guard:
            ended = {source, target} & self._open
            self._open -= ended
        for connection in ended:
            _close(connection)

    def _request(self, data: bytes, asked: deque[bytes]) -> bool:
        asked.append(data)
        if self._held is not None and self._held in data:
            self._goes_on.wait(_LONGEST_HELD)
        return not self._swallows

    def _reply(self, asked: deque[bytes]) -> bool:
        if self._delay:
            time.sleep(self._delay)
        with self._guard:
            loses = self._lose is not None and self._lose in asked[0]
            if loses:
                self._lose = None
                self._lost.set()
        return not loses and not self._swallows


def _close(connection: socket.socket, *, reset: bool = False) -> None:
    with suppress(OSError):
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        # A pump that still reads would keep the connection open.
        connection.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
    connection.close()
