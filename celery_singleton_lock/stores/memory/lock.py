"""One lock in memory: its places, its queue and its marks, in the words of the scripts for Redis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from celery_singleton_lock.stores.records import Answer, Claim, Needed, Succession

PATIENCE = 30.0


@dataclass
class Place:
    """One of a lock's places, as its last holder has left it."""

    claim: Claim
    fence: int
    since: float
    deadline: float
    on_hold: bool = False
    makes_way: bool = False
    has_heard: bool = False
    copy_has_come: bool = False
    merged: str = ""
    broken_by: str = ""


@dataclass
class Turn:
    """One waiter in a lock's queue."""

    claim: Claim
    deadline: float
    copy_has_come: bool = False


@dataclass
class Mark:
    """A mark of a call that holds no lease; it has no effect after its deadline."""

    task_id: str
    deadline: float
    label: str = field(default="", kw_only=True)


@dataclass
class Successor(Mark):
    """The call that runs next."""

    published: float
    policy: Succession
    task_name: str


@dataclass
class Merged:
    """Arguments for the next run of a task; they stay until a run with them has ended for good."""

    arguments: str
    published: float
    memory: float
    token: str = ""


AnyMark = TypeVar("AnyMark", bound=Mark)


def in_force(mark: AnyMark | None, now: float) -> AnyMark | None:
    """The mark, if its time has not come."""
    return mark if mark is not None and mark.deadline > now else None


