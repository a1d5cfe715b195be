"""The cost of a lock for a task in instructions, which repeat within a percent whatever else the machine does.

They are counted in user space, by valgrind, in three parts: the publisher's `delay()`, the request in the worker's
main process, and the run in its pool process, until its result is stored. Each part runs in a process of its own, in
which nothing else is counted. What the kernel and the server do is not in it: round trips are counted elsewhere.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from celery import Celery, signals
from celery.app.trace import build_tracer, fast_trace_task, setup_worker_optimizations
from celery.utils.imports import symbol_by_name
from celery.worker.request import create_request_cls

import celery_singleton_lock.leases.counters as counting
from benchmarks.libraries import HEIMDALL, LOCKING, Plain, named, usable, versions
from tests.servers import running

PARTS = ("publisher", "main process", "pool process")
COUNTED = (Plain(), *LOCKING)
HOST = "here"
# Before anything is counted: the first tasks import, connect and fill caches.
WARM_UP = 40
PATIENCE = 900
# Two plays of one part that differ by more than this share count nothing: something else was counted with them.
AGREE_WITHIN = 0.005
# Each call has an argument of its own, also among those of other plays. All have as many digits, and are above 2**30,
# from which on Python spends five thousand instructions more on a call.
_firsts = itertools.count(10_000_000_000, 1_000_000)


def problem() -> str | None:
    """Why nothing can be counted here; None if it can."""
    missing = [name for name in ("valgrind", "callgrind_control") if shutil.which(name) is None]
    return (
        f"instructions are counted by valgrind; on Debian: apt-get install valgrind ({missing[0]})" if missing else None
    )


def measure(number: int) -> dict[str, dict[str, float]]:
    """Thousands of instructions for one task, by library and part."""
    with running("valkey") as server, TemporaryDirectory() as folder:
        _compile(folder)
        return {
            each.label: {part: _count(each.label, part, number, server.url, folder) for part in PARTS}
            for each in usable(COUNTED)
        }


def _compile(folder: str) -> None:
    """Leave the client requests of valgrind in *folder*; without a compiler, or valgrind's header, leave nothing."""
    compiler = shutil.which("cc")
    if compiler is not None:
        source = str(Path(__file__).with_name("counting.c"))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", f"{folder}/counting.so", source], check=False)  # noqa: S603


def _count(label: str, part: str, number: int, url: str, folder: str) -> float:
    """The less of two plays.

    Raises:
        SystemExit: The two do not agree.
    """
    one, other = sorted(_count_once(label, part, number, url, folder) for _ in range(2))
    if other - one > AGREE_WITHIN * one and label != HEIMDALL:
        raise SystemExit(
            f"{label}, {part}: two plays counted {one:.0f} and {other:.0f} thousand instructions, which differ by more "
            f"than {AGREE_WITHIN:.1%}; count again"
        )
    return one


def _count_once(label: str, part: str, number: int, url: str, folder: str) -> float:
    # Heimdall waits for a quarter of a second and more at each task, so its plays are short and do not agree.
    number = min(number, 20) if label == HEIMDALL else number
    first = next(_firsts)
    told = json.dumps([label, first, first + WARM_UP + number, url, f"{folder}/tasks"])
    ours = [sys.executable, "-m", "benchmarks.instructions", "--told", told]
    if part != "publisher":
        _run(ours)
    counting = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null"]
    (collected,) = re.findall(r"Collected : (\d+)", _run([*counting, *ours, "--play", part]))
    return int(collected) / number / 1000


def _run(command: list[str]) -> str:
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stderr


# In a process of its own.


def prepare(label: str, first: int, end: int, url: str, path: str) -> None:
    """Leave at *path* what main process and pool process work on: messages, and what comes of them."""
    task, sent, runs = _task(label, url), list[Sequence[Any]](), list[tuple[Any, ...]]()

    def keep(body: Any, headers: Any, properties: Any, **_: Any) -> None:
        sent.append((body, headers, properties))

    signals.before_task_publish.connect(keep)
    for each in range(first, end):
        task.delay(each)
    receive = _receiver(task, runs)
    for message in sent:
        receive(message)
    Path(path).write_bytes(pickle.dumps({"main process": sent, "pool process": runs}))


