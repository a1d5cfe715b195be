"""Sentry's Crons: how they see the calls of a beat that are skipped, wait, or are not published."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest

from tests.frameworks.stage import visited
from tests.waiting import until
from tests.workers import workers

SHOP = "tests.frameworks.sentry_shop"
CheckIns = dict[str, list[str]]


@pytest.fixture
def check_ins(env: dict[str, str]) -> Iterator[CheckIns]:
    heard: CheckIns = defaultdict(list)

    class Sentry(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            lines = body.split(b"\n")
            for head, payload in pairwise(lines):
                if b'"type":"check_in"' in head.replace(b" ", b""):
                    told = json.loads(payload)
                    heard[told["check_in_id"]].append(told["status"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not among the output of the test."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Sentry)
    thread = Thread(target=server.serve_forever)
    thread.start()
    env["SENTRY_DSN"] = f"http://key@127.0.0.1:{server.server_port}/1"
    yield heard
    server.shutdown()
    thread.join()
    server.server_close()


def beat() -> Any:
    """Send each entry while somebody else holds its lock, and once more; return the ids of its check-ins."""
    import sentry_sdk
    from celery.beat import Scheduler

    from celery_singleton_lock.testing import hold
    from tests.frameworks import sentry_shop as shop
    from tests.waiting import until

    results = []

    class Beat(Scheduler):
        def apply_async(self, *args: Any, **options: Any) -> Any:
            results.append(super().apply_async(*args, **options))
            return results[-1]

    scheduler = Beat(shop.app)
    entries = scheduler.get_schedule()

    def send(name: str) -> str:
        scheduler.apply_entry(entries[name])
        return str(entries[name].options["headers"]["sentry-monitor-check-in-id"])

    ids = {}
    for name, task, state in (
        ("prices", shop.sync_prices, "SUCCESS"),
        ("skipped", shop.skipped, "REVOKED"),
        ("waiting", shop.waiting, "RETRY"),
    ):
        with hold(task):
            ids[f"{name} 1"] = send(name)
            until(lambda state=state: results[-1].state == state, f"{name} is in {state}", 60)
        results[-1].get(timeout=60, propagate=False)
        ids[f"{name} 2"] = send(name)
        results[-1].get(timeout=60)
    scheduler.apply_entry(entries["stock"])
    results[-1].get(timeout=60)
    sentry_sdk.flush(60)
    return ids


def test_what_crons_hear_of_the_entries_of_a_beat(env: dict[str, str], check_ins: CheckIns) -> None:
    ended = ["in_progress", "ok"]

    # One process, which tells in order: after the last one it has told all.
    with workers(SHOP, env, concurrency=1):
        names = {number: name for name, number in visited(beat, env).items()}
        until(lambda: ended in [sorted(check_ins[each]) for each in set(check_ins) - set(names)], "all is told", 60)

    assert {name: sorted(check_ins.pop(number)) for number, name in names.items()} == {
        "prices 1": ended,
        "prices 2": ended,
        # As if it had never ended.
        "skipped 1": ["in_progress"],
        "skipped 2": ended,
        "waiting 1": ["error", "in_progress", "ok"],
        "waiting 2": ended,
    }
    # The check-in of the body's own decorator.
    assert [sorted(each) for each in check_ins.values()] == [ended]
