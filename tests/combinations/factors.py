"""The factors with their values, which combinations are left out and why, and rows drawn of them."""

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import celery

Row = Mapping[str, Any]

# The first value of each is the plain one, of which a line of a program says nothing.
STAGE: dict[str, tuple[Any, ...]] = {
    "broker": ("redis", "classic", "quorum"),
    "results": ("redis", "rpc", "database", "none", "forgotten"),
    "pool": ("prefork", "threads", "gevent", "eventlet", "solo"),
    "track": (False, True),
    "redelivers": (False, True),
}
TASK: dict[str, tuple[Any, ...]] = {
    "mode": ("while_executing", "until_executing", "until_executed", "until_and_while_executing"),
    "policy": ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace"),
    "limit": ("1", "2", "1 then 2", "2 then 1"),
    "late": (False, True),
    "ignore": (False, True),
    "min_hold": (0, 2),
    "wait_timeout": (None, 3),
    "queue_ttl": (None, 4),
    "autoretry": (False, True),
    # By code: what its worker would make of the message is another key than its publisher's, as after a deploy of other
    # code.
    "keys": ("by name", "by code"),
}
CALL: dict[str, tuple[Any, ...]] = {
    "retries": ("none", "countdown", "other arguments", "replace"),
    "ending": (
        *("return", "raise", "ignore", "reject", "soft limit", "hard limit"),
        *("kill", "revoke", "terminate", "before_start"),
    ),
    "place": (
        *("single", "first of a chain", "middle of a chain", "group", "chord header", "chord body"),
        "before a group",
    ),
    "serializer": ("json", "pickle"),
    "timing": ("now", "countdown", "eta", "expires"),
    "route": ("delay", "send_task", "own id"),
}
FACTORS = STAGE | TASK | CALL

_CHORDS = ("chord header", "chord body")
_CHAINS = ("first of a chain", "middle of a chain")
_AFTER_OTHERS = ("middle of a chain", "chord body")
_REFUSED = [
    *((mode, "join") for mode in ("until_executing", "until_executed", "until_and_while_executing")),
    *(("until_executed", policy) for policy in ("rerun", "replace")),
    ("until_executing", "replace"),
]
_ONLY_PREFORK = ("soft limit", "hard limit", "kill", "terminate")


