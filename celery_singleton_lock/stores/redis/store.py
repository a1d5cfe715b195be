"""Locks in Redis or Valkey, each in one hash that scripts change."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from os import getpid
from typing import Any, Literal, Self, cast

from redis import ConnectionPool, exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores import records
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Ending, Grant, Holder, LockState, Verdict
from celery_singleton_lock.stores.redis import Input, encoding, packed
from celery_singleton_lock.stores.redis.answers import is_passing, problem_of
from celery_singleton_lock.stores.redis.connection import REPLY_TIMEOUT, Connections, check_parts, settled
from celery_singleton_lock.stores.redis.encoding import Script, milliseconds
from celery_singleton_lock.stores.redis.listener import Listener
from celery_singleton_lock.stores.threads import patched_by

# Bounds of requests, in seconds.
RELEASE_BOUND = 2.0
PUBLISH_BOUND = 2.0
_TIME_BOUND = 0.5
_TIME_IS_KNOWN = 60.0  # seconds
_TIME_IS_UNKNOWN = 10.0  # seconds until a silent server is asked again
_NOBODY = "~"  # nobody's token, so release.lua only writes a marker or wakes turns
_COUNTS_ARE_KEPT = 30 * 24 * 3600.0
_SLOTS_ARE_KEPT = 400 * 24 * 3600.0  # an entry of a beat's schedule may be due once a year


class Store:
    """A request without a usable answer raises `StoreError` in bounded time, but may have worked.

    All requests but `count` and `record` are idempotent.
    """

    on_clock_step: Callable[[float], None] | None = None  # gets the seconds by which the server's clock was set
    history: int = 500  # events
    is_of_one_process = False

    def __init__(self, url: str, options: Mapping[str, Any], replicas: int = 0) -> None:
        self._url = url
        self._options = options
        self.replicas: int = replicas
        self.servers: Connections = self._connect(url, options)
        self.address: str = self.servers.address
        # A cluster refuses a script with keys in several slots.
        self._renewals_per_script = 1 if self.servers.is_sharded else encoding.RENEWALS_PER_SCRIPT
        self._listeners: dict[int, Listener] = {}  # by pid, for forked children

    def _connect(self, url: str, options: Mapping[str, Any]) -> Connections:
        if url.startswith("sentinel://"):
            from celery_singleton_lock.stores.redis.sentinel import SentinelConnections  # noqa: PLC0415 (few use it)

            return SentinelConnections(url, options)
        scheme, _, rest = url.partition("://")
        if scheme.endswith("+cluster"):
            from celery_singleton_lock.stores.redis.cluster import Cluster  # noqa: PLC0415 (few use one)

            return Cluster(url, options)
        address = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"

        def make(**arguments: Any) -> ConnectionPool:
            check_parts(url)
            return ConnectionPool.from_url(url, **arguments)

        return Connections(settled(make, options, address), address)

    @property
    def listener(self) -> Listener:
        found = self._listeners.get(getpid())
        if found is None:
            # The listener is a real thread, and must not share connections with greenlets.
            servers = self.clone().servers if patched_by() is not None else self.servers
            found = self._listeners.setdefault(getpid(), Listener(servers))
        return found

    def clone(self) -> Self:
        return type(self)(self._url, self._options, self.replicas)

    def acquire(self, claim: Claim) -> Verdict:
        part = self.servers.part_of(claim.key)
        bound = claim.patience
        if part.is_away and claim.task_id and not claim.waits_here:
            # Give up soon on a silent server, otherwise each call would occupy its pool slot for seconds.
            bound = min(bound, REPLY_TIMEOUT)
        try:
            command = encoding.packed_acquire(claim)
            reply, sent_at, _ = self.request(encoding.ACQUIRE, claim.key, command, bound, self.replicas)
        except StoreError:
            part.is_away = True
            raise
        if type(reply) is int:
            # In the usual grant, the fence is the server's time.
            if sent_at >= part.clock.compares_at:
                self._compare(claim.key, reply, sent_at)
            return Grant(1, reply, reply / 1_000_000, sent_at)
        self._compare(claim.key, reply[1], sent_at)
        if reply[0] == "walked":
            return self.acquire(claim)
        return encoding.answer_in(claim.key, reply, sent_at)

    def look(self, claim: Claim) -> records.Position | Verdict:
        """Ask whether a waiting message must go to the pool. Takes no place.

        A new message that may wait (`turn_for`, and no `rank`) takes a turn if no place is free. The mark of a call
        that runs next is extended.
        """
        command = encoding.packed_acquire(claim, looks=True)
        reply, sent_at, _ = self.request(encoding.ACQUIRE, claim.key, command)
        return encoding.position_in(reply) if reply[0] == "looked" else encoding.answer_in(claim.key, reply, sent_at)

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[records.Renewal]:
        """Extend the lease of each claim, even if the lease has expired.

        A lease is lost instead if another holder may have had its place meanwhile.
        """
        if not claims:
            return []
        part = self.servers.part_of(claims[0].key)
        (inputs, replies), sent_at, _ = part.persist(lambda until: self.renew_once(claims, until), timeout)
        for (key, _), (*_, now) in zip(inputs, replies, strict=True):
            self._compare(key, now, sent_at)
        return [records.Renewal(answer) for *answers, _ in replies for answer in answers]

    def renew_once(self, claims: Sequence[Claim], until: float) -> tuple[list[Input], list[Any]]:
        inputs = list[Input](encoding.renewals_of(claims, self._renewals_per_script))
        try:
            return inputs, self.servers.run(encoding.RENEW, inputs, until, self.replicas)
        except exceptions.ResponseError as error:
            # A plain URL may hide a cluster. Match the error's text: before redis-py 6.0, only the client for clusters
            # has a class for this error.
            if "CROSSSLOT" not in problem_of(error).upper() or len(inputs) == len(claims):
                raise
            self._renewals_per_script = 1
        return self.renew_once(claims, until)

    def release(
        self, claim: Claim, place: int | None, ending: Ending | None = None, bound: float = RELEASE_BOUND
    ) -> records.Release:
        """Give back the token's place or turn. With *place*, give back only that place.

        The store keeps *ending* if another delivery of the message has come or is likely, or if the lease was lost.
        """
        command = encoding.packed_release(claim, place, ending)
        reply, _, tries = self.request(encoding.RELEASE, claim.key, command, bound)
        if reply == 1:
            answer = records.RELEASED
        else:
            lost, is_marked, has_stopped_short = reply
            answer = records.Release("left" if is_marked else "none", lost or None)
            if has_stopped_short:
                # If waking fails, the waiting calls ask again on their own.
                with suppress(StoreError):
                    self.wake_next(claim.key)
        # An earlier try may have released the lease, so the last try did not find it.
        return replace(answer, lost=None) if tries > 1 else answer

    def wake_next(self, key: str) -> None:
        """Wake the next turns, in steps. Otherwise a long line of dead turns would block the server."""
        has_stopped_short = True
        while has_stopped_short:
            _, _, has_stopped_short = self.run(encoding.RELEASE, key, _NOBODY, "")

    def mark_queued(
        self,
        key: str,
        task_id: str,
        seconds: float,
        *,
        limit: int,
        cooldown: float,
        label: str = "",
        sent: records.PublishMode = "",
        queue: str = "",
        published: int = 0,
        due_for: float = 0.0,
        newest: bool = False,
        due_in: float = 0.0,
        within: float | None = None,
    ) -> records.Marked | Holder:
        """Mark a call as queued for *seconds*, or return the call or run in its way.

        With *limit* 0, no run is in its way. No other call of the key is published for *cooldown* seconds. A *newest*
        call supersedes a queued call that was published earlier. If newest calls keep coming, the last is due
        at most *within* seconds after the first was published. Otherwise they could postpone the work for ever.
        """
        words = f"limit={limit}{f' sent={sent}' if sent else ''}{' newest' if newest else ''}"
        if within is not None:
            words += f" due_in={milliseconds(due_in)} within={milliseconds(within)}"
        arguments = [task_id, milliseconds(seconds), milliseconds(cooldown), words]
        if about := encoding.mark_text(label, queue, published, due_for):
            arguments.append(about)
        reply = self.run(encoding.MARK_QUEUED, key, *arguments, bound=PUBLISH_BOUND)
        return records.Marked(reply[1] / 1_000_000) if reply[0] == "marked" else encoding.conflict_in(key, reply).first

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
        """End the marks and the turn of a call.

        With *call_ended*, the next call may be published while the run still holds the key. With *heeds*, another
        queued call is a conflict. For a *claim* of `rerun` or `replace`, only a newer call is a conflict. After a
        conflict nothing has ended.
        """
        options = {"ends_cooldown": ends_cooldown, "call_ended": call_ended, "heeds": heeds}
        words = " ".join(word for word, is_set in options.items() if is_set)
        arguments = [task_id, words]
        if claim is not None and claim.succeeds is not None:
            words += f" succeeds={claim.succeeds} published={claim.published}"
            arguments = [task_id, words, claim.task_name]
        reply = self.run(encoding.UNMARK, key, *arguments)
        return None if reply == 1 else encoding.conflict_in(key, reply)

    def mark_done(self, key: str, marker: str, attempt: int, outcome: records.Outcome, seconds: float) -> None:
        words = f"attempt={attempt} outcome={outcome} kept={milliseconds(seconds)}"
        self.run(encoding.RELEASE, key, _NOBODY, words, marker)

    def change_slot(self, key: str, verb: records.SlotVerb, slot: records.Slot) -> bool:
        """False if a later beat leads, the slot to `claim` was sent before, or the entry to `forget` is unknown."""
        facts = slot.entry, str(slot.due), str(slot.fence), str(slot.sent)
        arguments = [verb, *facts, milliseconds(_SLOTS_ARE_KEPT)]
        return bool(self.run(encoding.rare_script("claim_slot"), key, *arguments))

    def slots(self, key: str) -> dict[str, records.Slot]:
        return {entry: records.Slot(entry, *encoding.numbers_in(text, 3)) for entry, text in self.fields(key).items()}

    def fields(self, key: str) -> dict[str, str]:
        reply = self.call("HGETALL", key)
        return dict(zip(reply[::2], reply[1::2], strict=True))

    def count(self, key: str, sums: Mapping[str, int], timeout: float) -> int:
        """Add *sums* to the counts in a hash, and return the first count."""
        first, *others = [packed("HINCRBY", key, field, str(amount)) for field, amount in sums.items()]
        # PEXPIRE comes second, otherwise a connection that breaks could leave a hash without an expiry.
        commands = [first, packed("PEXPIRE", key, milliseconds(_COUNTS_ARE_KEPT)), *others]
        replies, *_ = self.servers.part.persist(lambda until: self.servers.call(key, commands, until), timeout)
        return int(replies[0])

    def record(self, key: str, texts: Collection[str], timeout: float) -> None:
        """Add *texts* to a ring of `history` fields. *timeout* bounds each of two requests."""
        last = self.count(key, {"last": len(texts)}, timeout)
        fields = [(str(number % self.history), text) for number, text in enumerate(texts, last - len(texts) + 1)]
        self.call("HSET", key, *chain(*fields), bound=timeout)

    def survey(self, keys: Sequence[str], *, tolerant: bool = False) -> list[LockState]:
        """With *tolerant*, a key that cannot be read gets a `problem`."""

        def look(keys: Sequence[str], until: float) -> list[LockState]:
            inputs = [(key, encoding.SURVEY.on(key)) for key in keys]
            try:
                return list(map(encoding.state_in, keys, self.servers.run(encoding.SURVEY, inputs, until)))
            except exceptions.ResponseError as error:
                if not tolerant:
                    raise
                if len(keys) == 1:
                    return [encoding.foreign(keys[0], error)]
            # Find the unreadable key by halving. Each half gets a new deadline, because the server may be far away.
            middle = len(keys) // 2
            return [each for half in (keys[:middle], keys[middle:]) for each in look(half, clock() + RELEASE_BOUND)]

        states: list[LockState] = self.servers.part.persist(partial(look, keys), RELEASE_BOUND)[0] if keys else []
        return states

    def holders(self, key: str) -> list[Holder]:
        """The holders of *key*, and its cool-downs."""
        return list(self.survey([key])[0].places)

    def asked_to_stop_by(self, claim: Claim, how: Literal["broken", "replaced"]) -> str | None:
        """The person who asked, or the task id of the successor."""
        return cast("str | None", self.call("HGET", claim.key, f"{how}:{claim.token}"))

    def run(self, script: Script, key: str, *arguments: str, bound: float = RELEASE_BOUND) -> Any:
        return self.request(script, key, script.on(key, *arguments), bound)[0]

    def request(
        self, script: Script, key: str, command: bytes, bound: float = RELEASE_BOUND, replicas: int = 0
    ) -> tuple[Any, float, int]:
        """Return the reply to a packed command, when its try was sent, and the number of tries."""
        part = self.servers.part_of(key)
        sent_at = clock()
        tries = 0
        # A direct try is faster than `persist`, but may take REPLY_TIMEOUT, so shorter bounds go to `persist`.
        if not (self.servers.is_sharded or replicas or part.is_away) and bound > REPLY_TIMEOUT:
            try:
                (reply,) = self.servers.call(key, (command,), sent_at + bound)
            except exceptions.NoScriptError:
                # Nothing was done, so this is no try.
                pass
            except exceptions.RedisError as error:
                if not is_passing(error):
                    raise part.unanswered(error) from error
                tries = 1
            else:
                part.has_answered = True
                return reply, sent_at, 1
        inputs = [(key, command)]
        (reply,), sent_at, more = part.persist(
            lambda until: self.servers.run(script, inputs, until, replicas), bound - (clock() - sent_at)
        )
        return reply, sent_at, tries + more

    def call(self, *command: str, bound: float = RELEASE_BOUND) -> Any:
        """Send a command whose second word is the key."""
        key = command[1] if len(command) > 1 else ""
        sent = [packed(*command)]
        return self.servers.part.persist(lambda until: self.servers.call(key, sent, until)[0], bound)[0]

    def time(self, key: str) -> int | None:
        """The time of *key*'s server in microseconds, if known."""
        part = self.servers.part_of(key)
        now = part.clock.now(_TIME_IS_KNOWN)
        if now is not None or clock() < part.clock.ask_again_at:
            return now or part.clock.now()
        try:
            asked = [packed("TIME")]
            (time,), sent_at, _ = part.persist(lambda until: self.servers.call(key, asked, until), _TIME_BOUND)
            self._compare(key, encoding.microseconds(time), sent_at)
        except StoreError:
            part.clock.ask_again_at = clock() + _TIME_IS_UNKNOWN
        # The request may have found another owner of the key, so `part` may be outdated.
        return self.servers.part_of(key).clock.now()

    def close(self) -> None:
        self.servers.close()

    def _compare(self, key: str, now: int, sent_at: float) -> None:
        step = self.servers.part_of(key).clock.compare(now, sent_at)
        if step and self.on_clock_step is not None:
            self.on_clock_step(step)
