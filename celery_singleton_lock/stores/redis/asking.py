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


class Asking:
    """Asks one server.

    Arguments:
        address: Of the server, for errors.
        arguments: Of the connections to it.
    """

    def __init__(self, address: str, arguments: Mapping[str, Any]) -> None:
        is_provided = arguments.get("credential_provider") is not None
        self._address = address
        self._user = PROVIDED if is_provided else arguments.get("username") or "default"
        self._signs_in = is_provided or bool(arguments.get("password"))
        self._is_away = False

    def persist(self, ask: Callable[[float], Any], bound: float, *, is_one_of_many: bool = False) -> tuple[Any, float]:
        """Ask until there is an answer, for *bound* seconds at most, all tries together.

        Arguments:
            ask: Does so once, in so many seconds.
            bound: The seconds in all.
            is_one_of_many: Many ask the same, each in a slot of a pool. So after one of them has asked in vain for
                as long as any may, they do not persist, until the server answers somebody.

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
                # Silence in less time than a reply may take says nothing.
                if tries == 1 or give_up_at - sent_at >= REPLY_TIMEOUT or not is_silence(error):
                    problem = error
                # What was refused may have gone to a connection of before.
                does_not_persist = is_one_of_many and self._is_away and (tries > 1 or isinstance(error, _SILENT))
                # Who has signed in has to do so again, on a new connection.
                passes = is_passing(error) or (self._signs_in and is_signed_out(error))
                if does_not_persist or clock() + pause >= give_up_at or not passes:
                    self._is_away |= is_one_of_many and bound >= ACQUIRE_BOUND and passes
                    raise self._unanswered(problem) from error
            else:
                self._is_away = False
                return answer, sent_at
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _unanswered(self, error: exceptions.RedisError) -> StoreError:
        problem, advice = problem_of(error), what_to_set(error, self._user)
        return StoreError(self._address, problem) if advice is None else StoreRefused(self._address, problem, advice)
