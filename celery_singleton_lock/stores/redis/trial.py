"""Trying out what a server lets us do, on a key that nobody else uses."""

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.hash import arguments_of
from celery_singleton_lock.stores.redis.opening import hear
from celery_singleton_lock.stores.redis.wire import Script, Wire

# What a trial that is broken off leaves is soon gone.
_TTL = 1.0


def commands_on(key: str) -> list[tuple[str, ...]]:
    """Each command that a script or a client of ours needs, once: a user may lack any of them. They leave nothing."""
    of_strings = [("GET", key), ("SET", key, "", "PX", "1000"), ("DEL", key)]
    writing = [("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), ("HSETNX", key, "b", "0"), ("HINCRBY", key, "a", "1")]
    reading = [("HGET", key, "a"), ("HMGET", key, "a"), ("HEXISTS", key, "a")]
    reading_all = [("HGETALL", key), ("HLEN", key), ("EXISTS", key)]
    others = [("TIME",), ("EVAL", "return 1", "0"), ("PUBLISH", f"{key}:nobody", "")]
    return [*others, *of_strings, *writing, *reading, *reading_all, ("HDEL", key, "a", "b")]


def try_out(wire: Wire, acquire: Script, release: Script, key: str, timeout: float) -> None:
    """Use each command, take a lock and queue for it, release it, and hear of that.

    All in one go, for a server that is far away.

    Raises:
        RedisError: The server does not let us, or not all of it was answered within *timeout* seconds.
    """
    give_up_at = clock() + timeout
    holder, waiter = Claim(key, "holder", _TTL), Claim(key, "waiter", _TTL)
    ears = wire.subscribe(f"{key}:{waiter.token}", timeout)
    try:
        wire.run_all(
            commands_on(key),
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
