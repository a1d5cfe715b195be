"""A server for the page, from the standard library, which is enough for operators."""

import socket
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

# Seconds to wait for a client that is silent.
_LONGEST_SILENCE = 10


class Server(ThreadingMixIn, WSGIServer):
    """A client that is slow keeps nobody else waiting."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Listen, without asking a resolver, which may be slow, for the name of this machine."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class Handler(WSGIRequestHandler):
    """One client."""

    timeout = _LONGEST_SILENCE

    def address_string(self) -> str:
        """The client's address; no resolver is asked."""
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (so the base has it)
        """Log no line for each request; the handler's traceback tells of errors."""