def play(part: str, label: str, first: int, end: int, url: str, path: str) -> None:
    """Have the instructions of the tasks with these numbers counted in one part."""
    task = _task(label, url)
    steps: dict[str, Callable[[Any], Any]] = {
        "publisher": task.delay,
        "main process": _receiver(task, []),
        "pool process": lambda run: fast_trace_task(*run),
    }
    step = steps[part]
    # Valgrind makes a process fifty times slower, so what is done every few seconds would be done every few tasks.
    counting._EVERY = 3600.0  # noqa: SLF001 (no user has a reason to set it)
    each_of = range(first, end) if part == "publisher" else pickle.loads(Path(path).read_bytes())[part]  # noqa: S301
    for each in each_of[:WARM_UP]:
        step(each)
    _hand_over()
    # The preparation must not change what the garbage collector walks.
    gc.collect()
    gc.freeze()
    with _counted(Path(path).with_name("counting.so")):
        for each in each_of[WARM_UP:]:
            step(each)
        _hand_over()


def _task(label: str, url: str) -> Any:
    library, base = named(label), url.removesuffix("/0")
    app = Celery("counted", broker=url, backend=f"{base}/1")
    app.conf.update(library.settings(f"{base}/2"))
    task = app.task(name="noop", **library.options(None))(_noop)
    app.finalize()
    app.set_current()
    app.set_default()
    setup_worker_optimizations(app, HOST)
    task.__trace__ = build_tracer(task.name, task, hostname=HOST, app=app)
    return task


def _noop(number: int) -> None: ...


def _hand_over() -> None:
    """Do what a library has kept of each task for later, as a process that ends does."""
    signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)


@contextmanager
def _counted(requests: Path) -> Iterator[None]:
    """Have callgrind count the block: by its client requests, or where those were not compiled, by its command."""
    if requests.exists():
        valgrind = ctypes.CDLL(str(requests))
        valgrind.begin()
        yield
        valgrind.end()
    else:
        _control("on")
        yield
        _control("off")


def _control(word: str) -> None:
    subprocess.run(["callgrind_control", "-i", word, str(os.getpid())], capture_output=True, check=True)  # noqa: S603, S607


def _receiver(task: Any, runs: list[tuple[Any, ...]]) -> Callable[[Sequence[Any]], None]:
    """A main process that takes a message, and adds to *runs* what it would send to its pool."""

    class Pool:
        def apply_async(self, _: Any, args: tuple[Any, ...], *, accept_callback: Any, callback: Any, **__: Any) -> None:
            accept_callback(os.getpid(), time.monotonic())
            runs.append(args)
            callback((0, "null", 0.001))

    pool = Pool()
    request = create_request_cls(symbol_by_name(task.Request), task, pool, HOST, None, app=task.app)

    def receive(sent: Sequence[Any]) -> None:
        payload, headers, properties = sent
        body, headers = json.dumps(payload), dict(headers)
        message = SimpleNamespace(
            headers=headers,
            body=body,
            payload=payload,
            content_type="application/json",
            content_encoding="utf-8",
            properties=properties,
            delivery_info={"exchange": "", "routing_key": "celery"},
            delivery_tag=headers["id"],
        )
        options = {"on_ack": _ignore, "on_reject": _ignore, "app": task.app, "hostname": HOST, "eventer": None}
        more = {"connection_errors": (), "body": body, "headers": headers, "decoded": False, "utc": True}
        request(message, task=task, **options, **more).execute_using_pool(pool)

    return receive


def _ignore(*_: Any) -> None: ...


def main() -> None:
    """Count, show, and save."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--number", type=int, default=400, help="tasks of each library in each part")
    options.add_argument("--out", type=Path, default=Path("benchmarks/out/instructions.json"))
    options.add_argument("--play", help=argparse.SUPPRESS)
    options.add_argument("--told", type=json.loads, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.told:
        play(given.play, *given.told) if given.play else prepare(*given.told)
        return
    if why := problem():
        raise SystemExit(why)
    found = measure(given.number)
    plain = sum(found[Plain.label].values())
    for label, parts in found.items():
        counted = "".join(f"{name} {count:7.0f}  " for name, count in parts.items())
        print(f"{label:40} {counted} added {sum(parts.values()) - plain:7.0f}")  # noqa: T201 (it is what it is for)
    facts = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "python": platform.python_version(), "versions": versions()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**facts, "thousands": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
