"""One lock in memory: its places, its queue, and who is next."""

from dataclasses import dataclass, field

from celery_singleton_lock.stores.records import Claim, Succession

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
    arguments: str = ""


@dataclass
class Turn:
    """One waiter in a lock's queue."""

    claim: Claim
    deadline: float


@dataclass
class Successor:
    """Who is next, and with what."""

    task_id: str
    deadline: float
    arguments: str


@dataclass
class Mark:
    """A call that was published."""

    task_id: str
    deadline: float


@dataclass
class Lock:
    """All that is known of one key."""

    limit: int = 0
    expiry: float = 0.0
    places: dict[int, Place] = field(default_factory=dict)
    queue: list[Turn] = field(default_factory=list)
    successor: Successor | None = None
    queued: Mark | None = None
    quiet: Mark | None = None

    def marks(self, now: float) -> list["Mark"]:
        """The call that is queued, then the one that keeps the key quiet."""
        return [mark for mark in (self.queued, self.quiet) if mark is not None and mark.deadline > now]

    def publish(self, task_id: str, now: float, seconds: float, quiet: float) -> None:
        """Mark a call as queued."""
        self.queued = Mark(task_id, now + seconds)
        if quiet:
            self.quiet = Mark(task_id, now + quiet)
        self.expiry = max(self.expiry, now + max(seconds, quiet))

    def withdraw(self, task_id: str, *, afresh: bool) -> None:
        """Let a call be next, or queued, no longer."""
        if self.successor is not None and self.successor.task_id == task_id:
            self.successor = None
        if self.queued is not None and self.queued.task_id == task_id:
            self.queued = None
        if afresh and self.quiet is not None and self.quiet.task_id == task_id:
            self.quiet = None

    def place_of(self, token: str) -> int | None:
        """Which place the token has, expired or not."""
        return next((number for number, place in self.places.items() if place.claim.token == token), None)

    def free_places(self, now: float, limit: int = 0) -> list[int]:
        """Places that nobody holds, lowest first; *limit* counts where nobody has said one yet."""
        numbers = range(1, (self.limit or limit) + 1)
        return [n for n in numbers if n not in self.places or self.places[n].deadline <= now]

    def turns_before(self, token: str, now: float) -> list[Turn]:
        """Living waiters that came before this token, or all if it does not wait; the dead ones are dropped."""
        tokens = [turn.claim.token for turn in self.queue]
        mine = tokens.index(token) if token in tokens else len(tokens)
        ahead = [turn for turn in self.queue[:mine] if turn.deadline > now]
        self.queue[:mine] = ahead
        return ahead

    def successor_before(self, claim: Claim, now: float) -> Successor | None:
        """Who comes before the claim; given up, or replaced by a claim that is newer, nobody does."""
        following, wish = self.successor, claim.succession
        overruled = wish is not None and wish.policy == "replace" and not wish.asked_at
        if following is not None and (following.deadline <= now or overruled):
            self.successor = following = None
        return following

    def ask_to_succeed(self, claim: Claim, wish: Succession, now: float) -> None:
        """Be next, or leave the arguments to the one who is."""
        following, task_id = self.successor, claim.facts.get("task_id", "")
        if following is not None and following.task_id != task_id:
            if not wish.asked_at:
                following.arguments = wish.arguments
            return
        if following is None:
            somebody_newer_runs = any(place.since * 1_000_000 > wish.asked_at for place in self.places.values())
            if wish.asked_at and somebody_newer_runs:
                return
            following = self.successor = Successor(task_id, 0.0, wish.arguments)
        following.deadline = now + PATIENCE
        self.expiry = max(self.expiry, following.deadline)
        living = [p for p in self.places.values() if p.deadline > now and not p.on_hold]
        if wish.policy == "replace" and living and not any(place.makes_way for place in living):
            min(living, key=lambda place: place.since).makes_way = True


def successors_claim(key: str, successor: Successor | Mark) -> Claim:
    """The successor as one who waits."""
    return Claim(key, "", 0.0, facts={"task_id": successor.task_id})
