"""R13 for greenlets: an error, such as a `Timeout`, can be thrown into one wherever it lets others run."""

import subprocess
import sys

import pytest

from tests.servers import Server

# In a process of its own, which is patched as a worker with this pool is.
STRUCK = """
import sys
{patch}
import gc, time
import greenlet
from celery_singleton_lock import Lock
from celery_singleton_lock.leases.heartbeat import heartbeat
from celery_singleton_lock.stores.records import Answer, Claim, Grant

TTL = 300.0

class StruckError(Exception): pass

lock = Lock("green", url=sys.argv[1], ttl=TTL)
store = lock._store
bystander = Claim("singleton:v2:{{bystander:1}}", "bystander", TTL)
holder = Claim(lock.key, "holder", TTL)

def a_block():
    with lock:
        pass

leaving = []

def a_block_that_waits():
    leaving.append(True)
    spawn(leave)
    a_block()

def a_refusal():
    assert lock.acquire(blocking=False) is None

def leave():
    time.sleep(0.05)
    store.release(holder, 1)
    leaving.pop()

def struck(body, moment):
    # How often it let others run; where it did so for this time, an error is thrown into it.
    seen, ended = 0, []

    def run():
        try:
            body()
        except StruckError:
            pass
        ended.append(True)

    def switched(event, args):
        nonlocal seen
        if args[0] is victim and not ended:
            seen += 1
            if seen == moment + 1:
                call_soon(lambda: ended or victim.throw(StruckError()))

    victim = spawn(run)
    greenlet.settrace(switched)
    try:
        is_reached(lambda: ended, "it has ended " + body.__name__ + " " + str(moment))
    finally:
        greenlet.settrace(None)
    return seen

def is_reached(condition, what):
    # Less than the ttl, which would end all.
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, what
        gc.collect()
        time.sleep(0.002)

def check(where):
    is_reached(lambda: not heartbeat.watched(), "nothing is renewed that nobody is in; " + where)
    is_reached(lambda: not store.holders(lock.key), "the key is free; " + where)
    lease = Lock("fresh", url=sys.argv[1], ttl=TTL).acquire(timeout=10)
    first = lease._renewal.deadline
    store.on_reconnect()
    is_reached(lambda: lease._renewal.deadline > first, "a fresh lease is renewed; " + where)
    lease.release()
    assert store.renew([bystander], 5.0) == [Answer.DONE], where

{library}
assert isinstance(store.acquire(bystander), Grant)
tried = 0
for body in (a_block, a_block_that_waits, a_refusal):
    # Connections that have to be opened, and those that there are.
    for opens in (True, False):
        moment = 0
        while True:
            if body is not a_block:
                assert isinstance(store.acquire(holder), Grant)
            if opens:
                store.close()
            seen = struck(body, moment)
            # Otherwise it would release the holder of the next moment.
            is_reached(lambda: not leaving, "the holder has left")
            store.release(holder, 1)
            check(body.__name__ + ", struck at " + str(moment) + " of " + str(seen))
            if seen <= moment:
                break
            moment += 1
            tried += 1
print(tried, "moments tried")
"""

GEVENT = """
def spawn(run):
    return gevent.spawn(run)

def call_soon(call):
    gevent.get_hub().loop.run_callback(call)
"""

EVENTLET = """
def spawn(run):
    return eventlet.spawn(run)

def call_soon(call):
    eventlet.hubs.get_hub().schedule_call_global(0, call)
"""


@pytest.mark.parametrize(
    ("patch", "library"),
    [
        ("from gevent import monkey; monkey.patch_all()\nimport gevent", GEVENT),
        ("import eventlet; eventlet.monkey_patch()", EVENTLET),
    ],
    ids=["gevent", "eventlet"],
)
def test_no_switch_is_a_bad_one(server: Server, patch: str, library: str) -> None:
    script = STRUCK.format(patch=patch, library=library)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, server.url], capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr
    tried, _, _ = done.stdout.partition(" ")
    # A reply that is there already lets nobody else run, so there are fewer on some machines.
    assert int(tried) > 0, done.stdout
    print(done.stdout)  # noqa: T201 (`make prove` shows it)
