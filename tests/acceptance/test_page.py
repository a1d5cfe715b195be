"""The page of the locks: what it shows, and who may see it."""

import base64
import html
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from celery_singleton_lock.beat import SingletonSchedulerMixin
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.stores.records import Facts
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.web import application
from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP, Operate
from tests.acceptance.test_operations import claim
from tests.browsing import Visitor
from tests.contract.asking import Waiter
from tests.servers import Server
from tests.waiting import SOON, until

OF_ONE_PROCESS = "memory of one process"
EVIL = "<script>alert(1)</script>' onload=a \" onclick=b &"


@pytest.fixture
def reader() -> Visitor:
    return Visitor(application(tasks.app))


def words_in(page: str) -> str:
    without_style = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without_style)).split())


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_page_without_locks_says_so(reader: Visitor) -> None:
    reply = reader.get()

    assert reply.status == 200
    assert "Set-Cookie" not in reply.headers
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "Nothing is held" in words_in(reply.body)
    assert OF_ONE_PROCESS not in words_in(reply.body)


def test_the_page_shows_who_holds_who_waits_and_what_is_queued(reader: Visitor, store: Store) -> None:
    held, queued = tasks.skipped.lock_key_for("k"), tasks.refused.lock_key_for("k")
    store.acquire(claim(held, "id-1"))
    store.mark_queued(queued, "id-q", 60.0, limit=0, cooldown=0.0)
    waits, lock = Waiter(store, claim(held, "id-w", token="w")), Waiter(store, claim(held, token="l"))
    with waits, lock:
        waits.ask()
        lock.ask()
        said = words_in(reader.get().body)

    waiting = r"waiting: id-w for \d+\.\ds, a Lock for \d+\.\ds held id-1 w1@web:7 \d+\.\ds \d+\.\ds of 30\.0s 2"
    assert re.search(f"{re.escape(f'{tasks.skipped.name} {held}')} {waiting}", said)
    # The call has been due since its publication, and 60 of its 3600 seconds are left.
    assert re.search(rf"{re.escape(f'{tasks.refused.name} {queued}')} queued id-q - 59m\d\ds", said)
    assert "Held: 1 Waiting: 2 Queued: 1" in said


def test_a_call_with_a_countdown_is_due_in_its_time(reader: Visitor) -> None:
    tasks.by_mode["until_executed"].apply_async(("k",), countdown=600)

    (row,) = json.loads(reader.get("/locks.json").body)

    assert row["queued_for"] == 0
    assert 500 < row["due_in"] <= 600
    assert re.search(r"queued in celery \S+ - in (9m\d\ds|10m00s) ", words_in(reader.get().body))


def test_a_lease_of_which_half_is_gone_is_not_renewed(operate: Operate, reader: Visitor, store: Store) -> None:
    for task, left in (tasks.skipped, 330.0), (tasks.warned, 270.0):
        lease = replace(claim(task.lock_key_for("k"), task.name, token=task.name), ttl=600.0)
        store.acquire(lease)
        store.call("HSET", lease.key, lease.token, str(int((time.time() + left) * 1_000_000)))

    page = reader.get().body

    rows = {row["task_id"]: row.get("not_renewed") for row in json.loads(reader.get("/locks.json").body)}
    assert rows == {tasks.skipped.name: None, tasks.warned.name: True}
    assert "UTC 1 lease is not renewed. " in words_in(page)
    assert page.count('<strong class="note fault">not renewed</strong>') == 1
    assert re.search(r"held not renewed \S+warned \S+ \S+ 4m\d\ds of 10m00s ", words_in(page))
    assert re.search(rf"{tasks.warned.name} .*not renewed", operate("list").stdout)


