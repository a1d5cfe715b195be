"""A lock and a done marker while their slot moves from one server to another, key by key.

A server that has one of two keys refuses both until the slot has moved. So the two keys are asked for one by one, in
an order that misleads no other caller in between: the marker is there before the lock is free.
"""

from collections.abc import Callable, Sequence
from typing import Any

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.store import GRANTED, MARK_DONE, RELEASE
from celery_singleton_lock.stores.redis.wire import Wire

IS_DONE = Script("is_done", "time", "clock", "done")


Ask = Callable[[Sequence[str], Sequence[str], float], Any]


def take(wire: Wire, ask: Ask, keys: Sequence[str], arguments: Sequence[str], give_up_at: float) -> Any:
    """The answer of acquire.lua, run by *ask*, to a claim that may be a copy."""
    key, marker = keys
    token, ttl, words, run, *rest = arguments
    _, attempt, _ = run.split(" ")

    def past_run() -> Any:
        return wire.run(IS_DONE, [marker], [attempt], give_up_at - clock())

    if done := past_run():
        return done
    reply = ask([key], [token, ttl, f"{words} copy", run, *rest], give_up_at - clock())
    # The run may have ended between the two requests.
    if (isinstance(reply, int) or reply[0] == GRANTED) and (done := past_run()):
        wire.run(RELEASE, [key], [token, "0", "0 0"], give_up_at - clock())
        return done
    return reply


def give_back(wire: Wire, keys: Sequence[str], arguments: Sequence[str], give_up_at: float) -> Any:
    """The answer of release.lua to a run that has ended for good; its marker is left in any case."""
    key, marker = keys
    *_, ending = arguments
    attempt, outcome, kept, _ = ending.split(" ")
    wire.run(MARK_DONE, [marker], [attempt, outcome, kept], give_up_at - clock())
    reply = wire.run(RELEASE, [key], arguments, give_up_at - clock())
    if isinstance(reply, list):
        return [_marked(each) for each in reply]
    return _marked(reply)


def _marked(answer: int) -> int:
    return int(Answer.MARKED) if answer == Answer.DONE else answer
