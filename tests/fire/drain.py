"""After the fire: all is healed, everything has to end, and what is left is counted."""

import dataclasses
import subprocess
import time
from contextlib import suppress

import kombu

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.fire.checker import Call, History, Remains, unaccounted
from tests.fire.kinds import KINDS
from tests.fire.load import states
from tests.fire.stage import LONGEST_WARM_SHUTDOWN, Host, Stage
from tests.runs.watch import Watch
from tests.waiting import until

# Longer than a message is ever away before it is delivered again.
_QUIET = 3.0


def drain(stage: Stage, watch: Watch, bound: float) -> History:
    end = time.monotonic() + bound
    stage.supervise()
    stuck = [event.facts for event in watch.events if event.name == "stuck"]
    troubles = [f"the {facts['what']} did not end" for facts in stuck if not facts["in_celery"]]
    for host in stage.hosts:
        host.heal()
        until(host.is_ready, f"{host} is ready", timeout=60)
    while not (drained := _is_drained(stage, watch)) and time.monotonic() < end:
        time.sleep(0.5)
        stage.supervise()
    stage.supervise()
    for host in stage.hosts:
        host.stop()
    staying = [host for host in stage.hosts if not _has_ended(host)]
    troubles += [f"{host} did not end when it was told to" for host in staying if host.hangs_in_the_lock(watch.pids())]
    gone = [event.facts["what"] for event in watch.events if event.name == "gone"]
    remains = Remains(drained, messages(stage), _holders(stage), _without_expiry(stage), [*troubles, *gone])
    return dataclasses.replace(known(stage, watch), remains=remains)


def known(stage: Stage, watch: Watch) -> History:
    events = list(watch.events)
    sent = {event.facts["task_id"]: event.facts["task"] for event in events if event.name == "sent"}
    ended = states(stage.results, list(sent))
    calls = [Call(task_id, task, *ended.get(task_id, ("PENDING", ""))) for task_id, task in sent.items()]
    return History(events, calls)


def messages(stage: Stage) -> int:
    with kombu.Connection(stage.broker.url) as connection:
        return int(connection.default_channel.queue_declare("fire", passive=True).message_count)


def _is_drained(stage: Stage, watch: Watch) -> bool:
    latest = max((event.at for event in watch.events if event.name in ("began", "ended")), default=0.0)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    if now - latest < _QUIET or watch.bodies() or messages(stage):
        return False
    return not unaccounted(known(stage, watch))


def _has_ended(host: Host) -> bool:
    with suppress(subprocess.TimeoutExpired):
        host.worker.wait(LONGEST_WARM_SHUTDOWN)
    return not host.is_alive()


def _holders(stage: Stage) -> list[str]:
    """The holders that are left when all leases of dead processes must have ended."""
    store = store_from_url(stage.url_of_locks)

    def found() -> list[str]:
        surveys = store.survey(list(Inventory(store).keys("singleton:")))
        return [f"{each.key} by {holder.task_id}" for each in surveys for holder in each.holders if holder.fence]

    end = time.monotonic() + max(kind.ttl for kind in KINDS.values()) + 1
    while (holders := found()) and time.monotonic() < end:
        time.sleep(0.2)
    store.close()
    return holders


def _without_expiry(stage: Stage) -> list[str]:
    store = store_from_url(stage.url_of_locks)
    found = [key for key in Inventory(store).keys("") if store.call("PTTL", key) == -1]
    store.close()
    return found
