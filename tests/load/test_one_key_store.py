"""One key's crowd harms no other key: what a script costs and answers, however many hold, wait or come.

The figures are the server's own, by its commandstats and slow log, and go into the report of the run.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer, Claim, Facts, Grant
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.load.asking import asked
from tests.servers import Server
from tests.waiting import until

KEY, OTHER = "singleton:v3:{shop.tasks.sync:00}", "singleton:v3:{shop.tasks.sync:11}"
SAMPLES = 200
CROWD = 10_000
# Milliseconds of the server that a script may take, by the median: many times what it takes on a quiet machine, and
# less than a walk over the whole crowd.
AT_MOST = 5.0
# With ten times the holders it may be more, as long as it is no second.
AT_MOST_AT_1000 = 200.0


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    store = RedisStore(server.url, {})
    yield store
    store.close()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        client.config_set("slowlog-log-slower-than", 0)
        # The commands within the scripts are noted as well.
        client.config_set("slowlog-max-len", 1_000_000)
        client.slowlog_reset()
        yield client
        client.slowlog_reset()
        client.config_set("slowlog-log-slower-than", 10_000)


Costs = Callable[[str, Callable[[int], Any]], float]


@pytest.fixture
def costs(client: Any, record_property: Callable[[str, object], None]) -> Costs:
    """Tells the median of what the scripts of many tries take, in milliseconds, and notes the rest."""

    def measured(name: str, attempt: Callable[[int], Any]) -> float:
        client.slowlog_reset()
        for number in range(SAMPLES):
            attempt(number)
        entries = client.slowlog_get(1_000_000)
        took = sorted(entry["duration"] / 1000 for entry in entries if entry["command"].startswith(b"EVALSHA"))
        assert len(took) >= SAMPLES
        median = statistics.median(took)
        record_property(name, f"{median:.3f} ms, {took[len(took) * 99 // 100]:.3f} at 99 %, {took[-1]:.3f} at most")
        return median

    return measured


def claim(token: str, limit: int = 1, **more: Any) -> Claim:
    return Claim(KEY, token, 600.0, limit, Facts(f"id-of-{token}", hostname="celery@worker-1", pid=12345), **more)


def fill(client: Any, claims: list[Claim], *, waits: bool) -> None:
    """Have them all ask, in as few round trips as may be."""
    pipeline = client.pipeline(transaction=False)
    for command in asked(client, claims, waits=waits):
        pipeline.execute_command(*command)
    pipeline.execute()


def bytes_of_a_refusal(server: Server, wanted: Claim) -> int:
    with server.client() as client:
        (command,) = asked(client, [wanted], waits=False)
        before = client.info("stats")["total_net_output_bytes"]
        client.execute_command(*command)
        between = client.info("stats")["total_net_output_bytes"]
        idle = client.info("stats")["total_net_output_bytes"] - between
    return int(between - before - idle)


@pytest.mark.parametrize(("limit", "at_most"), [(100, AT_MOST), (1000, AT_MOST_AT_1000)])
def test_very_many_holders_cost_little(
    store: RedisStore, client: Any, server: Server, costs: Costs, limit: int, at_most: float
) -> None:
    holders = [claim(f"t{number}", limit) for number in range(limit)]
    fill(client, holders, waits=False)
    copy = claim("t0", limit, may_be_copy=True)

    def release_and_grant(number: int) -> None:
        mine = holders[number % limit]
        assert store.release(mine, None) is Answer.DONE
        assert isinstance(store.acquire(mine), Grant)

    took = {
        "refused": costs(f"refused at {limit}", lambda _: store.acquire(claim("newcomer", limit))),
        "its own copy": costs(f"a copy at {limit}", lambda _: store.acquire(copy)),
        "renewed": costs(f"renewed at {limit}", lambda number: store.renew(holders[number % 50 :][:50], 5.0)),
        "released, granted": costs(f"released, granted at {limit}", release_and_grant),
        "queued": costs(f"queued at {limit}", lambda number: mark_queued(store, number, limit)),
        "next": costs(f"next at {limit}", lambda number: is_next(store, number, limit)),
        "looked at": costs(f"looked at, {limit}", lambda _: store.holders(KEY)),
    }

    assert max(took.values()) <= at_most, took
    assert bytes_of_a_refusal(server, claim("newcomer", limit)) < 3000


def mark_queued(store: RedisStore, number: int, limit: int) -> None:
    store.mark_queued(KEY, f"call-{number}", 600.0, limit=limit, quiet=0.0)


def is_next(store: RedisStore, number: int, limit: int) -> None:
    store.acquire(claim(f"next-{number}", limit, succeeds="replace", supersedes_for=600.0, asked=True))


def test_very_many_waiters_cost_little(store: RedisStore, client: Any, server: Server, costs: Costs) -> None:
    store.acquire(claim("holder"))
    waiters = [claim(f"w{number}") for number in range(CROWD)]
    fill(client, waiters, waits=True)
    last = store.waiter(waiters[-1])

    def comes_and_goes(number: int) -> None:
        mine = claim(f"n{number}")
        fill(client, [mine], waits=True)
        store.release(mine, None)

    with last:
        took = {
            "asked again": costs("asked again by the last of 10,000", lambda _: last.ask()),
            "refused": costs("refused beside 10,000", lambda _: store.acquire(claim("newcomer"))),
            "a turn taken and given back": costs("a turn behind 10,000", comes_and_goes),
            "looked at": costs("looked at, 10,000 wait", lambda _: store.holders(KEY)),
        }

    assert max(took.values()) <= AT_MOST, took
    assert bytes_of_a_refusal(server, claim("newcomer")) < 3000


def test_very_many_waiters_that_vanished_slow_no_release_and_keep_nobody_out(
    store: RedisStore, client: Any, costs: Costs, record_property: Callable[[str, object], None]
) -> None:
    store.acquire(claim("holder"))
    fill(client, [claim(f"w{number}") for number in range(CROWD)], waits=True)
    with store.waiter(claim("alive")) as waiter:
        waiter.ask()
        client.slowlog_reset()
        began = clock()

        assert store.release(claim("holder"), 1) is Answer.DONE

        seconds = clock() - began
        waiter.sleep(20)
        assert clock() - began < 15
        assert isinstance(waiter.ask(), Grant)
    took = sorted(entry["duration"] / 1000 for entry in client.slowlog_get(1_000_000) if b"EVAL" in entry["command"])
    told = f"{seconds:.3f} s in {len(took)} scripts, {statistics.median(took):.3f} ms each, {took[-1]:.3f} at most"
    record_property("released past 10,000 that vanished", told)
    # No script looks at more than a hundred of them.
    assert len(took) > CROWD / 100
    assert statistics.median(took) <= AT_MOST


def keep_a_lease(url: str, stop: Any, told: Any) -> None:
    """As another process does it: renewed every third of its ttl; whether it was ever lost, and the longest renewal."""
    store, mine = RedisStore(url, {}), Claim(OTHER, "mine", 6.0)
    store.acquire(mine)
    longest, is_kept = 0.0, True
    while not stop.wait(2.0):
        began = clock()
        with suppress(StoreError):
            is_kept &= store.renew([mine], 4.0) == [Answer.DONE]
        longest = max(longest, clock() - began)
    told.put((is_kept, longest))


def test_another_lease_is_renewed_in_time_while_very_many_wait(
    server: Server, store: RedisStore, client: Any, record_property: Callable[[str, object], None]
) -> None:
    spawn = multiprocessing.get_context("spawn")
    stop, told = spawn.Event(), spawn.SimpleQueue()
    process = spawn.Process(target=keep_a_lease, args=(server.url, stop, told))
    process.start()
    until(lambda: store.holders(OTHER), "the other lease is held", timeout=60)
    waiters = [claim(f"w{number}") for number in range(CROWD)]
    store.acquire(claim("holder"))
    began = clock()

    # They all ask, and all ask again, for as long as three renewals and more take.
    while clock() - began < 10:
        fill(client, waiters, waits=True)
    store.release(claim("holder"), 1)
    stop.set()
    is_kept, longest = told.get()
    process.join(60)

    record_property("renewal of another lease", f"{1000 * longest:.1f} ms at most")
    assert is_kept
    assert longest < 4.0
