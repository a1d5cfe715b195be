"""A RabbitMQ of our own, from Debian's rabbitmq-server."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kombu

from tests.servers import free_port, missing
from tests.waiting import until

_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


@contextmanager
def rabbitmq() -> Iterator[str]:
    """A broker on a free port, as a URL; skips the test without one, or fails it in CI."""
    if not _SERVER.exists():
        missing("rabbitmq-server is not installed")
    port, names, directory = free_port(), str(free_port()), tempfile.mkdtemp(prefix="singleton-lock-rabbit-")
    url = f"amqp://guest:guest@127.0.0.1:{port}//"
    env = {
        **os.environ,
        "HOME": directory,
        "RABBITMQ_NODENAME": f"singleton{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": names,
        "RABBITMQ_MNESIA_BASE": directory,
        "RABBITMQ_LOG_BASE": directory,
        "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/plugins",
        "RABBITMQ_PID_FILE": f"{directory}/pid",
    }
    with (Path(directory) / "output").open("wb") as output:
        # Erlang's name server, in the foreground, because one that Erlang starts would outlive us.
        epmd = subprocess.Popen(["epmd", "-port", names, "-address", "127.0.0.1"], stdout=output, stderr=output)
        process = subprocess.Popen([_SERVER], env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        until(lambda: _answers(url), "RabbitMQ answers", timeout=60)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        epmd.kill()
        epmd.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        with kombu.Connection(url, connect_timeout=2) as connection:
            connection.ensure_connection(max_retries=1, timeout=2)
            return True
    except (OSError, kombu.exceptions.OperationalError):
        return False
