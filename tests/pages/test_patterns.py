"""Needs of public projects that no other test shows; each docstring says whose need it is."""

import gc
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import Lock, LockHeld
from celery_singleton_lock.testing import HELD_BY_TEST, hold
from tests.acceptance.conftest import forget_connections
from tests.pages.test_how_to import refused
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

SOON = 60.0
"""Seconds in which a worker on a busy machine has done anything."""

_numbers = count(1)


@pytest.fixture(scope="module")
def running(valkey_process: Server) -> Iterator[Any]:
    with valkey_process.client() as client:
        client.flushall()
    module: Any = import_module("tests.pages.patterns_app")
    url = valkey_process.url
    module.app.conf.update(broker_url=url, result_backend=url, singleton_lock_url=url)
    with workers("tests.pages.patterns_app", {"TEST_STORE": url}, concurrency=2):
        yield module
    forget_connections(module.app)
    # Results that are collected only when the server is gone complain.
    gc.collect()


@pytest.fixture
def shop(running: Any) -> Any:
    # A test of another module, in between, may have closed its connections.
    forget_connections(running.app)
    return running


@pytest.fixture
def key() -> int:
    return next(_numbers)


def test_some_arguments_count_in_any_order(shop: Any, key: int) -> None:
    """makeplane/plane: one notification for an issue, a user and a set of labels, whatever its text."""
    with hold(shop.track, key, "text", 1, ["a", "b"]):
        assert refused(shop.track.delay(key, "other text", 1, ["b", "a"]))
        assert shop.track.delay(key, "text", 2, ["a", "b"]).get(timeout=SOON) == "text"


def test_something_is_done_about_a_call_that_is_skipped(shop: Any, key: int) -> None:
    """mozilla/pontoon, nautobot/nautobot: it is written down that the previous run was still busy."""
    with hold(shop.pull, f"p{key}"):
        assert refused(shop.pull.delay(f"p{key}"))
    assert shop.app.backend.get(f"busy:p{key}") == b"yes"


def test_a_base_class_makes_tasks_unique_in_the_queue(shop: Any, key: int) -> None:
    """allianceauth/allianceauth and its plug-ins, RedHatProductSecurity/component-registry, fecgov/openFEC."""
    queued = shop.update.apply_async((key,), countdown=600)

    assert shop.update.s(key, force=True).apply_async(countdown=60).id == queued.id
    queued.revoke()
    assert shop.update.delay(key).id != queued.id


def test_a_call_may_ignore_the_lock(shop: Any, key: int) -> None:
    """openedx/enterprise-catalog, nautobot/nautobot: a person forces a run."""
    with hold(shop.rebuild, f"c{key}"):
        assert refused(shop.rebuild.delay(f"c{key}"))
        assert shop.rebuild.delay(f"c{key}", force=True).get(timeout=SOON) == f"c{key} True"


def test_the_id_of_a_row_is_that_of_its_call(shop: Any, key: int) -> None:
    """OpenConceptLab/oclapi2, nautobot/nautobot, openedx/edx-platform: a second row gets a 409."""
    source = f"s{key}"
    with hold(shop.export, source), pytest.raises(LockHeld) as caught:
        shop.export.apply_async((source,), task_id=f"row {key}")
    assert caught.value.holder_task_id == HELD_BY_TEST
    assert shop.export.apply_async((source,), task_id=f"next row {key}").get(timeout=SOON) == source
    assert shop.export.AsyncResult(f"next row {key}").get(timeout=SOON) == source


def test_a_start_that_is_none_has_another_id(shop: Any, key: int) -> None:
    """iplweb/bpp: a view compares the id that it has chosen with that of the result."""
    with hold(shop.prune, key):
        assert shop.prune.apply_async((key,), task_id=f"scan {key}").id == HELD_BY_TEST
    started = shop.prune.apply_async((key,), task_id=f"next scan {key}")
    assert (started.id, started.get(timeout=SOON)) == (f"next scan {key}", key)


def test_a_task_that_is_a_class_has_a_key_of_what_it_is_given(shop: Any, key: int) -> None:
    """codecov/worker: every task takes keyword arguments, of which two make the key."""
    with hold(shop.notify, repository=key, commit="a", pull=1):
        assert refused(shop.notify.delay(repository=key, commit="a", pull=2))
        assert shop.notify.delay(1, repository=key, commit="b").get(timeout=SOON) == "b 1"


def test_a_process_holds_a_lock_for_its_life(shop: Any) -> None:
    """onyx-dot-app/onyx, jumpserver/jumpserver: of several workers one is the primary."""
    assert len(shop.primary.state().holders) == 1
    assert shop.primary.acquire(blocking=False) is None


def test_how_many_may_run_is_known_only_when_it_runs(shop: Any, key: int) -> None:
    """PostHog/posthog, project-koku/koku: each team or customer has a number of places of its own."""
    with Lock(f"queries of {key}", app=shop.app, limit=2), Lock(f"queries of {key}", app=shop.app, limit=2):
        full = shop.query.delay(key, 2)
        until(lambda: full.state == "RETRY", "there is no place", timeout=SOON)
        assert shop.query.delay(key, 3).get(timeout=SOON) == "queried"
    assert full.get(timeout=SOON) == "queried"


def test_a_run_takes_the_first_server_that_is_free(shop: Any, key: int) -> None:
    """openwisp/openwisp-monitoring: a measurement needs one of several servers for itself."""
    first, second = f"{key} a", f"{key} b"
    with Lock(f"measures {first}", app=shop.app):
        assert shop.measure.delay([first, second]).get(timeout=SOON) == second
        with Lock(f"measures {second}", app=shop.app):
            waiting = shop.measure.delay([first, second])
            until(lambda: waiting.state == "RETRY", "none is free", timeout=SOON)
    assert waiting.get(timeout=SOON) in (first, second)


def test_a_publisher_that_knows_only_names_calls_a_stub(shop: Any, key: int) -> None:
    """onyx-dot-app/onyx: the code of the tasks is only in the workers, and each publisher has a guard of its own."""
    web = Celery("web", broker=shop.STORE, set_as_current=False)
    web.conf.update({name: shop.app.conf[name] for name in ("broker_url", "result_backend", "singleton_lock_url")})

    @web.task(base=shop.Unique, name=shop.update.name, ignore_result=True)
    def update(character: int, force: bool = False) -> None: ...

    queued = update.apply_async((key,), countdown=600)
    assert update.delay(key, force=True).id == queued.id
    assert shop.update.delay(key).id == queued.id
    queued.revoke()
    web.close()


def test_a_body_publishes_itself_again(shop: Any) -> None:
    """Issue 53 of celery-singleton: a loop, of which one is queued at a time."""
    next_one = shop.poll.delay(2).get(timeout=SOON)
    last = shop.app.AsyncResult(next_one).get(timeout=SOON)
    assert shop.app.AsyncResult(last).get(timeout=SOON) is None


def test_a_success_publishes_the_next_call(shop: Any) -> None:
    """A project whose name is not known, by celery-once: the same, where no call may be queued during a run."""
    first = shop.follow.delay(2)

    for number, suffix in ((2, ""), (1, "+"), (0, "++")):
        assert shop.app.AsyncResult(first.id + suffix).get(timeout=SOON) == number
