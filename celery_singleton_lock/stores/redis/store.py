"""Locks in Redis or Valkey: one hash per lock, one script per verb."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from os import getpid
from typing import Any, Self

from redis import ConnectionPool, exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import (
    RELEASES,
    RENEWALS,
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    LockState,
    Outcome,
    Place,
    PublishMode,
    Release,
    Renewal,
    Slot,
)
from celery_singleton_lock.stores.redis.answers import Part, accepted, is_passing
from celery_singleton_lock.stores.redis.connection import REPLY_TIMEOUT, Call, Connections, check_parts, settled
from celery_singleton_lock.stores.redis.encoding import (
    ACQUIRE,
    CLAIM_SLOT,
    MARK_DONE,
    MARK_QUEUED,
    NOBODY,
    RELEASE,
    RENEW,
    RENEWALS_PER_SCRIPT,
    STOPPED_SHORT,
    SURVEY,
    UNMARK,
    Script,
    acquire_arguments,
    answer_in,
    conflict_in,
    look_arguments,
    mark_text,
    milliseconds,
    place_in,
    release_arguments,
    renewals_of,
    slot_in,
    states_in,
    unmark_arguments,
    unreadable_in,
)
from celery_singleton_lock.stores.redis.listener import Listener
from celery_singleton_lock.stores.threads import patched_by

# Seconds that a call takes at most, whatever the store does.
ACQUIRE_BOUND = 5.0
RELEASE_BOUND = 2.0
PUBLISH_BOUND = 2.0
# A publisher waits no longer for the time of the server, because it has a clock of its own.
_TIME_BOUND = 0.5
# Seconds after which the server is asked for its time again: in a minute two clocks drift apart by milliseconds.
_TIME_IS_KNOWN = 60.0
# The same after no answer.
_TIME_IS_UNKNOWN = 10.0
_FIRST_TRY = 2 * REPLY_TIMEOUT
# Seconds for which counts are kept if nobody adds to them.
_COUNTS_ARE_KEPT = 30 * 24 * 3600.0
# Longer than a year, for an entry that is due once a year.
_SLOTS_ARE_KEPT = 400 * 24 * 3600.0


class Store:
    """Locks in one Redis or Valkey server, or in whichever is Sentinel's master.

    Every call is bounded in time and raises `StoreError` if no usable answer came. Such a call may have worked
    nevertheless, so each is safe to repeat: acquire recognises the token it has already granted, and renew and release
    touch nothing that another token holds. A grant or a renewal counts once so many *replicas* have it.
    """

    has_parts = False
    """It has several parts, each of which answers, or is silent, by itself."""
    on_clock_step: Callable[[float], None] | None = None
    """Called with the seconds by which the store's clock was set, in whichever thread finds out."""
    history: int = 500
    """So many unusual events are kept in it; 0 for none."""
    servers: Connections
    replicas: int
    _renewals_per_script = RENEWALS_PER_SCRIPT

    def __init__(self, url: str, options: Mapping[str, Any], replicas: int = 0) -> None:
        self._url = url
        self._options = options
        self.replicas = replicas
        self.servers = self._connect(url, options)
        # By process: after a fork the child begins with nothing.
        self._listeners: dict[int, Listener] = {}

    def _connect(self, url: str, options: Mapping[str, Any]) -> Connections:
        if url.startswith("sentinel://"):
            from celery_singleton_lock.stores.redis.sentinel import SentinelConnections  # noqa: PLC0415 (few use it)

            return SentinelConnections(url, options)
        scheme, _, rest = url.partition("://")
        address = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"

        def make(**arguments: Any) -> ConnectionPool:
            check_parts(url)
            return ConnectionPool.from_url(url, **arguments)

        return Connections(settled(make, options, address), address)

    @property
    def address(self) -> str:
        """Where the store is, fit for logs: never with credentials."""
        return self.servers.address

    @property
    def listener(self) -> Listener:
        """Hears channels of this store; the same object for all who ask in this process."""
        found = self._listeners.get(getpid())
        if found is None:
            # A thread beside greenlets needs connections of its own.
            servers = self.clone().servers if patched_by() is not None else self.servers
            found = self._listeners.setdefault(getpid(), Listener(servers))
        return found

    def part_of(self, key: str) -> Part:  # noqa: ARG002 (for a store that has parts)
        """The part of the store that has *key* now."""
        return self.servers.part

    def clone(self) -> Self:
        return type(self)(self._url, self._options, self.replicas)

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        """Take a free place, or return the holders that have them all; a copy first hears of the run of its message.

        A claim with `turn_for` has a turn if it is refused. Whoever waits here listens at its `channel`, to ask again.
        """
        part = self.part_of(claim.key)
        bound = min(ACQUIRE_BOUND, claim.patience)
        if part.is_away and claim.facts.task_id and not claim.waits_here:
            # Other calls, each in a slot of a pool, do not try for as long as the first one has.
            bound = min(bound, REPLY_TIMEOUT)
        try:
            reply, sent_at, _ = self.request(ACQUIRE, claim.key, acquire_arguments(claim), bound, self.replicas)
        except StoreError:
            part.is_away = True
            raise
        # By now it is known which part that is.
        if type(reply) is int:
            self._compare(claim.key, reply, sent_at)
        else:
            self._compare(claim.key, reply[1], sent_at)
            if reply[0] == "walked":
                return self.acquire(claim)
        return answer_in(claim.key, reply, sent_at)

    def look(self, claim: Claim) -> Place:
        """See whether a message that waits for its turn has to come; and keep its place, if it is to run next."""
        return place_in(self.request(ACQUIRE, claim.key, look_arguments(claim))[0])

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Renewal]:
        """Restart the ttl of each claim; one answer each, in order.

        A claim is renewed only if nobody else can have had its place. Some may have been renewed even if there is no
        answer.
        """
        if not claims:
            return []
        part = self.part_of(claims[0].key)
        (calls, replies), sent_at, _ = part.persist(lambda until: self.renew_once(claims, until), timeout)
        for (keys, _), (*_, now) in zip(calls, replies, strict=True):
            self._compare(keys[0], now, sent_at)
        return [RENEWALS[answer] for *answers, _ in replies for answer in answers]

    def renew_once(self, claims: Sequence[Claim], until: float) -> tuple[list[Call], list[Any]]:
        """The scripts that renew the claims, and the reply to each; the errors are those of redis-py."""
        calls = list[Call](renewals_of(claims, self._renewals_per_script))
        try:
            return calls, accepted(self.servers.run(RENEW, calls, until, self.replicas))
        except exceptions.ClusterCrossSlotError:
            # Only the server knows that its keys are in slots: a plain address may hide a cluster.
            self._renewals_per_script = 1
            if len(calls) == len(claims):
                raise
        return self.renew_once(claims, until)

    def release(
        self, claim: Claim, place: int | None, ending: Ending | None = None, bound: float = RELEASE_BOUND
    ) -> Release:
        """Give back the place, or the turn in the queue; if *place* is None, any place or turn that the token has.

        In the same step the store keeps *ending* if a later delivery is known or likely, or if the lease had been lost,
        because then nobody knows.
        """
        reply, _, tries = self.request(RELEASE, claim.key, release_arguments(claim, place, ending), bound)
        try:
            answer = RELEASES[reply]
        except KeyError:
            answer = RELEASES[reply - STOPPED_SHORT]
            # The place is free. A call that lives behind the dead looks by itself, too.
            with suppress(StoreError):
                self.call_next(claim.key)
        # An earlier try may have released it, and its answer was lost.
        return replace(answer, lost=None) if tries > 1 else answer

    def call_next(self, key: str) -> None:
        """Call those whose turn it is, in steps: a script that passes a long line of the dead blocks the server."""
        while self.request(RELEASE, key, RELEASE.arguments(token=NOBODY, words="min_hold=0"))[0] >= STOPPED_SHORT:
            pass

    def mark_queued(
        self,
        key: str,
        task_id: str,
        seconds: float,
        *,
        limit: int,
        cooldown: float,
        label: str = "",
        sent: PublishMode = "",
        queue: str = "",
        published: int = 0,
        due_for: float = 0.0,
        newest: bool = False,
    ) -> Holder | None:
        """Mark a call as the one that is queued, for so many seconds, and return None; or the call that is in its way.

        That is the call that is queued or keeps the key in its cool-down; or a run, if *limit* is not 0 and at least so
        many hold the key. From now on no other call of the key is published for *cooldown* seconds. *published* is
        found with the mark, as `Holder.published`; *queue* and *due_for* are found as fields of `LeftMark`. If it is to
        be the *newest*, no queued call that was published before it is in its way: it takes that call's place.
        """
        words = f"limit={limit}{f' sent={sent}' if sent else ''}{' newest' if newest else ''}"
        found = self._marked(key, task_id, seconds, words, cooldown, mark_text(label, queue, published, due_for))
        return found if isinstance(found, Holder) else None

    def mark_newest(
        self,
        key: str,
        task_id: str,
        seconds: float,
        *,
        cooldown: float,
        label: str,
        queue: str = "",
        sent: PublishMode,
        published: int,
        due_for: float,
        due_in: float,
        within: float,
    ) -> Holder | float:
        """Mark a call as `mark_queued` does, and return by how many seconds sooner than in *due_in* it has to be due.

        That is no later than *within* seconds after the first of the calls of which each has taken the place of the one
        before it, and this call that of the last.
        """
        words = f"limit=0 newest due_in={milliseconds(due_in)} within={milliseconds(within)}"
        words += f" sent={sent}" if sent else ""
        return self._marked(key, task_id, seconds, words, cooldown, mark_text(label, queue, published, due_for))

    def _marked(
        self, key: str, task_id: str, seconds: float, words: str, cooldown: float, about: str
    ) -> Holder | float:
        times = {"lasts": milliseconds(seconds), "cooldown": milliseconds(cooldown)}
        arguments = MARK_QUEUED.arguments(task_id=task_id, **times, words=words, about=about)
        reply = self.request(MARK_QUEUED, key, arguments, PUBLISH_BOUND)[0]
        if reply == 1:
            return 0.0
        return float(reply[1]) / 1_000_000 if reply[0] == "sooner" else conflict_in(key, reply).first

    def unmark(
        self,
        key: str,
        task_id: str,
        *,
        ends_cooldown: bool = True,
        call_ended: bool = False,
        heeds: bool = False,
        claim: Claim | None = None,
    ) -> Conflict | None:
        """End what a call has left: it is queued and next no longer, and its cool-down ends if *ends_cooldown*.

        If the *call_ended*, its run stands for no other call from now on, although that run may still hold the key.

        If it *heeds*, leave everything if another call is queued, and return the conflict with it; with a *claim* that
        `succeeds`, only if that one is newer, or if a newer one has begun.
        """
        says = {"ends_cooldown": ends_cooldown, "call_ended": call_ended, "heeds": heeds}
        reply = self.request(UNMARK, key, unmark_arguments(task_id, claim, **says))[0]
        return None if reply == 1 else conflict_in(key, reply)

    def mark_done(self, key: str, marker: str, attempt: int, outcome: Outcome, seconds: float) -> None:
        """Write the marker of a message, unless more is known: a later attempt, or the last word on this one."""
        lasts = milliseconds(seconds)
        arguments = MARK_DONE.arguments(marker=marker, attempt=str(attempt), outcome=outcome, lasts=lasts)
        self.request(MARK_DONE, key, arguments)

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Claim a slot, or note when it was sent, or forget its entry; False if that was done, or others lead."""
        moments = {"due": str(slot.due), "fence": str(slot.fence), "sent": str(slot.sent)}
        arguments = CLAIM_SLOT.arguments(entry=slot.entry, **moments, lasts=milliseconds(_SLOTS_ARE_KEPT))
        return bool(self.request(CLAIM_SLOT, key, arguments)[0])

    def slots(self, key: str) -> dict[str, Slot]:
        """The last slot of each entry."""
        found = self.fields(key).items()
        return {entry: slot_in(entry, value) for entry, value in found}

    def fields(self, key: str) -> dict[str, str]:
        """All of a hash, such as that of slots or of counts."""
        reply = self.call("HGETALL", key)
        return dict(zip(reply[::2], reply[1::2], strict=True))

    def count(self, key: str, sums: Mapping[str, int], timeout: float) -> None:
        """Add to the fields of a hash of counts; twice if an answer is lost."""
        first, *others = [("HINCRBY", key, field, str(amount)) for field, amount in sums.items()]
        # Second, so that a connection that breaks leaves no hash without an expiry.
        commands = [first, ("PEXPIRE", key, milliseconds(_COUNTS_ARE_KEPT)), *others]
        self.servers.part.persist(lambda until: accepted(self.servers.ask(key, commands, until)), timeout)

    def record(self, key: str, entries: Collection[str], timeout: float) -> None:
        """Add texts to a history, which is a ring of `history` fields; twice if an answer is lost."""
        newest = list(entries)[-self.history :]
        numbered = ("HINCRBY", key, "last", str(len(newest))), ("PEXPIRE", key, milliseconds(_COUNTS_ARE_KEPT))

        def write(until: float) -> None:
            last, _ = accepted(self.servers.ask(key, numbered, until))
            numbers = range(last - len(newest) + 1, last + 1)
            fields = [(str(number % self.history), text) for number, text in zip(numbers, newest, strict=True)]
            accepted(self.servers.ask(key, [("HSET", key, *chain(*fields))], until))

        self.servers.part.persist(write, timeout)

    def survey(self, keys: Sequence[str], *, tolerant: bool = False) -> list[LockState]:
        """Look at each of the keys, and change nothing.

        If *tolerant*, an error of the server about one key is its `problem`, and hides no other.
        """
        states = unreadable_in(keys) if tolerant else {}
        calls = [([key], ()) for key in keys if key not in states]
        if calls:
            found, _, _ = self.servers.part.persist(
                lambda until: states_in(calls, self.servers.run(SURVEY, calls, until), tolerant=tolerant), RELEASE_BOUND
            )
            states |= found
        return [states[key] for key in keys]

    def holders(self, key: str) -> list[Holder]:
        """All holders of *key*, cool-downs too; the lease that ends first comes first."""
        return list(self.survey([key])[0].places)

    def broken_by(self, claim: Claim) -> str | None:
        """The person that has asked this holder to end, if there is one."""
        by: str | None = self.call("HGET", claim.key, f"broken:{claim.token}")
        return by

    def replaced_by(self, claim: Claim) -> str | None:
        """The task id of the successor that has asked this holder to end, if there is one."""
        by: str | None = self.call("HGET", claim.key, f"replaced:{claim.token}")
        return by

    def request(
        self, script: Script, key: str, arguments: Sequence[str], bound: float = RELEASE_BOUND, replicas: int = 0
    ) -> tuple[Any, float, int]:
        """The reply to a script about *key*; when it was asked for; and how many tries may have worked.

        A single server that is well answers the first one. Otherwise a `Part` asks again and again.
        """
        part = self.part_of(key)
        sent_at = clock()
        tries = 0
        if not (self.has_parts or replicas or part.is_away) and bound >= _FIRST_TRY:
            try:
                (reply,) = self.servers.ask(
                    key, (("EVALSHA", script.digest, "1", key, *arguments),), sent_at + _FIRST_TRY
                )
            except exceptions.RedisError as error:
                if not is_passing(error):
                    raise part.unanswered(error) from error
                tries = 1
            else:
                part.has_answered = True
                # What was refused was not done.
                if not isinstance(reply, exceptions.RedisError):
                    return reply, sent_at, 1
        calls = [((key,), arguments)]
        replies, sent_at, more = part.persist(
            lambda until: accepted(self.servers.run(script, calls, until, replicas)), bound - (clock() - sent_at)
        )
        return replies[0], sent_at, tries + more

    def call(self, *command: str, bound: float = RELEASE_BOUND, servers: Connections | None = None) -> Any:
        """The reply to a command about the key that follows its name."""
        key = command[1] if len(command) > 1 else ""
        asked = servers or self.servers
        return self.servers.part.persist(lambda until: accepted(asked.ask(key, [command], until))[0], bound)[0]

    def time(self, key: str) -> int | None:
        """The time of the server that has *key*, in microseconds; None if it has never told.

        A process asks once a minute at most, a worker hardly ever: each grant and each renewal tells the time as well.
        """
        part = self.part_of(key)
        now = part.clock.now(_TIME_IS_KNOWN)
        if now is not None or clock() < part.clock.ask_again_at:
            return now or part.clock.now()
        try:
            (seconds, more), sent_at, _ = part.persist(
                lambda until: accepted(self.servers.ask(key, [("TIME",)], until))[0], _TIME_BOUND
            )
            self._compare(key, int(seconds) * 1_000_000 + int(more), sent_at)
        except StoreError:
            part.clock.ask_again_at = clock() + _TIME_IS_UNKNOWN
        # By now it is known which part that is.
        return self.part_of(key).clock.now()

    def close(self) -> None:
        self.servers.close()

    def _compare(self, key: str, now: int, sent_at: float) -> None:
        step = self.part_of(key).clock.compare(now, sent_at)
        if step and self.on_clock_step is not None:
            self.on_clock_step(step)