def test_the_first_line_says_whether_the_locks_are_well(reader: Visitor, store: Store) -> None:
    said = words_in(reader.get().body)
    assert "UTC The locks are well. Held: 0 Waiting: 0 Queued: 0 Oldest wait: - Last hour: nothing unusual" in said

    key = tasks.skipped.lock_key_for("k")
    facts = Facts(task_id="id-1", hostname="w1@web", pid=7)
    for event, outcome in (("conflict", "skipped"), ("lost", "replaced"), ("lost", "expired"), ("lost", "expired")):
        counters.record(store, key, event, outcome, tasks.skipped.name, facts)
    counters.flush()
    store.mark_queued(key, "id-q", 1800.0, limit=0, cooldown=0.0)
    page = Visitor(application(tasks.app)).get().body

    said = words_in(page)
    assert 'class="verdict faulty" role="status"' in page
    assert re.search(r"UTC A call waits for 30m0\ds; 2 faults in the last hour\. Held: 0 .* Oldest wait: 30m0\ds", said)
    assert "Last hour: 2 lost expired, " in said
    assert "A call waits for" in words_in(Visitor(application(tasks.app)).get("/", "name=nothing").body)


def test_a_beat_that_leads_and_one_that_is_gone_stand_in_the_first_line(reader: Visitor) -> None:
    beat = SingletonSchedulerMixin(tasks.app)
    beat.tick()
    assert "The locks are well. Beat: leads" in words_in(reader.get().body)
    beat.close()

    assert "No beat leads. Beat: none leads" in words_in(Visitor(application(tasks.app)).get().body)


def test_programs_read_what_the_command_line_writes(reader: Visitor, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))

    reply = reader.get("/locks.json")

    (row,) = json.loads(reply.body)
    assert reply.headers["Content-Type"].startswith("application/json")
    assert (row["key"], row["state"], row["task_id"]) == (tasks.skipped.lock_key_for("k"), "held", "id-1")
    assert json.loads(reader.get("/locks.json", "name=nothing").body) == []
    assert "secret" not in reply.body + reader.get().body


def test_names_are_text_and_no_part_of_the_page(reader: Visitor, store: Store) -> None:
    name = EVIL.replace("{", "%7B")
    store.acquire(claim(f"singleton:v3:{{{name}:{0:032}}}", EVIL))

    body = reader.get("/", "name=%3Cscript%3E").body

    seen = Parsed(body)
    assert "script" not in seen.tags
    assert {name for name in seen.attributes if name.startswith("on")} == set()
    assert EVIL in words_in(body)


def test_of_many_that_wait_the_first_are_named_once(reader: Visitor, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    for token in "ab":
        store.acquire(claim(key, f"id-{token}", token, limit=2))
    with ExitStack() as waiting:
        for number in range(12):
            waiting.enter_context(Waiter(store, claim(key, f"w-{number}", token=f"w{number}", limit=2))).ask()
        said = words_in(reader.get().body)

    assert said.count("waiting: w-0 for ") == 1
    assert re.search(r"w-9 for \d\.\ds and 2 more", said)


@pytest.mark.prove
@pytest.mark.parametrize("path", ["/", "/locks.json", "/healthz", "/nowhere"])
def test_a_browser_is_told_to_run_and_to_load_nothing(reader: Visitor, path: str) -> None:
    headers = reader.get(path).headers

    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_a_queued_call_is_due_from_its_publication_though_it_expires(reader: Visitor) -> None:
    tasks.by_mode["until_executed"].apply_async(("k",), expires=600)

    def seconds() -> float:
        lines = reader.get("/metrics").body.splitlines()
        start = 'singleton_lock_oldest_queued_seconds{task="until_executed"}'
        (line,) = (line for line in lines if line.startswith(start))
        return float(line.split()[1])

    assert 0 < until(seconds, "it is due") < 60


def test_a_user_who_may_not_walk_the_keys_has_the_counters(reader: Visitor, valkey: Server) -> None:
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "scraper", "reset", "on", ">pa55", "~*", "&*", "+@all", "-scan")
        try:
            tasks.app.conf.singleton_lock_url = f"redis://scraper:pa55@127.0.0.1:{valkey.port}/2"
            lines = reader.get("/metrics").body.splitlines()
            page = reader.get()
        finally:
            client.execute_command("ACL", "DELUSER", "scraper")

    assert "singleton_lock_up 1.0" in lines
    assert not any(line.startswith("singleton_lock_holders") for line in lines)
    assert (page.status, "'scan'" in html.unescape(page.body)) == (503, True)


