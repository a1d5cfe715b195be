"""docs/reference/what-you-see.md is what is seen: each situation is played, and its messages are those of the page."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance import seen_app
from tests.acceptance.conftest import forget_connections
from tests.acceptance.situations import AWAY, LOGGER, SITUATIONS, Log, Scene, Seen, Situation
from tests.proxy import Proxy
from tests.recorder import Recorder
from tests.servers import Server
from tests.workers import Worker

APP = "tests.acceptance.seen_app"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-you-see.md"

HEAD = """# What you see when ...

The log, the state and the `.get()` of each situation, from real runs (`make seen` writes this page). `<key>` is a lock
key, `<n>` a number, other words in angle brackets are task ids. [The log](log.md) has every line with its meaning.
"""


@pytest.fixture(scope="module")
def seen(valkey_process: Server) -> Iterator[dict[str, Seen]]:
    valkey_process.flush()
    base = valkey_process.url.removesuffix("/0")
    conf = {"broker_url": valkey_process.url, "result_backend": f"{base}/1", "singleton_lock_url": f"{base}/2"}
    seen_app.app.conf.update(conf)
    log, recorder, logger = Log(), Recorder(f"{base}/3"), logging.getLogger(LOGGER)
    with ExitStack() as stack:
        away = stack.enter_context(Proxy(valkey_process.port))
        env = {"TEST_STORE": valkey_process.url, "TEST_TTL": "3"}
        at_hand = Worker(APP, env, pool="threads", concurrency=40)
        cut_off = Worker(APP, {"TEST_LOCKS": away.url}, "-Q", AWAY, pool="threads", concurrency=10)
        for worker in (at_hand, cut_off):
            stack.callback(worker.close)
            worker.start()
        for worker in (at_hand, cut_off):
            worker.ready()
        away.reset()
        logger.addHandler(log)
        stack.callback(logger.removeHandler, log)
        level = logger.level
        logger.setLevel(logging.INFO)
        stack.callback(logger.setLevel, level)

        def play(one: Situation) -> Seen:
            return one.play(Scene(one.name, (at_hand, cut_off), log, recorder, valkey_process, {}))

        with ThreadPoolExecutor(len(SITUATIONS)) as players:
            yield dict(zip([one.name for one in SITUATIONS], players.map(play, SITUATIONS), strict=True))
    recorder.close()
    forget_connections(seen_app.app)


def section(one: Situation, seen: Seen) -> str:
    circumstances, _, advice = one.text.partition("\n\n")
    log = "\n".join(seen.log)
    shown = f"```text\n{log}\n```" if log else "The log has no line of this library."
    state = f"State: {seen.state}. " if seen.state else ""
    return f"\n## {one.name}\n\n{circumstances}\n\n{shown}\n\n{state}{seen.get}.\n\n{advice}\n"


def text(seen: dict[str, Seen]) -> str:
    return HEAD + "".join(section(one, seen[one.name]) for one in SITUATIONS)


# At the lowest priority of a busy machine a worker found its store later than the second that the start waits for it.
@pytest.mark.prove
def test_the_page_is_what_is_seen(seen: dict[str, Seen]) -> None:
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(text(seen), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text(seen)
