"""What a lock costs, in multiples of a PING in the same cycle.

All candidates take turns in short rounds on the same server, on loopback, so a
ratio is worth more than the microseconds behind it. It still depends on what a
PING costs here: less where client and server find themselves on one core, and
then everything is more PINGs. --one-core makes that so, for numbers that repeat.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import report, server_side
from benchmarks.candidates import OURS, Candidate, candidates, client_of
from benchmarks.handoff import hand_offs
from benchmarks.report import Row, ServerReport
from benchmarks.rounds import Spread, interleaved, ratio
from tests.servers import SERVERS, running

PING = "PING"
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
        actions = {PING: client_of(url).ping, **_named("pair", pairs), **_named("conflict", conflicts)}
        seconds = interleaved({name: (action, plan.calls) for name, action in actions.items()}, plan.cycles)

        def costs(of: str) -> dict[str, Spread]:
            return {label: ratio(seconds[f"{of} {label}"], seconds[PING]) for label in pairs}

        def commands(of: dict[str, Callable[[], None]]) -> dict[str, Spread]:
            return {label: Spread.of([server_side.commands(url, action)]) for label, action in of.items()}

        rows = [
            report.row(report.PAIR, PING, costs("pair")),
            report.row(report.PAIR_COMMANDS, "", commands(pairs)),
            report.row(report.CONFLICT, PING, costs("conflict")),
            report.row(report.CONFLICT_COMMANDS, "", commands(conflicts)),
        ]
    return rows, Spread.of([1e6 * ping for ping in seconds[PING]])


def _named(what: str, actions: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    return {f"{what} {label}": action for label, action in actions.items()}


def _pair(candidate: Candidate) -> Callable[[], None]:
    lock = candidate.lock("free")

    def pair() -> None:
        lock.acquire()
        lock.release()

    return pair


def _conflict(candidate: Candidate, held: ExitStack) -> Callable[[], None]:
    holder, lock = candidate.lock("held"), candidate.lock("held")
    holder.acquire()
    held.callback(holder.release)

    def conflict() -> None:
        assert not lock.acquire(blocking=False)

    return conflict


def renewals(url: str, plan: Plan) -> Iterator[Row]:
    """Start the time of many held leases afresh."""
    actions = {candidate.label: candidate.renewal(LEASES) for candidate in candidates(url)}
    rounds = {PING: (client_of(url).ping, plan.calls), **{label: (action, 1) for label, action in actions.items()}}
    seconds = interleaved(rounds, plan.renewals)
    yield report.row(report.RENEWAL, PING, {label: ratio(seconds[label], seconds[PING]) for label in actions})
    scripts = server_side.longest_scripts(url, actions[OURS], plan.renewals)
    yield report.row(report.SCRIPT, "ms", {OURS: Spread.of(scripts)})
    turn = server_side.busy_turn(url, actions[OURS], plan.renewals)
    if turn is not None:
        yield report.row(report.TURN, "ms", {OURS: Spread.of([turn])})


def hand_off(url: str, plan: Plan) -> Row:
    """To a waiter in another process."""
    seconds = hand_offs(url, plan.hand_offs)
    ping = seconds.pop(PING)
    return report.row(report.HAND_OFF, PING, {label: ratio(each, ping) for label, each in seconds.items()})


def memory(url: str) -> Row:
    """What the server keeps for a lock that is held."""
    sizes = {candidate.label: server_side.memory(url, candidate, "memory") for candidate in candidates(url)}
    return report.row(report.MEMORY, "bytes", {label: Spread.of([size]) for label, size in sizes.items()})


def main() -> None:
    """Measure on every server there is, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.locks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, which only prove that everything works")
    parser.add_argument("--one-core", action="store_true", help="everything on one core (Linux)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/locks.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    console, reports = Console(), []
    for kind in SERVERS:
        if kind == "redis" and shutil.which("redis-server") is None:
            console.print("redis-server is not installed, so there are no numbers for it")
            continue
        reports.append(measure(kind, QUICK if arguments.quick else FULL))
        report.show(reports[-1], console)
    report.save(report.by_server(reports), arguments.out)
    console.print(f"saved as {arguments.out}")


if __name__ == "__main__":
    main()
