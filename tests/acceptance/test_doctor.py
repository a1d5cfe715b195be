"""`singleton doctor`: each of its checks is made false, on a real server, and seen."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.beat import SingletonSchedulerMixin
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.web import application
from tests.acceptance import app as tasks
from tests.acceptance.conftest import invoked
from tests.acceptance.test_start import env_of
from tests.browsing import Visitor
from tests.proxy import Proxy
from tests.recorder import Recorder
from tests.servers import SERVERS, FakeClock, Server, free_port, running, started
from tests.waiting import Watch, until
from tests.workers import Process, Worker, workers

APP = "tests.acceptance.start_app"
CELERY = (sys.executable, "-m", "celery", "-A", APP)
YES, NO, AWAY = 0, 1, 69
OF_THE_SERVER = ["server", "eviction", "persistence", "connections"]
ALL = ["store", "locking", *OF_THE_SERVER, "clock", "tasks", "workers", "holders"]
NOWHERE = {"broker_url": "nowhere://"}
AT_LEISURE = ("--timeout", "30")
"""On a machine that is busy; a store that is there, and workers that cannot be asked, take none of it."""
SOON = ("--timeout", "0.1")
LONG = 30.0
(RIGHTS,) = re.findall(
    r"^ACL SETUSER shop (.*(?:\n +\S.*)*)",
    (Path(__file__).parents[2] / "docs/reference/start.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


class Diagnosis:
    def __init__(self, stdout: str, code: int) -> None:
        said = json.loads(stdout)
        self.ok, self.checks, self.code, self.text = said["ok"], said["checks"], code, stdout
        assert self.ok == all(check["ok"] is not False for check in self.checks)
        assert code == YES if self.ok else code in (NO, AWAY)

    def of(self, name: str) -> tuple[bool | None, str]:
        (check,) = [check for check in self.checks if check["name"] == name]
        return check["ok"], check["detail"]

    @property
    def wrong(self) -> list[str]:
        return [check["name"] for check in self.checks if check["ok"] is False]

    @property
    def unseen(self) -> list[str]:
        return [check["name"] for check in self.checks if check["ok"] is None]

    @property
    def advice(self) -> list[str]:
        return [check["detail"] for check in self.checks if check["name"] == "advice"]


AppOf = Callable[..., Celery]


@pytest.fixture
def app_of() -> Iterator[AppOf]:
    made: list[Celery] = []

    def make(url: str, name: str = "task", settings: dict[str, Any] | None = None, **options: Any) -> Celery:
        app = Celery("doctor", set_as_current=False)
        app.conf.update({"singleton_lock_url": url, **NOWHERE, **(settings or {})})
        made.append(app)

        @app.task(base=SingletonTask, name=name, shared=False, **{"time_limit": 60, **options})
        def task() -> None: ...

        return app

    yield make
    for app in made:
        app.close()


def examined(app: Celery, *arguments: str) -> Diagnosis:
    done = invoked(app, "doctor", "--json", *arguments)
    assert isinstance(done.exception, SystemExit | None), done.exception
    return Diagnosis(done.stdout, done.exit_code)


def on_command_line(env: dict[str, str], *arguments: str) -> Diagnosis:
    command = [*CELERY, "singleton", "doctor", "--json", *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return Diagnosis(done.stdout, done.returncode)


def test_all_is_well_and_nothing_is_left(own: Server, app_of: AppOf) -> None:
    diagnosis = examined(app_of(own.url), *AT_LEISURE)

    assert (diagnosis.code, diagnosis.wrong, diagnosis.unseen) == (YES, [], ["workers"])
    assert [check["name"] for check in diagnosis.checks] == ALL
    with own.client() as client:
        assert client.keys() == []


def test_dead_beats_are_noted_with_the_last_leader_and_are_no_fault(own: Server, app_of: AppOf) -> None:
    app = app_of(own.url)
    beat = SingletonSchedulerMixin(app)
    assert "no beat" not in examined(app, *AT_LEISURE).text
    beat.tick()
    assert "no beat" not in examined(app, *AT_LEISURE).text
    assert beat_leads(app) == "1.0"
    beat.close()

    diagnosis = examined(app, *AT_LEISURE)

    assert diagnosis.ok
    (advice,) = [text for text in diagnosis.advice if "no beat leads" in text]
    assert f"{socket.gethostname()}:{os.getpid()}" in advice
    assert re.search(r"was seen at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", advice)
    assert beat_leads(app) == "0.0"


def beat_leads(app: Celery) -> str:
    lines = Visitor(application(app)).get("/metrics").body.splitlines()
    return next(line.split()[1] for line in lines if line.startswith("singleton_lock_beat_leads "))


def lines_for_people(app: Celery) -> tuple[list[tuple[str, ...]], Any]:
    done = invoked(app, "doctor", *AT_LEISURE)
    return [tuple(re.split(r" {2,}", line, maxsplit=2)) for line in done.stdout.splitlines()], done


def test_what_people_read_has_a_line_for_each(own: Server, app_of: AppOf) -> None:
    with own.client() as client:
        configured(client, maxmemory="1gb", maxmemory_policy="allkeys-lru")

    lines, done = lines_for_people(app_of(own.url))

    assert [name for _, name, _ in lines] == ALL
    told = {name: verdict for verdict, name, _ in lines if verdict != "ok"}
    assert told == {"eviction": "NO", "workers": "-"}
    assert "a master, up for " in done.stdout
    assert done.exit_code == NO


def test_who_may_do_no_more_than_runs_do_is_not_told_that_something_is_wrong(own: Server, app_of: AppOf) -> None:
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", *RIGHTS.split())

    diagnosis = examined(app_of(f"redis://shop:secret@127.0.0.1:{own.port}/0"), *AT_LEISURE)

    assert (diagnosis.code, diagnosis.wrong) == (YES, [])
    assert diagnosis.unseen == [*OF_THE_SERVER, "workers", "holders"]
    assert "ACL SETUSER" in diagnosis.of("server")[1]


@pytest.mark.parametrize("is_silent", [False, True], ids=["away", "silent"])
def test_a_store_that_does_not_answer_is_told_by_the_exit_code_within_seconds(
    own: Server, app_of: AppOf, *, is_silent: bool
) -> None:
    with Proxy(own.port) as proxy, Watch() as watch:
        proxy.black_hole()
        port = proxy.port if is_silent else free_port()
        diagnosis = examined(app_of(f"redis://:pa55@127.0.0.1:{port}/0"), *SOON)

    assert (diagnosis.code, diagnosis.wrong) == (AWAY, ["store"])
    assert diagnosis.unseen == ["locking", *OF_THE_SERVER, "clock", "workers", "holders"]
    assert f"127.0.0.1:{port}" in diagnosis.of("store")[1]
    assert "pa55" not in diagnosis.text
    assert watch.seconds < LONG


def test_a_wrong_password_is_told_to_people_once(own: Server, app_of: AppOf) -> None:
    with own.client() as client:
        configured(client, requirepass="right-secret")

    lines, done = lines_for_people(app_of(f"redis://:wr0ng-secret@127.0.0.1:{own.port}/0"))

    told = [(verdict, name) for verdict, name, _ in lines if verdict != "ok"]
    prevented = [("-", name) for name in ("locking", *OF_THE_SERVER, "clock")]
    assert told == [("NO", "store"), *prevented, ("-", "workers"), ("-", "holders"), ("note", "advice")]
    assert done.exit_code == AWAY
    assert "singleton_lock_url" in lines[0][2]
    assert "secret" not in done.stdout
    assert done.stdout.count("refuses us") == 1


def test_a_url_that_cannot_be_used_is_told(app_of: AppOf) -> None:
    diagnosis = examined(app_of("ftp://somewhere"), *AT_LEISURE)

    assert (diagnosis.code, diagnosis.wrong) == (NO, ["store"])
    assert "unknown scheme" in diagnosis.of("store")[1]


def configured(client: Any, **settings: object) -> None:
    for name, value in settings.items():
        client.config_set(name.replace("_", "-"), value)


def evicted(client: Any) -> None:
    client.set("foreign", "x" * 100_000, ex=3600)
    configured(client, maxmemory_policy="volatile-lru", maxmemory=1)
    with suppress(redis.ResponseError):
        client.set("another", "x")
    until(lambda: client.info("stats")["evicted_keys"], "a key is evicted")
    configured(client, maxmemory=0)


def crowded(client: Any) -> list[Any]:
    configured(client, maxclients=40)
    others = [client.connection_pool.make_connection() for _ in range(32)]
    for other in others:
        other.connect()
    return others


def user(*rights: str) -> Callable[[Any], Any]:
    return lambda client: client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *rights)


FAULTS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "it is full": (
        lambda client: configured(client, maxmemory=1),
        {"locking": "failed: OutOfMemory", "eviction": r"full and refuses to write: \d+ of 1 bytes"},
    ),
    **{
        f"it may drop locks: {policy}": (
            lambda client, policy=policy: configured(client, maxmemory="1gb", maxmemory_policy=policy),
            {"eviction": policy},
        )
        for policy in ("allkeys-lru", "volatile-ttl")
    },
    "it has dropped keys": (evicted, {"eviction": "evicted"}),
    "it has hardly any connection left": (crowded, {"connections": "of 40"}),
    "no right to a channel": (user("~singleton:*", "+@all", "resetchannels"), {"locking": "channel"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_server_is_told(own: Server, app_of: AppOf, fault: str) -> None:
    begin, told = FAULTS[fault]
    with own.client() as client:
        others = begin(client)

        diagnosis = examined(app_of(own.url.replace("//", "//shop:secret@" if "right" in fault else "//")), *AT_LEISURE)

    assert (diagnosis.code, diagnosis.wrong) == (NO, [*told])
    assert [name for name, words in told.items() if not re.search(words, diagnosis.of(name)[1])] == []
    assert "secret" not in diagnosis.text
    assert "TimeoutError" not in diagnosis.text
    del others


def test_a_replica_is_told(own: Server, app_of: AppOf) -> None:
    with own.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))

    diagnosis = examined(app_of(own.url), "--timeout", "3")

    assert {"server", "locking"} <= {*diagnosis.wrong}
    assert "replica" in diagnosis.of("server")[1]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_that_cannot_write_its_file_is_told(kind: str, app_of: AppOf) -> None:
    server = Server(kind, "--appendonly", "yes")
    # A limit on the length of files is then an error of the write, and not a signal.
    server._command = ["env", "--ignore-signal=XFSZ", *server._command]
    with started(server), server.client() as client:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        client.set("a", "b", ex=600)
        until(lambda: client.info("persistence")["aof_last_write_status"] != "ok", "it cannot write")
        diagnosis = examined(app_of(server.url), *AT_LEISURE)

    assert {"persistence"} <= {*diagnosis.wrong} <= {"persistence", "locking"}
    assert "append-only" in diagnosis.of("persistence")[1]


def test_a_server_that_may_forget_is_well_but_it_is_said(own: Server, app_of: AppOf) -> None:
    with running(own.kind) as replica, replica.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(own.port))
        with own.client() as master:
            until(lambda: master.info("replication")["connected_slaves"], "it has a replica")

        ok, said = examined(app_of(own.url), *AT_LEISURE).of("persistence")

    assert ok
    assert all(word in said for word in ("restart", "failover", "fence"))


@pytest.mark.parametrize(("step", "word"), [("+100", "ahead of"), ("-100", "behind")])
def test_a_clock_that_is_wrong_is_told(app_of: AppOf, wall_clock: FakeClock, step: str, word: str) -> None:
    # Redis does not start with it.
    with running("valkey", env=wall_clock.env) as server:
        app = app_of(server.url)
        assert examined(app, *AT_LEISURE).wrong == []
        wall_clock.step(step)
        diagnosis = examined(app, *AT_LEISURE)

    assert diagnosis.wrong == ["clock"]
    assert word in diagnosis.of("clock")[1]


def test_tasks_and_settings_that_cannot_work_are_told(valkey: Server) -> None:
    results = {"result_backend": "cache+memory://"}
    tasks: list[dict[str, Any]] = [{"lock_name": ["shop"]}, {"lock_on_conflict": "join", "ignore_result": True}]

    diagnosis = on_command_line(env_of(*tasks, **NOWHERE, **results, singleton_lock_ttl="30s"), *AT_LEISURE)

    assert (diagnosis.code, diagnosis.wrong) == (NO, ["tasks"])
    said = diagnosis.of("tasks")[1]
    assert all(word in said for word in ("lock_name=['shop']", "ignore_result", "singleton_lock_ttl='30s'"))


def test_a_lock_name_of_which_no_key_can_be_made_is_told_and_the_rest_is_checked(own: Server, app_of: AppOf) -> None:
    diagnosis = examined(app_of(own.url, lock_name="x" * 201), *AT_LEISURE)

    assert (diagnosis.code, diagnosis.wrong, diagnosis.unseen) == (NO, ["locking", "tasks"], ["workers"])
    assert "lock_name='xxx" in diagnosis.of("tasks")[1]


@pytest.fixture
def threads(valkey: Server) -> Iterator[Worker]:
    """Its tasks were well when it began."""
    with workers(APP, env_of(), 1, "-Q", "io", pool="threads", concurrency=1) as (worker,):
        yield worker


@pytest.fixture
def prefork(valkey: Server) -> Iterator[Worker]:
    with workers("tests.acceptance.app", {"TEST_STORE": valkey.url, "TEST_TTL": "30"}, concurrency=2) as (worker,):
        yield worker


@pytest.mark.prove
def test_what_a_worker_cannot_run_or_leaves_waiting_is_told(threads: Worker, valkey: Server) -> None:
    diagnosis = answered(on_command_line, env_of({"lock_on_lost": "kill"}, task_routes={"task-0": "io"}))
    assert diagnosis.wrong == ["workers"]
    assert all(word in diagnosis.of("workers")[1] for word in ("task-0", "lock_on_lost='kill'", "--pool prefork"))

    (said,) = answered(on_command_line, env_of({"lock_on_conflict": "wait", "time_limit": 60})).advice
    assert all(word in said for word in ("lock_on_conflict='wait'", "1 of them", "task-0"))

    env = env_of({"lock_mode": "until_executed", "time_limit": 60})
    store = store_from_url(valkey.url.removesuffix("/0") + "/2")

    def queued(number: int, seconds: float) -> str:
        key = f"singleton:v3:{{task-0:{number:032x}}}"
        store.mark_queued(key, f"id-{number}", 3600.0 - seconds, limit=0, cooldown=0.0)
        return key

    # One that comes due while the doctor waits for the worker, and one behind a run.
    queued(1, -60)
    store.acquire(Claim(queued(2, 120), "t", 60.0, task_id="running", hostname="w", pid=1))
    assert answered(on_command_line, env).advice == []
    for number in (3, 4):
        queued(number, 120)
    (said,) = answered(on_command_line, env).advice
    store.close()
    assert all(words in said for words in ("queued for more than a minute", "task-0 (2)", "--marks"))


@pytest.mark.prove
def test_locks_in_memory_are_none_for_a_pool_of_processes(app_of: AppOf, valkey: Server, prefork: Worker) -> None:
    app = app_of("memory://doctor", settings={"broker_url": valkey.url})

    diagnosis = answered(examined, app)

    assert diagnosis.wrong == ["workers"]
    assert "memory://" in diagnosis.of("workers")[1]
    assert diagnosis.of("store")[0] is None
    assert "fault" not in diagnosis.of("locking")[1]


@pytest.mark.parametrize(
    ("settings", "verdict", "timeout"),
    [
        # All of it is waited for, because a worker may answer.
        ({}, False, "1"),
        ({"worker_enable_remote_control": False}, None, "1"),
        ({"broker_url": "sqla+sqlite://"}, None, "1"),
        pytest.param({"broker_url": "redis://:pa55@127.0.0.1:1/0"}, None, "30", marks=pytest.mark.prove),
    ],
    ids=["none runs", "none may be asked", "none can be asked", "no broker"],
)
def test_workers_are_missing_only_if_they_could_have_answered(
    own: Server, app_of: AppOf, settings: dict[str, Any], verdict: bool | None, timeout: str
) -> None:
    diagnosis = examined(app_of(own.url, settings={"broker_url": own.url, **settings}), "--timeout", timeout)

    told, said = diagnosis.of("workers")
    assert (diagnosis.code, told) == (YES if verdict is None else NO, verdict)
    assert ("start one" in said) == (verdict is False)
    assert "pa55" not in diagnosis.text


@pytest.mark.prove
def test_holders_are_told_apart_and_left_alone(prefork: Worker, recorder: Recorder) -> None:
    url = tasks.app.conf.singleton_lock_url
    store = store_from_url(url)
    alive = recorder.begun(tasks.skipped.delay("k", LONG))
    (holder,) = tasks.skipped.lock_holders("k", LONG)

    def diagnosis() -> Diagnosis:
        def is_told() -> Diagnosis | None:
            found = answered(examined, tasks.app)
            return found if "1 alive" in found.of("holders")[1] else None

        # That is an answer of its own, which may be later than the one to whether the worker is there.
        return until(is_told, "the worker tells which run it has", timeout=60)

    assert diagnosis().of("holders") == (True, "1 alive")
    store.acquire(Claim("singleton:v3:{a:00}", "dead", LONG, task_id="gone", hostname=holder.hostname, pid=1))
    ok, said = diagnosis().of("holders")
    assert ok is True
    assert f"task_id=gone on {holder.hostname} (free in " in said
    store.acquire(Claim("singleton:v3:{b:00}", "far", LONG, task_id="far", hostname="w@elsewhere", pid=1))
    store.acquire(Claim("singleton:v3:{c:00}", "lock", LONG, hostname="web", pid=1))
    last = diagnosis()

    ok, said = last.of("holders")
    assert (ok, last.code) == (None, YES)
    unanswered = "on a worker that has not answered"
    assert all(words in said for words in ("1 alive", unanswered, "task_id=far on w@elsewhere", "1 held by a Lock"))
    keys = ["singleton:v3:{a:00}", "singleton:v3:{b:00}", "singleton:v3:{c:00}", tasks.skipped.lock_key_for("k")]
    assert all(survey.holders for survey in store.survey(keys))
    store.close()
    tasks.app.control.terminate(alive.id, signal="SIGKILL")


def answered(examine: Callable[..., Diagnosis], what: Any, timeout: str = "2") -> Diagnosis:
    """With an answer of the worker, which a machine that is busy may delay: all of the time is waited for."""

    def found() -> Diagnosis | None:
        diagnosis = examine(what, "--timeout", timeout)
        return diagnosis if diagnosis.of("workers")[0] is not None else None

    return until(found, "a worker answers", timeout=60)


@pytest.mark.usefixtures("threads")
def test_a_queue_that_no_worker_takes_is_told_at_once_and_so_is_a_call_in_one(valkey: Server, app_of: AppOf) -> None:
    nobody_takes = "no worker that has answered takes the queue"
    tasks: list[dict[str, Any]] = [{"time_limit": 60}, {"time_limit": 60}, {"time_limit": 60, "queue": "io"}]
    diagnosis = answered(on_command_line, env_of(*tasks))
    assert (diagnosis.code, diagnosis.wrong) == (NO, ["workers"])
    assert f"{nobody_takes} 'celery', to which calls of task-0, task-1 go" in diagnosis.of("workers")[1]
    assert "'io'" not in diagnosis.text

    settings = {"broker_url": valkey.url, "task_routes": {"put": "io"}}
    app = app_of(f"{valkey.url.removesuffix('/0')}/2", "put", settings, lock_mode="until_executed")
    assert answered(examined, app).wrong == []
    app.tasks["put"].apply_async(queue="oi")
    diagnosis = answered(examined, app)
    assert diagnosis.wrong == ["workers"]
    assert f"{nobody_takes} 'oi', to which calls of put go" in diagnosis.of("workers")[1]


@pytest.mark.prove
@pytest.mark.usefixtures("threads")
def test_a_worker_with_other_locks_than_this_process_is_told_if_it_takes_our_calls(valkey: Server) -> None:
    elsewhere = "has another store or another singleton_lock_prefix"
    other_database = {"singleton_lock_url": f"{valkey.url.removesuffix('/0')}/5"}
    to_worker = {"task_routes": {"task-0": "io"}}
    task = {"time_limit": 60}

    assert answered(on_command_line, env_of(task, **to_worker)).wrong == []
    for other in (other_database, {"singleton_lock_prefix": "shop:"}):
        diagnosis = answered(on_command_line, env_of(task, **to_worker, **other))
        assert (diagnosis.code, diagnosis.wrong) == (NO, ["workers"])
        assert elsewhere in diagnosis.of("workers")[1]
    assert elsewhere not in answered(on_command_line, env_of(task, **other_database)).text


@pytest.mark.prove
def test_a_worker_that_is_cut_off_from_the_store_is_told_though_the_doctor_is_not(valkey: Server) -> None:
    store = f"{valkey.url.removesuffix('/0')}/2"
    with Proxy(valkey.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/2"
        with workers(APP, env_of(singleton_lock_url=url), pool="threads", concurrency=1):
            here = env_of(singleton_lock_url=store)
            assert answered(on_command_line, here).wrong == []
            proxy.black_hole()
            diagnosis = answered(on_command_line, here, "6")

    assert diagnosis.wrong == ["workers"]
    assert f"cannot use the store: lock store {url}" in diagnosis.of("workers")[1]


def test_the_clock_of_a_worker_that_is_wrong_is_told(valkey: Server, wall_clock: FakeClock) -> None:
    wall_clock.step("+100")
    with workers(APP, {**env_of(), **wall_clock.env}, pool="threads", concurrency=1) as (worker,):
        name = re.findall(r"(w\w{6}@\S+) ready", worker.log())[0]
        diagnosis = answered(on_command_line, env_of())

    assert diagnosis.wrong == ["clock"]
    assert re.search(rf"the store's clock is (99|100)\.\d s behind that of {name}:", diagnosis.of("clock")[1])


@pytest.mark.parametrize(
    ("theirs_is_named", "verdict", "words"),
    [
        pytest.param(
            *("w@same", False, "Perhaps another deployment has the same singleton_lock_prefix"),
            id="of another deployment",
        ),
        pytest.param(
            *("w@staging", None, "or of another deployment with the same singleton_lock_prefix"),
            id="of another deployment, by another name",
            marks=pytest.mark.prove,
        ),
        pytest.param(None, True, "1 alive", id="of this one", marks=pytest.mark.prove),
    ],
)
def test_a_holder_that_no_worker_of_ours_runs_may_belong_to_another_deployment(
    valkey: Server, recorder: Recorder, theirs_is_named: str | None, verdict: bool | None, words: str
) -> None:
    broker = f"{valkey.url.removesuffix('/0')}/5" if theirs_is_named else valkey.url
    env = {"TEST_STORE": valkey.url, "TEST_TTL": "3"}
    command = ("worker", "--pool", "threads", "--without-gossip", "--without-mingle", "-n")
    started = [Process("tests.acceptance.app", env, *command, "w@same")]
    if theirs_is_named:
        started.append(Process("tests.acceptance.app", {"TEST_BROKER": broker}, *command, theirs_is_named))
    try:
        until(lambda: all(" ready." in each.log() for each in started), "they are ready", timeout=60)
        with Celery(broker=broker, set_as_current=False) as publisher:
            publisher.send_task(tasks.skipped.name, ("k", LONG))
        until(lambda: recorder.events("enter"), "it runs", timeout=60)

        def is_told() -> bool:
            found, said = answered(examined, tasks.app).of("holders")
            return found is verdict and words in said and ("another deployment" in said) == (verdict is not True)

        until(is_told, "the doctor says so", timeout=60)
    finally:
        for process in started:
            # Its body goes on for half a minute.
            process.send(signal.SIGKILL)
            process.close()


NO_LIMIT: dict[str, Any] = {"time_limit": None}
ON_SQS = {"broker_transport_options": {"predefined_queues": {"celery": {"url": "https://sqs"}}}}
SURPRISES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (NO_LIMIT, {}, ("no time limit", "task")),
    (NO_LIMIT, {"task_time_limit": 60}, ()),
    (NO_LIMIT, {"task_soft_time_limit": 60}, ()),
    ({}, ON_SQS, ("predefined_queues", "visibility_timeout")),
    ({"lock_ttl": 30000}, {}, ("lock_ttl", "task (30000 s)")),
    ({}, {"singleton_lock_ttl": 3600}, ("lock_ttl", "task (3600 s)")),
    ({"lock_wait_timeout": 5}, {}, ("task (lock_wait_timeout beside lock_on_conflict='skip'",)),
    ({"lock_wait_timeout": 5, "lock_on_conflict": "reschedule"}, {}, ()),
    ({"lock_wait_timeout": 5, "lock_on_conflict": "rerun", "lock_mode": "until_executing"}, {}, ()),
    ({"lock_skip_result": 5, "lock_on_conflict": "raise"}, {}, ("lock_skip_result beside lock_on_conflict='raise'",)),
    ({"lock_skip_result": 5, "lock_on_conflict": "raise", "lock_on_store_error": "skip"}, {}, ()),
    ({"lock_skip_result": 5}, {}, ()),
    ({"lock_skip_result": None, "lock_on_conflict": "rerun"}, {}, ()),
    ({"lock_queue_ttl": 5}, {}, ("task (lock_queue_ttl beside lock_mode='while_executing'",)),
    ({"lock_queue_ttl": 5, "lock_mode": "until_executed"}, {}, ()),
    ({"lock_queue_ttl": 5, "lock_on_conflict": "replace"}, {}, ()),
    ({"lock_min_hold_on_failure": False}, {}, ("task (lock_min_hold_on_failure beside no lock_min_hold)",)),
    ({"lock_min_hold_on_failure": False, "lock_min_hold": 5}, {}, ()),
    ({}, {"task_always_eager": True}, ("task_always_eager",)),
]


@pytest.mark.parametrize(("options", "settings", "words"), SURPRISES)
def test_what_may_surprise_is_told(valkey: Server, app_of: AppOf, options: Any, settings: Any, words: Any) -> None:
    advice = examined(app_of(valkey.url, settings=settings, **options), *AT_LEISURE).advice

    assert len(advice) == bool(words)
    assert all(word in advice[0] for word in words)


@pytest.mark.prove
def test_a_password_is_in_no_report_where_the_docs_and_the_doctor_tell_to_put_it(own: Server, app_of: AppOf) -> None:
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">pa55word", "~*", "&*", "+@all")
    by_url = app_of(own.url.replace("//", "//shop:pa55word@"))
    user = {"username": "shop", "password": "pa55word"}
    env = env_of(singleton_lock_url=own.url, singleton_lock_client_options=user)

    (said,) = examined(by_url, *AT_LEISURE).advice
    with workers(APP, env, pool="threads", concurrency=1) as (worker,):
        (name,) = re.findall(r"(w\w{6}@\S+) ready", worker.log())
        # One worker is asked by its name, because otherwise the command waits for others as well.
        asks = ["inspect", "conf", "--timeout", "30", "--destination", name]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": {**os.environ, **env}}
        told = [subprocess.run([*CELERY, *command], check=True, **streams).stdout for command in (["report"], asks)]

    assert "singleton_lock_client_options" in said
    assert all("singleton_lock_client_options" in each for each in told)
    assert not any("pa55word" in each for each in [said, *told])


def test_locks_of_others_are_told(own: Server, app_of: AppOf) -> None:
    store = store_from_url(own.url)
    for name in ("task", "celery.beat.shop", "somebody"):
        store.acquire(Claim(f"singleton:v3:{{{name}:00}}", "a", 60.0))
    store.close()

    (said,) = examined(app_of(own.url), *AT_LEISURE).advice

    assert said.endswith("singleton_lock_prefix: somebody")
