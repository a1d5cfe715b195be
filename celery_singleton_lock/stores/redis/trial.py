"""Trying out what a server lets us do, on a key that nobody else uses."""

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.hash import arguments_of
from celery_singleton_lock.stores.redis.opening import hear
from celery_singleton_lock.stores.redis.wire import Script, Wire

# What a trial that is broken off leaves is soon gone.
_TTL = 1.0


def try_out(wire: Wire, acquire: Script, release: Script, key: str, timeout: float) -> None:
    """Take a lock and queue for it, release it, and hear of that; all scripts in one go, for a server that is far away.

    Raises:
        RedisError: The server does not let us, or not all of it was answered within *timeout* seconds.
    """
    give_up_at = clock() + timeout
    holder, waiter = Claim(key, "holder", _TTL), Claim(key, "waiter", _TTL)
    ears = wire.subscribe(f"{key}:{waiter.token}", timeout)
    try:
        wire.run_all(
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
