"""What has to be true of a history, whatever was done to it: a function without side effects."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from tests.fire.kinds import GATHER, KINDS, Kind
from tests.recorder import Event

# Within so many seconds who is thawed without a lease, or finds the store empty, is told, and who is told has ended.
PROMPT = 2.0
# By so many seconds a busy machine may be late to tell who has lost its lease.
SLACK = 0.25

# With these a call may fail because another did: one that it joined, or one of its canvas.
_INHERITED = ("LockLost", "LockHeld", "ChordError", "CallRevoked", "TaskRevokedError", "StoreError", "StruckError")
# With these a call may fail whose own run has ended so.
_BROUGHT_ABOUT = {"LockLost": "told", "StruckError": "struck"}
# With these a body has ended that was told, or that a signal struck meanwhile.
_BROKEN_OFF = ("LockLost", "SystemExit", "StruckError")
# After these a message is requeued, or is none of the call's own.
_NO_END = ("", "Retry", "Ignore", "Reject", "SystemExit")
_KINDS = {**KINDS, GATHER.name: GATHER}


@dataclass(frozen=True)
class Call:
    """One that was sent, and what its sender would see in the end."""

    task_id: str
    task: str
    state: str = "PENDING"
    error: str = ""
    alone: bool = True
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remains:
    """What is left once all is healed."""

    drained: bool = True
    messages: int = 0
    holders: Sequence[str] = ()
    without_expiry: Sequence[str] = ()
    troubles: Sequence[str] = ()


@dataclass(frozen=True)
class History:
    """All that is known."""

    events: Sequence[Event]
    calls: Sequence[Call] = ()
    remains: Remains = Remains()


@dataclass(frozen=True)
class Finding:
    """Something that must not be."""

    promise: str
    what: str
    at: float = 0.0
    key: str = ""


@dataclass
class Verdict:
    """What was found, what was counted, and which overlaps were declared beforehand."""

    findings: list[Finding]
    fates: Counter[str]
    excused: Counter[str]
    counts: dict[str, int]

    @property
    def good(self) -> bool:
        return not self.findings


@dataclass
class Run:
    """One execution of a message; without a body if it did not get the lock."""

    run: str
    task: str
    task_id: str
    kind: Kind
    pid: int
    began: float
    label: str = ""
    entered: float = inf
    fence: int = 0
    told: float = inf
    left: float = inf
    died: float = inf
    ended: float = inf
    outcome: str = ""
    process_died: float = inf
    was_cancelled: bool = False
    excuses: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        """It had a body."""
        return self.entered < inf

    @property
    def was_cut_short(self) -> bool:
        """Its process died before it had come to its end, or before it may have stored its result."""
        if self.outcome in ("Retry", "Ignore"):
            return False
        return self.outcome == "SystemExit" or self.process_died < self.ended + PROMPT

    @property
    def end(self) -> float:
        return min(self.left, self.died)

    def counts_at(self, moment: float) -> bool:
        """It runs, and nothing excuses that it is not alone."""
        return self.runs_at(moment) and self.excuse_at(moment) is None

    def runs_at(self, moment: float) -> bool:
        return self.entered <= moment < self.end

    def excuse_at(self, moment: float) -> str | None:
        return next((why for since, until, why in self.excuses if since <= moment < until), None)


def check(history: History) -> Verdict:
    """The verdict on a history."""
    runs = read(history.events)
    findings, excused = exclusive(runs)
    fates = {call.task_id: fate(call, found) for call, found in by_call(history, runs)}
    findings += [*fenced(runs), *told(runs), *accounted(history.calls, fates), *remains(history.remains)]
    counts = {
        "calls": len(history.calls),
        "bodies": sum(run.ran for run in runs),
        "faults": sum(event.name == "fault" for event in history.events),
        "told": sum(run.told < inf for run in runs),
        "died": sum(run.ran and run.died < run.left for run in runs),
        "workers that ended by themselves": sum(event.name == "gone" for event in history.events),
        "hung in Celery": sum(event.name == "stuck" and event.facts["in_celery"] for event in history.events),
        "unpublished": sum(
            event.name == "conflict" and event.facts["outcome"] == "unpublished" for event in history.events
        ),
    }
    if not counts["bodies"]:
        findings.append(Finding("bite", "no body ever ran"))
    return Verdict(findings, Counter(found[0] for found in fates.values()), excused, counts)


def unaccounted(history: History) -> list[Call]:
    """The calls without an outcome so far."""
    found = by_call(history, read(history.events))
    return [call for call, traces in found if fate(call, traces)[0].startswith("lost")]


# Reading.


def read(events: Sequence[Event]) -> list[Run]:
    """The runs, with all that happened to them."""
    runs: dict[str, Run] = {}
    of: dict[int, list[Run]] = defaultdict(list)
    for event in events:
        if event.name == "began":
            task, task_id = event.facts["task"], event.facts["task_id"]
            runs[event.run] = run = Run(event.run, task, task_id, _KINDS[task], event.pid, event.at)
            of[event.pid].append(run)
        elif event.run in runs:
            _follow(runs[event.run], event)
        elif event.name == "died":
            for run in of.pop(event.facts["victim"], []):
                run.process_died = event.facts["alive_at"]
                if run.left == inf:
                    run.died = max(event.facts["alive_at"], run.began if not run.ran else run.entered)
    found = list(runs.values())
    _tell(events, found)
    _excuse(events, found)
    _cancel(events, found)
    return found


def _follow(run: Run, event: Event) -> None:
    if event.name == "enter":
        run.label, run.entered, run.fence = event.key, event.at, event.facts["fence"]
    elif event.name in ("leave", "ended"):
        run.left = min(run.left, event.at)
        if event.name == "ended":
            run.ended, run.outcome = event.at, event.facts["outcome"]


def _tell(events: Sequence[Event], runs: list[Run]) -> None:
    """Find the run that was told: the heartbeat knows no run, but a child has one at a time."""
    lost = [event for event in events if event.name == "lost" and event.facts["reason"] != "replaced"]
    for event in lost:
        for run in runs:
            if run.pid != event.pid or run.task_id != event.facts["task_id"]:
                continue
            if run.entered <= event.at < run.end:
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
            if beyond and run.pid in stop.facts["pids"] and run.began < until and since < run.end:
                run.excuses.append((since, until + PROMPT, "stopped beyond its lease"))
        if run.told < inf:
            run.excuses.append((run.told - SLACK, inf, "told"))


def _cancel(events: Sequence[Event], runs: list[Run]) -> None:
    """Find those that had ended when a cold shutdown cancelled them, because their worker had not read of it."""
    for since, until in _cold_shutdowns(events):
        for run in runs:
            if since - PROMPT < run.ended <= until and since <= run.process_died <= until:
                run.was_cancelled = True


def _cold_shutdowns(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    for begin in events:
        if begin.name == "fault" and begin.facts["what"].startswith(("cold shutdown", "soft shutdown")):
            ends = (event.at for event in events if event.name == "healed" and event.facts == begin.facts)
            yield begin.at, next((at for at in ends if at > begin.at), inf)


# One at a time.


def exclusive(runs: Sequence[Run]) -> tuple[list[Finding], Counter[str]]:
    """At no moment more bodies of a key than its limit, but for what is declared; and how often that was."""
    findings, excused = [], Counter[str]()
    for label, alike in _by_label(runs).items():
        for run in alike:
            # The latest to come, or to lose its excuse, makes it too many.
            for moment in sorted({run.entered, *(until for _, until, _ in run.excuses if until < run.end)}):
                others = [other for other in alike if other.runs_at(moment)]
                counted = [other for other in others if other.counts_at(moment)]
                limit = run.kind.limit
                if run in counted and len(counted) > limit:
                    what = f"{len(counted)} bodies at once, {limit} allowed: " + ", ".join(map(_name, counted))
                    findings.append(Finding("one at a time", what, moment, label))
                elif len(others) > limit and moment == run.entered:
                    excused[next(filter(None, (other.excuse_at(moment) for other in others)), "")] += 1
    return findings, excused


def _by_label(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.entered):
        if run.ran and run.kind.exclusive:
            alike[run.label].append(run)
    return alike


def _name(run: Run) -> str:
    return f"{run.task} {run.task_id[:8]} in {run.pid}"


# The number that only grows.


def fenced(runs: Sequence[Run]) -> Iterator[Finding]:
    """Who asked after another had been granted has a greater fence, and no two have the same."""
    for label, alike in _by_label(runs).items():
        entered = [run.entered for run in alike]
        greatest = list(accumulate((run.fence for run in alike), max))
        given: set[int] = set()
        for run in alike:
            before = bisect_left(entered, run.began)
            if not run.fence:
                yield Finding("fenced", f"{_name(run)} ran without a lease", run.entered, label)
            elif run.fence in given:
                yield Finding("fenced", f"{_name(run)} has the fence {run.fence} of another", run.entered, label)
            elif before and greatest[before - 1] > run.fence:
                what = f"{_name(run)} has fence {run.fence}, less than {greatest[before - 1]} before it"
                yield Finding("fenced", what, run.entered, label)
            given.add(run.fence)


# You are told.


def told(runs: Sequence[Run]) -> Iterator[Finding]:
    """Who was told that its lease is lost was interrupted by that, and has soon ended."""
    for run in runs:
        if run.kind.how != "work" and run.outcome in ("Retry", "Reject"):
            # What it still did was to publish its retry, or try to, which is not broken off.
            continue
        stops = [(since, until - PROMPT) for since, until, why in run.excuses if why.startswith("stopped")]
        stopped = sum(max(0.0, until - max(since, run.told)) for since, until in stops)
        on = run.end - run.told - stopped
        if on > PROMPT or (on > 2 * SLACK and run.left < run.died and run.outcome not in _BROKEN_OFF):
            yield Finding("told", f"{_name(run)} went on for {on:.1f} s, {run.outcome}", run.told, run.label)


# Nothing lost.


@dataclass
class Traces:
    """What is known of one task id; of the body of a chord, of those in its header as well."""

    runs: list[Run] = field(default_factory=list)
    conflicts: set[str] = field(default_factory=set)
    members: list["Traces"] = field(default_factory=list)


def by_call(history: History, runs: Sequence[Run]) -> list[tuple[Call, Traces]]:
    traces: dict[str, Traces] = defaultdict(Traces)
    for run in runs:
        traces[run.task_id].runs.append(run)
    for event in history.events:
        outcome = outcome_of(event)
        if outcome:
            traces[event.facts["task_id"]].conflicts.add(outcome)
    for call in history.calls:
        traces[call.task_id].members = [traces[member] for member in call.members]
    return [(call, traces[call.task_id]) for call in history.calls]


def outcome_of(event: Event) -> str:
    """What an event says becomes of its call, if it says so; `gave up` if that has found no answer for too long."""
    if event.name == "unanswered" and event.facts["outcome"] == "raised":
        return "gave up"
    return str(event.facts["outcome"]) if event.name == "conflict" else ""


def fate(call: Call, traces: Traces) -> tuple[str, str]:
    """What became of a call, in a word, and what is wrong with that."""
    if call.state == "SUCCESS":
        return _success(call, traces)
    if call.state == "FAILURE":
        return _failure(call, traces)
    if call.state == "REVOKED":
        return _revoked(call, traces)
    return why_unended(call.state, _is_late(call), traces)


def _success(call: Call, traces: Traces) -> tuple[str, str]:
    if any(run.ran and run.left < inf for run in traces.runs):
        return "ran", ""
    settled = traces.conflicts & {"joined", "skipped", "superseded"}
    return (min(settled), "") if settled else ("pretended", "it succeeded without a run")


def _failure(call: Call, traces: Traces) -> tuple[str, str]:
    if call.error in _BROUGHT_ABOUT and any(run.outcome == call.error for run in traces.runs):
        return _BROUGHT_ABOUT[call.error], ""
    settled = {"LockHeld": "raised", "StoreError": "gave up"}.get(call.error, "")
    if settled in traces.conflicts:
        return settled, ""
    if call.error == "WorkerLostError" and not _is_late(call):
        return "killed after an early ack", ""
    if (call.error == "Reject" and _has_lost_its_retry(traces)) or _has_lost_its_next_step(call, traces):
        return "what comes after it could not be published", ""
    if call.error in _INHERITED and ("joined" in traces.conflicts or not call.alone):
        return "failed with another", ""
    return "failed", f"it failed with {call.error}, {len(traces.runs)} runs, {sorted(traces.conflicts)}"


def _revoked(call: Call, traces: Traces) -> tuple[str, str]:
    settled = traces.conflicts & {"joined", "skipped", "superseded"}
    if settled:
        return min(settled), ""
    if any(run.ran and run.left < inf for run in traces.runs):
        return "made way", ""
    if not call.alone:
        return "its chain was skipped", ""
    return "pretended", "it was revoked by nobody"


def why_unended(state: str, late: bool, traces: Traces) -> tuple[str, str]:
    """The same of a call in this state, which is none of an end."""
    if state == "RETRY" and _is_overwritten(late, traces):
        return "ended, and RETRY was stored over that", ""
    if _has_lost_its_retry(traces):
        # Celery rejects the message then, once and for all.
        return "its retry could not be published", ""
    if not late and any(run.was_cut_short for run in traces.runs):
        # Acknowledged when it began: at most once, as Celery has it.
        return "killed after an early ack", ""
    if any(map(_may_count_twice, traces.members)):
        return "its chord has counted a part twice", ""
    return "lost", f"it ended nowhere: {state}, {len(traces.runs)} runs, {sorted(traces.conflicts)}"


def _has_lost_its_retry(traces: Traces) -> bool:
    return any(run.kind.how != "work" and run.outcome == "Reject" for run in traces.runs)


def _has_lost_its_next_step(call: Call, traces: Traces) -> bool:
    """Celery fails a step whose body has ended well if it cannot publish the next one, and that one with it."""
    ended_well = all(run.outcome == "returned" for run in traces.runs[:1])
    return call.error == "OperationalError" and not call.alone and ended_well


def _may_count_twice(member: Traces) -> bool:
    """Its process died as it stored its end, and its message was delivered again."""
    return len(member.runs) > 1 and any(run.ended < inf and run.was_cut_short for run in member.runs)


def _is_overwritten(late: bool, traces: Traces) -> bool:
    """Celery has stored RETRY over the end of the call; it does not compare first."""
    settled = traces.conflicts & {"skipped", "superseded"}
    ends = [run for run in traces.runs if run.outcome not in _NO_END or (settled and run.outcome == "Ignore")]
    if any(run.outcome == "Retry" and run.told < inf and run.ended > end.began for end in ends for run in traces.runs):
        return True
    return not late and any(end.was_cancelled for end in ends)


def _is_late(call: Call) -> bool:
    return _KINDS[call.task].late


def accounted(calls: Sequence[Call], fates: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Every call that was sent has an outcome that something explains."""
    for call in calls:
        _, wrong = fates[call.task_id]
        if wrong:
            yield Finding("nothing lost", f"{call.task} {call.task_id}: {wrong}")


# What is left.


def remains(left: Remains) -> Iterator[Finding]:
    """Once all is healed everything drains, and the store keeps nothing for ever."""
    if not left.drained:
        yield Finding("drains", "not every call had ended within the bound")
    if left.messages:
        yield Finding("drains", f"{left.messages} messages are left in the broker")
    yield from (Finding("drains", f"{holder} is still held") for holder in left.holders)
    yield from (Finding("drains", trouble) for trouble in left.troubles)
    yield from (Finding("no key without expiry", key) for key in left.without_expiry)
