"""Asking all sentinels at once who the master is."""

import _thread
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis import ConnectionPool, exceptions

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT, hear, opened, pool_of
from celery_singleton_lock.stores.redis.refusals import NoMaster, problem_of, what_to_set
from celery_singleton_lock.stores.redis.sentinel_url import WHERE, Deployment

# Seconds for all sentinels together, and for the others after the first that knows a master.
_PATIENCE = 0.25
_GRACE = 0.05
_DOWN = frozenset({"s_down", "o_down"})
_NOT_KNOWN = "No such master"


@dataclass(frozen=True)
class Report:
    """The answer of a sentinel about the master.

    Attributes:
        sentinel: Who says so.
        host: Where the master is.
        port: Its port.
        epoch: Grows with each failover.
        run_id: Of the master's process; empty if the sentinel does not know it yet.
        down_after: Seconds of silence after which the sentinel takes the master for dead.
        others: How many other sentinels it knows.
        is_down: It takes the master for dead.
    """

    sentinel: str
    host: str
    port: int
    epoch: int
    run_id: str
    down_after: float
    others: int
    is_down: bool

    @property
    def master(self) -> str:
        """Host and port of the master."""
        return f"{self.host}:{self.port}"

    def names_another_than(self, other: "Report") -> bool:
        """It is about another server; a name and an address may belong to one server."""
        return self.master != other.master and (self.run_id != other.run_id or not self.run_id)


class Sentinels:
    """The sentinels of one deployment.

    Raises:
        ConfigurationError: redis-py does not know one of their options.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._name = deployment.name
        self._least_others = deployment.least_others
        options = {name: value for name, value in deployment.sentinel_options.items() if name != "ssl"}
        scheme = deployment.sentinel_scheme
        self._pools = {
            each: pool_of(f"{scheme}://{each}", options, f"sentinel_kwargs for {each}") for each in deployment.sentinels
        }
        self._patience = _PATIENCE

    def ask(self, timeout: float) -> Report:
        """The report of the sentinel that knows of the last failover.

        Asks all of them at once, and waits no longer than a quarter of a second; or up to a second, if they are so far
        away that none has answered in that time before.

        Raises:
            RedisError: None knows a master, or they disagree.
        """
        poll = _Poll(self._pools, self._name)
        reports, errors = poll.result(min(timeout, self._patience))
        self._patience = min(REPLY_TIMEOUT, max(_PATIENCE, 2 * poll.took))
        # Count reports that say that the master is down, too: the master before it is not the master again.
        last = max((report.epoch for report in reports), default=0)
        informed = [report for report in reports if report.epoch == last]
        able = [report for report in informed if not report.is_down and report.others >= self._least_others]
        if not able:
            raise self._why_nobody_knows(reports, errors)
        first = able[0]
        for other in able[1:]:
            if other.names_another_than(first):
                raise NoMaster(
                    f"the sentinels disagree on {self._name}: it is {first.master} as {first.sentinel} says, and "
                    f"{other.master} as {other.sentinel} says, both since failover {last}; name those of one deployment"
                )
        return first

    def _why_nobody_knows(self, reports: Sequence[Report], errors: Mapping[str, exceptions.RedisError]) -> NoMaster:
        problems = dict.fromkeys(self._pools, "it is silent")
        problems |= {each: problem_of(error).partition(": ")[2] for each, error in errors.items()}
        for report in reports:
            few = f"it knows of {report.others} others, and min_other_sentinels={self._least_others}"
            problems[report.sentinel] = f"{report.master} is down" if report.is_down else few
        told = "; ".join(f"{each}: {why}" for each, why in problems.items())
        problem = f"no sentinel knows a master {self._name} ({told})"
        advice = [each for error in errors.values() if (each := _advice_about(error)) is not None]
        # A refusal by one of several may be the fault of that one.
        never = len(advice) == len(self._pools)
        is_silence = not reports and not advice
        return NoMaster(problem, advice[0] if never else None, is_silence=is_silence, errors=errors.values())


class _Poll:
    """One question to all sentinels, each asked in a thread of its own: none waits for another."""

    def __init__(self, pools: Mapping[str, ConnectionPool], name: str) -> None:
        self._pools, self._name = pools, name
        self._reports: list[Report] = []
        self._errors: dict[str, exceptions.RedisError] = {}
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self.took = 0.0

    def result(self, timeout: float) -> tuple[list[Report], dict[str, exceptions.RedisError]]:
        """The reports once all have answered, or soon after the first one with a master, or after *timeout* seconds.

        From then on `took` says how long the first answer took.
        """
        began = clock()
        give_up_at = began + timeout
        for each in self._pools:
            try:
                _thread.start_new_thread(self._run, (each, give_up_at))
            except RuntimeError:
                # There are no threads any more at the end of a process.
                self._run(each, give_up_at)
        is_enough = False
        while len(self._reports) + len(self._errors) < len(self._pools) and (left := give_up_at - clock()) > 0:
            self._bell.acquire(timeout=left)
            if not self._reports or not self.took:
                self.took = clock() - began
            if not is_enough and self._is_enough():
                is_enough, give_up_at = True, min(give_up_at, clock() + _GRACE)
        # Copies, because late answers still come in.
        return self._reports.copy(), self._errors.copy()

    def _is_enough(self) -> bool:
        has_master = any(not report.is_down for report in self._reports)
        # Or most of them say that it is down; then they are asked again soon.
        return has_master or 2 * len(self._reports) > len(self._pools)

    def _run(self, sentinel: str, give_up_at: float) -> None:
        try:
            fields = _fields(self._pools[sentinel], self._name, give_up_at)
            self._reports.append(_report(sentinel, fields))
        except exceptions.RedisError as error:
            self._errors[sentinel] = error
        except Exception as error:  # noqa: BLE001 (of a provider of passwords, or a sentinel that is none; it is told)
            self._errors[sentinel] = exceptions.ConnectionError(f"{type(error).__name__}: {error}")
        finally:
            # It may ring already.
            with suppress(RuntimeError):
                self._bell.release()


def _fields(pool: ConnectionPool, name: str, give_up_at: float) -> Sequence[str]:
    connection = opened(pool, give_up_at - clock())
    try:
        connection.send_command("SENTINEL", "MASTER", name, check_health=False)
        hear(connection, give_up_at - clock())
        fields: Sequence[str] = connection.read_response()
        return fields
    finally:
        connection.disconnect()


def _report(sentinel: str, fields: Sequence[str]) -> Report:
    said: dict[str, Any] = dict(zip(fields[::2], fields[1::2], strict=True))
    return Report(
        sentinel=sentinel,
        host=said["ip"],
        port=int(said["port"]),
        epoch=int(said.get("config-epoch", 0)),
        run_id=said.get("runid", ""),
        down_after=int(said.get("down-after-milliseconds", 0)) / 1000,
        others=int(said.get("num-other-sentinels", 0)),
        is_down=not _DOWN.isdisjoint(said.get("flags", "").split(",")),
    )


def _advice_about(error: exceptions.RedisError) -> str | None:
    """The setting to change; None if the error may pass without a change."""
    text = str(error)
    if _NOT_KNOWN in text:
        return f"let master_name be what the sentinels call the master (sentinel monitor <name> ...), {WHERE}"
    if "unknown command" in text:
        return "name the sentinels in the URL, with their ports (as a rule 26379), and not the servers they watch"
    if what_to_set(error) is not None:
        return (
            "give what the sentinels want of us, such as username, password, ssl and ssl_ca_certs, in sentinel_kwargs "
            f"{WHERE}; their user needs the right +sentinel|master"
        )
    return None
