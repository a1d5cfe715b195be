"""Trying out what a server lets us do, on a key that nobody else uses."""

from collections.abc import Iterable

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.hash import arguments_of
from celery_singleton_lock.stores.redis.opening import hear
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.wire import Wire

# Seconds after which the rest of a broken-off trial expires.
_TTL = 1.0
# So many slots are looked at that one server of a cluster does not have all of them by luck.
_OTHER_SLOTS = 20


def with_tag(key: str, number: int) -> str:
    """A key beside *key*, with a hash tag of its own, so it is in another slot."""
    return f"{key.removesuffix('}')}:{number}}}"


def in_other_slots(key: str) -> list[str]:
    """Keys beside *key*; a server that answers for all of them is not one of several in a cluster."""
    return [with_tag(key, number) for number in range(_OTHER_SLOTS)]


def commands_on(key: str) -> list[tuple[str, ...]]:
    """Each command that our scripts and clients need, once, because a user may lack any right. They leave nothing."""
    writing = [("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), ("HSETNX", key, "b", "0"), ("HINCRBY", key, "a", "1")]
    reading = [("HGET", key, "a"), ("HMGET", key, "a"), ("HEXISTS", key, "a")]
    reading_all = [("HGETALL", key), ("HRANDFIELD", key, "1"), ("HLEN", key), ("EXISTS", key)]
    others = [("TIME",), ("EVAL", "return 1", "0"), ("PUBLISH", f"{key}:nobody", "")]
    return [*others, ("DEL", key), *writing, *reading, *reading_all, ("HDEL", key, "a", "b")]


def try_out(wire: Wire, acquire: Script, release: Script, key: str, timeout: float, others: Iterable[str] = ()) -> None:
    """Use each command, take a lock and queue for it, release it, and hear of that; look at the keys in *others*.

    All in one go, for a server that is far away.

    Raises:
        RedisError: The server does not let us, or not all of it was answered within *timeout* seconds.
    """
    give_up_at = clock() + timeout
    holder, waiter = Claim(key, "holder", _TTL), Claim(key, "waiter", _TTL)
    ears = wire.subscribe(f"{key}:{waiter.token}", timeout)
    try:
        wire.run_all(
            [*commands_on(key), *(("HLEN", other) for other in others)],
            [
                (acquire, key, arguments_of(holder)),
                (acquire, key, arguments_of(waiter, waits=True)),
                (release, key, (holder.token, "0", "1 0")),
                (release, key, (waiter.token, "0", "0 0")),
            ],
            give_up_at - clock(),
        )
        hear(ears, give_up_at - clock())
    finally:
        ears.disconnect()
