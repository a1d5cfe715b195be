"""One server of a store: it answers, or is silent, by itself."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from redis import exceptions

from celery_singleton_lock.errors import StoreError, StoreRefused
from celery_singleton_lock.stores.clock import ServerClock, clock
from celery_singleton_lock.stores.redis.errors import PROVIDED, advice_about, is_passing, problem_of

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
# A server that has not read all that was sent resets the connection as it closes it.
_HANGS_UP = re.compile("Connection closed by server|Connection reset|Broken pipe|EOF occurred|Timeout connecting")
_WITH_TLS = "If this port is one with TLS, its URL begins with rediss, not redis."
_WITHOUT_TLS = (
    "If this port has no TLS, its URL begins with redis, not rediss. If this server asks for certificates, give "
    "ssl_certfile and ssl_keyfile in singleton_lock_client_options."
)


class Part:
    """Asks a server again and again, until it answers or the time for it is over."""

    silent_until: float = 0.0
    """On `clock()`; no release that is repeated asks it before."""

    def __init__(self, address: str, arguments: Mapping[str, Any]) -> None:
        # It has not answered an acquire, and nothing since.
        self.is_away: bool = False
        # It is what its URL says, whatever comes.
        self.has_answered: bool = False
        is_provided = arguments.get("credential_provider") is not None
        self._address = address
        self._user = PROVIDED if is_provided else arguments.get("username") or "default"
        self.clock: ServerClock = ServerClock()

    def persist(self, ask: Callable[[float], Any], bound: float) -> tuple[Any, float, int]:
        """The answer of *ask*, which asks once until that moment; when it was sent; which try it was.

        Raises:
            StoreError: No answer; no try began later than after *bound* seconds.
        """
        give_up_at = clock() + bound
        pause = _FIRST_PAUSE
        problem = None
        tries = 0
        while True:
            sent_at = clock()
            tries += 1
            try:
                answer = ask(give_up_at)
            except exceptions.RedisError as error:
                # The last try may have had too little time, so its silence says less than an answer before it.
                if problem is None or not isinstance(error, exceptions.TimeoutError):
                    problem = error
                if not is_passing(error) or clock() + pause >= give_up_at:
                    raise self.unanswered(problem) from error
            else:
                self.is_away = False
                self.has_answered = True
                return answer, sent_at, tries
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def unanswered(self, error: exceptions.RedisError) -> StoreError:
        problem = problem_of(error)
        advice = advice_about(error, self._user)
        if advice is not None:
            return StoreRefused(self._address, problem, advice)
        if not self.has_answered and _HANGS_UP.search(problem):
            hint = _WITHOUT_TLS if self._address.startswith("rediss") else _WITH_TLS
            problem = f"{problem.removesuffix('.')}. {hint}"
        return StoreError(self._address, problem)
