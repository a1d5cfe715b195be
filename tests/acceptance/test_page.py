"""The page of the locks: what it shows, whom it obeys, and who may see it."""

import base64
import html
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import pytest
from celery.bin.base import CLIContext
from celery.exceptions import TaskRevokedError
from click.testing import CliRunner

from celery_singleton_lock.operations.cli import singleton
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts, Grant
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.web import application
from tests.acceptance.conftest import APP
from tests.browsing import Visitor
from tests.recorder import Recorder, overlaps
from tests.servers import Server, free_port
from tests.waiting import until
from tests.workers import workers

PROMPTLY = 30
OF_ONE_PROCESS = "memory of one process"
EVIL = "<script>alert(1)</script>' onload=a \" onclick=b &"


@pytest.fixture
def store(tasks: Any) -> Store:
    return store_of(tasks.app)


@pytest.fixture
def reader(tasks: Any) -> Visitor:
    return Visitor(application(tasks.app))


@pytest.fixture
def operator(tasks: Any) -> Visitor:
    return Visitor(application(tasks.app, allow_break=True))


def claim(key: str, task_id: str = "", token: str = "secret", limit: int = 1, **more: Any) -> Claim:
    return Claim(key, token, 30.0, limit, Facts(task_id, hostname="w1@web", pid=7), **more)


def words_in(page: str) -> str:
    """What a person reads."""
    without_style = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without_style)).split())


