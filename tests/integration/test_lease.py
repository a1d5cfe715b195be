"""A `Lease`: users get the documented names and no others, and its state goes only where its table says."""

import gc
import re
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from inspect import getdoc
from typing import Any

import pytest
from celery import Celery
from celery.utils.dispatch import Signal

from celery_singleton_lock import Lease, Lock, SingletonTask, current_lease, signals
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import LostReason
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.heartbeat import RenewalThread
from celery_singleton_lock.leases.holding import Holding
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.store import Store
from tests.integration.conftest import is_renewed
from tests.waiting import until

KEY = "singleton:v3:{stock:00}"


def documented() -> set[str]:
    told = re.findall(r"^    (\w+): ", getdoc(Lease) or "", re.MULTILINE)
    return {*told, *(name for name, value in vars(Lease).items() if not name.startswith("_") and value.__doc__)}


def by_a_lock(app: Celery, see: Callable[[Any], None]) -> None:
    with Lock("stock", app=app) as lease:
        see(lease)


def by_a_task(app: Celery, see: Callable[[Any], None]) -> None:
    @app.task(base=SingletonTask, bind=True)
    def body(self: Any) -> None:
        assert self.lock is self.lock is current_lease()
        see(self.lock)

    body.apply().get()


def outside_a_run(app: Celery, see: Callable[[Any], None]) -> None:
    @app.task(base=SingletonTask)
    def body() -> None:
        pass

    see(body.lock)


def by_a_signal(app: Celery, see: Callable[[Any], None]) -> None:
    @app.task(base=SingletonTask, bind=True)
    def body(self: Any) -> None:
        mine.append(self.lock)

    mine: list[Any] = []
    told: list[Any] = []
    signals.lock_released.connect(lambda lease, **_: told.append(lease), sender=body, weak=False)
    body.apply().get()
    assert told[0] is mine[0]
    see(told[0])


@pytest.mark.parametrize("way", [by_a_lock, by_a_task, outside_a_run, by_a_signal])
def test_a_lease_has_the_documented_names_and_no_others(app: Celery, way: Any) -> None:
    def see(lease: Any) -> None:
        seen.append({name for name in dir(lease) if not name.startswith("_")})

    seen: list[set[str]] = []
    way(app, see)

    assert seen == [documented()]


def test_a_loss_that_comes_after_the_release_is_no_loss(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    lost: list[LostReason] = []
    late = Holding(store_of(app), Claim(KEY, "mine", 30.0), on_lost=lambda _, reason: lost.append(reason))
    late.acquire()
    late.release()

    for reason in ("expired", "replaced"):
        late.lose(reason)  # type: ignore[arg-type]

    assert (lost, late.view.lost, late.view.lost_reason) == ([], False, None)
    assert "lock.lost" not in caplog.text


def test_a_loss_after_its_holder_was_asked_to_stop_is_told_as_well(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[LostReason] = []
    asked = Holding(store_of(app), Claim(KEY, "mine", 30.0), on_lost=lambda _, reason: lost.append(reason))
    asked.acquire()

    for reason in ("replaced", "replaced", "unreachable", "expired"):
        asked.lose(reason)  # type: ignore[arg-type]

    assert lost == ["replaced", "unreachable"]
    assert asked.view.lost_reason == "replaced"
    until(lambda: "reason=unreachable" in caplog.text, "the log says it")
    asked.release()


@pytest.mark.parametrize(
    ("where", "owner", "name"),
    [
        ("heartbeat", Store, "renew"),
        ("heartbeat", RenewalThread, "_beat"),
        ("background", Store, "release"),
        ("background", Signal, "send"),
    ],
)
def test_an_unexpected_error_is_told_and_the_thread_goes_on(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, owner: Any, name: str
) -> None:
    own, errors = getattr(owner, name), [ArithmeticError("of ours")] * (2 if name == "release" else 1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return own(*args, **kwargs)

    lease = Lock("stock", app=app, ttl=6).acquire()
    monkeypatch.setattr(owner, name, fail)
    if name == "send":
        background.submit(partial(signals.lock_lost.send, sender=None))
    if name == "release":
        with suppress(ArithmeticError):
            lease.release()
    until(lambda: f"lock.bug where={where}" in caplog.text, "it is told")

    assert "ArithmeticError: of ours" in caplog.text
    if name == "renew":
        # As a renewal without an answer, it is repeated soon, before a short lease runs out.
        until(lambda: "lock.renewal_failed" in caplog.text, "it is told for each lease")
    if name == "release":
        until(lambda: not store_of(app).holders(lease.key), "it is released all the same")
    else:
        is_renewed(lease)
        lease.release()


def test_a_lease_is_renewed_while_somebody_has_it_and_no_longer(app: Celery) -> None:
    lock = Lock("stock", app=app, ttl=4)
    key = lock.key
    with lock as lease:
        # It brings the scripts to the server, whose errors keep frames until the garbage collector comes.
        is_renewed(lease)
    gc.collect()
    gc.disable()
    try:
        lease = copy_context().run(lock.__enter__)
        # The lease alone keeps what the heartbeat renews.
        del lock
        is_renewed(lease)
        del lease
        until(lambda: not store_of(app).holders(key), "nobody renews it")
    finally:
        gc.enable()
