"""Scripts, their arguments and their replies. The files in lua/parts describe the hash of a lock."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache
from importlib import resources
from itertools import groupby, islice
from math import inf
from typing import Any

from redis import exceptions

from celery_singleton_lock.stores import records
from celery_singleton_lock.stores.records import Claim, Conflict, Grant, Holder, HolderState, LockState, lock_name_of
from celery_singleton_lock.stores.redis import Input, packed
from celery_singleton_lock.stores.redis.answers import advice_about

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_ARGUMENT = re.compile(r"^-- @argument (\w+)", re.MULTILINE)
_VALUES_PER_HOLDER = 7
_SEPARATOR = "\x1f"
_NO_RESULT = "no-result"
RENEWALS_PER_SCRIPT = 50  # blocks the server for about 0.1 ms
_FOREIGN = "another program's key, or a damaged one: "


class Script:
    """A Lua script, called by its digest.

    `-- @argument NAME` makes the next argument a local. Callers may leave out the last ones. `-- @include NAME` inserts
    `lua/parts/NAME.lua`. Include parts after the fast path. Otherwise the fast path would define their functions, which
    it does not use.
    """

    def __init__(self, verb: str, publish: str = "PUBLISH") -> None:
        text = _INCLUDE.sub(lambda found: _file(f"parts/{found[1]}"), _file(verb))
        self._verb = verb
        locals_ = [f"local {name} = ARGV[{number}]\n" for number, name in enumerate(_ARGUMENT.findall(text), 1)]
        self.text: str = "".join([*locals_, text.replace("'PUBLISH'", f"'{publish}'")])
        self.digest: str = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        # Cut off the number of words (`*2`), because a whole command has more words.
        self.by_digest: bytes = packed("EVALSHA", self.digest)[4:]
        self.by_text: bytes = packed("EVAL", self.text)[4:]
        self.for_one_key: str = f"{self.by_digest.decode()}$1\r\n1\r\n"

    @cached_property
    def sharded(self) -> "Script":
        return Script(self._verb, "SPUBLISH")

    def on(self, key: str, *arguments: str) -> bytes:
        return packed("EVALSHA", self.digest, "1", key, *arguments)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(f"lua/{name}.lua").read_text(encoding="utf-8")


ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew")
MARK_QUEUED = Script("mark_queued")
UNMARK = Script("unmark")
SURVEY = Script("survey")
rare_script = cache(Script)


def packed_acquire(claim: Claim, *, looks: bool = False) -> bytes:
    key, token, task_id, hostname = claim.key, claim.token, claim.task_id, claim.hostname
    grant = f"{milliseconds(claim.ttl)} {claim.pid} {claim.attempt} {claim.published}"
    if not claim.keeps_result:
        grant = f"{grant} {_NO_RESULT}"
    words = _words_of(claim, looks=looks)
    if claim.task_name or claim.label:
        name = f"{claim.task_name}{_SEPARATOR}{claim.label}" if claim.label else claim.task_name
        return ACQUIRE.on(key, token, grant, words, task_id, hostname, name)
    # Faster than `packed`, but right only in ASCII, where each character is one byte.
    command = (
        f"*9\r\n{ACQUIRE.for_one_key}${len(key)}\r\n{key}\r\n${len(token)}\r\n{token}\r\n${len(grant)}\r\n{grant}\r\n"
        f"${len(words)}\r\n{words}\r\n${len(task_id)}\r\n{task_id}\r\n${len(hostname)}\r\n{hostname}\r\n"
    )
    return command.encode() if command.isascii() else ACQUIRE.on(key, token, grant, words, task_id, hostname)


def _words_of(claim: Claim, *, looks: bool) -> str:
    # `looks` must come first, otherwise acquire.lua would grant a free lock.
    words = f"looks limit={claim.limit}" if looks else f"limit={claim.limit}"
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
    """The text of a mark after its deadline and task id."""
    numbers = f"{published},{milliseconds(due_for)}" if published or due_for else ""
    return f"{label}{_SEPARATOR}{queue}{_SEPARATOR}{numbers}".rstrip(_SEPARATOR)


def renewals_of(claims: Sequence[Claim], most: int) -> Iterator[Input]:
    for ttl, alike in groupby(claims, key=lambda claim: claim.ttl):
        while part := list(islice(alike, most)):
            words = *[claim.key for claim in part], milliseconds(ttl), *[claim.token for claim in part]
            yield part[0].key, packed("EVALSHA", RENEW.digest, str(len(part)), *words)


def packed_release(claim: Claim, place: int | None, ending: records.Ending | None) -> bytes:
    key, token = claim.key, claim.token
    is_due = ending is not None and ending.is_due
    if place == 1 and not claim.min_hold and not is_due:
        words = "size=7 place=1" if claim.task_name or claim.label else "size=6 place=1"
    else:
        words = f"{f'place={place} ' if place else ''}min_hold={milliseconds(claim.min_hold)}"
    if ending is None:
        return RELEASE.on(key, token, words)
    words += f" attempt={claim.attempt} outcome={ending.outcome} kept={milliseconds(ending.kept)}"
    if is_due:
        words += " is_due"
    marker = records.marker_of(claim.task_id, claim.message)
    command = (
        f"*7\r\n{RELEASE.for_one_key}${len(key)}\r\n{key}\r\n${len(token)}\r\n{token}\r\n"
        f"${len(words)}\r\n{words}\r\n${len(marker)}\r\n{marker}\r\n"
    )
    return command.encode() if command.isascii() else RELEASE.on(key, token, words, marker)


def answer_in(key: str, reply: Any, sent_at: float) -> records.Verdict:
    match reply:
        case ["granted", _, place, fence, since, *died]:
            return Grant(place, fence, since / 1_000_000, sent_at, bool(died), _dead(key, *died[0]) if died else None)
        case ["done", _, attempt, outcome]:
            return records.Done(attempt, outcome)
    return conflict_in(key, reply)


def position_in(reply: Sequence[Any]) -> records.Position:
    _, now, comes, near, free_in = reply
    return records.Position(now, bool(comes), bool(near), free_in / 1_000_000)


def conflict_in(key: str, reply: Sequence[Any]) -> Conflict:
    verdict, now, successor, rows, *turn = reply
    rank, near, free_in = turn or (0, 1, inf)
    holders = holders_in(key, now, rows)
    return Conflict(key, holders, successor or None, now, verdict == "twin", rank, bool(near), free_in / 1_000_000)


def holders_in(key: str, now: int, rows: Sequence[str]) -> tuple[Holder, ...]:
    starts = range(0, len(rows), _VALUES_PER_HOLDER)
    return tuple(_holder(key, now, *rows[start : start + _VALUES_PER_HOLDER]) for start in starts)


def _dead(key: str, task_id: str | None, hostname: str | None, name: str | None) -> records.Facts:
    task_name, label, *_ = [*(name or "").split(_SEPARATOR), ""]
    known_as = task_name or (lock_name_of(key) if task_id else "")
    return records.Facts(task_id=task_id or "", task_name=known_as, hostname=hostname or "", label=label)


def _holder(
    key: str, now: int, place: int | str, token: str, deadline: str, grant: str, task_id: str, hostname: str, name: str
) -> Holder:
    task_name, label, *_ = [*name.split(_SEPARATOR), ""]
    expires_in = (int(deadline) - now) / 1_000_000
    known: dict[str, Any] = {"task_id": task_id or None, "label": label or None}
    if isinstance(place, str):
        published, due_for, is_unheard, rank = numbers_in(grant, 4)
        known |= {"published": published, "due_for": due_for / 1000, "queue": hostname or None}
        known |= {"is_unheard": bool(is_unheard), "refused_at": rank}
        # Of the calls without a lease, only a successor has a task name in the store. An empty name stands for the
        # lock's name.
        known["task_name"] = task_name or (lock_name_of(key) if place == HolderState.NEXT else None)
        return Holder(key, token, HolderState(place), _moment(now), expires_in, **known)
    state = HolderState.COOLDOWN if token.startswith("~") else HolderState.HELD
    since, ahead, ttl, pid, attempt, published = numbers_in(grant, 6)
    words = grant.split(" ")
    known |= {"published": published, "attempt": attempt, "pid": pid or None, "hostname": hostname or None}
    known["task_name"] = task_name or (lock_name_of(key) if task_id else None)
    known |= {"keeps_result": _NO_RESULT not in words, "call_ended": "ended" in words and state is HolderState.HELD}
    return Holder(key, token, state, _moment(since), expires_in, since + ahead, ttl=ttl / 1000, **known)


def numbers_in(value: str, known: int) -> list[int]:
    """The first *known* numbers of a field, and 0 for each that is missing.

    Another version of this library may have written more or fewer.
    """
    numbers = list(map(int, value.split(" ")[:known]))
    return [*numbers, *[0] * (known - len(numbers))]


def foreign(key: str, refusal: exceptions.ResponseError) -> LockState:
    """The state of a key that survey.lua cannot read. Raises *refusal* if it concerns more than the key."""
    text = str(refusal)
    if "WRONGTYPE" not in text and ("user_script" not in text or advice_about(refusal) is not None):
        raise refusal
    return LockState(key, problem=_FOREIGN + text.partition(" script:")[0])


def state_in(key: str, reply: Any) -> LockState:
    try:
        now, fence, waiting, marks, rows, turns, asks = reply
        asks = dict(asks)
        stops = HolderState.ASKED_TO_STOP
        places = [replace(each, state=stops) if each.token in asks else each for each in holders_in(key, now, rows)]
        calls = holders_in(key, now, marks), waiting, holders_in(key, now, turns)
        by = {token: name for token, name in asks.items() if name}
        return LockState(key, now, int(fence) if fence else None, tuple(places), *calls, by)
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        return LockState(key, problem=f"{_FOREIGN}{type(error).__name__}: {error}")


def _moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)


@lru_cache(maxsize=256)
def milliseconds(seconds: float) -> str:
    """Text, because Python crashes if a signal handler raises while hiredis converts a number."""
    return str(round(seconds * 1000))


def microseconds(time: Sequence[str]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])
