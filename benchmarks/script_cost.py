"""The server's time for a lock: the two calls of a task as a worker sends them, and the least there could be."""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from benchmarks import perf, processor, report
from benchmarks.candidates import OURS, client_of
from benchmarks.libraries import named
from benchmarks.report import Row
from benchmarks.rounds import AGAIN, Spread, in_turns
from benchmarks.runner import APP, Plan, Runner
from tests.servers import Server
from tests.workers import Worker

SET_AND_DEL, EMPTY = "SET NX PX + DEL", "two empty scripts"
# Sent in one go, and few enough for the buffers of a connection.
PAIRS = 250

Command = Sequence[str]


def rows(server: Server, rounds: int) -> Iterator[Row]:
    """The cost of a pair, pipelined: system calls and turns of the server's loop then weigh little, as under load."""
    calls = calls_of_a_task(server)
    client = client_of(server.url)
    empty = ("EVALSHA", str(client.script_load("return 1")), "1", calls[0][3])
    native = ("SET", "native", calls[0][4], "NX", "PX", "60000"), ("DEL", "native")
    connection = client.connection_pool.get_connection()
    actions = {
        label: _pipelined(connection, pair)
        for label, pair in {
            OURS: calls,
            SET_AND_DEL: native,
            AGAIN: calls,
            EMPTY: (empty, empty),
        }.items()
    }
    for action in actions.values():
        action()
    microseconds = in_turns({label: _processor_time(server, action) for label, action in actions.items()}, rounds)
    yield Row(report.SERVER_PAIR, "µs", {label: Spread.of(each) for label, each in microseconds.items()})
    if perf.problem() is None:
        thousands = in_turns({label: _instructions(server, action) for label, action in actions.items()}, 3)
        spreads = {label: Spread.of(each) for label, each in thousands.items()}
        yield Row(report.SERVER_PAIR_INSTRUCTIONS, "thousands", spreads)


def calls_of_a_task(server: Server) -> list[list[str]]:
    """With the holder's facts: hostname, pid, task id, name and what else a worker tells."""
    locks = f"{server.url[:-1]}2"
    os.environ.update(BENCH_STORE=server.url, BENCH_LOCKS=locks)
    library = named(OURS)
    worker = Worker(APP, {}, "--queues", import_module(APP).queue_of(library), concurrency=1)
    try:
        worker.start().ready()
        plan = Plan(blocks=1, pinned_blocks=0, cycles=1, seconds=0, most_tasks=1, starts=1, counts=0)
        return Runner(library, False, worker, server, plan).scripts(locks)
    finally:
        worker.close()


def _pipelined(connection: Any, pair: Sequence[Command]) -> Callable[[], None]:
    packed = b"".join(b"".join(connection.pack_command(*command)) for command in pair)

    def send() -> None:
        connection.send_packed_command([packed * PAIRS], check_health=False)
        replies = [connection.read_response() for _ in range(len(pair) * PAIRS)]
        # The last reply is of a release, and all releases are alike.
        assert replies[-1] == 1, replies[-1]

    return send


def _processor_time(server: Server, action: Callable[[], None]) -> Callable[[], float]:
    def measured() -> float:
        before = processor.seconds(server.pid)
        action()
        return 1e6 * (processor.seconds(server.pid) - before) / PAIRS

    return measured


def _instructions(server: Server, action: Callable[[], None]) -> Callable[[], float]:
    def measured() -> float:
        with perf.counters([server.pid]) as (counter,):
            action()
            return counter.end() / 1000 / PAIRS

    return measured
