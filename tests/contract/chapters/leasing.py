"""To take a lock, to keep it and to give it back; and more than one place."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_singleton_lock.stores.records import RELEASED, WHOLE, Claim, Grant, Release, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    CLOCKS_DIFFER_BY,
    ENDED,
    GONE,
    KEY,
    OTHER,
    SHORT,
    TAKEN,
    Contract,
    Waiter,
    call,
    claim,
    found,
    granted,
    mark_queued,
    queued,
    refused,
    tokens,
)


class Leasing(Contract):
    def test_a_held_lock_is_refused_naming_the_holder(self, store: Store) -> None:
        facts = {"task_id": "id-of-a", "task_name": "shop.tasks.other", "hostname": "w1@höst", "pid": 42, "attempt": 3}
        grant = granted(store.acquire(claim("a", **facts)))

        conflict = refused(store.acquire(claim("b")))

        assert conflict.key == KEY
        assert conflict.holders == (conflict.first,)
        for holder in (conflict.first, *store.holders(KEY)):
            assert (holder.key, holder.token, holder.fence) == (KEY, "a", grant.fence)
            assert {name: getattr(holder, name) for name in facts} == facts
            assert 0 < holder.expires_in <= 30
            assert 0 <= holder.age < 60

    @pytest.mark.parametrize("hostname", ["w1@host", "100%s@host", "w1@höst", "\udcff@host"])
    def test_a_holder_is_told_in_its_own_words_and_gone_once_it_has_ended(self, store: Store, hostname: str) -> None:
        for number, task_id in enumerate(["1", "2", "%s%%", "{0}", "ü", "\udcff", "\r\n$1\r\n", "x" * 300, ""]):
            wanted = claim(f"{number}" * (number + 1), task_id=task_id, hostname=hostname, pid=7, published=10**number)
            granted(store.acquire(wanted))

            (holder,) = store.holders(KEY)
            words = holder.token, holder.task_id or "", holder.hostname, f"{holder.pid} {holder.published}"
            sent = [wanted.token, *(text.encode(errors="backslashreplace").decode() for text in (task_id, hostname))]
            assert words == (*sent, f"7 {10**number}")
            assert store.release(wanted, 1, ENDED) == RELEASED
            assert store.holders(KEY) == []

    def test_asking_again_with_the_same_token_is_the_same_grant(self, store: Store) -> None:
        first = granted(store.acquire(claim("a")))

        again = granted(store.acquire(claim("a")))
        self.pass_time(20.0)
        granted(store.acquire(claim("a")))

        assert (again.place, again.fence, again.since) == (first.place, first.fence, first.since)
        assert not again.took_over
        (holder,) = store.holders(KEY)
        assert holder.expires_in > 15, "its ttl begins anew"

    def test_each_grant_has_a_greater_fence_than_those_before(
        self, store: Store, lose_all: Callable[[], object]
    ) -> None:
        fences = [granted(store.acquire(claim("a"))).fence]

        store.release(claim("a"), 1)
        fences.append(granted(store.acquire(claim("after-a-release", ttl=SHORT))).fence)
        self.let_expire(store)
        fences.append(granted(store.acquire(claim("after-an-expiry", ttl=SHORT))).fence)
        self.pass_time(3 * SHORT)
        fences.append(granted(store.acquire(claim("after-the-key-is-gone"))).fence)
        for number in range(50):
            store.acquire(claim(f"t{number}", key=OTHER))
            store.release(claim(f"t{number}", key=OTHER), 1)
        lose_all()
        fences.append(granted(store.acquire(claim("after-a-loss-of-all-data"))).fence)

        assert fences == sorted(set(fences))

    def test_a_lease_past_its_deadline_is_renewed_while_nobody_else_has_had_its_place(self, store: Store) -> None:
        granted(store.acquire(claim("a", ttl=SHORT, limit=2)))
        granted(store.acquire(claim("long", limit=2)))  # so that the key stays
        self.pass_time(1.5 * SHORT)
        ended = tokens(store.holders(KEY))

        answers = store.renew([claim("a", ttl=SHORT, limit=2)], 1.0)

        assert ended == ["long"]
        assert answers == [Renewal.RENEWED]
        assert tokens(refused(store.acquire(claim("b", limit=2))).holders) == ["a", "long"]

    def test_a_lease_past_its_deadline_is_its_owners_while_nobody_else_has_had_its_place(self, store: Store) -> None:
        mine = claim("a", ttl=SHORT, limit=2)
        first = granted(store.acquire(mine))
        granted(store.acquire(claim("long", limit=2)))  # so that the key stays
        self.pass_time(1.5 * SHORT)
        again = granted(store.acquire(mine))
        self.pass_time(1.5 * SHORT)

        released = store.release(mine, None)

        assert (again.fence, again.took_over) == (first.fence, False)
        assert released == RELEASED
        assert not granted(store.acquire(claim("b", limit=2))).took_over

    def test_a_lease_past_its_deadline_is_renewed_until_a_waiter_has_its_place(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with Waiter(store, claim("w")) as waiter:
            queued(waiter.ask())
            self.let_expire(store)
            before = store.renew([claim("a", ttl=SHORT)], 1.0)
            queued(waiter.ask())
            self.let_expire(store)

            granted(waiter.ask())

        assert before == [Renewal.RENEWED]
        assert store.renew([claim("a", ttl=SHORT)], 1.0) == [Renewal.TAKEN]
        assert tokens(store.holders(KEY)) == ["w"]

    def test_renewals_are_answered_one_by_one_in_their_order(self, store: Store) -> None:
        store.acquire(claim("a", key=KEY))
        store.acquire(claim("b", key=OTHER))

        answers = store.renew(
            [
                claim("gone", key="singleton:v3:{nobody:00}"),
                claim("b", key=OTHER),
                claim("stranger", key=KEY),
                claim("a", key=KEY),
            ],
            1.0,
        )

        assert answers == [Renewal.GONE, Renewal.RENEWED, Renewal.TAKEN, Renewal.RENEWED]

    def test_a_second_release_finds_nothing_or_the_successor(self, store: Store) -> None:
        store.acquire(claim("a"))
        store.release(claim("a"), 1)

        again = store.release(claim("a"), 1)
        store.acquire(claim("b"))
        once_more = store.release(claim("a"), 1)

        assert (again, once_more) == (GONE, TAKEN)
        assert tokens(store.holders(KEY)) == ["b"]

    @pytest.mark.parametrize("token", ["a", "b", "c"])
    def test_a_release_without_a_place_finds_it(self, store: Store, token: str) -> None:
        for other in ["a", "b", "c"]:
            store.acquire(claim(other, limit=3))

        answer = store.release(claim(token, limit=3), None)

        assert answer == RELEASED
        assert tokens(store.holders(KEY)) == sorted({"a", "b", "c"} - {token})

    def test_a_place_stays_taken_for_as_long_as_it_is_to_be_held_at_least(self, store: Store) -> None:
        mine = claim("a", min_hold=2 * SHORT, task_id="id-of-a")
        asked_at = self.now()
        grant = granted(store.acquire(mine))

        answer = store.release(mine, 1)
        conflict = refused(store.acquire(claim("b")))
        self.let_expire(store)

        assert answer == RELEASED
        assert (conflict.first.task_id, conflict.first.fence) == ("id-of-a", grant.fence)
        assert 0 < conflict.first.expires_in <= 2 * SHORT
        assert not granted(store.acquire(claim("b"))).took_over
        assert self.now() >= asked_at + 2 * SHORT - CLOCKS_DIFFER_BY

    def test_a_place_that_was_held_long_enough_is_free_at_once(self, store: Store) -> None:
        mine = claim("a", min_hold=SHORT)
        store.acquire(mine)
        self.pass_time(SHORT)

        store.release(mine, 1)

        assert store.holders(KEY) == []
        granted(store.acquire(claim("b")))

    def test_a_holder_that_dies_does_not_hold_its_place_any_longer(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT, min_hold=30.0))
        self.let_expire(store)

        assert granted(store.acquire(claim("b"))).took_over

    @pytest.mark.parametrize("token", ["a", "b"])
    def test_a_place_that_stays_taken_can_be_neither_renewed_nor_released(self, store: Store, token: str) -> None:
        store.acquire(claim("a", min_hold=30.0))
        store.release(claim("a", min_hold=30.0), 1)

        renewed = store.renew([claim(token)], 1.0)
        released = [store.release(claim(token), place) for place in (1, None)]

        assert renewed == [Renewal.TAKEN]
        assert released == [Release("none", "taken"), Release("none", "taken")]
        refused(store.acquire(claim("c")))


def whole(name: str = "whole") -> Claim:
    return claim(f"{WHOLE}{name}")


class Limit(Contract):
    def test_each_holder_has_a_deadline_of_its_own(self, store: Store) -> None:
        store.acquire(claim("long", limit=3, ttl=30))
        store.acquire(claim("short", limit=3, ttl=SHORT))
        store.acquire(claim("longer", limit=3, ttl=60))

        self.pass_time(1.5 * SHORT)

        assert [holder.token for holder in store.holders(KEY)] == ["long", "longer"]
        grant = granted(store.acquire(claim("newcomer", limit=3)))
        assert (grant.place, grant.took_over) == (2, True)
        assert store.renew([claim("long", limit=3), claim("short", limit=3)], 1.0) == [Renewal.RENEWED, Renewal.TAKEN]

    @pytest.mark.parametrize(("held", "wanted"), [(1, 3), (2, 3), (3, 2), (3, 1)])
    def test_the_limit_that_counts_is_that_of_the_asker(self, store: Store, held: int, wanted: int) -> None:
        fences = [granted(store.acquire(claim(f"old{n}", limit=held))).fence for n in range(held)]

        answers = [store.acquire(claim(f"new{n}", limit=wanted)) for n in range(4)]

        is_granted = [isinstance(answer, Grant) for answer in answers]
        assert is_granted == [n < wanted - held for n in range(4)]
        fences += [answer.fence for answer in answers if isinstance(answer, Grant)]
        assert fences == sorted(set(fences))
        assert len(store.holders(KEY)) == max(held, wanted)

    def test_a_conflict_tells_of_a_few_holders_among_them_the_one_that_ends_first(self, store: Store) -> None:
        for number in range(40):
            store.acquire(claim(f"t{number}", limit=40, ttl=20.0 if number == 31 else 30.0))

        conflict = refused(store.acquire(claim("one-more", limit=40)))

        assert len(conflict.holders) == 8
        assert conflict.first.token == "t31"
        assert len(store.holders(KEY)) == 40

    def test_who_has_the_whole_lock_keeps_everybody_out(self, store: Store) -> None:
        mine = whole()
        grant = granted(store.acquire(mine))

        for limit in (1, 3, 100):
            assert refused(store.acquire(claim("other", limit=limit))).first.fence == grant.fence
        refused(store.acquire(whole("another")))
        assert found(mark_queued(store, "q", limit=3)).fence == grant.fence
        assert store.renew([mine], 1.0) == [Renewal.RENEWED]
        assert granted(store.acquire(mine)).fence == grant.fence
        assert store.release(mine, grant.place) == RELEASED
        self.nothing_is_left(store)
        for name in "abc":
            granted(store.acquire(claim(name, limit=3)))

    def test_a_holder_that_has_died_keeps_nobody_from_the_whole_lock(self, store: Store) -> None:
        store.acquire(claim("short", limit=3, ttl=SHORT))
        refused(store.acquire(whole()))
        self.let_expire(store)

        assert granted(store.acquire(whole())).took_over
        refused(store.acquire(claim("other", limit=3)))

    def test_who_waits_for_the_whole_lock_gets_each_place_that_becomes_free(self, store: Store) -> None:
        for name in "ab":
            granted(store.acquire(claim(name, limit=3)))
        with Waiter(store, whole()) as waiter, Waiter(store, claim("later", limit=3)) as later:
            queued(waiter.ask())
            refused(store.acquire(claim("newcomer", limit=3)))
            queued(later.ask())
            store.release(claim("a", limit=3), 1)
            refused(store.acquire(claim("newcomer", limit=3)))
            queued(later.ask())
            queued(waiter.ask())
            store.release(claim("b", limit=3), 2)
            refused(store.acquire(claim("newcomer", limit=3)))

            granted(waiter.ask())
            queued(later.ask())
            store.release(whole(), 1)
            granted(later.ask())
        granted(store.acquire(claim("newcomer", limit=3)))

    def test_a_message_that_waits_and_who_wants_the_whole_lock_come_in_their_order(self, store: Store) -> None:
        granted(store.acquire(claim("a")))
        first, later = replace(call("sooner"), turn_for=60.0), replace(call("later"), turn_for=60.0, limit=3)
        first.rank = refused(store.acquire(first)).rank
        with Waiter(store, whole()) as waiter:
            queued(waiter.ask())
            later.rank = refused(store.acquire(later)).rank
            store.release(claim("a"), 1)

            queued(waiter.ask())
            granted(store.acquire(first))
            refused(store.acquire(later))
            store.release(first, 1)
            granted(waiter.ask())
            refused(store.acquire(later))
            store.release(whole(), 1)
        granted(store.acquire(later))
