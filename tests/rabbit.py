"""A RabbitMQ of our own, from Debian's rabbitmq-server."""

import os
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import kombu

from tests.servers import free_port, missing, started
from tests.waiting import until

_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class Rabbit:
    """One broker on a port of its own, which keeps its durable queues when it is stopped."""

    def __init__(self) -> None:
        self.port, self._names = free_port(), str(free_port())
        self.directory = tempfile.mkdtemp(prefix="singleton-lock-rabbit-")
        self._env = {
            **os.environ,
            "HOME": self.directory,
            "RABBITMQ_NODENAME": f"singleton{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": self._names,
            "RABBITMQ_MNESIA_BASE": self.directory,
            "RABBITMQ_LOG_BASE": self.directory,
            "RABBITMQ_CONFIG_FILE": f"{self.directory}/rabbitmq",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{self.directory}/plugins",
            "RABBITMQ_PID_FILE": f"{self.directory}/pid",
        }
        self._epmd: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        with (Path(self.directory) / "output").open("ab") as output:
            if self._epmd is None:
                # Erlang's name server, in the foreground, because one that Erlang starts would outlive us.
                self._epmd = subprocess.Popen(["epmd", "-port", self._names], stdout=output, stderr=output)
            self._process = subprocess.Popen(
                [_SERVER], env=self._env, stdout=output, stderr=output, start_new_session=True
            )
        until(self._answers, "RabbitMQ answers", timeout=60)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with kombu.Connection(self.url, connect_timeout=2) as connection:
                connection.ensure_connection(max_retries=1, timeout=2)
                return True
        except (OSError, kombu.exceptions.OperationalError):
            return False


def is_needed() -> None:
    if not _SERVER.exists():
        missing("rabbitmq-server is not installed")


def rabbitmq() -> AbstractContextManager[Rabbit]:
    is_needed()
    return started(Rabbit())
