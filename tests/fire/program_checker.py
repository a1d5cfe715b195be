"""What of the rules of `tests/combinations` has to be true of a program that was played under fire."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tests.combinations import checker as combinations
from tests.combinations.app import name_of
from tests.combinations.history import Answer, History, Known
from tests.combinations.history import read as read_history
from tests.combinations.program import TTL, Program
from tests.fire.checker import Finding, Run, Traces, crowded, exclusive, fenced, outcome_of, read, told, why_unended
from tests.fire.kinds import Kind

_ENDED = ("SUCCESS", "FAILURE", "REVOKED", "ENDED", "UNSENT")
# Of the rules of a quiet stage, those that ask for nothing that a fault may take away.
_RULES = (combinations.who_succeeds_has_run, combinations.no_flood)


def check(history: History, *, forgetful: bool) -> tuple[list[Finding], Counter[str]]:
    """What is wrong with it, and which overlaps were declared beforehand."""
    known, runs = read_history(history), runs_of(history)
    findings, excused = exclusive(runs)
    twice, _ = crowded("one body of a message", _by_message(known, runs), lambda _: 1)
    findings += [*twice, *fenced(runs), *told(runs)]
    findings += [_finding("every call ends", what) for what in unended(history, forgetful=forgetful)]
    findings += [_finding("it fails for a reason", what) for what in _failed(known, runs)]
    findings += [_finding(rule.__name__.replace("_", " "), what) for rule in _RULES for what in rule(known)]
    findings += [_finding("nothing is left", key) for key in history.left]
    return findings, excused


def runs_of(history: History) -> list[Run]:
    """Its runs, as fire's checker knows them."""
    return read(history.events, {name_of(task): _kind(task, history.program) for task in history.program.tasks})


def unended(history: History, *, forgetful: bool) -> Iterator[str]:
    """The calls that have not ended, and nothing explains why."""
    known, runs = read_history(history), runs_of(history)
    for answer in history.answers:
        if answer.merged or answer.state in _ENDED or combinations.waits_for_celery(known, answer):
            continue
        _, wrong = why_unended(answer.state, _is_late(known, answer), _traces(known, answer, runs), forgetful)
        if wrong:
            yield f"number {answer.call} ({answer.task_id}): {wrong}"


def _kind(task: Mapping[str, object], program: Program) -> Kind:
    retries = task["autoretry"] or any(call.retries != "none" for call in program.calls)
    return Kind(
        name_of(task),
        str(task["policy"]),
        program.mode,
        program.limit,
        TTL,
        late=bool(task["late"]),
        how="retry" if retries else "work",
    )


def _by_message(known: Known, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each message; a map is a task of Celery's own, without a lock, and may be there twice.

    So may a message whose run takes no lease, and a plain step of a canvas: each time it publishes the next one, under
    one task id.
    """
    loops, steps = _ids_at(known, combinations.LOOPS), _ids_at(known, combinations.STEPS)
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.entered):
        if run.ran and run.kind.exclusive and run.task_id not in loops:
            message = f"{run.task_id} of {run.published}" if run.task_id in steps else run.task_id
            found.setdefault(message, []).append(run)
    return found


def _ids_at(known: Known, places: Sequence[str]) -> set[str]:
    """The task ids of the calls at these places of a canvas."""
    answers = [answer for answer in known.history.answers if known.calls[answer.call].place in places]
    return {task_id for answer in answers for task_id in known.messages(answer)}


def _failed(known: Known, runs: Sequence[Run]) -> Iterator[str]:
    """The calls that failed with an error that is neither in the program nor what a fault brings about."""
    for answer in known.history.answers:
        if answer.state != "FAILURE":
            continue
        allowed = combinations.may_fail_with(known, answer) | _brought_about(known, answer, runs)
        if answer.error not in allowed:
            yield f"number {answer.call} ({answer.task_id}) failed with {answer.error}"


def _brought_about(known: Known, answer: Answer, runs: Sequence[Run]) -> set[str]:
    if known.program.tasks[known.calls[answer.call].task]["policy"] == "join":
        # Who joins fails as another does.
        inherited = ("LockLost", "LockHeld", "StoreError", "Reject", "WorkerLostError", "StruckError")
        return {*inherited, "CallRevoked", "TaskRevokedError"}
    traces = _traces(known, answer, runs)
    found = {run.outcome for run in traces.runs} & {"LockLost", "Reject", "StruckError"}
    found |= {"LockHeld"} if "raised" in traces.conflicts else set()
    # Its lock_wait_timeout is over, or its message cannot come again.
    found |= {"StoreError"} if "gave up" in traces.conflicts else set()
    found |= {"OperationalError"} if _publishes_more(known, answer) else set()
    place = known.calls[answer.call].place
    if place in combinations.STEPS and not traces.runs:
        # The plain step before it was struck, or had no broker, as it published this one.
        found.add("ChordError" if place == "chord body" else "StruckError")
    return found if _is_late(known, answer) else found | {"WorkerLostError"}


def _publishes_more(known: Known, answer: Answer) -> bool:
    """It replaces itself, or is a step: Celery fails a step if it cannot publish the next one, and that one as well."""
    call = known.calls[answer.call]
    has_neighbours = call.place in ("first of a chain", "before a group", *combinations.STEPS)
    return has_neighbours or call.retries == "replace" or call.link != "none"


def _traces(known: Known, answer: Answer, runs: Sequence[Run]) -> Traces:
    ids = known.messages(answer)
    outcomes = [event for event in known.history.events if outcome_of(event)]
    return Traces(
        [run for run in runs if run.task_id in ids],
        {outcome_of(event) for event in outcomes if event.facts["task_id"] in ids},
        [Traces(alike) for alike in _header(known, answer)],
    )


def _header(known: Known, answer: Answer) -> list[list[Run]]:
    """Of the body of a chord, the runs of each plain step in its header."""
    if known.calls[answer.call].place != "chord body":
        return []
    events = known.history.events
    ids = {event.facts["task_id"] for event in events if event.name == "step" and event.facts["number"] == answer.call}
    runs = read(events, {"step": Kind("step", late=True)})
    return [[run for run in runs if run.task_id == task_id] for task_id in sorted(ids)]


def _is_late(known: Known, answer: Answer) -> bool:
    """Celery does not lose it; nor a map, which is a task of its own."""
    call = known.calls[answer.call]
    return call.place in combinations.LOOPS or bool(known.program.tasks[call.task]["late"])


def _finding(promise: str, what: str) -> Finding:
    return Finding(promise, what)
