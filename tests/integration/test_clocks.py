"""A server whose clock is set: the log says so once, with the size of the step."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from celery_singleton_lock import Lock
from tests.integration.conftest import is_renewed
from tests.servers import FakeClock, Server, running
from tests.waiting import until

TTL = 4.0


@pytest.fixture
def server(wall_clock: FakeClock) -> Iterator[Server]:
    with running("valkey", env=wall_clock.env) as server:
        yield server


def set_to(server: Server, wall_clock: FakeClock, seconds: str) -> None:
    """Set the clock, and wait until the server goes by it: it looks now and then."""
    wall_clock.step(seconds)
    with server.client() as client:
        until(lambda: abs(client.time()[0] + client.time()[1] / 1e6 - time.time() - float(seconds)) < 0.2, "it is set")


def lock_in(server: Server, name: str = "stock", **options: object) -> Lock:
    return Lock(name, url=server.url, ttl=TTL, **options)  # type: ignore[arg-type]


def fence_of(server: Server, name: str = "stock") -> int:
    with lock_in(server, name) as lease:
        return lease.fence


def steps_told(caplog: pytest.LogCaptureFixture, server: Server) -> list[str]:
    """What is written of the server by when the end of a lease is, which comes after."""
    with lock_in(server, "the last") as last, server.client() as client:
        client.delete(last.key)
        until(lambda: f"lock.lost key={last.key}" in caplog.text, "all is written")
    told = [record for record in caplog.records if record.getMessage().startswith("lock.clock ")]
    assert all(record.levelno == logging.WARNING for record in told)
    return [record.getMessage() for record in told if server.url in record.getMessage()]


def by_asking(server: Server, is_told: Callable[[], bool]) -> None:
    until(lambda: fence_of(server) and is_told(), "it is told")


def by_renewing(server: Server, is_told: Callable[[], bool]) -> None:
    with lock_in(server) as lease:
        until(is_told, "it is told")
        is_renewed(lease)


@pytest.mark.parametrize("find_out", [by_asking, by_renewing])
@pytest.mark.parametrize("step", ["+60", "-60"])
def test_a_step_is_told_once_with_its_size(
    server: Server,
    wall_clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    step: str,
    find_out: Callable[[Server], None],
) -> None:
    fence_of(server)

    set_to(server, wall_clock, step)
    for _ in range(2):
        find_out(server, lambda: f"lock.clock store={server.url}" in caplog.text)

    (told,) = steps_told(caplog, server)
    size = float(told.partition("step=")[2].partition(":")[0])
    # The machine may stand still between the two clocks that are compared.
    assert abs(size - float(step)) < 10


IDLE = """
from gevent import monkey; monkey.patch_all()
import sys, time
from celery_singleton_lock import Lock
from celery_singleton_lock.leases import background

background.LINGERS = 0.05
lock = Lock("stock", url=sys.argv[1])
with lock:
    pass
time.sleep(1)
print("idle", flush=True)
input()
assert lock.acquire(blocking=False) is None
time.sleep(1)
"""


def test_greenlets_tell_of_a_step_also_while_they_hold_nothing(server: Server, wall_clock: FakeClock) -> None:
    command = [sys.executable, "-W", "ignore", "-c", IDLE, server.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as idle:
        assert idle.stdout is not None
        assert idle.stdout.readline() == "idle\n"
        set_to(server, wall_clock, "+60")
        with lock_in(server):
            _, told = idle.communicate("\n", timeout=60)
    assert told.count("lock.clock") == 1
