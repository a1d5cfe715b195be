"""A bad night of one worker: what it tells in the log, to monitors, in metrics and in JSON is what the docs list."""

import gc
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from celery_singleton_lock.beat import SingletonSchedulerMixin
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.web import application
from tests.acceptance import told_app as tasks
from tests.acceptance.conftest import forget_connections, invoked
from tests.browsing import Visitor
from tests.proxy import Proxy
from tests.recorder import Recorder
from tests.servers import Server, running
from tests.waiting import SOON, until
from tests.workers import workers

APP = "tests.acceptance.told_app"
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOG = (DOCS / "reference" / "log.md").read_text(encoding="utf-8")
COMMANDS = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
METRICS = (DOCS / "how-to" / "page-and-metrics.md").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^- `(singleton_lock_\w+)`", METRICS, re.MULTILINE))
KEPT = {"conflict", "lost", "holder_died", "unanswered"}
Line = tuple[str, str, frozenset[str]]

LINES = {
    (event, level, frozenset(re.findall(r"\w+", fields)))
    for event, level, fields in re.findall(r"^- `((?:lock|beat)\.\w+)` ([A-Z]+)((?: `\w+`)*): ", LOG, re.MULTILINE)
}
ELSEWHERE = {
    "acceptance/test_start.py": [
        *("lock.async_body", "lock.check_failed", "lock.misconfigured", "lock.no_base", "lock.store_unreachable")
    ],
    "acceptance/test_beat.py": ["beat.stands_by"],
    "acceptance/test_labels.py": ["lock.label_failed"],
    "integration/test_lease.py": ["lock.bug"],
    "contract/test_rights.py": ["lock.not_subscribed"],
    "integration/test_beats.py": [
        *("beat.differs", "beat.publish_failed", "beat.sent", "beat.slot_unrecorded", "beat.unanswered")
    ],
    "integration/test_clocks.py": ["lock.clock"],
    "topologies/test_worker.py": ["lock.moved"],
    "unit/test_publish.py": ["lock.unmarked"],
}
"""Events that this worker does not have, and the test of each."""


