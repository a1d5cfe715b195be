"""Code that both type checkers have to accept, and the types that they have to find."""

from datetime import datetime, timedelta
from typing import Any, assert_type

from celery import Celery, Task
from celery.result import AsyncResult

from celery_singleton_lock import (
    Holder,
    Lease,
    Lock,
    LockHeld,
    LockLost,
    LockState,
    SingletonOptions,
    SingletonTask,
    current_lease,
)
from celery_singleton_lock.operations import break_marks
from celery_singleton_lock.testing import SingletonLocks, disabled, expire, hold, memory_store, recorded

app = Celery("shop")


@app.task(base=SingletonTask, lock_key=("supplier_id",), lock_ttl=timedelta(minutes=1))
def import_catalogue(supplier_id: int, full: bool = False) -> None: ...


@app.task(base=SingletonTask, bind=True)
def import_prices(self: SingletonTask, supplier_id: int) -> None:
    self.lock.check()
    assert_type(self.lock, Lease)
    assert_type(self.lock.fence, int)
    assert_type(self.lock.held, bool)
    assert_type(self.lock.acquired_at, datetime)
    assert_type(self.lock.remaining(), float)


nightly: SingletonOptions = {"lock_ttl": 60, "lock_on_conflict": "raise", "lock_key": ("day",)}


@app.task(base=SingletonTask, **nightly)
def report(day: str) -> None: ...


@app.task(base=SingletonTask, **SingletonOptions(lock_mode="until_executed", lock_skip_result=None))
def digest(day: str) -> None: ...


class Count(SingletonTask[[int], str]):
    name = "count"
    lock_on_conflict = "join"
    lock_min_hold = timedelta(hours=1)
    lock_owner: str = "shop"

    def run(self, supplier_id: int) -> str:
        return f"{self.lock.key} {supplier_id}"


assert_type(Count().delay(7), AsyncResult[str])
assert_type(Count().apply_async((7,), countdown=1), AsyncResult[str])
assert_type(Count()(7), str)
assert_type(import_catalogue.lock_key_for(7), str)
assert_type(import_catalogue.lock_options.ttl, float)
assert_type(current_lease(), Lease | None)

for holder in import_prices.lock_holders(7):
    assert_type(holder.task_id, str | None)
    assert_type(holder.acquired_at, datetime)
    assert_type(holder.expires_in, float)

state = import_prices.lock_state(7)
assert_type(state, LockState)
assert_type(state.holders, list[Holder])
assert_type((state.queued, state.next), tuple[str | None, str | None])
assert_type(state.cooldown_until, datetime | None)
assert_type(import_prices.lock_for(7).state().waiting, int)
for_a_view = import_prices.lock_for(7)
for_a_view.timeout = timedelta(seconds=2)
assert_type(for_a_view.acquire(timeout=0), Lease | None)
assert_type(break_marks(app, "shop.*"), int)


@Lock("stock", timeout=timedelta(seconds=5))
def count_stock(shelf: int, *, again: bool = False) -> str:
    return "42"


@Lock("stock")
async def count_later(shelf: int) -> str:
    return "42"


async def in_a_loop() -> None:
    assert_type(await count_later(1), str)
    async with Lock("stock") as lease:
        assert_type(lease, Lease)
    taken = await Lock("stock").aacquire(timeout=timedelta(seconds=1))
    assert_type(taken, Lease | None)
    if taken is not None:
        await taken.arelease()


assert_type(count_stock(1, again=True), str)

with Lock("stock", ttl=timedelta(seconds=5)) as lease:
    assert_type(lease, Lease)
    assert_type(lease.token, str)


class CompanyTask(Task[..., Any]):
    abstract = True


shop = Celery("shop", task_cls=CompanyTask)
assert_type(Lock("stock", app=shop), Lock)
assert_type(Lock("stock", app=Celery("shop", task_cls="shop:CompanyTask")), Lock)
assert_type(Lock("stock", app=app), Lock)

stock = Lock("stock", url="redis://").acquire(timeout=timedelta(seconds=1))
assert_type(stock, Lease | None)

try:
    report.delay("today").get()
except LockHeld as error:
    assert_type(error.holder_task_id, str | None)
except LockLost as error:
    if error.reason == "replaced":
        assert_type(error.key, str)


def test_import(singleton_locks: SingletonLocks) -> None:
    with memory_store(app) as store, recorded() as record, hold(import_catalogue, 7, full=True) as holder:
        store.advance(60)
        expire(Lock("stock").key, app=app)
        assert_type(holder, Holder)
        assert_type([conflict.holder for conflict in record.conflicts], list[str | None])
        assert_type([lost.key for lost in singleton_locks.lost], list[str])
    with disabled():
        singleton_locks.advance(1.5)