@pytest.mark.prove
@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/locks.json"])
def test_pages_are_read_and_nothing_else(reader: Visitor, method: str, path: str) -> None:
    reply = reader.ask(method, path)

    assert (reply.status, ", ".join(sorted(reply.headers["Allow"].split(", ")))) == (405, "GET, HEAD, OPTIONS")


def test_who_has_asked_a_holder_to_stop_is_shown(reader: Visitor, store: Store) -> None:
    mine = claim(tasks.skipped.lock_key_for("k"), "id-1")
    store.acquire(mine)
    Inventory(store).break_lock(mine.key, [mine.token], "alice@ops-1", marks=False, force=False)

    (row,) = json.loads(reader.get("/locks.json").body)
    assert (row["state"], row["asked_by"]) == ("held", "alice@ops-1")
    assert "held asked to stop by alice@ops-1" in words_in(reader.get().body)


def test_a_missing_extra_is_told_with_the_command_to_type(operate: Operate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery_singleton_lock.web", raising=False)
    monkeypatch.setitem(sys.modules, "flask", None)

    with pytest.raises(ImportError, match="need flask: pip install"):
        importlib.import_module("celery_singleton_lock.web")
    assert "pip install 'celery-singleton-lock[web]'" in operate("web", code=2).stderr


@contextmanager
def served(valkey: Server, *arguments: str, **env: str) -> Iterator[str]:
    store = valkey.url.removesuffix("/0")
    command = [sys.executable, "-m", "celery", "-A", APP, "singleton", "web", "--bind", "127.0.0.1:0", *arguments]
    given = {**os.environ, "TEST_STORE": valkey.url, "TEST_LOCKS": f"{store}/2", "PYTHONUNBUFFERED": "1", **env}
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)
    try:
        assert select.select([process.stdout], [], [], 60)[0], "it says where it is"
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def fetched(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SOON) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_command_serves_the_page(valkey: Server, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))

    with served(valkey) as url:
        assert url.startswith("http://127.0.0.1:")
        status, body = fetched(url)
        assert (status, "id-1" in body) == (200, True)
        # A foreign page can let its own name lead here.
        for host in ("localhost:8765", "[::1]:8765", "LOCALHOST"):
            assert fetched(url, Host=host)[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "[::2]"):
            assert fetched(url, Host=host)[0] == 421


@pytest.mark.prove
def test_the_command_asks_for_the_password_it_was_given(valkey: Server) -> None:
    with served(valkey, SINGLETON_WEB_PASSWORD="geheim") as url:
        status, body = fetched(url)
        assert (status, "Locks" in body) == (401, False)
        assert fetched(f"{url}locks.json")[0] == 401
        for wrong in (basic("a", "Geheim"), basic("a", ""), "Basic ***", basic("a", "é")):
            assert fetched(url, Authorization=wrong)[0] == 401
        assert fetched(f"{url}healthz")[0] == 200
        status, body = fetched(url, Authorization=basic("alice", "geheim"))
        assert (status, "Locks" in body) == (200, True)


@pytest.mark.prove
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("bind", "says"),
    [
        ("0.0.0.0:0", "SINGLETON_WEB_PASSWORD"),
        ("[::]:0", "SINGLETON_WEB_PASSWORD"),
        ("example.com:80", "SINGLETON_WEB_PASSWORD"),
        ("127.0.0.1", "not an address to listen on"),
        ("127.0.0.1:99999", "not an address to listen on"),
        (":80", "not an address to listen on"),
    ],
)
def test_a_place_where_others_would_come_is_refused(operate: Operate, bind: str, says: str) -> None:
    assert says in operate("web", "--bind", bind, code=2).stderr


def test_a_port_that_is_in_use_is_said_in_a_line(operate: Operate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        done = operate("web", "--bind", f"127.0.0.1:{taken_port}", code=1)

    assert "Address already in use" in done.stderr
    assert f"Port {taken_port} is in use" in done.stderr