@dataclass
class Told:
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    columns: dict[str, set[str]] = field(default_factory=dict)
    history: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class Night:
    broker: Server
    to_broker: Proxy
    store: Server
    to_store: Proxy
    to_results: Proxy
    recorder: Recorder
    log: Path
    told: Told

    def lines(self) -> list[dict[str, Any]]:
        # Without one that is being written.
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()]

    def is_told(self, event: str, **facts: Any) -> None:
        def is_there() -> bool:
            return any(facts.items() <= line.items() for line in self.lines() if line["lock_event"] == event)

        until(is_there, f"the log says {event} {facts}", timeout=SOON)

    def runs(self, *results: Any, name: str = "enter") -> None:
        ids = {result.id for result in results}
        until(lambda: ids <= {event.run for event in self.recorder.events(name)}, f"{name}: {ids}", timeout=SOON)

    def look(self, form: str, *command: str) -> Any:
        said = json.loads(invoked(tasks.app, *command, "--json").stdout)
        rows = said if isinstance(said, list) else [said]
        self.told.columns.setdefault(form, set()).update(*(row.keys() for row in rows))
        return said

    def scrape(self) -> None:
        text = Visitor(application(tasks.app)).get("/metrics").body
        for name, value in re.findall(r"^(singleton_lock_\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            if float(value) > 0:
                self.told.metrics.add(re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name))

    def remember(self) -> None:
        told = self.look("history", "history")
        self.told.history |= {(each["event"], each["task_id"]): each["outcome"] for each in told}

    def a_person_asks(self) -> Any:
        """A run to stop, which takes its time: more than ten seconds."""
        broken = tasks.broken.delay("k", "it has been told to go on")
        self.runs(broken)
        self.look("break", "break", tasks.broken.lock_key_for("k", ""), "--yes", "--wait", "0")
        self.runs(broken, name="asked to stop")
        self.look("list", "list")
        return broken

    def conflicts(self) -> None:
        skip, join, unique = tasks.by_policy["skip"], tasks.by_policy["join"], tasks.by_mode["until_executed"]
        store = store_of(tasks.app)
        dead = Claim(skip.lock_key_for("dead"), "dead", 4.0, task_id="of-the-dead", hostname="w@gone")
        store.acquire(dead)
        holders = [task.delay("k", gate="the evening is over") for task in (skip, join, tasks.waits)]
        self.runs(*holders)
        skipped, joined, waiting = skip.delay("k"), join.delay("k"), tasks.waits.delay("k")
        self.is_told("lock.conflict", task_id=skipped.id)
        self.is_told("lock.conflict", task_id=joined.id, levelname="DEBUG")
        self.is_told("lock.waiting", task_id=waiting.id)
        due = unique.apply_async(("due",), queue="nobody")
        unique.apply_async(("later",), queue="nobody", countdown=600)
        assert unique.delay("due").id == due.id
        with self.store.client(2) as client:
            client.set("singleton:v3:{foreign:00000000000000000000000000000000}", "x")

        def is_unrenewed() -> bool:
            if not store.holders(dead.key):
                # The machine has stood still for longer than its ttl.
                store.acquire(dead)
            return any("not_renewed" in row for row in self.look("list", "list"))

        until(is_unrenewed, "half of its ttl is over", timeout=SOON)
        self.look("show of a lock", "show", tasks.waits.lock_key_for("k"))
        (row,) = self.look("show of a call", "show", waiting.id)["locks"]
        self.told.columns["list"] |= row.keys()
        # A page whose look at the store takes too long leaves it out.
        until(lambda: self.scrape() or "singleton_lock_waiters" in self.told.metrics, "it is told", timeout=SOON)
        self.look("break --marks", "break", "--marks", unique.name, "--yes")
        self.recorder.open_gate("the evening is over")
        assert [each.get(timeout=SOON) for each in (*holders, joined, waiting)] == [0] * 5
        until(self.a_grant_after_a_wait_is_heard, "a monitor hears of it", timeout=SOON)
        until(lambda: not store.holders(dead.key), "its lease has run out", timeout=SOON)
        assert skip.delay("dead").get(timeout=SOON) == 0
        self.is_told("lock.holder_died", task_id="of-the-dead")

    def a_grant_after_a_wait_is_heard(self) -> bool:
        """Wait once more if not: a call that waits is requeued if the machine stands still for long enough."""
        with suppress(AssertionError):
            until(lambda: any(each["type"] == "lock-acquired" for each in self.told.events), "it is heard", timeout=5)
            return True
        with tasks.waits.lock_for("once more"):
            waiting = tasks.waits.delay("once more")
            self.is_told("lock.waiting", task_id=waiting.id)
        waiting.get(timeout=SOON)
        return False

    def losses(self) -> None:
        """A run that has lost its lease, one that is killed, one that is late, and one that leaves a `Lock`."""
        warned = tasks.warned.delay("k", gate="it has been told")
        killed = tasks.killed.delay("k", gate="never")
        others = (
            tasks.leaves_a_lock.delay(),
            tasks.holds_the_gil.delay("k", 6),
            tasks.by_mode["until_executing"].delay("k"),
        )
        self.runs(warned, killed)
        with self.store.client(2) as client:
            client.delete(tasks.warned.lock_key_for("k"))
        self.is_told("lock.lost", task_id=warned.id)
        (run,) = [event for event in self.recorder.events("enter") if event.run == killed.id]
        os.kill(run.pid, signal.SIGKILL)
        self.is_told("lock.holder_died", task_id=killed.id)
        self.recorder.open_gate("it has been told")
        for each in (killed, *others):
            each.get(timeout=SOON, propagate=False)
        assert warned.get(timeout=SOON) == 0
        for event in ("finished_without_lease", "left_held", "late"):
            self.is_told(f"lock.{event}")

    def full(self) -> None:
        """The store is full, and the result backend is away."""
        self.to_results.reset()
        with self.store.client() as client:
            client.config_set("maxmemory", 1)
            unanswered = tasks.by_policy["skip"].delay("k", 7)
            for level in ("WARNING", "INFO"):
                self.is_told("lock.unanswered", task_id=unanswered.id, levelname=level)
            for event in ("result_failed", "counters_failed"):
                self.is_told(f"lock.{event}")
            client.config_set("maxmemory", 0)
        self.to_results.forward()
        assert unanswered.get(timeout=SOON) == 7

    def silent(self) -> None:
        """The store is silent as a run that is replaced ends, and one whose message was delivered twice."""
        late, first = tasks.late.delay("k", gate="its copy is here"), tasks.replaced.delay("k", "the store is silent")
        self.runs(late, first)
        with self.broker.client() as client:
            message, _, queue = next(json.loads(each) for each in client.hvals("unacked") if late.id in each)
            message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
            client.lpush(queue, json.dumps(message))
        self.is_told("lock.conflict", task_id=late.id, outcome="parked")
        successor = tasks.replaced.delay("k", "the store is silent", 0)
        self.runs(first, name="asked to stop")
        self.recorder.open_gate("its copy is here")
        until(lambda: self.recorder.events("released"), "its lease is released", timeout=SOON)
        self.to_store.black_hole()
        self.is_told("lock.renewal_failed", task_id=first.id)
        self.recorder.open_gate("the store is silent")
        for event in ("successor_unknown", "release_failed", "done_marker_failed"):
            self.is_told(f"lock.{event}")
        self.to_store.forward()
        successor.get(timeout=SOON)

    def no_way_back(self) -> None:
        with tasks.waits.lock_for("unroutable"):
            waiting = tasks.waits.delay("unroutable")
            self.is_told("lock.publish_failed", task_id=waiting.id)

    def is_cut_off(self) -> None:
        """The broker is away as a run that waits is granted its key. A worker may not survive that (kombu 5.7)."""
        with tasks.waits.lock_for("cut off"):
            waiting = tasks.waits.delay("cut off")
            self.is_told("lock.waiting", task_id=waiting.id)
            self.to_broker.reset()
        self.is_told("lock.event_failed", task_id=waiting.id)