# Why a combination is left out, and when: what Celery or the library refuses, or what has no meaning.
REASONS: dict[str, Callable[[Row], bool]] = {
    "before 5.5 Celery consumes from no quorum queue": lambda row: (
        row["broker"] == "quorum" and celery.VERSION < (5, 5)
    ),
    # Seen with 5.4 and not with 5.7, also without the lock.
    "an older Celery leaves a group waiting by rpc once another result for one of its ids is dropped": lambda row: (
        celery.VERSION < (5, 7)
        and row["results"] == "rpc"
        and row["mode"] != "while_executing"
        and row["place"] in ("group", "before a group")
    ),
    "an older Celery stores RETRY once a worker has thrown the retry away as revoked": lambda row: (
        celery.VERSION < (5, 7)
        and row["ending"] in ("revoke", "terminate")
        and (row["retries"] in ("countdown", "other arguments") or row["autoretry"])
    ),
    "join is refused where results cannot be read": lambda row: (
        row["policy"] == "join" and row["results"] in ("rpc", "none")
    ),
    "join is refused where results are ignored": lambda row: row["policy"] == "join" and row["ignore"],
    "who joins a result that is forgotten at once may come too late for it": lambda row: (
        row["policy"] == "join" and row["results"] == "forgotten"
    ),
    "only Redis as the broker has a visibility timeout": lambda row: row["redelivers"] and row["broker"] != "redis",
    "RabbitMQ itself drops what has expired, and nobody is told": lambda row: (
        row["broker"] != "redis" and row["timing"] == "expires"
    ),
    "a step that a worker sends may come to its eta, of which Celery leaves RabbitMQ no whole second": lambda row: (
        row["broker"] == "quorum" and row["place"] in _AFTER_OTHERS and row["timing"] == "eta"
    ),
    "only prefork has children that can be killed or timed out": lambda row: (
        row["pool"] != "prefork" and row["ending"] in _ONLY_PREFORK
    ),
    "Celery leaves whoever waits for an Ignore or a Reject waiting": lambda row: (
        row["place"] != "single" and row["ending"] in ("ignore", "reject")
    ),
    "Celery leaves a group waiting after a step that fails": lambda row: (
        row["place"] == "before a group" and row["ending"] != "return"
    ),
    "Celery waits for a result that a member of a group, or the body of a chord, has ignored": lambda row: (
        row["place"] in ("group", "chord body") and row["ignore"]
    ),
    "Celery leaves a chain waiting after a step that fails and ignores its result": lambda row: (
        row["place"] in _CHAINS and row["ignore"] and row["ending"] != "return"
    ),
    # Seen without the lock: `chain(ignored.si(), other.si())` loses the result of `other`, if `get` comes late.
    "by rpc, Celery declares no queue for results if the first step of a chain ignores its own": lambda row: (
        row["broker"] in ("classic", "quorum")
        and row["results"] == "rpc"
        and row["ignore"]
        and row["place"] in ("first of a chain", "before a group")
    ),
    "what replaces a call sends its result by rpc to the worker that was replaced": lambda row: (
        row["results"] == "rpc" and row["retries"] == "replace"
    ),
    "what expires in a canvas leaves Celery's own steps waiting": lambda row: (
        row["place"] != "single" and row["timing"] == "expires"
    ),
    "who sends by another way is no member of a canvas": lambda row: (
        row["place"] != "single" and row["route"] != "delay"
    ),
    "this result backend has no chords": lambda row: row["results"] in ("rpc", "none") and row["place"] in _CHORDS,
    # Seen on a busy machine: `celery.chord_unlock` succeeds twice, and each time with a new message for the body.
    "a chord that polls publishes its body twice if its own message is delivered twice": lambda row: (
        row["results"] == "database" and row["redelivers"] and row["place"] in _CHORDS
    ),
    "a chord that polls needs stored results": lambda row: (
        row["results"] == "database" and row["place"] == "chord header" and row["ignore"]
    ),
    "such a pair of mode and policy is refused": lambda row: (row["mode"], row["policy"]) in _REFUSED,
    "in until_executing a run takes no lease, so its copies are Celery's": lambda row: (
        row["mode"] == "until_executing" and row["redelivers"]
    ),
    "what a worker publishes first has the key that a worker makes": lambda row: (
        row["keys"] == "by code" and row["place"] in _AFTER_OTHERS
    ),
    "what comes without notes has the key that its worker makes": lambda row: (
        row["keys"] == "by code" and row["route"] == "send_task"
    ),
    "a retry with other arguments, and what replaces a run, has the key that its worker makes": lambda row: (
        row["keys"] == "by code" and row["retries"] in ("other arguments", "replace")
    ),
}


def plain() -> dict[str, Any]:
    """The plainest row."""
    return {name: values[0] for name, values in FACTORS.items()}


def why_not(row: Row) -> str | None:
    """Why this combination is left out, as far as its factors are known; None if it is not."""
    for reason, applies in REASONS.items():
        with suppress(KeyError):
            if applies(row):
                return reason
    return None


def drawn(rng: random.Random, names: Iterable[str], given: Row) -> dict[str, Any]:
    """The row that is given, and a value of each of these factors, in an order that gives each value its chance."""
    names = list(names)
    while True:
        row = dict(given)
        rng.shuffle(names)
        for name in names:
            allowed = [value for value in FACTORS[name] if why_not({**row, name: value}) is None]
            if not allowed:
                break
            row[name] = rng.choice(allowed)
        else:
            return row
