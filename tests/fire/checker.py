"""The promises, checked against a history of fire: a function without side effects."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from tests.fire.kinds import KINDS, Kind
from tests.fire.load import STRUCK_WHILE_PICKLED
from tests.recorder import Event
from tests.runs import rules
from tests.runs.rules import Finding, exclusive, fenced

# Within so many seconds who is thawed without a lease, or finds the store empty, is told, and who is told has ended.
PROMPT = 2.0
# By so many seconds a busy machine may be late to tell who has lost its lease.
SLACK = 0.25

# With these a call may fail because the call that it joined did.
_INHERITED = ("LockLost", "LockHeld", "CallRevoked", "TaskRevokedError", "StoreError", "StruckError")
# With these a call may fail whose own run has ended so.
_BROUGHT_ABOUT = {"LockLost": "told", "StruckError": "struck", STRUCK_WHILE_PICKLED: "struck"}
# Outcomes of a body that was told of a lost lease, or that a signal struck.
_BROKEN_OFF = ("LockLost", "SystemExit", "StruckError")
# Outcomes that are no end of the call: its message is requeued, or the run has left no outcome.
_NO_END = ("", "Retry", "Ignore", "Reject", "SystemExit")


@dataclass(frozen=True)
class Call:
    task_id: str
    task: str
    state: str = "PENDING"
    error: str = ""


@dataclass(frozen=True)
class Remains:
    drained: bool = True
    messages: int = 0
    holders: Sequence[str] = ()
    without_expiry: Sequence[str] = ()
    troubles: Sequence[str] = ()


@dataclass(frozen=True)
class History:
    events: Sequence[Event]
    calls: Sequence[Call] = ()
    remains: Remains = Remains()


@dataclass
class Verdict:
    findings: list[Finding]
    fates: Counter[str]
    excused: Counter[str]
    counts: dict[str, int]

    @property
    def good(self) -> bool:
        return not self.findings


@dataclass
class Run(rules.Run):
    """One execution of a message; without a body if it did not get the lock."""

    told: float = inf
    was_cancelled: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS[self.task]

    @property
    def was_cut_short(self) -> bool:
        """Its process died before it had come to its end, or before it may have stored its result."""
        if self.outcome in ("Retry", "Ignore"):
            return False
        return self.outcome == "SystemExit" or self.process_died < self.ended + PROMPT


def check(history: History) -> Verdict:
    runs = read(history.events)
    alone = [run for run in runs if run.kind.exclusive]
    findings, excused = exclusive(alone, lambda run: KINDS[run.task].limit)
    fates = {call.task_id: fate(call, found) for call, found in by_call(history, runs)}
    findings += [*fenced(alone), *told(runs), *accounted(history.calls, fates), *remains(history.remains)]
    named = Counter(event.name for event in history.events)
    counts = {
        "calls": len(history.calls),
        "bodies": sum(run.ran for run in runs),
        "faults": named["fault"],
        "told": sum(run.told < inf for run in runs),
        "died": sum(run.ran and run.died < run.left for run in runs),
        "workers that ended by themselves": named["gone"],
        "hung in Celery": sum(event.name == "stuck" and event.facts["in_celery"] for event in history.events),
        "unpublished": sum(outcome_of(event) == "unpublished" for event in history.events),
    }
    if not counts["bodies"]:
        findings.append(Finding("bite", "no body ever ran"))
    return Verdict(findings, Counter(found[0] for found in fates.values()), excused, counts)


def unaccounted(history: History) -> list[Call]:
    found = by_call(history, read(history.events))
    return [call for call, traces in found if fate(call, traces)[0].startswith("lost")]


def read(events: Sequence[Event]) -> list[Run]:
    found = rules.read(events, Run)
    _tell(events, found)
    _excuse(events, found)
    for since, until in _cold_shutdowns(events):
        # The shutdown cancels runs that have ended if their worker has not read of the end.
        for run in found:
            run.was_cancelled |= since - PROMPT < run.ended <= until and since <= run.process_died <= until
    return found


def _tell(events: Sequence[Event], runs: list[Run]) -> None:
    """Find the run that was told: the heartbeat knows no run, but a child has one at a time."""
    lost = [event for event in events if event.name == "lost" and event.facts["reason"] != "replaced"]
    for event in lost:
        for run in runs:
            if run.pid != event.pid or run.task_id != event.facts["task_id"]:
                continue
            if run.entered <= event.at < run.over:
                run.told = event.at
            elif run.outcome == "LockLost" and run.left <= event.at < run.left + PROMPT:
                # By the exception; the signal comes from a thread that may be kept busy by another receiver.
                run.told = run.left


def _excuse(events: Sequence[Event], runs: list[Run]) -> None:
    stops = [event for event in events if event.name == "stopped"]
    losses = [event for event in events if event.name == "emptied"]
    for run in runs:
        for loss in losses:
            if run.entered < loss.at:
                until = loss.at + run.kind.ttl + PROMPT
                run.excuses.append((loss.facts["down"], until, "the store lost its data"))
        for stop in stops:
            since, until = stop.facts["since"], stop.at
            # A shorter one leaves a lease that was renewed in time.
            beyond = until - since > run.kind.ttl / 2
            if beyond and run.pid in stop.facts["pids"] and run.began < until and since < run.over:
                run.excuses.append((since, until + PROMPT, "stopped beyond its lease"))
        if run.told < inf:
            run.excuses.append((run.told - SLACK, inf, "told"))


def _cold_shutdowns(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    for begin in events:
        if begin.name == "fault" and begin.facts["what"].startswith(("cold shutdown", "soft shutdown")):
            ends = (event.at for event in events if event.name == "healed" and event.facts == begin.facts)
            yield begin.at, next((at for at in ends if at > begin.at), inf)


def told(runs: Sequence[Run]) -> Iterator[Finding]:
    """A run that was told of its lost lease was interrupted by that, and has soon ended."""
    for run in runs:
        if run.kind.how != "work" and run.outcome in ("Retry", "Reject"):
            # Publishing a retry is not interrupted.
            continue
        stops = [(since, until - PROMPT) for since, until, why in run.excuses if why.startswith("stopped")]
        stopped = sum(max(0.0, until - max(since, run.told)) for since, until in stops)
        on = run.over - run.told - stopped
        if on > PROMPT or (on > 2 * SLACK and run.left < run.died and run.outcome not in _BROKEN_OFF):
            yield Finding("told", f"{run} went on for {on:.1f} s, {run.outcome}", run.told, run.key)


@dataclass
class Traces:
    runs: list[Run] = field(default_factory=list)
    conflicts: set[str] = field(default_factory=set)


def by_call(history: History, runs: Sequence[Run]) -> list[tuple[Call, Traces]]:
    traces: dict[str, Traces] = defaultdict(Traces)
    for run in runs:
        traces[run.task_id].runs.append(run)
    for event in history.events:
        outcome = outcome_of(event)
        if outcome:
            traces[event.facts["task_id"]].conflicts.add(outcome)
    return [(call, traces[call.task_id]) for call in history.calls]


def outcome_of(event: Event) -> str:
    """The outcome of a call, if the event tells one; `gave up` if the store was silent for too long."""
    if event.name == "unanswered" and event.facts["outcome"] == "raised":
        return "gave up"
    return str(event.facts["outcome"]) if event.name == "conflict" else ""


def fate(call: Call, traces: Traces) -> tuple[str, str]:
    """The end of a call in a few words, and what is wrong with it."""
    if call.state == "SUCCESS":
        return _success(traces)
    if call.state == "FAILURE":
        return _failure(call, traces)
    if call.state == "REVOKED":
        return _revoked(traces)
    return why_unended(call.state, _is_late(call), traces)


def _success(traces: Traces) -> tuple[str, str]:
    if any(run.ran and run.left < inf for run in traces.runs):
        return "ran", ""
    settled = traces.conflicts & {"joined", "skipped", "superseded"}
    return (min(settled), "") if settled else ("pretended", "it succeeded without a run")


def _failure(call: Call, traces: Traces) -> tuple[str, str]:
    if call.error in _BROUGHT_ABOUT and any(call.error in (run.outcome, STRUCK_WHILE_PICKLED) for run in traces.runs):
        return _BROUGHT_ABOUT[call.error], ""
    settled = {"LockHeld": "raised", "StoreError": "gave up"}.get(call.error, "")
    if settled in traces.conflicts:
        return settled, ""
    if call.error == "WorkerLostError" and not _is_late(call):
        return "killed after an early ack", ""
    if call.error == "Reject" and _has_lost_its_retry(traces):
        # Celery rejects the message then, once and for all.
        return "its retry could not be published", ""
    if call.error in _INHERITED and "joined" in traces.conflicts:
        return "failed with another", ""
    return "failed", f"it failed with {call.error}, {len(traces.runs)} runs, {sorted(traces.conflicts)}"


def _revoked(traces: Traces) -> tuple[str, str]:
    settled = traces.conflicts & {"joined", "skipped", "superseded"}
    if settled:
        return min(settled), ""
    if any(run.ran and run.left < inf for run in traces.runs):
        return "made way", ""
    return "pretended", "it was revoked by nobody"


def why_unended(state: str, late: bool, traces: Traces) -> tuple[str, str]:
    """The same for a call whose state is no end."""
    if state == "RETRY" and _is_overwritten(late, traces):
        return "ended, and RETRY was stored over that", ""
    if _has_lost_its_retry(traces):
        # Celery rejects the message then, once and for all.
        return "its retry could not be published", ""
    if not late and any(run.was_cut_short for run in traces.runs):
        # Acknowledged when it began: at most once, as Celery has it.
        return "killed after an early ack", ""
    return "lost", f"it ended nowhere: {state}, {len(traces.runs)} runs, {sorted(traces.conflicts)}"


def _has_lost_its_retry(traces: Traces) -> bool:
    return any(run.kind.how != "work" and run.outcome == "Reject" for run in traces.runs)


def _is_overwritten(late: bool, traces: Traces) -> bool:
    """Celery has stored RETRY over the end of the call; it does not compare first."""
    settled = traces.conflicts & {"skipped", "superseded"}
    ends = [run for run in traces.runs if run.outcome not in _NO_END or (settled and run.outcome == "Ignore")]
    if any(run.outcome == "Retry" and run.told < inf and run.ended > end.began for end in ends for run in traces.runs):
        return True
    return not late and any(end.was_cancelled for end in ends)


def _is_late(call: Call) -> bool:
    return KINDS[call.task].late


def accounted(calls: Sequence[Call], fates: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for call in calls:
        _, wrong = fates[call.task_id]
        if wrong:
            yield Finding("nothing lost", f"{call.task} {call.task_id}: {wrong}")


def remains(left: Remains) -> Iterator[Finding]:
    if not left.drained:
        yield Finding("drains", "not every call had ended within the bound")
    if left.messages:
        yield Finding("drains", f"{left.messages} messages are left in the broker")
    yield from (Finding("drains", f"{holder} is still held") for holder in left.holders)
    yield from (Finding("drains", trouble) for trouble in left.troubles)
    yield from (Finding("no key without expiry", key) for key in left.without_expiry)