@contextmanager
def heard_by_a_monitor(server: Server, events: list[dict[str, Any]]) -> Iterator[None]:
    with tasks.app.connection_for_read() as connection, server.client() as client:
        receiver = tasks.app.events.Receiver(connection, handlers={"*": events.append})
        listens = Thread(target=receiver.capture, kwargs={"limit": None, "timeout": None, "wakeup": False})
        listens.start()
        until(client.pubsub_numpat, "it listens", timeout=SOON)
        try:
            yield
        finally:
            receiver.should_stop = True
            listens.join(SOON)


@contextmanager
def written_here(path: Path) -> Iterator[None]:
    """Have what this process writes in the same log: it publishes, commands and has a beat."""
    logger, handler = logging.getLogger("celery_singleton_lock"), tasks.handler_to(str(path))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="module")
def told(valkey_process: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    told, log = Told(), tmp_path_factory.mktemp("told") / "log"
    with ExitStack() as stack:
        enter = stack.enter_context
        valkey_process.flush()
        broker, store = enter(running("valkey")), enter(running("valkey"))
        to_broker, to_store, to_results = (enter(Proxy(each.port)) for each in (broker, store, valkey_process))
        base, locks = valkey_process.url.removesuffix("/0"), f"{store.url.removesuffix('/0')}/2"
        tasks.app.conf.update(broker_url=broker.url, result_backend=f"{base}/1", singleton_lock_url=locks)
        recorder = Recorder(f"{base}/3")
        stack.callback(recorder.close)
        env = {"TEST_LOG": str(log), "TEST_BROKER": to_broker.url}
        env |= {"TEST_RESULTS": f"{to_results.url[:-1]}1", "TEST_LOCKS": f"{to_store.url[:-1]}2"}
        enter(heard_by_a_monitor(broker, told.events))
        enter(workers(APP, env, 1, "-E", concurrency=8))
        enter(written_here(log))
        beat = SingletonSchedulerMixin(tasks.app)
        beat.tick()
        night = Night(broker, to_broker, store, to_store, to_results, recorder, log, told)
        broken = night.a_person_asks()
        night.silent()
        night.full()
        night.conflicts()
        night.losses()
        night.is_told("lock.goes_on", task_id=broken.id)
        recorder.open_gate("it has been told to go on")
        night.is_told("lock.broken", task_id=broken.id, levelname="WARNING")
        night.no_way_back()
        beat.tick()
        counters.flush()
        night.remember()
        night.look("doctor", "doctor", "--timeout", "0.1")
        # Events that could not be counted while the store was full are counted later.
        with suppress(AssertionError):
            until(lambda: night.scrape() or told.metrics >= LISTED, "all is counted", timeout=SOON)
            until(lambda: night.remember() or {each for each, _ in told.history} >= KEPT, "all is kept", timeout=SOON)
        night.is_cut_off()
        beat.close()
        told.lines += night.lines()
        yield told
    forget_connections(tasks.app)
    gc.collect()


def test_what_a_bad_night_tells_is_what_the_docs_list(told: Told) -> None:
    # Of several tests, each process that plays one of them would play the whole night for it.
    the_log_has_each_line_of_the_docs_with_its_columns(told)
    a_monitor_hears_each_event_of_the_docs(told)
    each_metric_of_the_docs_was_above_zero_and_there_are_no_others(told)
    each_command_writes_the_columns_of_the_docs(told)
    the_history_names_the_calls_of_which_the_log_tells_something_unusual(told)


def the_log_has_each_line_of_the_docs_with_its_columns(told: Told) -> None:
    named = {"lock_key": "key", "lock_label": "label"}
    beside = {"levelname", "lock_event", "label", "message", "exc_info"}
    written = {
        (line["lock_event"], line["levelname"], frozenset({named.get(name, name) for name in line} - beside))
        for line in told.lines
    }
    elsewhere = {event for events in ELSEWHERE.values() for event in events}

    assert written - LINES == set()
    assert {line[:2] for line in LINES - written if line[0] not in elsewhere} == set()


def test_each_other_line_of_the_log_has_a_test_that_names_it() -> None:
    texts = {file: (ROOT / "tests" / file).read_text(encoding="utf-8") for file in ELSEWHERE}

    assert [(file, event) for file, events in ELSEWHERE.items() for event in events if event not in texts[file]] == []


def a_monitor_hears_each_event_of_the_docs(told: Told) -> None:
    table = dict(re.findall(r"^- `((?:lock|task)-[a-z]+)`([^:]*):", LOG, re.MULTILINE))
    heard = {event["type"]: event for event in told.events if event["type"] in table}

    assert set(heard) == set(table) == {"lock-conflict", "lock-waiting", "lock-acquired", "task-revoked"}
    ids = {line.get("task_id") for line in told.lines}
    for name, fields in table.items():
        assert {*re.findall(r"`(\w+)`", fields), "uuid"} <= heard[name].keys()
        assert heard[name]["uuid"] in ids


def each_metric_of_the_docs_was_above_zero_and_there_are_no_others(told: Told) -> None:
    assert told.metrics == LISTED


def each_command_writes_the_columns_of_the_docs(told: Told) -> None:
    forms = re.findall(r"^\| (`.*?) \| [^|{]*`\{(.*?)\}", COMMANDS, re.MULTILINE)
    columns = {form.replace("`", ""): {*re.findall(r'"(\w+)"', names)} for form, names in forms}
    (example,) = re.findall(r"^\[\{.*\}\]$", COMMANDS, re.MULTILINE)
    (rare,) = re.findall(r"^Some rows have more: .*$", COMMANDS, re.MULTILINE)
    columns["list"] = {*json.loads(example)[0], *re.findall(r"`(\w+)`", rare)}

    assert told.columns == columns


def the_history_names_the_calls_of_which_the_log_tells_something_unusual(told: Told) -> None:
    logged = {(line["lock_event"].removeprefix("lock."), line.get("task_id")) for line in told.lines}

    assert {event for event, _ in told.history} == KEPT
    assert {*told.history} - logged == set()
    # Not of those that waited, joined another or were parked.
    assert {outcome for (event, _), outcome in told.history.items() if event == "conflict"} <= {
        "skipped",
        "unpublished",
    }
