"""The page as a real browser shows it, and its pictures for the docs."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import pytest
from celery import Celery

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.stores.records import Claim, Facts
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.web import application
from tests.page.chromium import BOUND, USUAL, browsing
from tests.servers import Server as Store
from tests.servers import missing

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"wide": (1400, 1320), "phone": (500, 1180)}
COLOURS = {"light": 1, "dark": 0}
GROUND = {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 22, 28)"}
SHOWN_IN_DOCS = {("wide", "light"), ("phone", "dark")}


@pytest.fixture(scope="module")
def chromium() -> str:
    path = shutil.which("chromium")
    if path is None:
        missing("chromium is not installed")
    return str(path)


class Serving(ThreadingMixIn, WSGIServer):
    daemon_threads = True


SKIPPED = "conflict", "skipped", "shop.import_catalogue"
DIED = "holder_died", "", "shop.charge"


def key_of(app: Celery, name: str, supplier: int) -> str:
    def task(supplier_id: int) -> None: ...

    known = app.tasks.get(f"shop.{name}")
    queued = {"lock_mode": "until_executed"} if name == "rebuild_index" else {}
    made = known or app.task(base=SingletonTask, name=f"shop.{name}", shared=False, **queued)(task)
    return str(made.lock_key_for(supplier))


def ids(number: int) -> str:
    return f"{number:08x}-fc02-479e-83b3-0e5e5bb9568d"


@pytest.fixture
def shop(valkey: Store) -> Iterator[Celery]:
    app = Celery("shop", broker=valkey.url, backend=valkey.url)
    app.conf.singleton_lock_url = valkey.url
    store = store_of(app)

    def key(name: str, number: int) -> str:
        return key_of(app, name, number)

    for number, (name, supplier) in enumerate([("import_catalogue", 7), ("import_catalogue", 8), ("send_invoices", 1)]):
        label = f"supplier {supplier}" if name == "import_catalogue" else ""
        who = {"task_id": ids(number + 0x358E5B), "hostname": f"w{number % 2 + 1}@web", "pid": 14590 + number}
        store.acquire(Claim(key(name, supplier), f"t{number}", 90.0, label=label, **who))
    # One that nobody renews: a fifth of its ttl is left, and less once a browser has begun.
    dead = Claim(key("charge", 3), "dead", 30.0, task_id=ids(0x9EF6962), hostname="w3@web", pid=21146)
    dead.label = "order 3"
    store.acquire(dead)
    with valkey.client() as client:
        client.hset(dead.key, "dead", str(int(client.time()[0] * 1_000_000 + 6_000_000)))
    Inventory(store).break_lock(key("send_invoices", 1), ["t2"], "alice@ops-1")
    store.mark_queued(key("rebuild_index", 1), ids(0x1274ECA), 2980.0, limit=0, cooldown=0.0, queue="search")
    store.mark_queued(key("rebuild_index", 2), ids(0x4B55D0B), 3720.0, limit=0, cooldown=0.0, queue="search")
    refused = Facts(task_id=ids(0x61E3), hostname="w1@web", pid=14590, label="supplier 7")
    counters.record(store, key("import_catalogue", 7), *SKIPPED, refused, ids(0x358E5B))
    counters.record(store, key("charge", 3), *DIED, Facts(task_id=ids(0x9EF6), hostname="w3@web", label="order 3"))
    counters.flush()
    refused_at = time.time_ns() // 1000 - 192_000_000
    waits = Claim(key("import_catalogue", 7), "w", 30.0, task_id=ids(0x6D2EA5), hostname="w2@web", pid=14601)
    store.acquire(replace(waits, published=refused_at, turn_for=600.0, rank=refused_at))
    yield app
    app.close()


@pytest.fixture
def url(shop: Celery) -> Iterator[str]:
    with Serving(("127.0.0.1", 0), WSGIRequestHandler) as server:
        server.set_app(application(shop))
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        serving.join(BOUND)


def browse(chromium: str, folder: Path, *arguments: str) -> str:
    command = [chromium, *USUAL, f"--user-data-dir={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_browser_shows_what_is_held_and_finds_nothing_to_complain_of(chromium: str, url: str, tmp_path: Path) -> None:
    seen = browse(chromium, tmp_path, "--dump-dom", "--enable-logging=stderr", url)

    assert "shop.import_catalogue" in seen
    assert "supplier 7" in seen
    assert f"waiting: <code>{ids(0x6D2EA5)} for 3m" in seen
    assert "Content Security Policy" not in seen


@pytest.mark.parametrize(("size", "colour"), list(product(SIZES, COLOURS)))
def test_its_picture_is_taken(chromium: str, url: str, tmp_path: Path, size: str, colour: str) -> None:
    width, height = SIZES[size]
    picture = tmp_path / "page.png"
    look = f"--blink-settings=preferredColorScheme={COLOURS[colour]}"

    browse(chromium, tmp_path / "home", f"--window-size={width},{height}", look, f"--screenshot={picture}", url)

    brightness = corner(picture)
    assert (brightness > 200) == (colour == "light"), brightness
    if os.environ.get("WRITE_DOCS") and (size, colour) in SHOWN_IN_DOCS:
        shutil.copy(picture, DOCS / f"page-{size}-{colour}.png")


@pytest.mark.parametrize("colour", COLOURS)
def test_nothing_of_it_is_beside_the_screen_of_a_phone(chromium: str, url: str, tmp_path: Path, colour: str) -> None:
    with browsing(chromium, tmp_path) as browser:
        browser.look_like(colour=colour, width=360, height=740)
        browser.open(url)

        widths = browser.told("[document.documentElement.scrollWidth, innerWidth]")
        background = browser.told("getComputedStyle(document.body).backgroundColor")
    assert widths[0] <= widths[1] == 360
    assert background == GROUND[colour]


def test_it_can_be_heard_and_used_without_a_mouse(chromium: str, url: str, tmp_path: Path) -> None:
    with browsing(chromium, tmp_path) as browser:
        browser.look_like(colour="light", width=360, height=740)
        browser.open(url)
        heard = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in browser.ask("Accessibility.getFullAXTree")["nodes"]
            if not node["ignored"]
        ]
        reached = []
        for _ in range(6):
            for kind in ("rawKeyDown", "keyUp"):
                browser.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            reached.append(browser.told("document.activeElement.innerText || document.activeElement.name"))

    roles = [role for role, _ in heard]
    assert {("table", "Locks"), ("table", "Recent")} <= set(heard)
    assert {"status", "main", "search", "heading", "columnheader", "row", "cell"} <= set(roles)
    assert reached[:5] == ["name", "Filter", "Refresh every 5 s", "JSON", "Metrics"]


def corner(picture: Path) -> float:
    from matplotlib import image

    pixels: Any = image.imread(picture)
    return float(pixels[2, 2, :3].mean() * 255)
