"""What is combined: the factors with their values, and which combinations are left out and why."""

from collections.abc import Callable, Mapping
from typing import Any

import celery

Row = Mapping[str, Any]

# The first value of each is the plain one, to which a failing program is shrunk.
STAGE: dict[str, tuple[Any, ...]] = {
    "broker": ("redis", "classic", "quorum", "broadcast"),
    "results": ("redis", "rpc", "database", "none", "forgotten"),
    "pool": ("prefork", "threads", "gevent", "eventlet", "solo", "eager"),
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
    # While its calls are queued, run or wait; which policy, or mode, that is, is drawn.
    "deploy": (None, "of another policy", "of another mode"),
    # By code: what its worker would make of the message is another key than its publisher's, as after a deploy of other
    # code. Of a set: an argument that counts has a set in it, which each process has in an order of its own.
    "keys": ("by name", "by code", "of a set"),
    # Its `__call__` catches an error and tries once more: a run of its own, of which the body fails as well, or not.
    "again": (None, "in vain", "with success"),
}
CALL: dict[str, tuple[Any, ...]] = {
    "retries": ("none", "countdown", "other arguments", "replace"),
    "ending": (
        *("return", "raise", "ignore", "reject", "soft limit", "hard limit"),
        *("kill", "revoke", "terminate", "before_start"),
    ),
    "place": (
        *("single", "first of a chain", "middle of a chain", "group", "chord header", "chord body"),
        *("before a group", "map", "starmap", "chunks"),
    ),
    "serializer": ("json", "pickle"),
    "timing": ("now", "countdown", "eta", "expires"),
    # What hands on has the headers of another call's message, as a body has that passes on its own.
    "route": (
        *("delay", "send_task", "own id", "id again", "own UUID", "id of a class"),
        *("hands on", "hands on by send_task"),
    ),
    # A `Lock` in the body.
    "lock": ("none", "once", "again inside"),
    # What Celery is to call when it has ended.
    "link": ("none", "link", "link_error", "both"),
}
FACTORS = STAGE | TASK | CALL

# Of these every triple is wanted; of all, every pair.
TRIPLES = (
    ("mode", "policy", "ending"),
    ("mode", "policy", "retries"),
    ("mode", "policy", "autoretry"),
    ("mode", "policy", "place"),
    ("mode", "policy", "redelivers"),
    ("mode", "policy", "deploy"),
    ("policy", "ending", "deploy"),
    ("policy", "retries", "deploy"),
    ("mode", "policy", "lock"),
    ("policy", "ending", "lock"),
    ("policy", "retries", "lock"),
    ("policy", "retries", "keys"),
)

_LOOPS = ("map", "starmap", "chunks")
_CHORDS = ("chord header", "chord body")
_CHAINS = ("first of a chain", "middle of a chain")
_AFTER_OTHERS = ("middle of a chain", "chord body")
_BY_WORKERS = (*_LOOPS, *_AFTER_OTHERS)
# What they need is in messages that Celery makes by itself, or is nothing but a key.
_WITHOUT_SETS = ("map", *_AFTER_OTHERS)
_ONLY_PREFORK = ("soft limit", "hard limit", "kill", "terminate")


def _eager(row: Row) -> bool:
    return row["pool"] == "eager"


