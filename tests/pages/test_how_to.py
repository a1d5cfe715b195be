"""README, the tutorial and the how-to pages: each does what it says."""

import asyncio
import re
import sys
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from celery.beat import Scheduler

from celery_singleton_lock import CallRevoked, Lock, LockHeld, LockLost, signals
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.testing import HELD_BY_TEST, expire, hold
from tests.pages.conftest import ROOT, Program, StartWorker, programs_of
from tests.servers import Server
from tests.tracing import traced
from tests.waiting import SOON, until


def test_the_example_of_the_readme(shop: Program, worker: StartWorker) -> None:
    module = shop("README.md")
    worker()

    with hold(module.import_catalogue, 7):
        other = module.import_catalogue.delay(8)
        skipped = module.import_catalogue.delay(7, full=True)
        assert other.get(timeout=SOON) is None
        with pytest.raises(CallRevoked, match=HELD_BY_TEST):
            skipped.get(timeout=SOON)

    assert skipped.state == "REVOKED"
    assert module.import_catalogue.delay(7).get(timeout=SOON) is None


def test_a_worker_is_killed_and_the_key_comes_free(shop: Program, worker: StartWorker) -> None:
    task = shop("docs/tutorial.md").import_catalogue
    one = worker()
    first = task.delay(7)
    until(lambda: task.lock_holders(7), "the first call runs", timeout=SOON)

    second = task.delay(7)
    with pytest.raises(CallRevoked, match=f"is held by task_id={first.id}"):
        second.get(timeout=SOON)
    assert second.state == "REVOKED"
    assert second.result.holder_task_id == first.id
    alone = task.delay(8, pages=1).get(timeout=SOON)
    assert "outcome=skipped" in one.log()

    one.kill()
    left = task.lock_holders(7)[0].expires_in
    assert 0 < left <= 12
    until(lambda: not task.lock_holders(7), "its lease ends", timeout=SOON)

    worker()
    taken_over = task.delay(7, pages=1).get(timeout=SOON)

    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for told in (alone, taken_over):
        assert f"'{told}'" in page
    assert taken_over.endswith("True")


def test_choose_what_counts(shop: Program) -> None:
    # The page asserts itself.
    module = shop("docs/how-to/choose-what-counts.md")

    assert len(module.keys) == 4


RATE = """
@app.task(
    base=SingletonTask, bind=True, lock_key=("host",), lock_limit=3, lock_min_hold=1, lock_on_conflict="reschedule"
)
def look(self, host, page):
    return self.lock.fence
"""


def test_choose_a_policy(shop: Program, worker: StartWorker, folder: Path) -> None:
    module = shop("docs/how-to/choose-a-policy.md")
    with (folder / "shop.py").open("a") as program:
        program.write(RATE)
    exec(RATE, vars(module))
    worker(concurrency=6)

    # Another run will do.
    with hold(module.import_catalogue, 7), pytest.raises(CallRevoked, match=HELD_BY_TEST):
        module.import_catalogue.delay(7).get(timeout=SOON)
    with hold(module.sync_prices):
        assert module.sync_prices.delay().get(timeout=SOON) == "on its way"
    with hold(module.send_invoice, 1), pytest.raises(LockHeld, match=HELD_BY_TEST):
        module.send_invoice.delay(1).get(timeout=SOON)
    assert [each.get(timeout=SOON) for each in (module.report.delay(5), module.report.delay(5))] == ["report of 5"] * 2

    with hold(module.book_delivery, "lamp", 0), hold(module.number_an_order, 0):
        booked, numbered = module.book_delivery.delay("lamp", 20), module.number_an_order.delay(2)
        until(lambda: booked.state == "RETRY", "the delivery is requeued", timeout=SOON)
    assert (booked.get(timeout=SOON), numbered.get(timeout=SOON)) == (20, 2)

    with hold(module.rebuild_index, 1):
        reruns = [module.rebuild_index.delay(version) for version in (2, 3, 4)]
        until(lambda: sum(each.ready() for each in reruns) == 2, "two calls end in favour of the newest", timeout=SOON)
    assert reruns[-1].get(timeout=SOON) == 4

    slow = module.search.delay("ann", "la")
    until(lambda: module.search.lock_holders("ann", "la"), "somebody searches", timeout=SOON)
    better = module.search.delay("ann", "lamp")
    assert better.get(timeout=SOON) == "found lamp"
    with pytest.raises(CallRevoked, match=better.id):
        slow.get(timeout=SOON)

    assert module.digest.delay("blue").get(timeout=SOON) == "sent to blue"
    with pytest.raises(CallRevoked):
        module.digest.delay("blue").get(timeout=SOON)
    with ExitStack() as holders:
        for _ in range(3):
            holders.enter_context(hold(module.crawl, "shop.example", 0))
        fourth = module.crawl.delay("shop.example", 4)
        until(lambda: fourth.state == "RETRY", "the fourth is requeued", timeout=SOON)
    assert fourth.get(timeout=SOON) == 4

    fences = sorted(each.get(timeout=SOON) for each in [module.look.delay("shop.example", page) for page in range(7)])
    # On the clock of the store, in microseconds; the fourth begins after the first, and so on.
    assert all(later - first >= 999_000 for first, later in zip(fences, fences[3:], strict=False))


