"""The rules for a program that has been played, each a function without side effects."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations

from tests.combinations.history import Answer, History, Known, read
from tests.combinations.program import Call
from tests.runs.rules import Finding, exclusive, fenced

# A call that comes more often than that is a flood: so often at once, and so often for each second of its life.
MOST_DELIVERIES = 40
MOST_A_SECOND = 5
# A worker publishes these.
STEPS = ("middle of a chain", "chord body")
# Their calls are requeued until they run, or until a newer one supersedes them.
NEVER_GIVES_UP = {"rerun", "replace"}
# Between the record and the store, a moment may pass.
SLACK = 0.2

# Outcomes of a body that has come to its own end, and of a body that is followed by another attempt.
_COMPLETED = ("returned", "ValueError")
_HANDED_ON = ("AgainError", "Retry", "Ignore", "Reject")
_CUT_SHORT = ("revoke", "terminate", "kill", "hard limit", "soft limit", "before_start")
_ERRORS = {
    "raise": ("ValueError",),
    "reject": ("Reject",),
    # Where the limit strikes while a retry is being published, Celery rejects the message.
    "soft limit": ("SoftTimeLimitExceeded", "Reject"),
    "hard limit": ("TimeLimitExceeded",),
    "kill": ("WorkerLostError",),
    "terminate": ("Terminated", "WorkerLostError"),
    "before_start": ("RefusedError",),
}


def check(history: History) -> list[Finding]:
    known = read(history)
    return [Finding(rule.__name__.replace("_", " "), what) for rule in RULES for what in rule(known)]


def one_body_of_a_message(known: Known) -> Iterator[str]:
    # `retry` and `replace` publish before their body has left. Without a lease nothing keeps the next one waiting.
    overlap = 0.25 if known.program.mode == "until_executing" else 0.0
    for first, second in combinations(known.bodies, 2):
        if first.task_id == second.task_id and first.over - second.entered > overlap:
            yield f"{second} entered {first.over - second.entered:.2f} s before {first} left"


def one_at_a_time(known: Known) -> Iterator[str]:
    if known.program.mode != "until_executing":
        yield from map(str, exclusive(known.bodies, lambda _: known.program.limit)[0])


def fences_grow(known: Known) -> Iterator[str]:
    """A run that asks after another had been granted has a greater fence, and no run is without."""
    if known.program.mode != "until_executing":
        yield from map(str, fenced(known.bodies))


def every_call_can_be_sent(known: Known) -> Iterator[str]:
    """Sending raises nothing but `LockHeld`, where that is the policy of a task that is unique in the queue."""
    for answer in known.history.answers:
        refused = known.policy(answer) == "raise" and known.program.mode != "while_executing"
        if answer.state == "UNSENT" and not (answer.error == "LockHeld" and refused):
            yield f"number {answer.call}: {answer.error}: {answer.text}"


def every_call_ends(known: Known) -> Iterator[str]:
    for answer in known.history.answers:
        if answer.merged or waits_for_celery(known, answer):
            continue
        if answer.state in ("HUNG", "PENDING", "STARTED", "RETRY"):
            yield f"number {answer.call} ({answer.task_id[:8]}) did not: {answer.state}"
        if answer.canvas == "HUNG" and not _is_left_by_celery(known, answer):
            yield f"the canvas ({known.calls[answer.call].place}) of number {answer.call} did not"
    yield from known.history.open


def it_fails_for_what_it_does(known: Known) -> Iterator[str]:
    for answer in known.history.answers:
        if answer.state == "FAILURE" and answer.error not in may_fail_with(known, answer):
            yield f"number {answer.call} failed with {answer.error}: {answer.text[:200]}"
        if answer.canvas_error and answer.canvas_error not in (
            *may_fail_with(known, answer),
            *("CallRevoked", "TaskRevokedError", "ChordError"),
        ):
            yield f"the canvas of number {answer.call} failed with {answer.canvas_error}"


def who_does_not_run_names_who_does(known: Known) -> Iterator[str]:
    texts = {
        answer.task_id: answer.text
        for answer in known.history.answers
        if answer.state == "REVOKED" or _is_refused(answer)
    }
    # Without a result backend nobody reads how one has ended, and one that joins has no error; its worker tells of it.
    for event in known.history.events:
        if event.name == "conflict" and event.facts["outcome"] in ("raised", "joined", "skipped", "superseded"):
            texts.setdefault(event.facts["task_id"], "")
            texts[event.facts["task_id"]] += f" {event.facts['holder']}"
    for answer in known.history.answers:
        if answer.merged or not (_is_refused(answer) or answer.state == "REVOKED") or _is_stopped(known, answer):
            continue
        named = _named(known, answer)
        if not named:
            yield f"number {answer.call} ({answer.task_id[:8]}) names nobody else: {answer.text[:200]}"
        elif not _leads_to_a_body(known, named, texts):
            yield f"number {answer.call} names {', '.join(name[:8] for name in named)}, which did not run"


def who_succeeds_has_run(known: Known) -> Iterator[str]:
    for answer in known.history.answers:
        place = known.calls[answer.call].place
        if answer.state != "SUCCESS" or answer.merged or place == "chord header":
            continue
        ran = any(body.body in _COMPLETED for body in known.of(answer.task_id))
        if not ran and known.policy(answer) != "join":
            yield f"number {answer.call} ({answer.task_id[:8]}) succeeded without a body"


def a_retry_makes_way_for_nobody_absent(known: Known) -> Iterator[str]:
    """A run that has begun, and is requeued, is skipped only for one that runs."""
    if any(task["min_hold"] for task in known.program.tasks):
        return
    for answer in known.history.answers:
        bodies = known.of(answer.task_id)
        if answer.state != "REVOKED" or _is_stopped(known, answer) or not bodies or bodies[-1].body != "Retry":
            continue
        skipped = [at for at in known.skipped(answer.task_id) if at > bodies[-1].over]
        for moment in skipped[-1:]:
            others = [body for body in known.bodies if body.entered <= moment and body.over >= moment - 2 * SLACK]
            if not others:
                yield f"number {answer.call} ({answer.task_id[:8]}) was skipped at its retry, and nobody ran"


def the_newest_runs(known: Known) -> Iterator[str]:
    if not known.program.policies <= {"rerun", "replace"} or not known.history.answers:
        return
    if any(_ends_early(known, call) for call in known.calls):
        return
    newest = max(known.history.answers, key=lambda answer: (_published(known, answer), answer.call))
    others = (answer for answer in known.history.answers if answer is not newest)
    if any(_published_at_latest(known, answer) > _published(known, newest) for answer in others):
        return
    call = known.calls[newest.call]
    alone = call.timing == "now" and not call.other and call.place not in STEPS
    ran = newest.call in {body.number for body in known.bodies if body.body not in ("LockLost", "")}
    if alone and not ran and not newest.merged and newest.state != "UNSENT":
        yield f"number {newest.call} did not: {[str(body) for body in known.bodies]}"


def who_is_superseded_is_run_for(known: Known) -> Iterator[str]:
    """If a call ended in favour of a newer one, that one runs, or one that is newer still; it may have run before."""
    if any(_ends_early(known, call) for call in known.calls):
        return
    answers = {answer.call: answer for answer in known.history.answers}
    for superseded in (refused for refused in known.refused if refused.outcome == "superseded"):
        answer = next((answer for answer in answers.values() if answer.task_id == superseded.task_id), None)
        if answer is None:
            continue
        ran = [body for body in known.bodies if body.key == superseded.key]
        numbers = {body.number for body in ran if body.body not in ("LockLost", "")}
        since = _published(known, answer) - SLACK
        if not any(_published(known, answers[number]) >= since for number in numbers):
            yield f"number {answer.call} ({answer.task_id[:8]}) was superseded, and nothing as new ran"


def nobody_older_runs_while_a_newer_one_waits(known: Known) -> Iterator[str]:
    """If two calls of a task with `rerun` or `replace` wait at once, the one that was published last runs."""
    if known.program.limit > 1 or known.program.mode == "until_executing":
        return
    plain = [answer for answer in known.history.answers if _waits_for_its_turn(known, answer)]
    for older, newer in permutations(plain, 2):
        its_task = known.calls[newer.call].task == known.calls[older.call].task
        if not its_task or older.sent + SLACK > newer.sent:
            continue
        if known.policy(older) == "rerun" and "replace" in known.program.policies:
            continue
        entered, waits_until = known.of(older.task_id)[0].entered, known.of(newer.task_id)[0].entered
        if known.began[newer.task_id][0] + SLACK < entered < waits_until:
            yield f"number {older.call} ({older.task_id[:8]}) ran while number {newer.call} waited"


def _waits_for_its_turn(known: Known, answer: Answer) -> bool:
    call, bodies = known.calls[answer.call], known.of(answer.task_id)
    is_plain = call.place == "single" and call.route != "send_task" and call.retries == "none" and not call.other
    stopped = call.ending in _CUT_SHORT or known.program.tasks[call.task]["autoretry"]
    succeeds = known.policy(answer) in ("rerun", "replace")
    return succeeds and is_plain and not stopped and bool(bodies)


def _ends_early(known: Known, call: Call) -> bool:
    """Its program stops it for good; whose process dies is delivered again where it is acknowledged late."""
    is_redelivered = call.ending == "kill" and known.program.tasks[call.task]["late"]
    return call.timing == "expires" or (call.ending in _CUT_SHORT and not is_redelivered)


def _published(known: Known, answer: Answer) -> float:
    """When it was, as far as its message tells; otherwise when its run began."""
    call = known.calls[answer.call]
    began = min(known.began.get(answer.task_id, [answer.sent]))
    if call.route == "send_task":
        # Its message does not tell, so it counts when it comes.
        return began
    if call.place in STEPS:
        # A worker publishes it, once the last step before it has run.
        events = (event for event in known.history.events if event.name == "step" and event.at <= began)
        return max((event.at for event in events if event.facts["number"] == call.number), default=began)
    return answer.sent


def _published_at_latest(known: Known, answer: Answer) -> float:
    """The same; a step is published a moment after the step before it has run."""
    call = known.calls[answer.call]
    if call.route == "send_task":
        # The store dates it, as its run asks.
        return _published(known, answer) + SLACK
    is_step = call.place in STEPS
    return min(known.began.get(answer.task_id, [answer.sent])) if is_step else _published(known, answer)


def an_attempt_is_completed_once(known: Known) -> Iterator[str]:
    replaced = {body.task_id for body in known.bodies if known.calls[body.number].retries == "replace"}
    completed = [body for body in known.bodies if body.body in (*_COMPLETED, *_HANDED_ON)]
    told = Counter((body.task_id, body.attempt, body.key) for body in completed)
    for (task_id, attempt, key), times in told.items():
        # A replacement counts its attempts from 0 again.
        if times > 1 + (task_id in replaced):
            yield f"attempt {attempt} of {task_id[:8]} on {key}: {times} times"


def who_was_replaced_is_over(known: Known) -> Iterator[str]:
    if "replace" not in known.program.policies:
        return
    for first, second in pairwise(sorted(known.bodies, key=lambda body: (body.task_id, body.entered))):
        if first.task_id == second.task_id and first.body == "LockLost":
            yield f"{second} came after {first} was told to make way"


def a_duplicate_is_not_sent(known: Known) -> Iterator[str]:
    tasks = known.program.tasks
    if known.program.limit > 1 or known.program.mode == "while_executing" or any(task["queue_ttl"] for task in tasks):
        return
    plain = [answer for answer in known.history.answers if _is_plain(known.calls[answer.call])]
    sent = [answer for answer in plain if not answer.merged and answer.state != "UNSENT"]
    for first, second in combinations(sorted(sent, key=lambda answer: answer.call), 2):
        if known.policy(second) in NEVER_GIVES_UP:
            # The newest one is always sent, and takes the place of the one that is queued.
            continue
        # On a busy machine publishing begins long before the store is asked.
        if _is_there(known, first, max(second.sent, second.published)):
            yield f"number {second.call} was sent while number {first.call} ({first.task_id[:8]}) was there"


def no_flood(known: Known) -> Iterator[str]:
    for task_id, began in known.began.items():
        if len(began) > MOST_DELIVERIES + MOST_A_SECOND * (began[-1] - began[0]):
            yield f"{task_id[:8]} began {len(began)} times"


def nothing_is_left(known: Known) -> Iterator[str]:
    yield from known.history.left


RULES = (
    one_body_of_a_message,
    one_at_a_time,
    fences_grow,
    every_call_can_be_sent,
    every_call_ends,
    it_fails_for_what_it_does,
    who_does_not_run_names_who_does,
    who_succeeds_has_run,
    a_retry_makes_way_for_nobody_absent,
    the_newest_runs,
    who_is_superseded_is_run_for,
    nobody_older_runs_while_a_newer_one_waits,
    an_attempt_is_completed_once,
    who_was_replaced_is_over,
    a_duplicate_is_not_sent,
    no_flood,
    nothing_is_left,
)


def waits_for_celery(known: Known, answer: Answer) -> bool:
    """Celery itself ends nothing that raises Ignore or Reject."""
    joined = {some.by for some in known.refused if some.outcome == "joined" and some.task_id == answer.task_id}
    is_ended_by_nobody = known.calls[answer.call].ending in ("ignore", "reject") or answer.task_id in known.rejected
    return is_ended_by_nobody or bool(joined & known.rejected)


def _is_left_by_celery(known: Known, answer: Answer) -> bool:
    """`factors.py` leaves out canvases whose step fails by its ending; a refused step fails as well."""
    place = known.calls[answer.call].place
    is_ignored = known.program.tasks[known.calls[answer.call].task]["ignore"]
    waits = place == "before a group" or (is_ignored and place in ("first of a chain", "middle of a chain"))
    return waits and answer.task_id in known.failed


def may_fail_with(known: Known, answer: Answer) -> set[str]:
    task = known.program.tasks[known.calls[answer.call].task]
    # A call that joins fails as the joined call does.
    call, policy = known.calls[answer.call], task["policy"]
    endings = {call.ending for call in known.calls} if policy == "join" else {call.ending}
    allowed = {error for ending in endings for error in _ERRORS.get(ending, ())}
    if policy == "raise" or (task["wait_timeout"] is not None and policy not in NEVER_GIVES_UP):
        allowed.add("LockHeld")
    if task["autoretry"] and "LockHeld" in allowed:
        allowed.add("MaxRetriesExceededError")
    return allowed


def _is_stopped(known: Known, answer: Answer) -> bool:
    call = known.calls[answer.call]
    return call.ending in ("revoke", "terminate") or call.timing == "expires"


def _is_refused(answer: Answer) -> bool:
    return answer.error == "LockHeld" and answer.state in ("FAILURE", "UNSENT")


def _named(known: Known, answer: Answer) -> list[str]:
    return sorted(_ids_in(known, answer.text) - {answer.task_id})


def _ids_in(known: Known, text: str) -> set[str]:
    ids = {*known.began, *(answer.task_id for answer in known.history.answers)} - {""}
    return {task_id for task_id in ids if task_id in text}


def _leads_to_a_body(known: Known, named: Sequence[str], texts: Mapping[str, str]) -> bool:
    """One of them has a body, or was stopped by its program, or names one that leads to a body."""
    seen: set[str] = set()
    open_ends = list(named)
    while open_ends:
        task_id = open_ends.pop()
        if task_id in seen:
            continue
        seen.add(task_id)
        answer = next((answer for answer in known.history.answers if answer.task_id == task_id), None)
        if known.of(task_id) or (answer and known.calls[answer.call].ending in _CUT_SHORT):
            return True
        if answer and known.calls[answer.call].timing == "expires":
            return True
        open_ends += _ids_in(known, texts.get(task_id, ""))
    return False


def _is_plain(call: Call) -> bool:
    """The call is sent as most are, and nothing cuts it short."""
    stopped = _is_cut_short(call) or call.retries == "other arguments" or call.other
    return call.place == "single" and call.route == "delay" and not stopped


def _is_cut_short(call: Call) -> bool:
    return call.ending in _CUT_SHORT or call.timing == "expires"


def _is_there(known: Known, answer: Answer, moment: float) -> bool:
    began, bodies = known.began.get(answer.task_id), known.of(answer.task_id)
    if not began or not bodies:
        return False
    queued = began[0] - SLACK > moment
    return queued or (known.program.mode == "until_executed" and bodies[-1].over - SLACK > moment)
