"""The page as a real browser shows it, and its pictures for the docs."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import pytest
from celery import Celery

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts
from celery_singleton_lock.web import application
from tests.page.chromium import BOUND, USUAL, browsing
from tests.servers import Server as Store
from tests.servers import missing

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"wide": (1280, 820), "phone": (500, 1180)}
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
    """A browser has several connections."""

    daemon_threads = True


def key_of(app: Celery, name: str, supplier: int) -> str:
    def task(supplier_id: int) -> None: ...

    known = app.tasks.get(f"shop.{name}")
    made = known or app.task(base=SingletonTask, name=f"shop.{name}", shared=False)(task)
    return str(made.lock_key_for(supplier))


def ids(number: int) -> str:
    return f"{number:08x}-fc02-479e-83b3-0e5e5bb9568d"


@pytest.fixture
def shop(valkey: Store) -> Iterator[Celery]:
    """An app in which something goes on."""
    app = Celery("shop", broker=valkey.url, backend=valkey.url)
    app.conf.singleton_lock_url = valkey.url
    store = store_of(app)

    def key(name: str, number: int) -> str:
        return key_of(app, name, number)

    for number, (name, supplier) in enumerate([("import_catalogue", 7), ("import_catalogue", 8), ("send_invoices", 1)]):
        label = f"supplier {supplier}" if name == "import_catalogue" else ""
        facts = Facts(ids(number + 0x358E5B), "", f"w{number % 2 + 1}@web", 14590 + number, label=label)
        store.acquire(Claim(key(name, supplier), f"t{number}", 90.0, facts=facts))
    store.mark_queued(key("rebuild_index", 1), ids(0x1274ECA), 3840.0, limit=0, cooldown=0.0)
    waiting = Claim(key("import_catalogue", 7), "w", 30.0, facts=Facts(ids(0x6D2EA5), "", "w2@web", 14601))
    with store.waiter(waiting) as waiter:
        waiter.ask()
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
    assert f"waiting: <code>{ids(0x6D2EA5)}" in seen
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


def corner(picture: Path) -> float:
    """How bright the page is beside its content, of 255."""
    from matplotlib import image

    pixels: Any = image.imread(picture)
    return float(pixels[2, 2, :3].mean() * 255)
