"""The cost of a lock alone, in multiples of a PING, and of redis-py or python-redis-lock in the same cycle.

All candidates take turns in short rounds on the same server, on loopback, so a ratio is worth more than the
microseconds behind it. The cost of a PING depends on the machine: less where client and server find themselves on one
core, and then everything is more PINGs. So what is mostly work of a processor is told beside others who do the same.
The unit takes part once more, for what is noise. --one-core is for numbers that repeat.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import perf, report, script_cost, server_side
from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY, TTL, Candidate, RedisPy, candidates, client_of
from benchmarks.handoff import hand_offs
from benchmarks.report import Row, Rows, ServerReport
from benchmarks.rounds import AGAIN, Spread, interleaved, ratio
from benchmarks.runner import in_a_process
from tests.servers import running

SERVERS = ("valkey", "redis")
PING = "PING"
PIPELINE = "redis-py's pipeline of PEXPIRE"
LEASES = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """How often."""

    cycles: int
    calls: int
    renewals: int
    hand_offs: int


FULL = Plan(cycles=300, calls=25, renewals=40, hand_offs=80)
QUICK = Plan(cycles=10, calls=5, renewals=3, hand_offs=5)


def measure(kind: str, plan: Plan) -> ServerReport:
    """Everything on one server of that kind, which lives as long as this takes."""
    with running(kind) as server:
        client = client_of(server.url)
        info = client.info("server")
        version = info.get("valkey_version") or info["redis_version"]
        rows, ping = pairs_and_conflicts(server.url, plan)
        rows += script_cost.rows(server, plan.renewals)
        client.flushall()
        rows += renewals(server.url, plan)
        client.flushall()
        rows += [hand_off(server.url, plan), memory(server.url)]
        return ServerReport(kind, version, ping, rows)


def pairs_and_conflicts(url: str, plan: Plan) -> tuple[list[Row], Spread]:
    """Acquire and release a free lock; ask once for a held one."""
    known = candidates(url)
    with ExitStack() as held:
        pairs = {candidate.label: _pair(candidate) for candidate in known}
        conflicts = {candidate.label: _conflict(candidate, held) for candidate in known}
        again = RedisPy(url)
        named = _named("pair", {**pairs, AGAIN: _pair(again)})
        named |= _named("conflict", {**conflicts, AGAIN: _conflict(again, held, "held-again")})
        actions = {PING: client_of(url).ping, **named}
        seconds = interleaved({name: (action, plan.calls) for name, action in actions.items()}, plan.cycles)

        def costs(of: str) -> dict[str, Spread]:
            return {label: ratio(seconds[f"{of} {label}"], seconds[PING]) for label in pairs}

        def commands(of: dict[str, Callable[[], None]]) -> dict[str, Spread]:
            return {label: Spread.of([server_side.commands(url, action)]) for label, action in of.items()}

        rows = [
            Row(report.PAIR, PING, costs("pair")),
            _beside(report.PAIR_SHARE, REDIS_PY, "redis-py's Lock", _of("pair", seconds)),
            Row(report.PAIR_COMMANDS, "", commands(pairs)),
            Row(report.CONFLICT, PING, costs("conflict")),
            _beside(report.CONFLICT_SHARE, REDIS_PY, "redis-py's Lock", _of("conflict", seconds)),
            Row(report.CONFLICT_COMMANDS, "", commands(conflicts)),
        ]
    return rows, Spread.of([1e6 * ping for ping in seconds[PING]])


def _of(what: str, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name.removeprefix(f"{what} "): each for name, each in seconds.items() if name.startswith(f"{what} ")}


def _beside(what: str, unit: str, of: str, seconds: dict[str, list[float]]) -> Row:
    """As multiples of what one of them takes."""
    values = {label: ratio(each, seconds[unit]) for label, each in seconds.items() if label != PIPELINE}
    return Row(what, f"multiples of {of}", values, Spread.of([1e6 * one for one in seconds[unit]]))


def _named(what: str, actions: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    return {f"{what} {label}": action for label, action in actions.items()}


def _pair(candidate: Candidate) -> Callable[[], None]:
    lock = candidate.lock("free")

    def pair() -> None:
        lock.acquire()
        lock.release()

    return pair


def _conflict(candidate: Candidate, held: ExitStack, name: str = "held") -> Callable[[], None]:
    holder, lock = candidate.lock(name), candidate.lock(name)
    holder.acquire()
    held.callback(holder.release)

    def conflict() -> None:
        assert not lock.acquire(blocking=False)

    return conflict


def renewals(url: str, plan: Plan) -> Iterator[Row]:
    """Start the time of many held leases afresh."""
    actions = {candidate.label: candidate.renewal(LEASES) for candidate in candidates(url)}
    pipelines = {PIPELINE: pipeline(url), AGAIN: pipeline(url)}
    seconds = interleaved({label: (action, 1) for label, action in {**actions, **pipelines}.items()}, plan.renewals)
    yield _beside(report.RENEWAL, PIPELINE, PIPELINE, seconds)
    scripts = server_side.longest_scripts(url, actions[OURS], plan.renewals)
    yield Row(report.SCRIPT, "ms", {OURS: Spread.of(scripts)})
    turn = server_side.busy_turn(url, actions[OURS], plan.renewals)
    if turn is not None:
        yield Row(report.TURN, "ms", {OURS: Spread.of([turn])})


def pipeline(url: str) -> Callable[[], object]:
    """The least that redis-py could do to renew as many, whoever holds them."""
    client = client_of(url)
    keys = [f"piped-{number}" for number in range(LEASES)]
    client.mset(dict.fromkeys(keys, f"{1:016}"))

    def renew() -> None:
        commands = client.pipeline(transaction=False)
        for key in keys:
            commands.pexpire(key, 1000 * TTL)
        assert sum(commands.execute()) == LEASES

    return renew


def hand_off(url: str, plan: Plan) -> Row:
    """To a waiter in another process."""
    return _beside(report.HAND_OFF, PYTHON_REDIS_LOCK, PYTHON_REDIS_LOCK, hand_offs(url, plan.hand_offs))


def memory(url: str) -> Row:
    """The bytes that the server keeps for a held lock."""
    sizes = {candidate.label: server_side.memory(url, candidate, "memory") for candidate in candidates(url)}
    return Row(report.MEMORY, "bytes", {label: Spread.of([size]) for label, size in sizes.items()})


def main() -> None:
    """Measure on every server there is, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.locks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, which only prove that everything works")
    parser.add_argument("--one-core", action="store_true", help="everything on one core (Linux)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/locks.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    notes = [f"Instructions are not counted: {why}."] if (why := perf.problem()) else []
    reports = []
    for kind in SERVERS:
        if kind == "redis" and shutil.which("redis-server") is None:
            notes.append("redis-server is not installed, so there are no numbers for it.")
            continue
        reports.append(in_a_process(measure, kind, QUICK if arguments.quick else FULL))
    tables = [Rows(each.title, each.rows) for each in reports]
    report.save(report.by_server(reports), arguments.out)
    report.save_markdown(tables, notes, arguments.out.with_suffix(".md"))
    report.show(tables, [*notes, f"saved as {arguments.out}, and for reading beside it"])


if __name__ == "__main__":
    main()
