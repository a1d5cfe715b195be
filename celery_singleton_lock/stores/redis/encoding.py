"""Scripts, their arguments and their replies: from the records to the fields of a lock's hash, and back.

The arguments of each script are a tuple with names, which its Lua reads as locals of the same names. lua/parts say what
is in the hash.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import resources
from itertools import groupby
from math import inf
from typing import Any

from redis import exceptions

from celery_singleton_lock.stores.records import (
    Claim,
    Conflict,
    Done,
    Ending,
    Facts,
    Grant,
    Holder,
    HolderState,
    LockState,
    Marked,
    Place,
    Slot,
    lock_name_of,
    marker_of,
)
from celery_singleton_lock.stores.redis.answers import accepted, advice_about

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_ARGUMENT = re.compile(r"^-- @argument (\w+)", re.MULTILINE)
_VALUES_PER_HOLDER = 7
# Between a task's name and its label, which share a field so that calls without a label cost nothing more.
_SEPARATOR = "\x1f"
# In the grant of a holder whose result nobody else can read.
_NO_RESULT = "no-result"
# In the grant of a run that goes on although its call has ended.
_ENDED = "ended"
# Begins the token in a place that a cool-down keeps.
_COOLDOWN = "~"
# Leases in one script, which blocks the server for about 0.1 ms.
RENEWALS_PER_SCRIPT = 50
STOPPED_SHORT = 8
"""Added to the answer of release.lua if more waiters have to be called."""
# Errors of a script that come from the data in a key.
_UNREADABLE = re.compile(r"WRONGTYPE|user_script")
_FOREIGN = "another program's key, or a damaged one: "


class Script:
    """A Lua file of this package, called by its digest.

    Each line `-- @argument NAME` of its head names an argument, which is a local of that name in the script. A line
    `-- @include NAME` stands for `lua/parts/NAME.lua`. The parts come after the usual answer: a script defines its
    functions each time it runs.
    """

    def __init__(self, verb: str, publish: str = "PUBLISH") -> None:
        text = _INCLUDE.sub(lambda found: _file(f"parts/{found[1]}"), _file(verb))
        self._verb = verb
        self._names = _ARGUMENT.findall(text)
        locals_ = [f"local {name} = ARGV[{number}]\n" for number, name in enumerate(self._names, 1)]
        self.text: str = "".join([*locals_, text.replace("'PUBLISH'", f"'{publish}'")])
        self.digest: str = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def sharded(self) -> "Script":
        """The script for a cluster, where a waiter listens at the server that has the key."""
        return Script(self._verb, "SPUBLISH")

    def arguments(self, **values: str) -> list[str]:
        """The arguments in their order. Empty ones at the end are left out, because each costs time."""
        arguments = list({**dict.fromkeys(self._names, ""), **values}.values())
        if len(arguments) > len(self._names):
            raise TypeError(f"{self._verb}.lua has no arguments {', '.join(values.keys() - self._names)}")
        while not arguments[-1]:
            arguments.pop()
        return arguments


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(f"lua/{name}.lua").read_text(encoding="utf-8")


ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew")
MARK_QUEUED = Script("mark_queued")
UNMARK = Script("unmark")
MARK_DONE = Script("mark_done")
CLAIM_SLOT = Script("claim_slot")
SURVEY = Script("survey")
BREAK = Script("break")


def acquire_arguments(claim: Claim) -> list[str]:
    facts = claim.facts
    grant = f"{round(claim.ttl * 1000)} {facts.pid} {facts.attempt} {facts.published}"
    if not facts.keeps_result:
        grant = f"{grant} {_NO_RESULT}"
    # By position, as in `release_arguments`: each run asks for these, and names would double the time that it takes.
    arguments = [claim.token, grant, _words_of(claim), facts.task_id, facts.hostname]
    if facts.task_name or facts.label:
        arguments.append(f"{facts.task_name}{_SEPARATOR}{facts.label}" if facts.label else facts.task_name)
    return arguments


def look_arguments(claim: Claim) -> list[str]:
    """The arguments of acquire.lua for a message that waits, and asks whether its turn has come."""
    token, grant, words, *others = acquire_arguments(replace(claim, turn_for=0.0, may_be_copy=False))
    return [token, grant, f"looks {words}", *others]


def _words_of(claim: Claim) -> str:
    """The fields of a claim that are no arguments of acquire.lua, if they are set."""
    words = f"limit={claim.limit}"
    if claim.may_be_copy:
        words += f" message={claim.message}"
    if claim.heeds_queued:
        words += " heeds_queued"
    if claim.queued_for:
        words += f" queued_for={milliseconds(claim.queued_for)}"
    if claim.succeeds:
        words += f" succeeds={claim.succeeds} supersedes_for={milliseconds(claim.supersedes_for)}"
        if claim.newest:
            words += f" newest={claim.newest}"
    if claim.turn_for:
        waits = " waits_here" if claim.waits_here else ""
        words += f" turn_for={milliseconds(claim.turn_for)} rank={claim.rank}{waits}"
    return words


def mark_text(label: str, queue: str, published: int, due_for: float) -> str:
    """The mark of a queued call, without its end and its task id."""
    if published or due_for:
        return f"{label}{_SEPARATOR}{queue}{_SEPARATOR}{published},{milliseconds(due_for)}"
    return f"{label}{_SEPARATOR}{queue}" if queue else label


def unmark_arguments(task_id: str, claim: Claim | None, **says: bool) -> list[str]:
    words = " ".join(word for word, is_said in says.items() if is_said)
    if claim is None or claim.succeeds is None:
        return UNMARK.arguments(task_id=task_id, words=words)
    facts = claim.facts
    words += f" succeeds={claim.succeeds} supersedes_for={milliseconds(claim.supersedes_for)}"
    return UNMARK.arguments(task_id=task_id, words=f"{words} published={facts.published}", task_name=facts.task_name)


def renewals_of(claims: Sequence[Claim], most: int) -> Iterator[tuple[list[str], list[str]]]:
    """Keys and arguments of renew.lua for at most *most* claims each."""
    # Claims with one ttl are mostly neighbours already, so they are not sorted.
    for ttl, alike in groupby(claims, key=lambda claim: claim.ttl):
        group = list(alike)
        for start in range(0, len(group), most):
            part = group[start : start + most]
            yield [claim.key for claim in part], [milliseconds(ttl), *[claim.token for claim in part]]


def release_arguments(claim: Claim, place: int | None, ending: Ending | None) -> list[str]:
    facts = claim.facts
    is_due = ending is not None and ending.is_due
    if place == 1 and not claim.min_hold and not is_due:
        # The fields of a hash that has nothing but this holder.
        words = "size=7 place=1" if facts.task_name or facts.label else "size=6 place=1"
    else:
        words = f"{f'place={place} ' if place else ''}min_hold={milliseconds(claim.min_hold)}"
    if ending is None:
        return [claim.token, words]
    words += f" attempt={facts.attempt} outcome={ending.outcome} kept={round(ending.kept * 1000)}"
    return [claim.token, f"{words} is_due" if is_due else words, marker_of(facts.task_id, claim.message)]


def answer_in(key: str, reply: Any, sent_at: float) -> Grant | Conflict | Done:
    """The verdict in a reply of acquire.lua that is more than a fence."""
    match reply:
        case ["granted", _, place, fence, since, *died]:
            return Grant(place, fence, since / 1_000_000, sent_at, bool(died), _dead(key, *died[0]) if died else None)
        case ["done", _, attempt, outcome]:
            return Done(attempt, outcome)
    return conflict_in(key, reply)


def place_in(reply: Sequence[Any]) -> Place:
    """The place in a reply of acquire.lua to `look_arguments`."""
    match reply:
        case ["looked", now, comes, near, free_in]:
            return Place(now, bool(comes), bool(near), free_in / 1_000_000)
    # The message's run has ended or has its place: let the message come, and its run handles that.
    return Place(reply[1], comes=True, is_near=True, free_in=0.0)


def conflict_in(key: str, reply: Sequence[Any]) -> Conflict:
    """The conflict in a reply of acquire.lua, mark_queued.lua or unmark.lua."""
    verdict, now, successor, rows, *turn = reply
    rank, near, free_in = turn or (0, 1, inf)
    holders = tuple(holders_in(key, now, rows))
    return Conflict(key, holders, successor or None, now, verdict == "twin", rank, bool(near), free_in / 1_000_000)


def mark_in(key: str, reply: Any) -> Marked | Holder:
    """The mark in a reply of mark_queued.lua, or the call that is in its way."""
    match reply:
        case ["marked", sooner]:
            return Marked(sooner / 1_000_000)
    return conflict_in(key, reply).first


def holders_in(key: str, now: int, rows: Sequence[str]) -> list[Holder]:
    """The holders in a reply, sorted by the end of their leases."""
    starts = range(0, len(rows), _VALUES_PER_HOLDER)
    holders = [_holder(key, now, *rows[start : start + _VALUES_PER_HOLDER]) for start in starts]
    # Calls without a place are in the order of their turns.
    return sorted(holders, key=lambda holder: 0.0 if holder.goes_before else holder.expires_in)


def _dead(key: str, task_id: str | None, hostname: str | None, name: str | None) -> Facts:
    task_name, label = _name_and_label_in(name or "")
    return Facts(task_id or "", task_name or (lock_name_of(key) if task_id else ""), hostname or "", label=label)


def _holder(
    key: str, now: int, place: int | str, token: str, deadline: str, grant: str, task_id: str, hostname: str, name: str
) -> Holder:
    # A call that goes before has the word for its state instead of a place, and its publication instead of a grant.
    has_place = isinstance(place, int)
    state = HolderState.COOLDOWN if token.startswith(_COOLDOWN) else HolderState.HELD
    if isinstance(place, str):
        state = HolderState(place)
    task_name, label = _name_and_label_in(name)
    facts = _numbers_in(grant, 6) if has_place else [now, -now, 0, 0, 0, int(grant or 0)]
    since, ahead, ttl, pid, attempt, published = facts
    words = grant.split(" ")
    return Holder(
        key=key,
        token=token,
        state=state,
        fence=since + ahead,
        acquired_at=datetime.fromtimestamp(since / 1_000_000, UTC),
        expires_in=(int(deadline) - now) / 1_000_000,
        task_id=task_id or None,
        # A task's name that is the name of the lock is not stored.
        task_name=task_name or (lock_name_of(key) if has_place and task_id else None),
        hostname=hostname or None,
        pid=pid or None,
        attempt=attempt,
        published=published,
        label=label or None,
        ttl=ttl / 1000,
        keeps_result=_NO_RESULT not in words,
        # In a cool-down no run goes on.
        call_ended=_ENDED in words and state is HolderState.HELD,
    )


def slot_in(entry: str, value: str) -> Slot:
    """The slot of a beat's entry."""
    return Slot(entry, *_numbers_in(value, 3))


