"""The model in memory and a real server, asked in the same way, and what it means that they answer the same."""

from typing import Any

from celery_singleton_lock.stores.base import RELEASE_BOUND
from celery_singleton_lock.stores.inventory import Asked, Survey
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Done, Ending, Grant, Holder
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redis.waiter import RedisWaiter
from tests.contract.ageing import StandingClock
from tests.servers import Server
from tests.waiting import until

RESULT_GRACE = 5.0
# Deadlines are further away than this. An example in which a request took half of it says nothing, and is left out.
NOISE = 0.4


class Model(MemoryStore):
    """The model, and what it leaves out: a release passes over the waiters that do not listen."""

    def __init__(self) -> None:
        self.time = 2_000_000_000.0
        self.listening: set[str] = set()
        self.woken: list[str] = []
        super().__init__(now=lambda: self.time)

    def queue(self, claim: Claim) -> Grant | Conflict | Done | float:
        self.listening.add(claim.token)
        return super().queue(claim)

    def hang_up(self, claim: Claim) -> None:
        self.listening.discard(claim.token)

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        has_a_place = claim.token in self.tokens(claim.key, of_turns=False)
        answer = super().release(claim, place, bound, ending)
        self.woken = []
        lock = self._lock(claim.key)
        if lock is not None:
            held = len(lock.alive(self._now()))
            # A place that is free later: the first waiter has to hear when.
            is_kept = has_a_place and f"~{claim.token}" in self.tokens(claim.key)
            for turn in list(lock.queue):
                is_dead = turn.deadline <= self._now()
                if not is_dead and len(self.woken) >= max(turn.claim.limit - held, is_kept):
                    break
                if is_dead or turn.claim.token not in self.listening:
                    lock.leave_queue(turn)
                else:
                    self.woken.append(turn.claim.token)
            self._delete_if_idle(claim.key)
        return answer

    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> Asked:
        asked = super().break_lock(key, token, by, force=force)
        # By a token that nobody has, so those are woken whose turn has come.
        self.release(Claim(key, "~", 0.0), None)
        return asked

    def expires_in(self, key: str) -> float | None:
        """Seconds until the lock is gone, or None if there is none."""
        lock = self._lock(key)
        return lock.expiry - self._now() if lock else None

    def living_turns(self, key: str) -> list[str]:
        lock = self._lock(key)
        return [turn.claim.token for turn in lock.queue if turn.deadline > self._now()] if lock else []

    def tokens(self, key: str, *, of_turns: bool = True) -> list[str]:
        """Of those who have a place or a turn, expired or not."""
        lock = self._lock(key)
        turns = lock.queue if lock and of_turns else []
        return [each.claim.token for each in (*lock.places.values(), *turns)] if lock else []

    def moments(self) -> list[float]:
        """In how many seconds something happens by itself."""
        now, found = self._now(), []
        for lock in self._locks.values():
            found += [lock.expiry, *(turn.deadline for turn in lock.queue)]
            found += [mark.deadline for mark in (lock.successor, lock.queued, lock.joined, lock.quiet) if mark]
            found += [mark.deadline for mark in lock.overtaken.values()]
            for place in lock.places.values():
                found += [place.deadline, place.since + place.claim.min_hold]
        for marker in self._markers._known.values():
            found += [marker.at + RESULT_GRACE, marker.expiry]
        return [moment - now for moment in found]


class Real:
    """A server, asked in the same way as the model."""

    def __init__(self, server: Server) -> None:
        self.store = RedisStore(server.url, {})
        self.client = server.client()
        self.clock = StandingClock(self.client)
        self.renew, self.release, self.mark_done = self.store.renew, self.store.release, self.store.mark_done
        self.mark_queued, self.unmark = self.store.mark_queued, self.store.unmark
        self.survey, self.break_lock = self.store.survey, self.store.break_lock
        self.waiters: dict[str, RedisWaiter] = {}
        self.fences: dict[str, int] = {}

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        return self.store.acquire(claim)

    def succeed(self, claim: Claim, *wish: Any) -> Any:
        return self.store.succeed(claim, *wish)

    def queue(self, claim: Claim) -> Grant | Conflict | Done | float:
        waiter = self.store.waiter(claim)
        if claim.token in self.waiters:
            waiter._ears = self.waiters[claim.token]._ears
        self.waiters[claim.token] = waiter
        # On a busy machine a waiter may be deaf at first, and the release then passes it over.
        until(lambda: waiter._listen() or waiter._ears, "the waiter listens")
        return waiter.ask()

    def hang_up(self, claim: Claim) -> None:
        waiter = self.waiters.pop(claim.token, None)
        if waiter is not None and waiter._ears is not None:
            # Without the answer to this, the server might not know yet that nobody listens.
            waiter._ears.send_command("UNSUBSCRIBE")
            while waiter._ears.read_response()[0] != "unsubscribe":
                pass
            waiter.__exit__()

    def was_woken(self, token: str) -> bool:
        ears = self.waiters[token]._ears
        while ears.can_read(timeout=1.0):
            if ears.read_response()[-1] == "free":
                return True
        return False

    def forget_everything(self) -> None:
        self.client.flushall()
        self.fences.clear()

    def close(self) -> None:
        self.store.close()
        self.client.close()


def same(answer: Any, expected: Any) -> bool:
    """The answers mean the same; each store has its own fences, and clocks are read one after the other."""
    if isinstance(expected, float):
        return isinstance(answer, float) and abs(answer - expected) < NOISE
    if isinstance(expected, Grant):
        return isinstance(answer, Grant) and told(answer) == told(expected)
    if isinstance(expected, Conflict):
        return (
            isinstance(answer, Conflict)
            and refused(answer) == refused(expected)
            and same(answer.holders, expected.holders)
        )
    if isinstance(expected, Holder):
        return isinstance(answer, Holder) and same((answer,), (expected,))
    if isinstance(expected, tuple) and all(isinstance(each, Holder) for each in expected):
        # Where two end at the same moment, either may come first; waiters have an order of their own.
        waiters = [holder.token for holder in expected if not holder.fence]
        pairs = list(zip(*(sorted(holders, key=lambda h: h.token) for holders in (answer, expected)), strict=False))
        alike = all(described(one) == described(two) and same(one.expires_in, two.expires_in) for one, two in pairs)
        return alike and len(answer) == len(expected) and waiters in ([], [holder.token for holder in answer])
    return bool(answer == expected)


def told(grant: Grant) -> tuple[Any, ...]:
    return grant.place, grant.took_over, grant.arguments


def seen(survey: Survey) -> tuple[Any, ...]:
    marks = [(mark.state, mark.task_id, mark.task_name) for mark in survey.marks]
    return survey.waiters, sorted(holder.token for holder in survey.holders), marks


def asked(answer: Asked) -> tuple[Any, ...]:
    return sorted(holder.token for holder in answer.holders), answer.dropped


def refused(conflict: Conflict) -> tuple[Any, ...]:
    return conflict.successor, conflict.crowd, conflict.is_own


def described(holder: Holder) -> tuple[Any, ...]:
    return holder.token, holder.task_id, holder.task_name, holder.hostname, holder.pid, holder.attempt
