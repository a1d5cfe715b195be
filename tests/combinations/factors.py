"""The factors with their values, which combinations are left out and why, and rows drawn of them."""

import random
from collections.abc import Iterable, Mapping
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

_IN_A_CANVAS = CALL["place"][1:]
_FAILING = CALL["ending"][1:]
_CHORDS = ("chord header", "chord body")
_CHAINS = ("first of a chain", "middle of a chain")
_AFTER_OTHERS = ("middle of a chain", "chord body")
_RABBITMQ = ("classic", "quorum")
_YES = (True,)

# Why a combination is left out, and when: if all values of a case occur together, and Celery is older than `before`.
REASONS: dict[str, list[dict[str, tuple[Any, ...]]]] = {
    "before 5.5 Celery consumes from no quorum queue": [{"before": (5, 5), "broker": ("quorum",)}],
    # Seen with 5.4 and not with 5.7, also without the lock.
    "an older Celery leaves a group waiting by rpc once another result for one of its ids is dropped": [
        {"before": (5, 7), "results": ("rpc",), "mode": TASK["mode"][1:], "place": ("group", "before a group")}
    ],
    "an older Celery stores RETRY once a worker has thrown the retry away as revoked": [
        {"before": (5, 7), "ending": ("revoke", "terminate"), "retries": ("countdown", "other arguments")},
        {"before": (5, 7), "ending": ("revoke", "terminate"), "autoretry": _YES},
    ],
    "join is refused where results cannot be read": [{"policy": ("join",), "results": ("rpc", "none")}],
    "join is refused where results are ignored": [{"policy": ("join",), "ignore": _YES}],
    "a call may join too late for a result that is forgotten at once": [
        {"policy": ("join",), "results": ("forgotten",)}
    ],
    "only Redis as the broker has a visibility timeout": [{"redelivers": _YES, "broker": _RABBITMQ}],
    "RabbitMQ itself drops what has expired, and nobody is told": [{"broker": _RABBITMQ, "timing": ("expires",)}],
    "a step that a worker sends may come to its eta, of which Celery leaves RabbitMQ no whole second": [
        {"broker": ("quorum",), "place": _AFTER_OTHERS, "timing": ("eta",)}
    ],
    "only prefork has children that can be killed or timed out": [
        {"pool": STAGE["pool"][1:], "ending": ("soft limit", "hard limit", "kill", "terminate")}
    ],
    "Celery leaves whoever waits for an Ignore or a Reject waiting": [
        {"place": _IN_A_CANVAS, "ending": ("ignore", "reject")}
    ],
    "Celery leaves a group waiting after a step that fails": [{"place": ("before a group",), "ending": _FAILING}],
    "Celery waits for a result that a member of a group, or the body of a chord, has ignored": [
        {"place": ("group", "chord body"), "ignore": _YES}
    ],
    "Celery leaves a chain waiting after a step that fails and ignores its result": [
        {"place": _CHAINS, "ignore": _YES, "ending": _FAILING}
    ],
    # Seen without the lock: `chain(ignored.si(), other.si())` loses the result of `other`, if `get` comes late.
    "by rpc, Celery declares no queue for results if the first step of a chain ignores its own": [
        {"broker": _RABBITMQ, "results": ("rpc",), "ignore": _YES, "place": ("first of a chain", "before a group")}
    ],
    "what replaces a call sends its result by rpc to the worker that was replaced": [
        {"results": ("rpc",), "retries": ("replace",)}
    ],
    "what expires in a canvas leaves Celery's own steps waiting": [{"place": _IN_A_CANVAS, "timing": ("expires",)}],
    "a call that is sent by another way is no member of a canvas": [
        {"place": _IN_A_CANVAS, "route": CALL["route"][1:]}
    ],
    "this result backend has no chords": [{"results": ("rpc", "none"), "place": _CHORDS}],
    # Seen on a busy machine: `celery.chord_unlock` succeeds twice, and each time with a new message for the body.
    "a chord that polls publishes its body twice if its own message is delivered twice": [
        {"results": ("database",), "redelivers": _YES, "place": _CHORDS}
    ],
    "a chord that polls needs stored results": [{"results": ("database",), "place": ("chord header",), "ignore": _YES}],
    "such a pair of mode and policy is refused": [
        {"mode": TASK["mode"][1:], "policy": ("join",)},
        {"mode": ("until_executed",), "policy": ("rerun", "replace")},
        {"mode": ("until_executing",), "policy": ("replace",)},
    ],
    "in until_executing a run takes no lease, so its copies are Celery's": [
        {"mode": ("until_executing",), "redelivers": _YES}
    ],
    "the worker makes the key of what a worker publishes first, of what comes without notes, and of other arguments": [
        {"keys": ("by code",), "place": _AFTER_OTHERS},
        {"keys": ("by code",), "route": ("send_task",)},
        {"keys": ("by code",), "retries": ("other arguments", "replace")},
    ],
}


def plain() -> dict[str, Any]:
    return {name: values[0] for name, values in FACTORS.items()}


def why_not(row: Row) -> str | None:
    for reason, cases in REASONS.items():
        if any(all(_is_so(row, *value) for value in case.items()) for case in cases):
            return reason
    return None


def _is_so(row: Row, name: str, values: tuple[Any, ...]) -> bool:
    return values > celery.VERSION if name == "before" else name in row and row[name] in values


def drawn(rng: random.Random, names: Iterable[str], given: Row) -> dict[str, Any]:
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