class Parsed(HTMLParser):
    """Tags and attributes, as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


# What is shown.


def test_a_page_without_locks_says_so(reader: Visitor) -> None:
    reply = reader.get()

    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "Nothing is held" in words_in(reply.body)
    assert OF_ONE_PROCESS not in words_in(reply.body)


def test_the_page_shows_who_holds_who_waits_and_what_is_queued(tasks: Any, reader: Visitor, store: Store) -> None:
    held, queued = tasks.skipped.lock_key_for("k"), tasks.refused.lock_key_for("k")
    store.acquire(claim(held, "id-1"))
    store.mark_queued(queued, "id-q", 60.0, limit=0, quiet=0.0)
    waits, lock = store.waiter(claim(held, "id-w", token="w")), store.waiter(claim(held, token="l"))
    with waits, lock:
        waits.ask()
        lock.ask()
        said = words_in(reader.get().body)

    assert f"{tasks.skipped.name} {held} waiting: id-w, a Lock held id-1 w1@web:7" in said
    # It is due since the publication, and 60 of its 3600 seconds are left.
    assert re.search(rf"{re.escape(f'{tasks.refused.name} {queued}')} queued id-q - 59m\d\ds", said)
    assert "Held 1 Waiting 2 Queued 1" in said
    assert re.search(rf"By task .* {re.escape(tasks.skipped.name)} 1 2 0 \d+\.\ds", said)


def test_programs_read_what_the_command_line_writes(tasks: Any, reader: Visitor, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))

    reply = reader.get("/locks.json")

    (row,) = json.loads(reply.body)
    assert reply.headers["Content-Type"].startswith("application/json")
    assert (row["key"], row["state"], row["task_id"]) == (tasks.skipped.lock_key_for("k"), "held", "id-1")
    assert json.loads(reader.get("/locks.json", "name=nothing").body) == []


def test_names_are_text_and_no_part_of_the_page(operator: Visitor, store: Store) -> None:
    name = EVIL.replace("{", "%7B")
    store.acquire(claim(f"singleton:v3:{{{name}:{0:032}}}", EVIL))

    body = operator.get("/", "name=%3Cscript%3E&said=%3Cscript%3E").body

    seen = Parsed(body)
    assert "script" not in seen.tags
    assert {name for name in seen.attributes if name.startswith("on")} == set()
    assert EVIL in words_in(body)


def test_of_many_that_wait_the_first_are_named_once(tasks: Any, reader: Visitor, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    for token in "ab":
        store.acquire(claim(key, f"id-{token}", token, limit=2))
    with ExitStack() as waiting:
        for number in range(12):
            waiting.enter_context(store.waiter(claim(key, f"w-{number}", token=f"w{number}", limit=2))).ask()
        said = words_in(reader.get().body)

    assert said.count("waiting: w-0, w-1,") == 1
    assert "w-9 and 2 more" in said


def test_no_token_is_shown(tasks: Any, operator: Visitor, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1", token="the-token-of-the-lease"))

    assert "id-1" in operator.get().body
    assert "the-token-of-the-lease" not in operator.get().body + operator.get("/locks.json").body


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


# The store is away.


@pytest.fixture
def away(tasks: Any) -> str:
    tasks.app.conf.singleton_lock_url = f"redis://:pa55@127.0.0.1:{free_port()}/0"
    return str(tasks.app.conf.singleton_lock_url)


@pytest.mark.prove
def test_a_page_without_its_store_says_why(reader: Visitor, away: str) -> None:
    reply = reader.get()

    assert reply.status == 503
    assert "cannot be asked" in reply.body
    assert away.partition("@")[2] in reply.body
    assert "pa55" not in reply.body


def test_health_is_that_of_the_store(reader: Visitor) -> None:
    assert (reader.get("/healthz").status, reader.get("/healthz").body) == (200, "ok\n")


# What Prometheus is told.


def test_what_is_held_and_what_was_counted_is_told_to_prometheus(tasks: Any, reader: Visitor, store: Store) -> None:
    name = tasks.skipped.name
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))
    store.mark_queued(tasks.one_of_two.lock_key_for("k"), "id-q", 60.0, limit=0, quiet=0.0)
    store.acquire(claim(f"singleton:v3:{{of-user-7:{0:032}}}"))
    store.count("singleton:v3:stats", {f"conflicts:skipped:{name}": 3}, 30.0)

    reply = reader.get("/metrics")

    lines = reply.body.splitlines()
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "singleton_lock_up 1.0" in lines
    assert f'singleton_lock_holders{{task="{name}"}} 1.0' in lines
    assert f'singleton_lock_conflicts_total{{outcome="skipped",task="{name}"}} 3.0' in lines
    assert f'singleton_lock_acquired_total{{task="{name}"}} 0.0' in lines
    assert 'singleton_lock_holders{task=""} 1.0' in lines
    # Two tasks share that lock, and a mark does not tell whose it is.
    assert 'singleton_lock_queued{task="tests.acceptance.app.one_of_two"} 1.0' in lines
    assert not any("of-user" in line or "celery." in line for line in lines)


def test_a_queued_call_is_due_from_its_publication_though_it_expires(tasks: Any, reader: Visitor) -> None:
    tasks.by_mode["until_executed"].apply_async(("k",), expires=600)

    def seconds() -> float:
        lines = reader.get("/metrics").body.splitlines()
        start = 'singleton_lock_oldest_queued_seconds{task="until_executed"}'
        (line,) = (line for line in lines if line.startswith(start))
        return float(line.split()[1])

    assert 0 < until(seconds, "it is due") < 60


def test_a_user_who_may_not_walk_the_keys_has_the_counters(tasks: Any, reader: Visitor, valkey: Server) -> None:
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


# What may be asked.


@pytest.mark.prove
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/locks.json", "/healthz"])
def test_pages_are_read_and_nothing_else(reader: Visitor, method: str, path: str) -> None:
    reply = reader.ask(method, path)

    assert (reply.status, ", ".join(sorted(reply.headers["Allow"].split(", ")))) == (405, "GET, HEAD, OPTIONS")


# Who may break.


def test_a_page_that_may_only_be_read_has_no_way_to_break(tasks: Any, reader: Visitor, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))
    page = reader.get()

    assert "Ask to stop" not in page.body
    assert "Set-Cookie" not in page.headers
    assert reader.send("/break", {"key": tasks.skipped.lock_key_for("k")}).status == 404


def test_nothing_is_broken_by_following_a_link(operator: Visitor) -> None:
    assert operator.get("/break", "key=x").status == 405


def test_who_is_asked_by_the_page_ends_revoked_and_learns_by_whom(
    tasks: Any, operator: Visitor, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 1) as (worker,):
        holder = tasks.skipped.delay("k", 60.0)
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        page = operator.get()
        form = {
            "csrf_token": page.token(),
            "key": tasks.skipped.lock_key_for("k"),
            "holder": holder.id,
            "name": "skipped",
        }

        reply = operator.send(
            "/break", form, HTTP_COOKIE=page.cookie(), HTTP_SEC_FETCH_SITE="same-origin", REMOTE_USER="alice"
        )

        assert (reply.status, reply.headers["Location"]) == (303, "/?said=asked&name=skipped")
        assert "Asked to stop" in operator.get("/", "said=asked").body
        with pytest.raises(TaskRevokedError, match=re.escape("broken by alice@10.0.0.7")):
            holder.get(timeout=PROMPTLY)
        assert f"task_id={holder.id} by=alice@10.0.0.7" in worker.log()
    assert overlaps(recorder.events()) == []


def sent(operator: Visitor, form: dict[str, str], **environ: Any) -> tuple[int, str]:
    """What becomes of a form with a good token."""
    page = operator.get()
    reply = operator.send("/break", {"csrf_token": page.token(), **form}, **{"HTTP_COOKIE": page.cookie(), **environ})
    return reply.status, reply.headers.get("Location", "")


def test_marks_are_dropped_where_nobody_holds(tasks: Any, operator: Visitor, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.mark_queued(key, "id-q", 60.0, limit=0, quiet=30.0)

    assert "Drop marks" in operator.get().body
    assert sent(operator, {"key": key}) == (303, "/?said=dropped")
    assert store.survey([key])[0].marks == ()


def test_a_holder_that_came_meanwhile_is_not_broken_with_the_marks(tasks: Any, operator: Visitor, store: Store) -> None:
    key = tasks.skipped.lock_key_for("k")
    store.mark_queued(key, "id-q", 60.0, limit=0, quiet=30.0)
    mine = claim(key, "id-1")
    store.acquire(mine)

    assert sent(operator, {"key": key}) == (303, "/?said=changed")
    assert store.broken_by(mine) is None


@pytest.mark.parametrize("key", ["", "*", "singleton:v3:{a:0}", "celery-task-meta-1"])
def test_only_one_key_of_this_app_can_be_broken(operator: Visitor, key: str) -> None:
    assert sent(operator, {"key": key, "holder": "x"})[0] == 400


def test_a_store_that_goes_away_is_told_to_who_breaks(tasks: Any, operator: Visitor) -> None:
    page, key = operator.get(), tasks.skipped.lock_key_for("k")
    tasks.app.conf.singleton_lock_url = f"redis://:pa55@127.0.0.1:{free_port()}/0"
    form = {"csrf_token": page.token(), "key": key, "holder": "x"}

    reply = operator.send("/break", form, HTTP_COOKIE=page.cookie())

    assert reply.status == 503
    assert "pa55" not in reply.body


@pytest.mark.prove
@pytest.mark.parametrize(
    ("lie", "status"),
    [
        ({"HTTP_SEC_FETCH_SITE": "cross-site"}, 403),
        # Another port of this machine.
        ({"HTTP_SEC_FETCH_SITE": "same-site", "HTTP_ORIGIN": "http://127.0.0.1:8765"}, 403),
        ({"HTTP_ORIGIN": "http://evil.example"}, 403),
        ({"HTTP_ORIGIN": "http://127.0.0.1:9999"}, 403),
        ({"HTTP_ORIGIN": "null"}, 403),
        ({"HTTP_COOKIE": None}, 400),
        ({"HTTP_COOKIE": "singleton_lock=" + "x" * 43}, 400),
        ({"HTTP_COOKIE": "singleton_lock=; other=\x01"}, 400),
        ({"CONTENT_TYPE": "application/json"}, 400),
        ({"CONTENT_TYPE": "text/plain"}, 400),
        ({"CONTENT_LENGTH": None}, 400),
        ({"CONTENT_LENGTH": "9999999999999999"}, 413),
    ],
)
def test_a_form_from_elsewhere_is_refused(
    tasks: Any, operator: Visitor, store: Store, lie: dict[str, Any], status: int
) -> None:
    key = tasks.skipped.lock_key_for("k")
    mine = claim(key, "id-1")
    store.acquire(mine)

    assert sent(operator, {"key": key, "holder": "id-1"}, **lie)[0] == status
    assert store.broken_by(mine) is None
    # The same without the lie.
    assert sent(operator, {"key": key, "holder": "id-1"}, HTTP_ORIGIN="http://127.0.0.1:8765")[0] == 303
    assert store.broken_by(mine) == "somebody@10.0.0.7"


@pytest.mark.prove
@pytest.mark.parametrize("token", ["", "x" * 43, "é"])
def test_a_form_with_another_token_is_refused(tasks: Any, operator: Visitor, token: str) -> None:
    assert sent(operator, {"key": tasks.skipped.lock_key_for("k"), "holder": "x", "csrf_token": token})[0] == 400


def test_a_token_is_kept_from_scripts_and_from_other_sites(operator: Visitor) -> None:
    cookie = operator.get("/", SCRIPT_NAME="/ops").headers["Set-Cookie"]

    assert {"HttpOnly", "SameSite=Strict", "Path=/ops"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    over_tls = operator.get("/", **{"wsgi.url_scheme": "https"}).headers["Set-Cookie"]
    assert "Secure" in over_tls


def test_a_token_holds_in_each_process_that_serves_the_page(tasks: Any, store: Store) -> None:
    one, other = (Visitor(application(tasks.app, allow_break=True)) for _ in range(2))
    store.mark_queued(tasks.skipped.lock_key_for("k"), "id-q", 60.0, limit=0, quiet=0.0)
    page = one.get()
    again = other.get("/", HTTP_COOKIE=page.cookie())

    form = {"csrf_token": again.token(), "key": tasks.skipped.lock_key_for("k")}
    assert other.send("/break", form, HTTP_COOKIE=page.cookie()).status == 303


# Who may see it.


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# What an operator asked for.


def test_who_has_asked_a_holder_to_stop_is_shown_until_it_has_ended(
    tasks: Any, operator: Visitor, store: Store
) -> None:
    mine = claim(tasks.skipped.lock_key_for("k"), "id-1")
    granted = store.acquire(mine)
    assert sent(operator, {"key": mine.key, "holder": "id-1"})[0] == 303

    page = operator.get()
    assert "held asked to stop by somebody@10.0.0.7" in words_in(page.body)
    assert "Ask to stop" not in page.body
    (row,) = json.loads(operator.get("/locks.json").body)
    assert (row["state"], row["asked_by"]) == ("held", "somebody@10.0.0.7")
    assert isinstance(granted, Grant)
    store.release(mine, granted.place)
    store.acquire(claim(mine.key, "id-2", token="next"))
    assert "asked to stop" not in words_in(Visitor(application(tasks.app)).get().body)


def test_a_missing_extra_is_one_line_with_the_command_to_type(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery_singleton_lock.web.site", raising=False)
    monkeypatch.setitem(sys.modules, "flask", None)
    done = CliRunner().invoke(singleton, ["web"], obj=CLIContext(tasks.app, True, None))

    assert done.exit_code == 2
    assert "pip install 'celery-singleton-lock[web]'" in done.stderr


# Served by ourselves.


@contextmanager
def served(valkey: Server, *arguments: str, **env: str) -> Iterator[str]:
    """The address of a page that the command serves."""
    store = valkey.url.removesuffix("/0")
    command = [sys.executable, "-m", "celery", "-A", APP, "singleton", "web", "--bind", "127.0.0.1:0", *arguments]
    given = {**os.environ, "TEST_STORE": valkey.url, "TEST_LOCKS": f"{store}/2", "PYTHONUNBUFFERED": "1", **env}
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "it says where it is"
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(PROMPTLY) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def fetched(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PROMPTLY) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_command_serves_the_page(tasks: Any, valkey: Server, store: Store) -> None:
    store.acquire(claim(tasks.skipped.lock_key_for("k"), "id-1"))

    with served(valkey) as url:
        assert url.startswith("http://127.0.0.1:")
        status, body = fetched(url)
        assert (status, "id-1" in body, "Ask to stop" in body) == (200, True, False)
        # A foreign page can let its own name lead here.
        for host in ("localhost:8765", "[::1]:8765", "LOCALHOST"):
            assert fetched(url, Host=host)[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "[::2]"):
            assert fetched(url, Host=host)[0] == 421


@pytest.mark.prove
def test_the_command_asks_for_the_password_it_was_given(tasks: Any, valkey: Server, store: Store) -> None:
    mine = claim(tasks.skipped.lock_key_for("k"), "id-1")
    store.acquire(mine)
    with served(valkey, "--allow-break", SINGLETON_WEB_PASSWORD="geheim") as url:
        status, body = fetched(url)
        assert (status, "Locks" in body) == (401, False)
        assert fetched(f"{url}locks.json")[0] == 401
        for wrong in (basic("a", "Geheim"), basic("a", ""), "Basic ***", basic("a", "é")):
            assert fetched(url, Authorization=wrong)[0] == 401
        assert fetched(f"{url}healthz")[0] == 200
        good = {"Authorization": basic("alice", "geheim")}
        with urllib.request.urlopen(urllib.request.Request(url, headers=good), timeout=PROMPTLY) as reply:
            cookie, page = reply.headers["Set-Cookie"].partition(";")[0], reply.read().decode()
        token = re.findall(r'name="csrf_token" value="([^"]+)"', page)[0]
        form = urlencode({"csrf_token": token, "key": mine.key, "holder": "id-1"}).encode()
        # It answers by leading back to the page, which asks for the password as well.
        asked = urllib.request.Request(f"{url}break", form, {**good, "Cookie": cookie})
        with urllib.request.urlopen(asked, timeout=PROMPTLY) as reply:
            assert reply.url.endswith("?said=asked")

    # Who gives the password is told as the one who asks.
    assert store.broken_by(mine) == "alice@127.0.0.1"


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
def test_a_place_where_others_would_come_is_refused(tasks: Any, bind: str, says: str) -> None:
    done = CliRunner().invoke(singleton, ["web", "--bind", bind], obj=CLIContext(tasks.app, True, None))

    assert done.exit_code == 2
    assert says in done.stderr


def test_a_port_that_is_in_use_is_said_in_a_line(tasks: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        done = CliRunner().invoke(singleton, ["web", "--bind", bind], obj=CLIContext(tasks.app, True, None))

    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(f"Error: --bind {bind}: Address already in use")


def test_prometheus_is_told_that_the_store_is_away(reader: Visitor, away: str) -> None:
    reply = reader.get("/metrics")

    assert reply.status == 200
    assert [line for line in reply.body.splitlines() if not line.startswith("#")] == ["singleton_lock_up 0.0"]