# Why a combination is left out, and when: what Celery or the library refuses, or what has no meaning.
REASONS: dict[str, tuple[tuple[str, ...], Callable[[Row], bool]]] = {
    "before 5.5 Celery consumes from no quorum queue": (
        ("broker",),
        lambda row: row["broker"] == "quorum" and celery.VERSION < (5, 5),
    ),
    # Seen with 5.4 and not with 5.7, also without the lock.
    "an older Celery leaves a group waiting by rpc once another result for one of its ids is dropped or settled": (
        ("mode", "results", "place"),
        lambda row: (
            celery.VERSION < (5, 7)
            and row["results"] == "rpc"
            and row["mode"] != "while_executing"
            and row["place"] in ("group", "chunks", "before a group")
        ),
    ),
    "join is refused where results cannot be read": (
        ("policy", "results"),
        lambda row: row["policy"] == "join" and row["results"] in ("rpc", "none"),
    ),
    "join is refused where results are ignored": (
        ("policy", "ignore"),
        lambda row: row["policy"] == "join" and row["ignore"],
    ),
    "who joins a result that is forgotten at once may come too late for it": (
        ("policy", "results"),
        lambda row: row["policy"] == "join" and row["results"] == "forgotten",
    ),
    "only Redis as the broker has a visibility timeout": (
        ("broker", "redelivers"),
        lambda row: row["redelivers"] and row["broker"] != "redis",
    ),
    "RabbitMQ itself drops what has expired, and nobody is told": (
        ("broker", "timing"),
        lambda row: row["broker"] != "redis" and row["timing"] == "expires",
    ),
    "what a worker sends of a canvas may come to its eta, of which Celery leaves RabbitMQ no whole second": (
        ("broker", "place", "timing"),
        lambda row: row["broker"] == "quorum" and row["place"] in _AFTER_OTHERS and row["timing"] == "eta",
    ),
    "only prefork has children that can be killed or timed out": (
        ("pool", "ending"),
        lambda row: row["pool"] != "prefork" and row["ending"] in _ONLY_PREFORK,
    ),
    "Celery leaves whoever waits for an Ignore or a Reject waiting": (
        ("place", "ending"),
        lambda row: row["place"] != "single" and row["ending"] in ("ignore", "reject"),
    ),
    "Celery leaves a group waiting after a step that fails": (
        ("place", "ending"),
        lambda row: row["place"] == "before a group" and row["ending"] != "return",
    ),
    "Celery waits for a result that a member of a group, or the body of a chord, has ignored": (
        ("place", "ignore"),
        lambda row: row["place"] in ("group", "chord body") and row["ignore"],
    ),
    "Celery leaves a chain waiting after a step that fails and ignores its result": (
        ("place", "ending", "ignore"),
        lambda row: row["place"] in _CHAINS and row["ignore"] and row["ending"] != "return",
    ),
    # Seen without the lock: `chain(ignored.si(), other.si())` loses the result of `other`, if `get` comes late.
    "by rpc, Celery declares no queue for results if the first step of a chain ignores its own": (
        ("broker", "results", "place", "ignore"),
        lambda row: (
            row["broker"] in ("classic", "quorum")
            and row["results"] == "rpc"
            and row["ignore"]
            and row["place"] in ("first of a chain", "before a group")
        ),
    ),
    "what replaces a call sends its result by rpc to the worker that was replaced": (
        ("results", "retries"),
        lambda row: row["results"] == "rpc" and row["retries"] == "replace",
    ),
    "what expires in a canvas leaves Celery's own steps waiting": (
        ("place", "timing"),
        lambda row: row["place"] != "single" and row["timing"] == "expires",
    ),
    "an item of map, starmap or chunks is no message that could be replaced": (
        ("place", "retries"),
        lambda row: row["place"] in _LOOPS and row["retries"] == "replace",
    ),
    "an item of a map is nothing but a key: nothing tells it to retry": (
        ("place", "retries"),
        lambda row: row["place"] == "map" and row["retries"] != "none",
    ),
    "an item is no message: what strikes one strikes all": (
        ("place", "ending"),
        lambda row: row["place"] in _LOOPS and row["ending"] not in ("return", "raise"),
    ),
    "an item of a map is nothing but a key: nothing tells it to take a Lock": (
        ("place", "lock"),
        lambda row: row["place"] == "map" and row["lock"] != "none",
    ),
    "who sends by another way is no member of a canvas": (
        ("place", "route"),
        lambda row: row["place"] != "single" and row["route"] != "delay",
    ),
    "what a member of a canvas is linked to are the next steps of the canvas": (
        ("place", "link"),
        lambda row: row["place"] != "single" and row["link"] != "none",
    ),
    "this result backend has no chords": (
        ("results", "place"),
        lambda row: row["results"] in ("rpc", "none") and row["place"] in _CHORDS,
    ),
    "a chord that polls needs stored results": (
        ("results", "place", "ignore"),
        lambda row: row["results"] == "database" and row["place"] == "chord header" and row["ignore"],
    ),
    "a message to all is no step of a canvas": (
        ("broker", "place"),
        lambda row: row["broker"] == "broadcast" and row["place"] != "single",
    ),
    "of a message to all, Celery's results are overwritten by whoever is last": (
        ("broker", "policy"),
        lambda row: row["broker"] == "broadcast" and row["policy"] == "join",
    ),
    "a retry of a message to all goes to all again": (
        ("broker", "retries"),
        lambda row: row["broker"] == "broadcast" and row["retries"] != "none",
    ),
    "a failure retried by one of all goes to all again": (
        ("broker", "autoretry"),
        lambda row: row["broker"] == "broadcast" and row["autoretry"],
    ),
    "AMQP carries no UUID as the id of a message": (
        ("broker", "route"),
        lambda row: row["broker"] != "redis" and row["route"] == "own UUID",
    ),
    "Celery's own results in a database are kept by ids that are text": (
        ("results", "route"),
        lambda row: row["results"] == "database" and row["route"] == "own UUID",
    ),
    "before 5.5 Celery keeps results by ids that are text": (
        ("results", "route"),
        lambda row: celery.VERSION < (5, 5) and row["results"] != "none" and row["route"] == "own UUID",
    ),
    "a worker remembers the ids that were revoked": (
        ("route", "ending"),
        lambda row: row["route"] == "id again" and row["ending"] in ("revoke", "terminate"),
    ),
    "a worker remembers the ids that have expired": (
        ("route", "timing"),
        lambda row: row["route"] == "id again" and row["timing"] == "expires",
    ),
    "a queue mode goes with no policy for which the others end": (
        ("mode", "policy"),
        lambda row: row["mode"] != "while_executing" and row["policy"] in ("join", "rerun", "replace"),
    ),
    "a policy for which the others end goes with no queue mode that a deploy could give its task": (
        ("policy", "deploy"),
        lambda row: row["policy"] in ("join", "rerun", "replace") and row["deploy"] == "of another mode",
    ),
    "in until_executing a run takes no lease, so its copies are Celery's": (
        ("mode", "redelivers"),
        lambda row: row["mode"] == "until_executing" and row["redelivers"],
    ),
    "one version with a lock around its body, and one without, exclude each other in nothing": (
        ("mode", "deploy"),
        lambda row: row["mode"] == "until_executing" and row["deploy"] == "of another mode",
    ),
    "what a worker publishes first has the key that a worker makes": (
        ("place", "keys"),
        lambda row: row["keys"] == "by code" and row["place"] in _BY_WORKERS,
    ),
    "what comes without notes has the key that its worker makes": (
        ("route", "keys"),
        lambda row: row["keys"] == "by code" and row["route"] in ("send_task", "hands on by send_task"),
    ),
    "a retry with other arguments, and what replaces a run, has the key that its worker makes": (
        ("retries", "keys"),
        lambda row: row["keys"] == "by code" and row["retries"] in ("other arguments", "replace"),
    ),
    "JSON carries no set": (
        ("keys", "serializer"),
        lambda row: row["keys"] == "of a set" and row["serializer"] == "json",
    ),
    "an item of a map is nothing but a key, and what other steps carry is written as JSON": (
        ("place", "keys"),
        lambda row: row["keys"] == "of a set" and row["place"] in _WITHOUT_SETS,
    ),
    "eager calls know no broker": (("pool", "broker"), lambda row: _eager(row) and row["broker"] != "redis"),
    "eager calls store no results": (("pool", "results"), lambda row: _eager(row) and row["results"] != "redis"),
    "eager calls are tracked by nobody": (("pool", "track"), lambda row: _eager(row) and row["track"]),
    "eager calls are not redelivered": (("pool", "redelivers"), lambda row: _eager(row) and row["redelivers"]),
    "eager calls are stopped by nobody": (("pool", "ending"), lambda row: _eager(row) and row["ending"] == "revoke"),
    "eager calls are played alone": (("pool", "place"), lambda row: _eager(row) and row["place"] != "single"),
    "eager calls are made at once": (("pool", "timing"), lambda row: _eager(row) and row["timing"] != "now"),
    "eager calls are sent by nobody": (("pool", "route"), lambda row: _eager(row) and row["route"] != "delay"),
    "what is linked to an eager call is sent to a worker": (
        ("pool", "link"),
        lambda row: _eager(row) and row["link"] != "none",
    ),
    "eager calls end where they began: no deploy comes between": (
        ("pool", "deploy"),
        lambda row: _eager(row) and row["deploy"] is not None,
    ),
    "an eager retry runs inside of the body that holds the Lock, and would wait for it for ever": (
        ("pool", "retries", "lock"),
        lambda row: _eager(row) and row["retries"] != "none" and row["lock"] != "none",
    ),
}


def plain() -> dict[str, Any]:
    """The plainest row."""
    return {name: values[0] for name, values in FACTORS.items()}


def why_not(row: Row) -> str | None:
    """Why this combination is left out, as far as its factors are known; None if it is not."""
    for reason, (names, applies) in REASONS.items():
        if all(name in row for name in names) and applies(row):
            return reason
    return None
