"""`celery -A proj singleton`: what an operator sees of locks, and how one is freed."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from celery.bin.celery import celery
from celery.exceptions import TaskRevokedError
from click.testing import CliRunner

from celery_singleton_lock import ConfigurationError, LockLost, SingletonTask
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.store import Store
from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import APP, Operate, invoked
from tests.contract.asking import Waiter
from tests.recorder import Recorder, numbers, overlaps
from tests.servers import free_port
from tests.waiting import SOON, until
from tests.workers import Worker, workers

YES, NO, USAGE, AWAY = 0, 1, 2, 69
TTL = 12
"""A holder asks each third of it whether it shall stop, and outlasts a machine that stands still for five seconds."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    with workers(combined.__name__, {"TEST_TTL": str(TTL)}, concurrency=4) as (worker,):
        yield worker


def claim(key: str, task_id: str = "", token: str = "secret", limit: int = 1, **more: Any) -> Claim:
    return Claim(key, token, 30.0, limit, task_id=task_id, hostname="w1@web", pid=7, **more)


def running(recorder: Recorder, number: int = 1) -> None:
    until(lambda: len(recorder.events("enter")) == number, "they run")


def test_a_list_tells_of_a_holder_while_all_workers_are_down(operate: Operate, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.acquire(claim(key, "id-1"))

    (row,) = json.loads(operate("list", "--json").stdout)

    acquired_at = datetime.fromisoformat(row.pop("acquired_at"))
    assert abs((datetime.now(UTC) - acquired_at).total_seconds()) < 10
    assert acquired_at.tzinfo == UTC
    assert 20 < row.pop("expires_in") <= 30
    assert row.pop("fence") == store.holders(key)[0].fence
    assert row == {
        "key": key,
        "state": "held",
        "task_name": tasks.skipped.name,
        "task_id": "id-1",
        "hostname": "w1@web",
        "pid": 7,
        "attempt": 0,
        "label": None,
        "waiters": 0,
    }


def test_a_list_fits_a_terminal_and_all_of_it_is_there_if_wide_or_in_a_pipe(operate: Operate, store: Store) -> None:
    task_id = "3d6d917c-69a7-491a-a8d8-5d8d4091e830"
    keys = [f"singleton:v3:{{{name}:850619f2bc8f15f0cb96f1808d711840}}" for name in ("a", f"first.{'x' * 150}.last")]
    for key in keys:
        host = f"w1@{'h' * 100}.example"
        store.acquire(
            Claim(key, "t", 300.0, 1, task_id=task_id, hostname=host, pid=12345, label="supplier " + "7" * 51)
        )
    store.mark_queued(keys[0].replace("85", "\x1b\x1b"), "\x1b" * 36, 60.0, limit=0, cooldown=0.0)

    _, narrow, of_terminal = on_a_terminal(["list"], ["list", "--wide"]).split("LOCK ")
    lines = f"LOCK {narrow}".splitlines()

    assert max(map(len, lines)) == 100
    assert all("3d6d917c…" in line and "850619f2…" in line and ":12345" in line for line in lines[1:3])
    assert all("first." in line and ".last" in line for line in lines if "first" in line)
    for wide in (operate("list").stdout, of_terminal):
        assert all(text in wide for text in (task_id, *keys, host, "7" * 51))


COMMANDS = """
import json, sys
from celery import Celery
from celery.bin.celery import celery
for command in json.loads(sys.argv[1]):
    celery(command, standalone_mode=False)
"""


def on_a_terminal(*commands: list[str]) -> str:
    ours, inside = os.openpty()
    all_of_it = json.dumps([["-A", APP, "singleton", *each] for each in commands])
    command = [sys.executable, "-c", COMMANDS, all_of_it]
    with subprocess.Popen(command, stdout=inside, stdin=inside) as process:
        os.close(inside)
        shown = b""
        # At its end the terminal has an error, and no more text.
        with suppress(OSError):
            while part := os.read(ours, 65536):
                shown += part
        os.close(ours)
    assert process.returncode == YES
    return shown.decode()


@pytest.mark.parametrize("pattern", ["*.skipped", "tests.acceptance.app.skippe[d]"])
def test_a_pattern_is_about_lock_names(operate: Operate, store: Store, pattern: str) -> None:
    for task in (tasks.skipped, tasks.refused):
        store.acquire(claim(task.lock_key_for("k")))

    rows = json.loads(operate("list", pattern, "--json").stdout)

    assert [row["key"] for row in rows] == [tasks.skipped.lock_key_for("k")]


def test_the_token_is_in_no_output(operate: Operate, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.acquire(claim(key, "id-1"))
    commands = [["list"], ["show", key], ["show", "id-1"], ["break", key, "--dry-run"]]
    said = [operate(*command, *more) for command in commands for more in ([], ["--json"])]
    said += [operate("break", key, "--yes", "--wait", "0", *more, code=NO) for more in ([], ["--json"])]

    assert not any("secret" in done.output + done.stderr for done in said)


def test_a_lock_is_shown_though_its_task_has_a_wrong_option(store: Store) -> None:
    app = Celery("wrong", set_as_current=False)
    app.conf.singleton_lock_url = store.address

    @app.task(base=SingletonTask, name="wrong", lock_limit="3", shared=False)
    def wrong() -> None: ...

    with pytest.raises(ConfigurationError):
        app.finalize()
    key = "singleton:v3:{wrong:00}"
    store.acquire(claim(key, "id-1"))

    for command in (["list"], ["show", key], ["show", "id-1"]):
        assert "id-1" in invoked(app, *command).stdout
    assert json.loads(invoked(app, "show", key, "--json").stdout)["limit"] is None


def test_all_about_a_lock_is_shown(operate: Operate, store: Store) -> None:
    key = tasks.three_at_once.lock_key_for("k")
    for token in "ab":
        store.acquire(claim(key, f"id-{token}", token, limit=3))
    store.mark_queued(key, "id-q", 60.0, limit=0, cooldown=30.0)
    with Waiter(store, claim(key, "id-w", "w")) as waiter:
        waiter.ask()
        shown = json.loads(operate("show", key, "--json").stdout)
        said = operate("show", key).stdout

    assert [holder["task_id"] for holder in shown.pop("holders")] == ["id-a", "id-b"]
    assert 20 < shown.pop("quiet_for") <= 30
    fence = max(holder.fence for holder in store.holders(key))
    assert shown.pop("turns") == ["id-w"]
    assert shown == {"key": key, "limit": 3, "fence": fence, "waiters": 1, "queued": "id-q", "next": None}
    assert all(word in said for word in (key, "id-a", "id-b", "id-q", "queued", "cooldown", "id-w", "waiting"))


def test_a_lock_is_found_by_its_task_and_the_arguments(operate: Operate, store: Store) -> None:
    key = tasks.three_at_once.lock_key_for("k", seconds=2)
    store.acquire(claim(key, "id-1"))
    name = tasks.three_at_once.name

    for call in (["-a", '["k"]'], ["-k", '{"key": "k"}'], ["-a", '["k"]', "-k", '{"seconds": 5}']):
        assert json.loads(operate("show", name, *call, "--json").stdout)["key"] == key
    plan = json.loads(operate("break", name, "-a", '["k"]', "--dry-run", "--json").stdout)
    assert plan["asked"] == ["id-1"]


@pytest.mark.parametrize("command", [["list"], ["doctor"], ["show", "KEY"], ["break", "KEY"], ["history"], ["web"]])
def test_an_app_that_is_not_given_is_said_as_such(command: list[str]) -> None:
    done = CliRunner().invoke(celery, ["singleton", *command], env={"APP": None, "CELERY_APP": None})

    assert done.exit_code == USAGE
    assert "no app: give -A" in done.stderr


def test_where_nothing_is_an_answer_says_so(operate: Operate) -> None:
    key = tasks.skipped.lock_key_for("k")

    assert operate("list").stdout == ""
    for pattern in ([], ["*nothing*"]):
        assert json.loads(operate("list", *pattern, "--json").stdout) == []
    assert json.loads(operate("show", key, "--json", code=NO).stdout)["holders"] == []
    assert json.loads(operate("show", "no-such-id", "--json", code=NO).stdout)["locks"] == []
    assert "Nothing to break" in operate("break", "no-such-id", "--yes", code=NO).stderr
    for wrong in ("singleton:v3:{a:0}", key.replace("singleton", "other"), "ops.*"):
        for command in (["show", wrong], ["break", wrong, "--yes"]):
            assert f"{wrong!r} is neither a lock key of this app" in operate(*command, code=USAGE).stderr
    assert "Nobody holds" in operate("show", key, code=NO).stderr
    operate("show", tasks.skipped.name, "-a", '["k"]', code=NO)
    said = operate("show", "no-such-id", code=NO).stderr
    assert "Nothing is known" in said
    assert "only in the log: task_id=no-such-id" in said
    for more in ([], ["--force"], ["--dry-run"]):
        assert "Nothing to break" in operate("break", key, "--yes", *more, code=NO).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tests.acceptance.app.skipped", "-a", "[1"], "Invalid value for '-a'"),
        (["tests.acceptance.app.skipped", "-a", '{"key": 1}'], "Invalid value for '-a'"),
        (["tests.acceptance.app.skipped", "-k", "[1]"], "Invalid value for '-k'"),
        (["tests.acceptance.app.skipped"], "cannot be called like this"),
        (["tests.acceptance.app.skipped", "-a", "[1, 2, 3, 4]"], "cannot be called like this"),
        (["tests.acceptance.app.skiped", "-a", "[1]"], "Did you mean 'tests.acceptance.app.skipped'"),
        (["skipped", "-a", "[1]"], "Did you mean 'tests.acceptance.app.skipped'"),
        (["tests.acceptance.app.after", "-a", "[1]"], "is not a SingletonTask"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(operate: Operate, arguments: list[str], says: str) -> None:
    assert says in operate("show", *arguments, code=USAGE).stderr


def test_what_became_of_a_call_is_shown_and_where_it_waits(
    operate: Operate, worker: Worker, recorder: Recorder, store: Store
) -> None:
    def shown(task_id: str) -> Any:
        return json.loads(operate("show", task_id, "--json").stdout)

    task, waits = tasks.by_policy["skip"], tasks.by_policy["wait"]
    key = task.lock_key_for("k")
    holder, first = (each.delay("k", gate="all is shown") for each in (task, waits))
    running(recorder, 2)
    skipped, waiter = task.delay("k"), waits.delay("k")
    with pytest.raises(TaskRevokedError):
        skipped.get(timeout=SOON)
    until(lambda: waits.lock_state("k").waiting == 1, "it waits")
    store.mark_queued(tasks.skipped.lock_key_for("k"), "id-q", 60.0, limit=0, cooldown=0.0)

    assert [(row["key"], row["state"]) for row in shown(holder.id)["locks"]] == [(key, "held")]
    expected = {"state": "REVOKED", "reason": "skipped", "key": key, "holder_task_id": holder.id, "locks": []}
    text = f"lock key={key} is held by task_id={holder.id}"
    assert shown(skipped.id) == {"task_id": skipped.id, **expected, "text": text}
    said = operate("show", skipped.id).stdout
    assert all(word in said for word in ("REVOKED", "skipped", key, holder.id))

    (row,) = shown(waiter.id)["locks"]
    told = row["key"], row["state"], row["task_id"], row["waiters"], row["position"]
    assert told == (waits.lock_key_for("k"), "waiting", waiter.id, 1, 1)
    now = re.compile(r"^now +(.*)$", re.MULTILINE)
    told_of = [now.findall(operate("show", each).stdout) for each in (first.id, waiter.id, "id-q")]
    assert told_of == [["holds the lock"], ["waits for the lock, position 1 in the line"], ["is queued"]]

    recorder.open_gate("all is shown")
    assert [each.get(timeout=SOON) for each in (holder, first, waiter)] == [0, 0, 0]
    is_over = shown(holder.id)
    assert (is_over["state"], is_over["reason"], is_over["locks"]) == ("SUCCESS", None, [])


def test_a_call_is_found_in_its_lock_where_results_cannot_be_read(operate: Operate, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))
    tasks.app.conf.result_backend = f"redis://127.0.0.1:{free_port()}/0?health_check_interval=0"
    tasks.app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    tasks.app._local.__dict__.pop("backend", None)
    tasks.app._backend_cache = None
    try:
        done = operate("show", "id-1", "--json")
    finally:
        tasks.app.conf.result_backend_transport_options = {}
        tasks.app._local.__dict__.pop("backend", None)
        tasks.app._backend_cache = None

    assert [row["task_id"] for row in json.loads(done.stdout)["locks"]] == ["id-1"]
    assert "cannot be read" in done.stderr
    assert done.stderr.rstrip().endswith("refused.")


@pytest.mark.parametrize("value", ["-inf", "-1", "soon"])
@pytest.mark.parametrize("words", [["break", "KEY", "--yes", "--wait"], ["doctor", "--timeout"]])
def test_what_is_no_number_of_seconds_is_refused(operate: Operate, words: list[str], value: str) -> None:
    assert f"Invalid value for '{words[-1]}'" in operate(*words, value, code=USAGE).stderr


@pytest.mark.prove
@pytest.mark.parametrize("command", [["list"], ["show", "KEY"], ["show", "some-id"], ["break", "KEY", "--yes"]])
def test_a_store_that_is_away_or_none_is_told_by_the_exit_code(operate: Operate, command: list[str]) -> None:
    key = tasks.skipped.lock_key_for("k")
    command = [key if word == "KEY" else word for word in command]
    tasks.app.conf.singleton_lock_url = "ftp://somewhere"
    assert "unknown scheme" in operate(*command, code=USAGE).stderr
    tasks.app.conf.singleton_lock_url = f"redis://:pa55@127.0.0.1:{(port := free_port())}/0"

    done = operate(*command, "--json", code=AWAY)

    assert done.stdout == ""
    assert done.stderr.count(f"redis://127.0.0.1:{port}/0") == 1
    assert "failed: " in done.stderr
    assert "pa55" not in done.stderr


def test_a_broken_run_ends_revoked_names_who_asked_and_is_not_run_again(
    operate: Operate, worker: Worker, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "ops-1")
    task = tasks.by_policy["reschedule"]
    holder = task.delay("k", 1, 60.0)
    running(recorder)
    later = task.delay("k", 2)
    until(lambda: "outcome=rescheduled" in worker.log(), "the later one has met it")

    broken = json.loads(operate("break", task.lock_key_for("k"), "--yes", "--json").stdout)

    assert broken["seconds"] < TTL + 10
    assert broken == {**broken, "asked": [holder.id], "dropped": [], "gone": True, "key": task.lock_key_for("k")}
    with pytest.raises(TaskRevokedError, match="broken by alice@ops-1") as ended:
        holder.get(timeout=SOON)
    assert (ended.value.reason, ended.value.holder_task_id) == ("broken", None)  # type: ignore[attr-defined]
    assert later.get(timeout=SOON) == 2
    assert overlaps(recorder.events()) == []
    assert "reason=broken" in worker.log()
    assert f"lock.broken key={task.lock_key_for('k')} task_id={holder.id} by=alice@ops-1" in worker.log()
    shown = json.loads(operate("show", holder.id, "--json").stdout)
    assert (shown["state"], shown["reason"]) == ("REVOKED", "broken")

    # Not by automatic retries either.
    task = combined.replace_autoretrying
    holder = task.delay("retried", 1, seconds=60)
    running(recorder, 3)
    operate("break", task.lock_key_for("retried"), "--yes")
    with pytest.raises(TaskRevokedError, match="broken by"):
        holder.get(timeout=SOON)
    assert task.delay("retried", 2).get(timeout=SOON) == 2
    assert numbers(recorder, "retried") == [1, 2]


@pytest.mark.prove
def test_force_frees_at_once_and_says_what_that_risks(operate: Operate, worker: Worker, recorder: Recorder) -> None:
    holder = tasks.aborted.delay("k", 60.0)
    running(recorder)
    key = tasks.aborted.lock_key_for("k", 60.0)

    done = operate("break", key, "--force", "--yes", "--json")

    assert json.loads(done.stdout) == {"key": key, "asked": [holder.id], "dropped": [], "gone": True, "seconds": 0.0}
    assert "keeps running beside the next one" in done.stderr
    operate("show", key, code=NO)
    with pytest.raises(LockLost, match="expired"):
        holder.get(timeout=SOON)


@pytest.mark.prove
def test_how_to_end_a_run_that_is_only_warned_is_said(operate: Operate, worker: Worker, recorder: Recorder) -> None:
    holder = tasks.warned.delay("k", 60.0)
    running(recorder)

    done = operate("break", tasks.warned.lock_key_for("k", 60.0), "--yes", "--wait", "0.5", code=NO)

    assert f"control terminate SIGKILL {holder.id}" in done.stderr
    tasks.app.control.terminate(holder.id, signal="SIGKILL")
    until(lambda: not tasks.warned.lock_holders("k", 60.0), "it is free")


def test_a_break_frees_what_a_purge_has_left(operate: Operate) -> None:
    task = tasks.by_mode["until_executed"]
    lost = task.delay("k")
    tasks.app.control.purge()
    assert task.delay("k").id == lost.id
    key = task.lock_key_for("k")

    broken = json.loads(operate("break", key, "--yes", "--json").stdout)

    assert broken == {"key": key, "asked": [], "dropped": ["queued"], "gone": True, "seconds": 0.0}
    operate("show", key, code=NO)
    again = task.delay("k", 3)
    assert again.id != lost.id
    with workers(APP):
        assert again.get(timeout=SOON) == 3


def test_marks_that_nobody_holds_are_dropped_by_a_pattern(operate: Operate, store: Store) -> None:
    def key(name: str, number: int) -> str:
        return f"singleton:v3:{{{name}:{number:032x}}}"

    for number in range(3000):
        store.mark_queued(key("shop.index", number), f"id-{number}", 600.0, limit=0, cooldown=0.0)
    store.mark_queued(key("other", 0), "id-other", 600.0, limit=0, cooldown=0.0)
    held, cooling = key("shop.held", 0), key("shop.cooling", 0)
    store.acquire(Claim(held, "secret", 300.0, 1, task_id="id-holder"))
    store.mark_queued(held, "id-behind", 600.0, limit=0, cooldown=0.0)
    store.mark_queued(cooling, "id-cooling", 600.0, limit=0, cooldown=300.0)

    planned = operate("break", "--marks", "shop.*", "--dry-run").stdout
    assert "Marks to be dropped: 3001." in planned
    assert "because they are held: 1." in planned
    assert "cooldown" not in planned
    assert "--yes" in operate("break", "--marks", "shop.*", code=NO).stderr
    assert len(json.loads(operate("list", "shop.index", "--json").stdout)) == 3000
    began = time.monotonic()
    done = json.loads(operate("break", "--marks", "shop.*", "--yes", "--json").stdout)

    assert time.monotonic() - began < 60
    assert (done["pattern"], len(done["dropped"]), done["held"]) == ("shop.*", 3001, 1)
    assert {"key": key("shop.index", 7), "state": "queued", "task_id": "id-7"} in done["dropped"]
    left = {(row["key"], row["state"], row["task_id"]) for row in json.loads(operate("list", "--json").stdout)}
    assert left == {
        (key("other", 0), "queued", "id-other"),
        (held, "held", "id-holder"),
        (held, "queued", "id-behind"),
        (cooling, "quiet", "id-cooling"),
    }
    assert store.asked_to_stop_by(claim(held), "broken") is None


def test_a_dry_run_and_a_break_without_a_terminal_do_nothing(operate: Operate, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.acquire(claim(key, "id-1"))
    store.mark_queued(key, "id-q", 60.0, limit=0, cooldown=30.0)
    before = store.survey([key])[0]

    for more in ([], ["--force"]):
        plan = json.loads(operate("break", key, "--dry-run", "--json", *more).stdout)
        expected = {"asked": ["id-1"], "dropped": ["queued", "quiet"], "gone": False, "seconds": 0.0}
        assert plan == {"key": key, **expected}
    assert "--yes" in operate("break", key, code=NO).stderr

    after = store.survey([key])[0]
    assert [mark.state for mark in after.marks] == [mark.state for mark in before.marks]
    assert store.asked_to_stop_by(claim(key), "broken") is None


class Terminal:
    def __init__(self, *arguments: str) -> None:
        self._keyboard, inside = os.openpty()
        command = [sys.executable, "-m", "celery", "-A", APP, "singleton", "break", *arguments]
        streams = {"stdin": inside, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, text=True, **streams)  # type: ignore[call-overload]
        os.close(inside)
        self._said = ""

    def is_asked(self) -> None:
        while "[y/N]" not in self._said:
            letter = self._process.stdout.read(1)
            assert letter, self._said
            self._said += letter

    def answers(self, text: str) -> tuple[int, str]:
        os.write(self._keyboard, text.encode())
        said, _ = self._process.communicate(timeout=30)
        os.close(self._keyboard)
        return self._process.returncode, self._said + said


@pytest.mark.parametrize(("answer", "code"), [("y\n", YES), ("\n", NO)])
def test_a_person_is_asked(store: Store, answer: str, code: int) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.acquire(claim(key, "id-1"))
    terminal = Terminal(key, "--force")

    terminal.is_asked()
    ended, said = terminal.answers(answer)

    assert ended == code
    assert "To be freed at once: id-1" in said
    assert (store.holders(key) == []) == (code == YES)


def test_who_has_come_while_a_person_was_thinking_is_left_alone(store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.acquire(claim(key, "id-1"))
    terminal = Terminal(key)
    terminal.is_asked()
    store.release(claim(key, "id-1"), 1)
    store.acquire(claim(key, "id-2", "another"))

    code, said = terminal.answers("y\n")

    assert code == NO
    assert "Nothing was done" in said
    assert store.asked_to_stop_by(claim(key, token="another"), "broken") is None


def test_one_of_several_holders_is_meant_by_its_name(operate: Operate, store: Store) -> None:
    key = tasks.three_at_once.lock_key_for("k")
    for token in "ab":
        store.acquire(claim(key, f"id-{token}", token, limit=3))
    # Not a task's, so it is known by its process.
    store.acquire(Claim(key, "c", 30.0, 3, hostname="web", pid=9))

    for name in ("id-b", "web:9"):
        plan = json.loads(operate("break", key, "--holder", name, "--dry-run", "--json").stdout)
        assert plan["asked"] == [name]
    # As `list` shows the process of a call.
    store.acquire(Claim(key, "d", 30.0, 4, task_id="id-d", hostname="w1@web", pid=10))
    plan = json.loads(operate("break", key, "--holder", "w1@web:10", "--dry-run", "--json").stdout)
    assert plan["asked"] == ["id-d"]
    operate("break", key, "--holder", "id-b", "--yes", "--force")

    assert sorted(holder.token for holder in store.holders(key)) == ["a", "c", "d"]
    assert "does not hold" in operate("break", key, "--holder", "id-b", "--yes", code=NO).stderr


def test_a_dry_run_shows_when_the_calls_of_marks_are_due(operate: Operate, store: Store) -> None:
    store.mark_queued(tasks.skipped.lock_key_for("k"), "id-1", 3600.0 + 7200.0, limit=0, cooldown=0.0)

    assert re.search(r" in (2h00m|1h59m) ", operate("break", "--marks", "*", "--dry-run").stdout)


def test_no_mark_is_dropped_that_has_come_or_is_held_since_a_person_agreed(operate: Operate, store: Store) -> None:
    keys = sorted(tasks.skipped.lock_key_for(str(number)) for number in range(4))
    for key in keys:
        store.mark_queued(key, "id-1", 60.0, limit=0, cooldown=0.0)
    terminal = Terminal("--marks", "*")
    terminal.is_asked()
    store.unmark(keys[0], "id-1")
    store.mark_queued(keys[0], "id-2", 60.0, limit=0, cooldown=0.0)
    store.unmark(keys[1], "id-1")
    store.acquire(claim(keys[1], "id-1"))
    # A call that has come and waits would lose its turn with its mark, and nobody would call it.
    store.acquire(claim(keys[2], "id-3"))

    code, said = terminal.answers("y\n")

    assert code == YES
    assert "Marks dropped: 1. Locks left alone because they are held: 2." in said
    rows = json.loads(operate("list", "--json").stdout)
    assert {(row["key"], row["state"], row["task_id"]) for row in rows} == {
        (keys[1], "held", "id-1"),
        (keys[2], "held", "id-3"),
        (keys[2], "queued", "id-1"),
        (keys[0], "queued", "id-2"),
    }