# A field may have more values than are known here, from a later release, or fewer, from an earlier one.


def _numbers_in(value: str, known: int) -> list[int]:
    """The first numbers in *value*, as many as are *known*; 0 for each that is missing."""
    numbers = list(map(int, value.split(" ")[:known]))
    return [*numbers, *[0] * (known - len(numbers))]


def _name_and_label_in(value: str) -> tuple[str, str]:
    name, label, *_ = [*value.split(_SEPARATOR), ""]
    return name, label


def unreadable_in(keys: Sequence[str]) -> dict[str, LockState]:
    """A `problem` for each key that is not UTF-8, with its bytes escaped: requests are sent in UTF-8."""
    states = {}
    for key in keys:
        name = key.encode(errors="surrogateescape").decode(errors="backslashreplace")
        if name != key:
            states[key] = LockState(name, problem="its name is not UTF-8")
    return states


def states_in(
    calls: Sequence[tuple[Sequence[str], Any]], replies: list[Any], *, tolerant: bool
) -> dict[str, LockState]:
    """The state of each key in replies of survey.lua. If *tolerant*, an error about one key is its `problem`."""
    for reply in replies if tolerant else accepted(replies):
        if isinstance(reply, exceptions.RedisError):
            text = str(reply)
            advice = advice_about(reply)
            if not _UNREADABLE.search(text) or (advice is not None and "WRONGTYPE" not in text):
                raise reply
    return {key: _state_in(key, reply) for ([key], _), reply in zip(calls, replies, strict=True)}


