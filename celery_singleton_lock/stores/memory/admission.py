"""One claim before a lock in memory; acquire.lua does the same for Redis."""

from collections.abc import Callable

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.memory.described import A_FEW, described, described_turn
from celery_singleton_lock.stores.memory.lock import Lock, Mark, Place, Successor, Turn, in_force
from celery_singleton_lock.stores.records import Claim, Conflict, Grant, Holder, Sent

_GRACE = 2.0
_NEAR = 8
_FAR = 20.0


class Admission:
    """The calls that go before the claim, and the answer to the claim.

    Arguments:
        lock: The lock.
        claim: The claim.
        now: By the store's clock.
        next_fence: Gives a fence that is greater than all before.
        waits: It takes a turn if it is refused.
    """

    def __init__(self, lock: Lock, claim: Claim, now: float, next_fence: Callable[[], int], *, waits: bool) -> None:
        self._lock, self._claim, self._now, self._waits = lock, claim, now, waits
        self._next_fence = next_fence
        self._sent_at = clock()
        self._alive = lock.alive(now)
        self._mine = claim.facts.task_id
        self._successor: Successor | None = in_force(lock.successor, now)
        self._overtaken_by: Mark | None = None
        self._own: Place | None = None

    def held_by_itself(self) -> Conflict | None:
        """Another delivery of the same message has a place; a later attempt takes a cool-down over, though."""
        for place in list(self._alive):
            if self._mine == place.claim.facts.task_id != "" and place.claim.token != self._claim.token:
                is_later = self._claim.facts.attempt > place.claim.facts.attempt
                if not place.on_hold:
                    place.copy_has_come |= not is_later
                    return self._conflict(described([place], self._now), is_own=True)
                if is_later:
                    self._alive.remove(place)
                    self._own = place
        return None

    def waits_by_itself(self) -> Conflict | None:
        """Another delivery of the same message has a turn."""
        turn = self._lock.turns.get(self._mine)
        if turn is None or turn.claim.token == self._claim.token or turn.deadline <= self._now:
            return None
        turn.copy_has_come = True
        return self._conflict([described_turn(self._claim.key, turn, self._now)], is_own=True)

    def answer(self) -> Grant | Conflict | float:
        """A place, if more places are free than the calls that go before want."""
        number = self._lock.place_of(self._claim.token)
        if number is not None:
            return self._grant_again(number)
        free = self._claim.limit - len(self._alive)
        before = self._before(free)
        if free > len(before):
            return self._grant()
        self._stay_queued()
        if self._waits:
            return self._take_turn([turn.deadline for turn in before] if free > 0 else [])
        queued = in_force(self._lock.queued, self._now)
        if self._claim.joins and queued is not None and queued.task_id == self._mine:
            self._lock.joined, self._lock.queued = queued, None
        if self._claim.crowds:
            self._lock.crowd.add(self._mine)
        turns = [described_turn(self._claim.key, turn, self._now) for turn in before]
        return self._conflict(described(self._alive, self._now)[:A_FEW] or turns[:A_FEW])

    def _before(self, free: int) -> list[Turn | Mark]:
        """A run that is here goes before a message that may come: a waiter yields to no message."""
        lock, before = self._lock, list[Turn | Mark]()
        overtaken_by = in_force(lock.overtaken.get(self._mine), self._now) if self._claim.asked else None
        if overtaken_by is not None:
            self._overtaken_by = overtaken_by
            return [overtaken_by] * max(1, free)
        queued = in_force(lock.queued, self._now)
        # A queued call does not wait for a later successor, because that heeds its mark: no waiting for each other.
        is_queued = queued is not None and queued.task_id == self._mine
        successor = None if is_queued and not self._is_merged_with_the_successor() else self._successor
        marks = () if self._waits else (successor, queued if self._claim.heeds_queued else None)
        before += [mark for mark in marks if mark is not None and mark.task_id != self._mine]
        if len(before) < free:
            for turn in lock.turns_before(self._claim.token, self._now):
                before.append(turn)
                if len(before) >= free:
                    break
        return before

    def _is_merged_with_the_successor(self) -> bool:
        """A refusal ends it: `rerun` leaves its arguments; with `replace` a newer successor runs in its place."""
        claim, successor = self._claim, self._successor
        if successor is None:
            return False
        if claim.succeeds == "rerun":
            return successor.policy == "rerun" and successor.task_name == claim.merges
        published = claim.facts.published / 1_000_000
        return claim.succeeds == "replace" and 0 < published <= successor.published

    def _stay_queued(self) -> None:
        lock, until = self._lock, self._now + self._claim.queued_for
        for mark in (in_force(lock.queued, self._now), in_force(lock.joined, self._now)):
            if mark is not None and mark.task_id == self._mine:
                mark.deadline = max(mark.deadline, until)
                lock.stay_until(mark.deadline)

    def _grant(self) -> Grant:
        lock, claim, now = self._lock, self._claim, self._now
        number = self._free_place()
        corpse = lock.places.get(number)
        place = lock.places[number] = Place(claim, self._next_fence(), now, now + claim.ttl)
        arguments = lock.take_merged(place, now)
        if lock.successor is not None and lock.successor.task_id == self._mine:
            # It has got another place than that of the holder that it has asked for.
            lock.let_holders_stay()
        lock.unmark_started(self._mine)
        # If it may be a copy, its original may have left something, and died.
        if claim.may_be_copy or claim.asked:
            lock.merged_with.discard(self._mine)
        turn = lock.turn_of(claim.token)
        if turn is not None:
            place.copy_has_come = lock.leave_queue(turn)
        if claim.may_be_copy or claim.returns:
            lock.crowd.discard(self._mine)
        lock.stay_for_the_holder(claim.ttl, now)
        took_over = corpse is not None and not corpse.on_hold
        return Grant(number, place.fence, took_over, now, self._sent_at, arguments)

    def _free_place(self) -> int:
        places = self._lock.places
        taken = [number for number, place in places.items() if any(place is other for other in self._alive)]
        own = [number for number, place in places.items() if place is self._own]
        return own[-1] if own else next(number for number in range(1, len(places) + 2) if number not in taken)

    def _grant_again(self, number: int) -> Grant:
        place = self._lock.places[number]
        place.deadline = self._now + self._claim.ttl
        self._lock.stay_until(self._now + 2 * self._claim.ttl)
        merged = self._lock.merged_into(place)
        return Grant(number, place.fence, False, place.since, self._sent_at, merged.arguments if merged else "")

    def _take_turn(self, deadlines: list[float]) -> float:
        queue, deadlines = self._lock.queue, [*deadlines, *(place.deadline for place in self._alive)]
        wait = min([self._claim.ttl, *(deadline - self._now for deadline in deadlines)])
        tokens = [turn.claim.token for turn in queue]
        if self._claim.token not in tokens:
            self._lock.join_queue(Turn(self._claim, 0.0))
            tokens.append(self._claim.token)
        number = tokens.index(self._claim.token)
        if number >= _NEAR:
            wait = max(wait, _FAR)
        queue[number].deadline = self._now + wait + _GRACE
        self._lock.stay_until(queue[number].deadline)
        return float(wait)

    def _conflict(self, holders: list[Holder], *, is_own: bool = False) -> Conflict:
        successor = next((mark.task_id for mark in (self._overtaken_by, self._successor) if mark), None)
        at = int(self._now * 1_000_000)
        return Conflict(self._claim.key, tuple(holders), successor, at, len(self._lock.crowd), is_own=is_own)


def in_the_way(key: str, lock: Lock, task_id: str, limit: int, now: float, sent: Sent = "") -> Holder | None:
    """The calls that keep another one from being published; mark_queued.lua does the same for Redis."""
    queued, still, joined = (in_force(mark, now) for mark in (lock.queued, lock.quiet, lock.joined))
    is_repeated = queued is not None and queued.task_id == task_id
    if queued is not None and not is_repeated and sent != "over":
        return described_turn(key, queued, now)
    if joined is not None and joined.task_id != task_id:
        return described_turn(key, joined, now)
    held = [] if is_repeated else described(lock.alive(now), now)
    if limit and len(held) >= limit:
        return held[0]
    if still is not None and still.task_id != task_id and not sent:
        return held[0] if held else described_turn(key, still, now)
    return None
