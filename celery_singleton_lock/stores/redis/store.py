"""Locks in Redis or Valkey: one hash per lock, one script per verb."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from redis import exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, PUBLISH_BOUND, RELEASE_BOUND, Store, Waiter, clock
from celery_singleton_lock.stores.records import (
    Answer,
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    Outcome,
    Sent,
    Slot,
)
from celery_singleton_lock.stores.redis.clock import ServerClock
from celery_singleton_lock.stores.redis.connection import (
    REPLY_TIMEOUT,
    Command,
    Connections,
    RetryLoop,
    TooFewReplicas,
    pool_of,
    replicated,
    wait_for,
)
from celery_singleton_lock.stores.redis.encoding import (
    Script,
    arguments_of,
    conflict_in,
    grant_in,
    holders_in,
    microseconds,
    milliseconds,
    release_arguments,
    renewals_of,
)
from celery_singleton_lock.stores.redis.errors import accepted
from celery_singleton_lock.stores.redis.inventory import SURVEY, RedisInventory

ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew")
MARK_QUEUED = Script("mark_queued")
UNMARK = Script("unmark")
MARK_DONE = Script("mark_done")
CLAIM_SLOT = Script("claim_slot")

# A refusal that begins so is about one key alone: another program has written it.
OVERWRITTEN = "WRONGTYPE"
# Seconds after which the rest of a broken-off trial expires.
_TRIAL_TTL = 1.0
# So many slots are looked at that one server of a cluster does not have all of them by luck.
_OTHER_SLOTS = 20
# A poll takes no more than 24 days at once.
_LONGEST_SLEEP = 3600.0
# Seconds of the bound for listening, so that enough of it is left for the question.
_LISTEN_BOUND = 2.0
# A server of a cluster says so when its channel has moved to another server; the next `ask` listens there.
_LEFT = "sunsubscribe"
# Longer than a year, for an entry that is due once a year.
_SLOTS_ARE_KEPT = 400 * 24 * 3600.0


class RedisWaiter(Waiter):
    """A turn in a queue, with a connection that hears the release."""

    def __init__(
        self, servers: Connections, claim: Claim, ask: Callable[[float], Grant | Conflict | Done | float]
    ) -> None:
        self._servers = servers
        self._channel = f"{claim.key}:{claim.token}"
        self._ask = ask
        self._patience = claim.patience
        self._ears: Any = None

    def __exit__(self, *_: object) -> None:
        """Disconnect, so that the server passes over a turn that may be left."""
        if self._ears is not None:
            self._ears.disconnect()

    def ask(self) -> Grant | Conflict | Done | float:
        """Listen first, and then run acquire.lua to take a turn, so that no wake-up is missed."""
        give_up_at = clock() + ACQUIRE_BOUND
        self._listen()
        return self._ask(give_up_at - clock())

    def sleep(self, seconds: float) -> None:
        """Wait for a message on the channel."""
        try:
            if self._ears is not None and self._ears.can_read(timeout=min(seconds, _LONGEST_SLEEP)):
                message = self._ears.read_response()
                if message[0] == _LEFT:
                    self._ears.disconnect()
                    self._ears = None
                    return
        except exceptions.RedisError:
            self._ears.disconnect()
            self._ears = None
        if self._ears is None:
            # It cannot hear a release, so it looks a little more often; `ask` reports a broken store.
            time.sleep(min(seconds, REPLY_TIMEOUT))

    def _listen(self) -> None:
        if self._ears is None:
            with suppress(exceptions.RedisError):
                self._ears = self._servers.listen(self._channel, min(_LISTEN_BOUND, self._patience))


class RedisStore(RedisInventory, Store):
    """Locks in one Redis or Valkey server, or in whichever is Sentinel's master.

    Arguments:
        url: `redis://`, `rediss://` or `unix://`, as redis-py reads it, or `sentinel://`.
        options: Further arguments for redis-py's connections. Timeouts and
            retries cannot be set: the bounds of the contract rest on them.
        replicas: How many replicas must have a grant or a renewal before it counts.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    # One server, whose word is enough.
    _is_plain = False

    def __init__(self, url: str, options: Mapping[str, Any], replicas: int = 0) -> None:
        self._url, self._options, self._replicas = url, options, replicas
        self._clock = ServerClock(self._stepped)
        self._servers = self._connect(url, options)
        self._loop = RetryLoop(self._servers.address, self._servers.pool.connection_kwargs)

    def _connect(self, url: str, options: Mapping[str, Any]) -> Connections:
        self._is_plain = not self._replicas
        if url.startswith("sentinel://"):
            from celery_singleton_lock.stores.redis.sentinel import SentinelConnections  # noqa: PLC0415 (few use it)

            return SentinelConnections(url, options, self._reconnected)
        scheme, _, rest = url.partition("://")
        address = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
        return Connections(pool_of(url, options, address), address, self._reconnected)

    @property
    def address(self) -> str:
        """Scheme, host, port and database; of Sentinel, all hosts and the name of the master."""
        return self._servers.address

    def twin(self) -> Self:
        """Another client of the same store."""
        return type(self)(self._url, self._options, self._replicas)

    def try_out(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:
        """Use each command, run acquire.lua and release.lua, and listen."""
        self._loop.persist(partial(self._try_out, key), bound)
        self._servers.weigh(ttls)

    def now(self) -> int:
        """Ask the server for its time."""
        return microseconds(self._call("TIME"))

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        """Run acquire.lua."""
        reply, sent_at = None, clock()
        if self._is_plain and not (self._clock.is_behind or self._loop.is_away) and claim.patience > REPLY_TIMEOUT:
            command = ("EVALSHA", ACQUIRE.digest, "1", claim.key, *arguments_of(claim))
            try:
                (reply,) = self._servers.ask(claim.key, (command,), claim.patience)
            except exceptions.RedisError as error:
                if not self._loop.may_pass(error):
                    raise self._loop.unanswered(error) from error
            else:
                self._loop.has_answered = True
                if type(reply) is int and self._clock.goes_on(reply, sent_at):
                    return Grant(1, reply, took_over=False, since=reply / 1_000_000, sent_at=sent_at)
                reply = self._believed(reply, claim.key)
        if reply is None:
            answer = self._take(claim, ACQUIRE_BOUND - (clock() - sent_at))
        else:
            answer = self._answer(claim, reply, sent_at)
        assert not isinstance(answer, float)
        return answer

    def waiter(self, claim: Claim) -> Waiter:
        """Queue with acquire.lua and listen on a channel of its own."""
        return RedisWaiter(self._servers, claim, lambda bound: self._take(claim, bound, waits=True))

    def renew(self, claims: Sequence[Claim], timeout: float) -> Sequence[Answer | StoreError]:
        """Run renew.lua, all parts in one go."""
        calls = list(renewals_of(claims))
        run = partial(self._servers.run, RENEW, calls, replicas=self._replicas)
        replies, sent_at = self._loop.persist(lambda left: accepted(run(timeout=left)), timeout) if calls else ([], 0.0)
        if replies:
            self._clock.tells(replies[-1][-1], sent_at)
        self._servers.weigh(claim.ttl for claim in claims)
        return [ANSWERS[answer] for *answers, _ in replies for answer in answers]

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Run survey.lua for each, because the deadlines of a server count by its own clock."""
        ask = partial(self._servers.run, SURVEY, [([claim.key], ("",)) for claim in claims])
        replies, _ = self._loop.persist(lambda left: accepted(ask(left), OVERWRITTEN), timeout)
        found = list[float | None]()
        for claim, reply in zip(claims, replies, strict=True):
            holders = [] if isinstance(reply, Exception) else holders_in(claim.key, reply[0], reply[4])
            found.append(next((each.expires_in for each in holders if each.token == claim.token), None))
        return found

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        """Run release.lua, until the next waiters have been told."""
        arguments = release_arguments(claim, place, ending)
        tries = 0
        if self._is_plain and bound > REPLY_TIMEOUT:
            command = ("EVALSHA", RELEASE.digest, "1", claim.key, *arguments)
            try:
                (reply,) = self._servers.ask(claim.key, (command,), bound)
            except exceptions.RedisError as error:
                if not self._loop.may_pass(error):
                    raise self._loop.unanswered(error) from error
                tries = 1
                bound -= REPLY_TIMEOUT
            else:
                if type(reply) is int:
                    return ANSWERS[reply]

        def ask(timeout: float) -> Any:
            nonlocal tries
            tries += 1
            return accepted(self._servers.run(RELEASE, [([claim.key], arguments)], timeout))[0]

        reply, _ = self._of(claim.key)[0].persist(ask, bound)
        answer = ANSWERS[reply[0] if isinstance(reply, list) else reply]
        if isinstance(reply, list):
            self._wake_the_rest(claim, bound)
        if tries > 1 and answer <= 0:
            # An earlier try may have released it, and its answer was lost.
            return Answer.DONE if ending is None else Answer.MARKED
        return answer

    def _wake_the_rest(self, claim: Claim, bound: float) -> None:
        give_up_at = clock() + bound
        # It is released even if this fails. Waiters look after their turn by themselves, if rarely.
        with suppress(StoreError):
            while isinstance(self._ask(RELEASE, claim.key, (claim.token, "0", "0 0")), list):
                if clock() > give_up_at:
                    break

    def mark_queued(
        self, key: str, task_id: str, seconds: float, *, limit: int, quiet: float, label: str = "", sent: Sent = ""
    ) -> Holder | None:
        """Run mark_queued.lua."""
        in_the_way = f"{limit} {sent}".strip()
        arguments = task_id, milliseconds(seconds), in_the_way, milliseconds(quiet), *filter(None, [label])
        reply = self._ask(MARK_QUEUED, key, arguments, PUBLISH_BOUND)
        return None if reply == 1 else conflict_in(key, reply).first

    def unmark(self, key: str, task_id: str, *, quiet: bool = True, heeds: bool = False) -> Conflict | None:
        """Run unmark.lua."""
        words = " ".join(word for word, is_said in {"quiet": quiet, "heeds": heeds}.items() if is_said)
        reply = self._ask(UNMARK, key, (task_id, words))
        return None if reply == 1 else conflict_in(key, reply)

    def mark_done(self, key: str, marker: str, attempt: int, outcome: Outcome, seconds: float) -> None:
        """Run mark_done.lua."""
        self._ask(MARK_DONE, key, (marker, str(attempt), outcome, milliseconds(seconds)))

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Run claim_slot.lua."""
        moments = (str(slot.due), str(slot.fence), str(slot.sent), milliseconds(_SLOTS_ARE_KEPT))
        return bool(self._ask(CLAIM_SLOT, key, (slot.entry, *moments)))

    def slots(self, key: str) -> dict[str, Slot]:
        """Read the hash."""
        fields = self._call("HGETALL", key)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return {entry: Slot(entry, *map(int, value.split(" "))) for entry, value in pairs}

    def close(self) -> None:
        """Close the idle connections."""
        self._servers.close()

    def _take(
        self, claim: Claim, bound: float = ACQUIRE_BOUND, *, waits: bool = False
    ) -> Grant | Conflict | Done | float:
        loop, seen = self._of(claim.key)
        lowest = seen.lowest_fence()
        arguments = arguments_of(claim, waits=waits, lowest_fence=lowest)

        def ask(timeout: float) -> Any:
            return self._ask_for_place(claim.key, arguments, timeout)

        # A `Lock`, and a run with a turn in the queue, persists.
        is_one_of_many = bool(claim.facts.task_id) and not waits
        reply, sent_at = loop.persist(ask, min(bound, claim.patience), is_one_of_many=is_one_of_many)
        return self._answer(claim, reply, sent_at, bound, is_above=bool(lowest))

    def _ask_for_place(self, key: str, arguments: Sequence[str], timeout: float) -> Any:
        give_up_at = clock() + timeout
        try:
            (reply,) = accepted(self._servers.run(ACQUIRE, [([key], arguments)], timeout, self._replicas))
        except TooFewReplicas as error:
            # A conflict needs no replica.
            (reply,) = accepted(error.replies)
            if isinstance(reply, int) or reply[0] == GRANTED:
                raise
        if _is_conflict(reply):
            self._servers.make_sure(key, give_up_at - clock())
        return reply

    def _believed(self, reply: Any, key: str) -> Any:
        """The reply, or None if it has to be asked for again: a refusal, or the conflict of a former master."""
        try:
            (reply,) = accepted([reply])
            if _is_conflict(reply):
                self._servers.make_sure(key, REPLY_TIMEOUT)
        except exceptions.RedisError:
            return None
        return reply

    def _answer(
        self, claim: Claim, reply: Any, sent_at: float, bound: float = ACQUIRE_BOUND, *, is_above: bool = False
    ) -> Grant | Conflict | Done | float:
        _, seen = self._of(claim.key)
        seen.tells(reply if isinstance(reply, int) else reply[1], sent_at)
        if isinstance(reply, int) or reply[0] == GRANTED:
            grant = grant_in(reply, sent_at)
            return grant if seen.has_given(grant.fence) or is_above else self._take_above(claim, bound, grant)
        if reply[0] == _QUEUED:
            return float(reply[2]) / 1_000_000
        return Done(*reply[2:]) if reply[0] == _DONE else conflict_in(claim.key, reply)

    def _of(self, key: str) -> tuple[RetryLoop, ServerClock]:  # noqa: ARG002 (there is one server)
        """The data about the server that has *key*."""
        return self._loop, self._clock

    def _take_above(self, claim: Claim, bound: float, grant: Grant) -> Grant | Conflict | Done | float:
        """Ask again for a higher fence, because the first grant has shown that the server's clock was set back."""
        again = self._take(claim, bound)
        return replace(again, took_over=grant.took_over) if isinstance(again, Grant) else again

    def _ask(self, script: Script, key: str, arguments: Sequence[str], bound: float = RELEASE_BOUND) -> Any:
        run = partial(self._servers.run, script, [([key], arguments)])
        return self._of(key)[0].persist(lambda left: accepted(run(left))[0], bound)[0]

    def _try_out(self, key: str, timeout: float) -> None:
        """Use each command, take a lock and queue for it, release it, and hear of that.

        All in one go, for a server that is far away.
        """
        give_up_at = clock() + timeout
        holder, waiter = Claim(key, "holder", _TRIAL_TTL), Claim(key, "waiter", _TRIAL_TTL)
        steps = [
            (ACQUIRE, arguments_of(holder)),
            (ACQUIRE, arguments_of(waiter, waits=True)),
            (RELEASE, (holder.token, "0", "1 0")),
            (RELEASE, (waiter.token, "0", "0 0")),
        ]
        calls = [(self._servers.spelled(script), ("1", key, *arguments)) for script, arguments in steps]
        commands = [*commands_on(key, self._servers.publish), *self._other_commands(key)]
        ears = self._servers.listen(f"{key}:{waiter.token}", timeout)
        try:
            known = [("EVALSHA", script.digest, *rest) for script, rest in calls]
            replies = self._servers.ask(key, [*commands, *known], give_up_at - clock())
            if any(isinstance(reply, exceptions.NoScriptError) for reply in replies[-len(calls) :]):
                accepted(replies[: -len(calls)])
                texts = [("EVAL", script.text, *rest) for script, rest in calls]
                replies = self._servers.ask(key, texts, give_up_at - clock())
            accepted(replies)
            if not ears.can_read(timeout=max(0.0, give_up_at - clock())):
                raise exceptions.TimeoutError("the waiter was not woken in time")
        finally:
            ears.disconnect()
        if self._replicas:
            writing = [("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), wait_for(self._replicas, timeout)]
            replicated(self._servers.ask(key, writing, give_up_at - clock()), self._replicas)

    def _other_commands(self, key: str) -> list[Command]:
        # A server that answers for all of these keys is not one of several in a cluster.
        return [("HLEN", with_tag(key, number)) for number in range(_OTHER_SLOTS)]

    def _reconnected(self) -> None:
        if self.on_reconnect is not None:
            self.on_reconnect()

    def _stepped(self, seconds: float) -> None:
        if self.on_clock_step is not None:
            self.on_clock_step(seconds)


def _is_conflict(reply: Any) -> bool:
    return not isinstance(reply, int) and reply[0] not in (GRANTED, _QUEUED, _DONE)


def with_tag(key: str, number: int) -> str:
    """A key beside *key*, with a hash tag of its own, so it is in another slot."""
    return f"{key.removesuffix('}')}:{number}}}"


def commands_on(key: str, publish: str) -> list[tuple[str, ...]]:
    """Each command that our scripts and clients need, once, because a user may lack any right. They leave nothing."""
    writing = [("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), ("HSETNX", key, "b", "0"), ("HINCRBY", key, "a", "1")]
    reading = [("HGET", key, "a"), ("HMGET", key, "a"), ("HEXISTS", key, "a")]
    reading_all = [("HGETALL", key), ("HRANDFIELD", key, "1"), ("HLEN", key), ("EXISTS", key)]
    others = [("TIME",), ("EVAL", "return 1", "0"), (publish, f"{key}:nobody", "")]
    return [*others, ("DEL", key), *writing, *reading, *reading_all, ("HDEL", key, "a", "b")]


GRANTED, _QUEUED, _DONE = 1, 2, 3
ANSWERS = {int(answer): answer for answer in Answer}