def _state_in(key: str, reply: Any) -> LockState:
    if isinstance(reply, exceptions.RedisError):
        return LockState(key, problem=_FOREIGN + str(reply).partition(" script:")[0])
    try:
        # Refuse bytes that are no UTF-8: they fail only where they are printed.
        json.dumps(reply, ensure_ascii=False).encode()
        return _survey_in(key, *reply)
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        return LockState(key, problem=f"{_FOREIGN}{type(error).__name__}: {error}")


def _survey_in(
    key: str, now: int, fence: str, waiters: int, marks: Any, rows: Any, queue: Any, asked: Any, foreign: str
) -> LockState:
    at = datetime.fromtimestamp(now / 1_000_000, UTC)
    # A task's name that is the name of the lock is not stored.
    names = {"next": lock_name_of(key)}

    def call(state: str, until: str, task_id: str, *of_mark: Any, token: str = "", **of_turn: Any) -> Holder:
        name, label, due, queue = of_mark or ("", "", 0, "")
        known = {"task_name": name or names.get(state), "label": label or None, "queue": queue or None, **of_turn}
        ends_in, due_for = (int(until) - now) / 1_000_000, int(due) / 1000
        return Holder(key, token, HolderState(state), at, ends_in, task_id=task_id, due_for=due_for, **known)

    left = tuple(call(*mark) for mark in marks)
    turns = tuple(
        call("waiting", until, task_id, token=token, is_unheard=bool(is_unheard), refused_at=int(rank))
        for until, task_id, token, is_unheard, rank in queue
    )
    # Each holder that was asked to stop, by its token; with the person, if a person has asked.
    stops = dict(asked)
    holders = tuple(
        replace(each, state=HolderState.ASKED_TO_STOP) if each.token in stops else each
        for each in holders_in(key, now, rows)
    )
    by = {token: name for token, name in stops.items() if name}
    problem = _FOREIGN + foreign if foreign else None
    return LockState(key, now, int(fence) if fence else None, holders, left, waiters, turns, by, problem)


def milliseconds(seconds: float) -> str:
    """*seconds* as scripts take them: as text, because a signal may interrupt the packer in C at a number."""
    return str(round(seconds * 1000))


def microseconds(time: Sequence[str]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])
