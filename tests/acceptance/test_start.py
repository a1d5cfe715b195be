"""The start of a worker or a beat: a fault that cannot pass stops it, in a line each; any other is told."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state
from celery.concurrency import prefork, thread
from celery.concurrency.base import BasePool
from celery.worker import WorkController

from celery_singleton_lock import SingletonTask
from tests.proxy import Proxy
from tests.servers import Server, running
from tests.waiting import until
from tests.workers import Process

APP = "tests.acceptance.start_app"
OURS = ("--scheduler", "celery_singleton_lock.beat:SingletonScheduler")


def env_of(*tasks: dict[str, Any], **settings: Any) -> dict[str, str]:
    return {"TEST_TASKS": json.dumps(tasks or [{}]), "TEST_SETTINGS": json.dumps(settings)}


def app_of(url: str, **options: Any) -> Celery:
    app = Celery("start", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = url

    @app.task(base=SingletonTask, name="task", shared=False, **options)
    def task() -> None: ...

    return app


def check_worker(app: Celery, pool: Any, queues: list[str] | None = None) -> None:
    """Make a worker in this process, as far as it goes before it starts its pool."""
    try:
        WorkController(app=app, pool=pool, hostname="w@start", queues=queues, concurrency=1)
    finally:
        # Or Celery takes this process for a task, which must not wait for results.
        _state._set_task_join_will_block(False)


Start = Callable[[dict[str, str]], "Starting"]


class Starting(Process):
    def __init__(self, env: dict[str, str], *command: str) -> None:
        super().__init__(APP, env, *command)

    def lines(self, event: str) -> list[str]:
        return [line for line in self.log().splitlines() if event in line]

    def refused(self) -> list[str]:
        until(lambda: self._process.poll() is not None or self.has_started(), "it ends, or starts", timeout=60)
        assert not self.has_started(), self.log()
        assert self._process.wait() == 1
        assert "Traceback" not in self.log()
        return self.lines("lock.misconfigured: ")

    def has_started(self) -> bool:
        return " ready." in self.log() or "beat.leads" in self.log() or "beat.unanswered" in self.log()

    def started(self) -> "Starting":
        until(lambda: self._process.poll() is not None or self.has_started(), "it starts", timeout=60)
        assert self._process.poll() is None, self.log()
        return self


@pytest.fixture
def started() -> Iterator[Callable[..., Starting]]:
    with ExitStack() as ends:
        yield lambda *command: ends.enter_context(closing(Starting(*command)))


@pytest.fixture
def worker(started: Callable[..., Starting]) -> Callable[..., Starting]:
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--concurrency", "1")
    return lambda env, pool="prefork": started(env, "worker", "--pool", pool, *quiet)


@pytest.fixture
def beat(started: Callable[..., Starting], tmp_path: Path) -> Callable[..., Starting]:
    schedule = ("--pidfile", "", "--schedule", str(tmp_path / "schedule"))
    return lambda env, *scheduler: started(env, "beat", *schedule, *(scheduler or OURS))


@pytest.fixture(params=["worker", "beat"])
def start(request: pytest.FixtureRequest) -> Start:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


FAULTY: list[dict[str, Any]] = [
    {"lock_on_conflict": "skpi", "lock_limit": 0, "lock_name": 7},
    {"lock_tll": 5, "is_shared": True},
    {},
    {"lock_on_conflict": "join"},
    {"lock_ttl": 0},
]


def test_each_fault_is_a_line_and_none_hides_another(start: Start, valkey: Server) -> None:
    annotations = {"task-2": {"lock_ttl": -1}}
    wrong = {"singleton_lock_tll": 5, "singleton_lock_min_hold": "1h", "singleton_lock_url": "nowhere://"}

    lines = start(env_of(*FAULTY, task_annotations=annotations, **wrong)).refused()

    for words in (
        ("there is no setting singleton_lock_tll", "singleton_lock_ttl"),
        ("singleton_lock_min_hold='1h'",),
        ("task-0: lock_on_conflict='skpi'",),
        ("task-0: lock_limit=0",),
        ("task-0: lock_name=7",),
        ("task-1: there is no option lock_tll",),
        ("task-2: lock_ttl=-1",),
        ("task-3: lock_on_conflict='join'", "result_backend"),
        ("task-4: lock_ttl=0",),
        ("singleton_lock_url", "nowhere"),
    ):
        assert [line for line in lines if all(word in line for word in words)], (words, lines)
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("tasks", "settings", "fault"),
    [
        ("[]", {"singleton_lock_url": "nowhere://"}, "singleton_lock_url"),
        ("[{}]", {"singleton_lock_url": "memory://"}, "each beat would lead with locks of its own"),
        ("[]", {"singleton_beat_ttl": 0}, "singleton_beat_ttl=0"),
    ],
)
def test_a_worker_ends_if_the_beat_in_it_could_not_lead(
    started: Callable[..., Starting], valkey: Server, tmp_path: Path, tasks: str, settings: dict[str, Any], fault: str
) -> None:
    env = {"TEST_TASKS": tasks, "TEST_SETTINGS": json.dumps(settings)}
    command = ("worker", "--pool", "threads", "--concurrency", "1", "--beat", *OURS)

    lines = started(env, *command, "--schedule", str(tmp_path / "schedule")).refused()

    assert [line for line in lines if fault in line], lines


def test_celerys_own_beat_is_refused_with_a_faulty_task(beat: Callable[..., Starting], valkey: Server) -> None:
    env = env_of({"lock_on_conflict": "skpi"}, {"lock_tll": 5, "is_shared": True})

    lines = beat(env, "--scheduler", "celery.beat:PersistentScheduler").refused()

    assert len(lines) == 2
    for words in ("task-0: lock_on_conflict='skpi'", "task-1: there is no option lock_tll"):
        assert [line for line in lines if words in line]


def test_options_of_ours_without_the_base_are_a_warning(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(valkey.url)

    @app.task(name="bare", shared=False, lock_key=("a",), lock_ttl=10)
    def bare(a: int) -> None: ...

    check_worker(app, "solo")

    (record,) = [record for record in caplog.records if record.getMessage().startswith("lock.no_base: task bare ")]
    assert record.levelname == "WARNING"
    assert "has lock_key, lock_ttl and no base=" in record.getMessage()


def test_an_option_for_every_task_is_no_warning(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(valkey.url)
    app.conf.task_annotations = {"*": {"lock_ttl": 10}}

    check_worker(app, "solo")

    assert [record for record in caplog.records if record.getMessage().startswith("lock.no_base")] == []


def test_a_task_whose_call_only_makes_a_coroutine_is_told(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(valkey.url)

    @app.task(name="async", base=SingletonTask, shared=False)
    async def unawaited() -> None: ...

    check_worker(app, "solo")

    (line,) = [text for text in caplog.messages if text.startswith("lock.async_body: task async ")]
    assert "asyncio.run" in line


def raising(name: str, args: Any, kwargs: Any, options: Any, task: Any = None) -> Any:
    return kwargs["queue"]


@pytest.mark.parametrize(
    ("routes", "queues", "starts"),
    [
        (None, None, False),
        (None, ["io"], True),
        ({"task": "io"}, ["io"], False),
        ({"task": {"queue": "cpu"}}, ["io", "celery"], True),
        ({"task": {"queue": "cpu"}}, None, True),
        ({"report": "cpu"}, ["io", "celery"], False),
        ([raising], ["io"], False),
    ],
    ids=["default", "default, not taken", "taken", "not taken", "not taken, no -Q", "another's", "told by its call"],
)
def test_kill_is_refused_by_a_worker_that_gets_the_task(
    valkey: Server, routes: Any, queues: list[str] | None, *, starts: bool
) -> None:
    app = app_of(valkey.url, lock_on_lost="kill")
    app.conf.task_routes = routes

    with nullcontext() if starts else pytest.raises(SystemExit):
        check_worker(app, "solo", queues)
    assert set(app.amqp.queues.consume_from) == set(queues or ["celery"])


class Base(BasePool):
    """A pool from nothing."""


class Threads(thread.TaskPool):
    """A pool that takes tasks its own way, as that of celery-aio-pool does."""

    def on_apply(self, target: Any, *args: Any, **kwargs: Any) -> Any: ...


class Mixed(Threads):
    """A subclass of one."""


class Children(prefork.TaskPool):
    def on_start(self) -> None: ...


def made(*args: Any, **kwargs: Any) -> prefork.TaskPool:
    return prefork.TaskPool(*args, **kwargs)


@pytest.mark.parametrize(("pool", "options"), [(Children, {}), ("prefork", {"lock_on_lost": "kill"})])
def test_a_pool_that_hands_tasks_over_as_celerys_does_starts(valkey: Server, pool: Any, options: Any) -> None:
    check_worker(app_of(valkey.url, **options), pool)


@pytest.mark.parametrize("pool", [Base, Threads, Mixed, made])
def test_a_pool_that_is_none_of_celerys_is_refused(valkey: Server, caplog: pytest.LogCaptureFixture, pool: Any) -> None:
    app = app_of(valkey.url)

    with pytest.raises(SystemExit):
        check_worker(app, pool)

    (line,) = [text for text in caplog.messages if "lock.misconfigured: " in text]
    assert all(words in line for words in (pool.__name__, "without the lock", "--pool prefork, threads", "task"))


def test_locks_in_memory_are_refused_before_a_pool_of_processes_starts(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit):
        check_worker(app_of("memory://"), "prefork")

    (line,) = [text for text in caplog.messages if "lock.misconfigured: " in text]
    for words in ("singleton_lock_url='memory://'", "'prefork'", "'redis://localhost:6379/0'", "--pool threads"):
        assert words in line


@contextmanager
def closed() -> Iterator[tuple[str, Callable[[], Any]]]:
    with closing(Server("valkey")) as server:
        yield server.url, server.start


@contextmanager
def black_hole() -> Iterator[tuple[str, Callable[[], Any]]]:
    with running("valkey") as server, Proxy(server.port) as proxy:
        proxy.black_hole()

        def answer() -> None:
            # A request that was swallowed would never be answered.
            proxy.cut()
            proxy.forward()

        yield proxy.url, answer


def test_a_check_that_fails_by_itself_is_logged_as_what_it_is(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    def stumble(_: Any) -> None:
        raise KeyError("vault")

    app = app_of(valkey.url)
    app.conf.singleton_lock_client_options = {"redis_connect_func": stumble}

    check_worker(app, "solo")

    (record,) = [record for record in caplog.records if record.name == "celery_singleton_lock"]
    assert record.getMessage().startswith("lock.check_failed")
    assert record.exc_info is not None


def test_a_setting_that_cannot_be_computed_yet_ends_no_worker(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    class OfVault(str):
        __slots__ = ()

        def __eq__(self, _: object) -> bool:
            raise OSError("the vault is away")

        __hash__ = str.__hash__

    app = app_of(valkey.url)
    app.conf.singleton_lock_on_lost = OfVault("abort")

    check_worker(app, "solo")

    told = {record.getMessage().partition(":")[0] for record in caplog.records}
    assert told == {"lock.check_failed"}


def test_a_store_that_is_far_away_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    with running("valkey") as server, Proxy(server.port) as proxy, server.client() as client:
        client.config_set("requirepass", "secret")
        proxy.delay(0.03)

        check_worker(app_of(f"redis://:secret@127.0.0.1:{proxy.port}/1"), "solo")

    assert caplog.text == ""


@pytest.fixture(params=[closed, black_hole])
def away(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], Any]]]:
    with request.param() as store:
        yield store


Away = tuple[str, Callable[[], Any]]


@pytest.mark.prove
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_starts_without_its_store_with_one_line_and_works_once_it_is_there(
    worker: Callable[..., Starting], valkey: Server, away: Away, pool: str
) -> None:
    url, come_back = away
    env = env_of(singleton_lock_url=url, result_backend=valkey.url.removesuffix("/0") + "/1")
    process = worker(env, pool).started()

    (line,) = process.lines("lock.store_unreachable")
    assert all(word in line for word in (url, "1 s", "singleton_lock_url", "lock_on_store_error"))
    come_back()
    app = Celery("publisher", broker=valkey.url, backend=valkey.url.removesuffix("/0") + "/1", set_as_current=False)
    try:
        assert app.send_task("task-0").get(timeout=30) == "ran"
    finally:
        app.close()
    assert len(process.lines("lock.store_unreachable")) == 1
    assert process.lines("lock.misconfigured") == []


UNAWARE = "tests.acceptance.unaware_app"
LOADED = """
import atexit, runpy, sys
atexit.register(lambda: print(*(name for name in sys.modules if name.startswith("celery_singleton_lock"))))
sys.argv[0] = "celery"
runpy.run_module("celery", run_name="__main__")
"""


def celery(*arguments: str) -> tuple[str, set[str]]:
    command = [sys.executable, "-c", LOADED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text, _, loaded = done.stdout.rstrip("\n").rpartition("\n")
    return text, set(loaded.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["worker", "--help"]], ids=" ".join)
def test_a_command_of_celerys_own_loads_the_name_of_ours(arguments: list[str]) -> None:
    text, loaded = celery(*arguments)

    assert loaded == {"celery_singleton_lock", "celery_singleton_lock.command", "celery_singleton_lock.signals"}
    assert arguments != ["--help"] or "singleton  Show the locks of singleton tasks" in text


def test_our_command_takes_the_options_that_an_app_adds_to_each() -> None:
    app = ["--app", UNAWARE]

    assert celery(*app, "singleton", "--site", "blue", "list", "--json")[0] == "[]"
    assert "--site" in celery(*app, "singleton", "--help")[0]


def test_a_worker_whose_project_never_imports_us_tells_of_an_option_without_the_base(valkey: Server) -> None:
    with closing(Process(UNAWARE, {}, "worker", "--pool", "solo", "--without-gossip")) as worker:
        until(lambda: " ready." in worker.log(), "it is ready", timeout=60)
        assert "lock.no_base: task bare " in worker.log()


def test_a_task_that_is_made_as_its_worker_starts_waits_for_a_part_of_its_time_limit(valkey: Server) -> None:
    command = ("worker", "--pool", "solo", "--without-gossip", "--time-limit", "2")
    app = app_of(valkey.url, lock_key=())
    app.conf.update(broker_url=valkey.url)
    with app.tasks["task"].lock_for(), closing(Process("tests.acceptance.late_app", {}, *command)) as worker:
        app.send_task("task")
        until(lambda: "lock.waiting" in worker.log(), "it waits", timeout=60)
        until(lambda: "outcome=rescheduled" in worker.log(), "it is requeued", timeout=5)


def test_a_quiet_beat_whose_project_never_imports_us_is_checked(valkey: Server, tmp_path: Path) -> None:
    command = ("--quiet", "beat", "--pidfile", "", "--schedule", str(tmp_path / "schedule"))
    with closing(Process(UNAWARE, {"TEST_LOCKS": "memory://"}, *command)) as beat:
        until(lambda: "lock.misconfigured: " in beat.log(), "it is refused", timeout=60)
