"""Asking a server again and again, until it answers or the time for it is over."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from redis import exceptions

from celery_singleton_lock.errors import StoreError, StoreRefused
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, clock
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT
from celery_singleton_lock.stores.redis.refusals import (
    PROVIDED,
    is_passing,
    is_signed_out,
    is_silence,
    problem_of,
    what_to_set,
)

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
_SILENT = exceptions.TimeoutError
_PLAIN = ("redis://", "redis+cluster://")
# A server that has not read all that was sent resets the connection as it closes it.
_HANGS_UP = "Connection closed by server", "Connection reset by peer", "Broken pipe", "EOF occurred in violation"
_WANTS_TLS = " If this port is one with TLS, its URL begins with rediss, not redis."
_WANTS_CERTIFICATE = (
    " If this server asks for certificates, give ssl_certfile and ssl_keyfile in singleton_lock_client_options."
)


class Asking:
    """Asks one server.

    Arguments:
        address: The server's address, for errors.
        arguments: Arguments of the connections to it.

    Attributes:
        is_away: One of many callers has asked in vain for as long as any may, and nobody has had an answer since.
    """

    def __init__(self, address: str, arguments: Mapping[str, Any]) -> None:
        is_provided = arguments.get("credential_provider") is not None
        self._address = address
        self._user = PROVIDED if is_provided else arguments.get("username") or "default"
        self._signs_in = is_provided or bool(arguments.get("password"))
        self._hint = _hint(address, arguments)
        self.is_away = False
        self._has_answered = False

    def persist(self, ask: Callable[[float], Any], bound: float, *, is_one_of_many: bool = False) -> tuple[Any, float]:
        """Ask until there is an answer, for *bound* seconds at most, all tries together.

        Arguments:
            ask: Asks once, within so many seconds.
            bound: The seconds in all.
            is_one_of_many: Many callers ask this, each in a slot of a pool. So once one of them has asked in vain for
                the longest time that any may take, they do not persist, until the server answers one of them.

        Returns:
            The answer, and the time at which the request it belongs to was sent.

        Raises:
            StoreError: No answer.
        """
        give_up_at = clock() + bound
        pause = _FIRST_PAUSE
        tries = 0
        while True:
            tries += 1
            sent_at = clock()
            try:
                answer = ask(give_up_at - sent_at)
            except exceptions.RedisError as error:
                # If less time was left than a reply may take, silence says nothing.
                if tries == 1 or give_up_at - sent_at >= REPLY_TIMEOUT or not is_silence(error):
                    problem = error
                # The refused request may have used a connection from before.
                does_not_persist = is_one_of_many and self.is_away and (tries > 1 or isinstance(error, _SILENT))
                # A client that has signed in has to sign in again, on a new connection.
                passes = is_passing(error) or (self._signs_in and is_signed_out(error))
                if does_not_persist or clock() + pause >= give_up_at or not passes:
                    self.is_away |= is_one_of_many and bound > ACQUIRE_BOUND - 2 * REPLY_TIMEOUT and passes
                    raise self._unanswered(problem) from error
            else:
                self.is_away, self._has_answered = False, True
                return answer, sent_at
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _unanswered(self, error: exceptions.RedisError) -> StoreError:
        problem, advice = problem_of(error), what_to_set(error, self._user)
        if advice is not None:
            return StoreRefused(self._address, problem, advice)
        hangs_up = any(words in problem for words in _HANGS_UP)
        if hangs_up and not self._has_answered:
            problem += self._hint
        return StoreError(self._address, problem)


def _hint(address: str, arguments: Mapping[str, Any]) -> str:
    """What may be wrong if the server does nothing but hang up."""
    if address.startswith(_PLAIN):
        return _WANTS_TLS
    # A server that wants a certificate says so, but a write that fails hides it.
    return _WANTS_CERTIFICATE if address.startswith("rediss") and "ssl_certfile" not in arguments else ""