def test_serial_work_by_key(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/serial-work-by-key.md")
    worker(concurrency=2)

    task = module.handle_webhook
    with hold(task, 1, "paid"):
        results = [task.delay(1, event) for event in ("paid", "refunded", "closed")]
        until(lambda: task.lock_state(1).waiting == 3, "they wait in the line", timeout=SOON)
        assert task.delay(2, "paid").get(timeout=SOON) == "paid of 2"
    assert [each.get(timeout=SOON) for each in results] == ["paid of 1", "refunded of 1", "closed of 1"]


def test_recipes(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/recipes.md")
    log = worker(concurrency=1).log

    assert [module.import_catalogue.delay(7).get(timeout=SOON) for _ in range(2)] == ["imported", "fresh"]
    module.sync_page.delay()
    until(lambda: log().count("Task shop.sync_page[") >= 6 and log().count("succeeded in") >= 5, "all", timeout=SOON)
    assert re.findall(r"shop.sync_page\[\S+\] succeeded in \S+: (\d)", log()) == ["1", "2", "3"]
    with Lock("api:silver", app=module.app), Lock("api:gold", app=module.app, limit=5):
        waiting, free = module.call_api.delay("silver"), module.call_api.delay("gold")
        assert free.get(timeout=SOON) == "gold"
        until(lambda: waiting.state == "RETRY", "the limit of the key is reached", timeout=SOON)
    assert waiting.get(timeout=SOON) == "silver"


def test_keep_duplicates_out_of_the_queue(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/unique-in-the-queue.md")
    module.call_twice()
    first = module.import_catalogue.delay(7)

    worker()
    assert first.get(timeout=SOON) == "imported 7"
    older, newest = (module.reindex.AsyncResult(module.saved(1, version)) for version in (1, 2))
    assert newest.get(timeout=SOON) == 2
    with pytest.raises(CallRevoked, match=newest.id):
        older.get(timeout=SOON)


def test_lock_a_whole_workflow(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/a-whole-workflow.md")

    first, duplicate = module.import_catalogue.delay(7), module.import_catalogue.delay(7)
    worker()
    assert first.id == duplicate.id
    assert first.get(timeout=SOON) == "published 4"
    second = module.import_catalogue.delay(7)
    assert second.id != first.id
    assert second.get(timeout=SOON) == "published 4"


def test_cancel_and_start_again(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/cancel-and-start-again.md")
    worker()
    task = module.import_catalogue
    # A worker says that it is ready a moment before it hears of revocations.
    until(module.app.control.ping, "the worker listens", timeout=SOON)

    # The body sleeps once for each page: Python hears a signal that comes just before a sleep only after that sleep.
    runs = task.delay(7, pages=3600)
    until(lambda: task.lock_state(7).holders, "it runs", timeout=SOON)
    queued = task.apply_async((8,), countdown=3600)
    again = {first: task.AsyncResult(module.start_again(key)) for first, key in ((runs, 7), (queued, 8))}

    for first, second in again.items():
        assert first.id != second.id
        assert second.get(timeout=SOON) == 1
    assert runs.state == "REVOKED"


def test_results(shop: Program) -> None:
    module = shop("docs/how-to/results.md")
    # Celery calls what redis-py has deprecated.
    module.app.conf.result_backend = "cache+memory://"
    task = module.import_catalogue

    status, place = module.start(7)
    assert (status, module.start(7), module.start(8)[0]) == (202, (409, place), 202)
    assert module.show(place.rpartition("/")[2]) == (200, "PENDING")

    # A run that is refused for the queued call, and one in whose place another runs.
    sent, _ = traced(task, 7)
    assert (task.AsyncResult(sent).state, module.show(sent)) == ("FAILURE", (303, place))
    for other, answer in (("another", (303, "/imports/another")), (None, (200, "REVOKED"))):
        error = CallRevoked("text", "key", other, "superseded" if other else "unanswered")
        module.app.backend.store_result(f"not for {other}", error, "REVOKED")
        assert module.show(f"not for {other}") == answer


def refused(result: Any) -> bool:
    with pytest.raises(CallRevoked, match=HELD_BY_TEST):
        result.get(timeout=SOON)
    return True


RETRYING = """
@app.task(base=TenantTask, bind=True, lock_mode="until_executed", lock_key=of_the_tenant)
def retrying(self, user):
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return f"{tenant_now.get()} {user}"
"""


def test_lock_for_each_tenant(shop: Program, worker: StartWorker, folder: Path) -> None:
    module = shop("docs/how-to/tenants.md")
    exec(RETRYING, vars(module))
    with (folder / "shop.py").open("a") as program:
        program.write(RETRYING)
    bill, entries = module.bill, list(Scheduler(module.app).get_schedule().values())
    scheduler = Scheduler(module.app, lazy=True)

    with module.tenant("north"):
        north = bill.delay(1)
        assert bill.delay(1).id == north.id
    with module.tenant("south"):
        south = bill.delay(1)
    assert south.id != north.id
    # Of the two entries of a tenant one is sent.
    sent = [scheduler.apply_async(entry, advance=False) for entry in entries]
    assert len(entries) == 4
    assert len({each.id for each in sent}) == 2
    with module.tenant("north"):
        retried = [module.retrying.delay(1)]
    with module.tenant("south"):
        retried.append(module.retrying.delay(1))
    # A class changes the arguments.
    reminders = [module.remind.delay(1, _tenant=name) for name in ("north", "north", "south")]
    assert reminders[0].id == reminders[1].id != reminders[2].id

    worker()
    assert [each.get(timeout=SOON) for each in reminders] == ["north 1", "north 1", "south 1"]
    assert [each.get(timeout=SOON) for each in (north, south)] == ["north 1", "south 1"]
    assert sorted(each.get(timeout=SOON) for each in {each.id: each for each in sent}.values()) == [
        "north 7",
        "south 7",
    ]
    assert [each.get(timeout=SOON) for each in retried] == ["north 1", "south 1"]
    with module.tenant("north"), hold(bill, 2):
        assert refused(module.app.send_task("shop.bill", (2,), headers={"tenant": "north"}))
        found = module.app.send_task("shop.bill", (2,), headers={"tenant": "south"})
        assert found.get(timeout=SOON) == "south 2"
    with pytest.raises(LookupError):
        bill.delay(1)
    # The tenant is an argument.
    with hold(module.invite, "north", 1):
        assert refused(module.invite.delay("north", 1, text="hi"))
        assert refused(module.app.send_task("shop.invite", ("north",), {"user": 1}))
        assert module.invite.delay("south", 1).get(timeout=SOON) == "south 1"


VENDOR = """
from celery import shared_task

@shared_task(bind=True, autoretry_for=(OSError,), retry_kwargs={"countdown": 0}, max_retries=2)
def clean_up(self, folder, dry=False):
    if self.request.retries < 2:
        raise OSError("busy")
    return f"{folder} {self.lock.held}"
"""


def test_lock_the_tasks_of_another_package(
    shop: Program, worker: StartWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "vendor").mkdir()
    (folder / "vendor" / "tasks.py").write_text(VENDOR)
    module = shop("docs/how-to/third-party-tasks.md")
    module.app.finalize()
    vendor = import_module("vendor.tasks")
    for name in ("vendor", "vendor.tasks"):
        monkeypatch.delitem(sys.modules, name)
    clean_up = module.app.tasks["vendor.tasks.clean_up"]

    worker()
    inspect, swapped = module.app.control.inspect, "clean_up [lock_key=('folder',)]"
    until(lambda: swapped in str(inspect().registered("lock_key")), "the worker has swapped it", timeout=SOON)
    assert vendor.clean_up.delay("a").get(timeout=SOON) == "a True"
    with hold(clean_up, "a"):
        assert refused(vendor.clean_up.delay("a", dry=True))
        assert refused(module.app.send_task("vendor.tasks.clean_up", ("a",)))
        assert vendor.clean_up.delay("b").get(timeout=SOON) == "b True"


def test_use_the_fence(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/use-the-fence.md")
    worker()

    fence = module.import_catalogue.delay(7, 2).get(timeout=SOON)
    later = module.import_catalogue.delay(7, 2).get(timeout=SOON)

    assert 0 < fence < later
    with pytest.raises(module.TooLate):
        module.save(7, 3, fence)
    module.save(7, 3, later)
    assert module.resize_images.delay(7).get(timeout=SOON) == ["large", "small"]
    assert module.resize_in_its_context() == "nobody has called copy_context()"


def test_work_that_must_stop(shop: Program, worker: StartWorker) -> None:
    module = shop("docs/how-to/work-that-must-stop.md")
    worker()

    endless = module.import_catalogue.delay(10**12)
    until(lambda: module.import_catalogue.lock_holders(10**12), "it runs", timeout=SOON)
    expire(module.import_catalogue, 10**12)
    with pytest.raises(LockLost):
        endless.get(timeout=SOON)
    assert module.print_label.delay(1).get(timeout=SOON) == 1


def test_lock_without_a_task(shop: Program) -> None:
    module = shop("docs/how-to/lock-without-a-task.md")

    assert len(set(module.fences)) == 2
    assert asyncio.run(module.count_stock())
    assert asyncio.run(module.reserve())


PRIMARY = """
from celery.signals import worker_init

@worker_init.connect(weak=False)
def become_the_primary(**_: object) -> None:
    Lock("primary", url="{url}", ttl=12).acquire(timeout=10)
"""


def test_a_worker_of_several_holds_a_lock_for_its_life(
    shop: Program, worker: StartWorker, folder: Path, valkey: Server
) -> None:
    shop("docs/how-to/lock-without-a-task.md")
    # Not in this process, which is no worker.
    with (folder / "shop.py").open("a") as program:
        program.write(PRIMARY.format(url=valkey.url))
    primary = Lock("primary", url=valkey.url)
    one = worker()

    (holder,) = primary.state().holders
    assert holder.pid == one.pid
    until(lambda: primary.state().holders[0].expires_in < 10, "time passes")
    until(lambda: primary.state().holders[0].expires_in > 10, "it is renewed")
    assert primary.acquire(blocking=False) is None


def test_observe(shop: Program, worker: StartWorker, request: pytest.FixtureRequest) -> None:
    module = shop("docs/how-to/observe.md")
    traced = worker()
    for signal, receiver in ((signals.lock_conflict, module.count_conflict), (signals.lock_lost, module.alert)):
        request.addfinalizer(partial(signal.disconnect, receiver))

    module.import_catalogue.apply((7,))
    with hold(module.import_catalogue, 7):
        module.import_catalogue.apply((7,))

    assert module.conflicts == {"shop.import_catalogue skipped": 1}
    # Other tests of this process may have left a `Lock`, whose server is gone by now.
    assert [each for each in module.alerts if "import_catalogue" in each] == []
    assert module.import_catalogue.delay(8).get(timeout=SOON) == "imported 8"
    assert "trace_runs" not in traced.log()


def test_page_and_metrics(shop: Program) -> None:
    module = shop("docs/how-to/page-and-metrics.md")

    page = module.site.test_client().get("/locks/")

    assert page.status_code == 200
    assert "Locks of shop" in page.text
    assert 'action="/locks/"' in page.text


def test_where_the_locks_are() -> None:
    told: dict[str, Any] = {}
    schemes = []
    for block in programs_of("docs/how-to/topologies.md"):
        exec(block, told)
        schemes.append(store_of(told["app"]).address.partition("://")[0])

    assert schemes == ["redis", "sentinel", "sentinel", "redis+cluster", "rediss"]
