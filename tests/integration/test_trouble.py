"""The page, the probe and the metrics say at once what stops the runs, and wait for no store."""

import html
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import SingletonTask, StoreError
from celery_singleton_lock.checks import try_store
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.web import application
from tests.browsing import Visitor
from tests.monitor import Monitor
from tests.servers import Server, free_port
from tests.waiting import Watch, until

HELD = "singleton:v3:{shop.sync:00}"
# A request may take 2 s. The machine may stand still for some more.
BOUND = 6.0


class Place:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = server.client()
        self.url = server.url

    def set(self, **config: Any) -> None:
        for name, value in config.items():
            self.client.config_set(name.replace("_", "-"), value)

    def cannot_save(self) -> None:
        self.set(save="3600 1")
        shutil.rmtree(self.server.directory)
        with suppress(redis.ResponseError):
            self.client.bgsave()
        until(lambda: self.client.info("persistence")["rdb_last_bgsave_status"] == "err", "it has failed")

    def let_user(self, right: str) -> None:
        self.client.execute_command("ACL", "SETUSER", "default", right)


TROUBLES: dict[str, tuple[Callable[[Place], Any], Callable[[Place], Any], str]] = {
    "full": (lambda it: it.set(maxmemory=1), lambda it: it.set(maxmemory=0), "the store is full"),
    "read-only": (
        lambda it: it.client.execute_command("REPLICAOF", "127.0.0.1", free_port()),
        lambda it: it.client.execute_command("REPLICAOF", "NO", "ONE"),
        "a master that was demoted",
    ),
    "no replicas": (
        lambda it: it.set(min_replicas_to_write=1),
        lambda it: it.set(min_replicas_to_write=0),
        "too few replicas",
    ),
    "no disk": (Place.cannot_save, lambda it: it.set(stop_writes_on_bgsave_error="no"), "cannot save to its disk"),
    "no right": (lambda it: it.let_user("-hset"), lambda it: it.let_user("+hset"), "lacks a right"),
    "no script": (lambda it: it.let_user("-evalsha"), lambda it: it.let_user("+evalsha"), "lacks a right"),
    "silent": (
        lambda it: os.kill(it.server.pid, signal.SIGSTOP),
        lambda it: os.kill(it.server.pid, signal.SIGCONT),
        "the store does not answer",
    ),
    "gone": (lambda it: it.server.stop(), lambda it: it.server.start(), "the store cannot be reached"),
}
SHOWN = ("full", "no right")


@pytest.fixture
def place(own: Server) -> Iterator[Place]:
    place = Place(own)
    yield place
    place.client.close()


@pytest.fixture
def app(place: Place) -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = place.url

    def sync() -> None: ...

    app.task(base=SingletonTask, name="shop.sync", shared=False)(sync)
    store_of(app).acquire(Claim(HELD, "a", 60.0, task_id="id-a"))
    store_of(app).count("singleton:v3:stats", {"unanswered:reschedule:shop.sync": 3}, 5.0)
    yield app
    store_of(app).close()
    app.close()


def metric(visitor: Visitor, name: str) -> float:
    (value,) = re.findall(rf"^singleton_lock_{re.escape(name)} (\S+)$", visitor.get("/metrics").body, re.MULTILINE)
    return float(value)


UNANSWERED = 'unanswered_total{policy="reschedule",task="shop.sync"}'


@pytest.mark.parametrize(
    "trouble", [each if each in SHOWN else pytest.param(each, marks=pytest.mark.prove) for each in TROUBLES]
)
def test_what_stops_the_runs_is_said_with_its_reason_and_its_end(place: Place, app: Celery, trouble: str) -> None:
    begin, end, words = TROUBLES[trouble]
    visitor = Visitor(application(app))
    until(lambda: visitor.get("/healthz").body == "ok\n", "all is well")
    assert (metric(visitor, "up"), metric(visitor, UNANSWERED)) == (1, 3)
    assert "Runs cannot lock" not in visitor.get().body

    begin(place)
    try:
        # An answer serves for some seconds. A machine that stands still meanwhile looks like a silent store at first.
        until(lambda: words in visitor.get("/healthz").body, "the probe is told why", timeout=60)
        assert visitor.get("/healthz").status == 503
        health, page = visitor.get("/healthz").body, visitor.get().body
        assert health.startswith("runs cannot lock: ")
        assert str(place.server.port) not in health
        assert f"Runs cannot lock: {health.strip().partition(': ')[2]}." in page.replace("&#39;", "'")
        # The words of the server stand in sentences of ours.
        said = html.unescape(page.partition('role="alert">')[2].partition("</p>")[0])
        assert re.search(r"[^.]\.$", said), said
        assert "nothing unusual" not in page
        with pytest.raises(StoreError) as error:
            try_store(app, 1.0)
        assert not re.search(r"\.[;:,)]", f"{error.value}; and then"), error.value
        # Once, at the top.
        assert page.count(f"127.0.0.1:{place.server.port}/0") == 1
        assert metric(visitor, "up") == 0
        # The series goes on, so Prometheus sees its rise afterwards.
        assert metric(visitor, UNANSWERED) == 3
    finally:
        end(place)

    until(lambda: visitor.get("/healthz").body == "ok\n", "the probe is told that it is over")
    assert metric(visitor, "up") == 1
    assert "Runs cannot lock" not in visitor.get().body


def test_while_the_store_is_silent_no_request_waits_and_none_piles_up(place: Place, app: Celery) -> None:
    visitor = Visitor(application(app))
    visitor.get()
    waited = list[float]()

    def ask(path: str) -> None:
        while watch.seconds < 3:
            began = watch.seconds
            visitor.get(path)
            waited.append(watch.seconds - began)

    with Watch() as watch:
        before = threading.active_count()
        os.kill(place.server.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(16) as pool:
                asking = list(pool.map(ask, ["/", "/metrics", "/locks.json", "/healthz"] * 4))
                most = threading.active_count()
        finally:
            os.kill(place.server.pid, signal.SIGCONT)

    assert len(asking) == 16
    assert max(waited) < BOUND
    # The visitors have 16, and each of the three looks has one at most.
    assert most <= before + 16 + 4
    until(lambda: visitor.get("/healthz").status == 200, "it is well again")


def test_a_trial_is_no_lock_that_anybody_sees(place: Place, app: Celery) -> None:
    visitor = Visitor(application(app))
    with Monitor(place.server) as monitor:
        until(lambda: visitor.get("/healthz").status == 200, "all is well")
        (asked, *_) = until(lambda: monitor.about(":trial-"), "it has tried")
    trial = next(word for word in asked.split() if ":trial-" in word)
    assert trial.startswith("singleton:v3:{shop.sync:")

    store_of(app).acquire(Claim(trial, "a", 60.0))

    assert [row["key"] for row in json.loads(visitor.get("/locks.json").body)] == [HELD]


def test_many_probes_cost_the_store_one_trial(place: Place, app: Celery) -> None:
    visitor = Visitor(application(app))
    with Monitor(place.server) as monitor:
        for _ in range(20):
            until(lambda: visitor.get("/healthz").status == 200, "all is well")
        place.client.echo("all have asked")
        until(lambda: monitor.about("all have asked"), "all is heard")
    # A machine that stands still may need another one.
    assert len(monitor.about("HSETNX")) <= 3