@dataclass
class Lock:
    """All that is known of one key; times are the store's, in seconds."""

    expiry: float = 0.0
    places: dict[int, Place] = field(default_factory=dict)
    queue: list[Turn] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)
    successor: Successor | None = None
    queued: Mark | None = None
    joined: Mark | None = None
    quiet: Mark | None = None
    overtaken: dict[str, Mark] = field(default_factory=dict)
    merged: dict[str, Merged] = field(default_factory=dict)
    merged_with: set[str] = field(default_factory=set)
    crowd: set[str] = field(default_factory=set)

    def mark_queued(self, mark: Mark, quiet: float, now: float) -> None:
        """Let a call count as queued, and keep the key quiet for so long, unless another call does."""
        self.queued, still = mark, in_force(self.quiet, now)
        if quiet and (still is None or still.task_id == mark.task_id):
            self.quiet = Mark(mark.task_id, now + quiet)
        self.stay_until(max(mark.deadline, now + quiet))

    def is_idle(self, now: float) -> bool:
        """The lock has nothing that still counts."""
        marks = [in_force(mark, now) for mark in (self.successor, self.queued, self.joined, self.quiet)]
        return not (self.places or self.queue or any(marks) or self._leavings())

    def _leavings(self) -> bool:
        return bool(self.overtaken or self.merged or self.merged_with or self.crowd)

    def stay_until(self, moment: float) -> None:
        """Keep the lock for so long, at least."""
        self.expiry = max(self.expiry, moment)

    def stay_for_the_holder(self, ttl: float, now: float) -> None:
        """Keep the lock for two ttl; if it has nothing but one holder, for no longer than that."""
        marks = (self.successor, self.queued, self.joined, self.quiet)
        if len(self.places) == 1 and not (self.queue or any(marks) or self._leavings()):
            self.expiry = 0.0
        self.stay_until(now + 2 * ttl)

    def place_of(self, token: str) -> int | None:
        """Which place the token has, expired or not."""
        return next((number for number, place in self.places.items() if place.claim.token == token), None)

    def alive(self, now: float) -> list[Place]:
        """Places that are taken, by a holder or as a cool-down, in their order."""
        return [place for _, place in sorted(self.places.items()) if place.deadline > now]

    def holders(self, now: float) -> list[Place]:
        """Places that a holder has."""
        return [place for place in self.alive(now) if not place.on_hold]

    def renew(self, place: Place, ttl: float, now: float) -> Answer:
        """Let it last for a ttl from now; its holder hears whether it has to make way."""
        place.deadline, place.has_heard = now + ttl, place.makes_way
        self.stay_until(now + 2 * ttl)
        if place.broken_by:
            return Answer.BROKEN
        return Answer.REPLACED if place.makes_way else Answer.DONE

    def turns_before(self, token: str, now: float) -> Iterator[Turn]:
        """Living waiters that came before this token, or all if it does not wait; dead waiters are removed."""
        for turn in list(self.queue):
            if turn.claim.token == token:
                return
            if turn.deadline > now:
                yield turn
            else:
                self.leave_queue(turn)

    def turn_of(self, token: str) -> Turn | None:
        """The turn that a waiter has."""
        return next((turn for turn in self.queue if turn.claim.token == token), None)

    def join_queue(self, turn: Turn) -> None:
        """Be the last in the queue, known by its task id as well."""
        self.queue.append(turn)
        if turn.claim.facts.task_id:
            self.turns[turn.claim.facts.task_id] = turn

    def leave_queue(self, turn: Turn) -> bool:
        """Give the turn back; True if another delivery of its message has come meanwhile."""
        self.queue.remove(turn)
        task_id = turn.claim.facts.task_id
        if self.turns.get(task_id) is not turn:
            return False
        del self.turns[task_id]
        return turn.copy_has_come

    def leave_place(self, number: int, min_hold: float, now: float) -> None:
        """Empty a place, or keep it for nobody until its cool-down is over."""
        place = self.places.pop(number)
        free_at = min(place.since, now) + min_hold
        if free_at > now:
            nobody = replace(place.claim, token=f"~{place.claim.token}")
            self.places[number] = Place(nobody, place.fence, place.since, free_at, on_hold=True)
            self.stay_until(free_at)

    def empty(self, place: Place) -> None:
        """Empty the place."""
        self.places = {number: each for number, each in self.places.items() if each is not place}

    def is_taken(self, merged: Merged, now: float) -> bool:
        """A run has taken them, and it still lives, as far as the store knows."""
        number = self.place_of(merged.token)
        return number is not None and self.places[number].deadline > now

    def take_merged(self, place: Place, now: float) -> str:
        """Arguments for the first run that takes them; a run that was published later has newer ones itself."""
        claim = place.claim
        merged = self.merged.get(claim.merges) if claim.merges else None
        if merged is None or self.is_taken(merged, now):
            return ""
        if merged.published <= claim.facts.published / 1_000_000:
            del self.merged[claim.merges]
            return ""
        place.merged, merged.token = claim.merges, claim.token
        self.stay_until(now + merged.memory)
        return merged.arguments

    def merged_into(self, place: Place) -> Merged | None:
        """The arguments that the run has taken, if no newer ones were left meanwhile."""
        merged = self.merged.get(place.merged)
        return merged if merged is not None and merged.token == place.claim.token else None

    def forget_merged(self, place: Place) -> None:
        """A run with them has ended for good."""
        if self.merged_into(place) is not None:
            del self.merged[place.merged]

    def unmark(self, task_id: str, *, quiet: bool) -> None:
        """End what a call has left."""
        if self._replaces(task_id):
            self.let_holders_stay()
        self.unmark_started(task_id)
        if quiet and self.quiet is not None and self.quiet.task_id == task_id:
            self.quiet = None
        self.overtaken.pop(task_id, None)
        self.merged_with.discard(task_id)

    def unmark_started(self, task_id: str) -> None:
        """Remove the call's marks: it is no longer next or queued, and waits for no result."""
        if self.successor is not None and self.successor.task_id == task_id:
            self.successor = None
        if self.queued is not None and self.queued.task_id == task_id:
            self.queued = None
        if self.joined is not None and self.joined.task_id == task_id:
            self.joined = None

    def holder_published_after(self, moment: float, now: float, like: Claim | None = None) -> str | None:
        """Task id of a holder whose call is newer than *moment*; of the same task, if it has to be *like* another."""
        for place in self.holders(now):
            facts = place.claim.facts
            is_meant = like is None or facts.task_name == like.facts.task_name
            # A `Lock` is no call, so no call ends in its favour.
            if is_meant and facts.task_id and (facts.published / 1_000_000 or place.since) > moment:
                return facts.task_id
        return None

    def _replaces(self, task_id: str) -> bool:
        successor = self.successor
        return successor is not None and (successor.task_id, successor.policy) == (task_id, "replace")

    def needs(self, task_id: str, why: Sequence[Needed], now: float) -> bool:
        """Other calls end in favour of this successor, or a holder makes way for it and has heard of that."""
        ends_a_holder = self._replaces(task_id) and any(place.has_heard for place in self.alive(now))
        return ("merged" in why and task_id in self.merged_with) or ("heard" in why and ends_a_holder)

    def let_holders_stay(self) -> None:
        """Take back the successor's request to make way, which holders may not have heard yet; not that of a person."""
        for place in self.places.values():
            if not place.broken_by:
                place.makes_way = place.has_heard = False

    def ask_oldest_to_make_way(self, now: float) -> None:
        """Ask one holder to make way, however often the successor repeats its request."""
        oldest = min(self.holders(now), key=lambda place: place.since, default=None)
        if oldest is not None:
            oldest.makes_way = True
