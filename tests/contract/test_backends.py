"""What every store of locks owes its callers, and what the one in Redis owes Redis."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from celery_singleton_lock import BackendError, ConfigurationError
from celery_singleton_lock.backends.base import Answer, Backend, Claim, Conflict, Grant, Holder, clock
from celery_singleton_lock.backends.memory import MemoryBackend
from celery_singleton_lock.backends.redis import RedisBackend
from tests.servers import Server
from tests.waiting import until

KEY = "singleton:v1:{shop.tasks.sync:00}"
OTHER_KEY = "singleton:v1:{shop.tasks.sync:11}"

SHORT = 0.3
"""A ttl that a test waits for."""

CLOCKS_DIFFER_BY = 0.02
"""Seconds that the store's clock may gain on the test's while a short ttl passes."""


def claim(token: str, *, key: str = KEY, ttl: float = 30.0, limit: int = 1, **facts: str) -> Claim:
    return Claim(key, token, ttl, limit, facts)


def granted(answer: Grant | Conflict) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def refused(answer: Grant | Conflict) -> Conflict:
    assert isinstance(answer, Conflict), answer
    return answer


def tokens(holders: list[Holder] | tuple[Holder, ...]) -> list[str]:
    return sorted(holder.token for holder in holders)


class BackendContract:
    """The tests that a store of locks has to pass.

    A subclass gives the fixtures `backend`, a store without any lock in it, and
    `lose_all`, which makes the store forget everything. A store that does not
    live by the real clock overrides `now` and `pass_time` as well.
    """

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError

    @pytest.fixture
    def lose_all(self) -> Callable[[], object]:
        raise NotImplementedError

    def now(self) -> float:
        """Seconds on a clock that goes with the store's."""
        return clock()

    def pass_time(self, seconds: float) -> None:
        """Let so much time go by in the store."""
        ends = clock() + seconds
        until(lambda: clock() > ends, f"{seconds} s have passed")

    def let_expire(self, backend: Backend, key: str = KEY) -> None:
        """Let time go by until nobody holds *key*."""
        for _ in range(100):
            self.pass_time(0.05)
            if not backend.holders(key):
                return
        raise AssertionError(f"{key} does not expire: {backend.holders(key)}")

    # Acquire.

    def test_a_free_lock_is_granted(self, backend: Backend) -> None:
        grant = granted(backend.acquire(claim("a")))

        assert grant.place == 1
        assert grant.fence > 0
        assert not grant.took_over

    def test_a_held_lock_is_refused_naming_the_holder(self, backend: Backend) -> None:
        grant = granted(backend.acquire(claim("a", task_id="id-of-a", hostname="w1@host", pid="42", attempt="3")))

        conflict = refused(backend.acquire(claim("b")))

        assert conflict.key == KEY
        (holder,) = conflict.holders
        assert conflict.first == holder
        assert (holder.key, holder.token, holder.fence) == (KEY, "a", grant.fence)
        assert (holder.task_id, holder.hostname, holder.pid, holder.attempt) == ("id-of-a", "w1@host", 42, 3)
        assert 0 < holder.expires_in <= 30

    def test_a_refused_claim_leaves_the_holder_as_it_was(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=30, task_id="id-of-a"))
        (before,) = backend.holders(KEY)

        refused(backend.acquire(claim("b", ttl=300, task_id="id-of-b")))

        (after,) = backend.holders(KEY)
        assert (after.token, after.fence, after.task_id) == (before.token, before.fence, before.task_id)
        assert after.expires_in <= before.expires_in

    def test_locks_with_different_keys_know_nothing_of_each_other(self, backend: Backend) -> None:
        granted(backend.acquire(claim("a")))

        granted(backend.acquire(claim("a", key=OTHER_KEY)))

        assert backend.release(claim("a"), 1) is Answer.DONE
        assert tokens(backend.holders(OTHER_KEY)) == ["a"]

    def test_asking_again_with_the_same_token_is_the_same_grant(self, backend: Backend) -> None:
        first = granted(backend.acquire(claim("a")))

        again = granted(backend.acquire(claim("a")))

        assert (again.place, again.fence, again.since) == (first.place, first.fence, first.since)
        assert not again.took_over
        assert len(backend.holders(KEY)) == 1

    def test_asking_again_starts_the_ttl_afresh(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=5))

        backend.acquire(claim("a", ttl=30))

        assert backend.holders(KEY)[0].expires_in > 5

    def test_asking_again_takes_no_second_place(self, backend: Backend) -> None:
        grants = [granted(backend.acquire(claim(token, limit=3))) for token in ["a", "b", "b", "a", "b"]]

        assert [grant.place for grant in grants] == [1, 2, 2, 1, 2]

    def test_a_grant_knows_when_it_was_asked_for(self, backend: Backend) -> None:
        before = clock()

        grant = granted(backend.acquire(claim("a")))

        assert before <= grant.sent_at <= clock()

    def test_a_grant_knows_when_it_was_given(self, backend: Backend) -> None:
        grant = granted(backend.acquire(claim("a")))

        (holder,) = backend.holders(KEY)

        assert holder.acquired_at == datetime.fromtimestamp(grant.since, UTC)
        assert abs(grant.since - time.time()) < 60

    # Release.

    def test_a_released_lock_is_free(self, backend: Backend) -> None:
        grant = granted(backend.acquire(claim("a")))

        answer = backend.release(claim("a"), grant.place)

        assert answer is Answer.DONE
        assert backend.holders(KEY) == []
        assert not granted(backend.acquire(claim("b"))).took_over

    def test_a_release_by_a_stranger_leaves_the_lock_alone(self, backend: Backend) -> None:
        backend.acquire(claim("a"))

        answer = backend.release(claim("b"), 1)

        assert answer is Answer.TAKEN
        assert tokens(backend.holders(KEY)) == ["a"]

    def test_a_release_of_a_free_lock_finds_nothing(self, backend: Backend) -> None:
        assert backend.release(claim("a"), 1) is Answer.GONE
        assert backend.release(claim("a"), None) is Answer.GONE

    def test_a_second_release_finds_nothing_or_the_successor(self, backend: Backend) -> None:
        backend.acquire(claim("a"))
        backend.release(claim("a"), 1)

        again = backend.release(claim("a"), 1)
        backend.acquire(claim("b"))
        once_more = backend.release(claim("a"), 1)

        assert (again, once_more) == (Answer.GONE, Answer.TAKEN)
        assert tokens(backend.holders(KEY)) == ["b"]

    def test_a_run_past_its_deadline_does_not_free_its_successor(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=SHORT))
        self.let_expire(backend)
        backend.acquire(claim("b"))

        answer = backend.release(claim("a"), 1)

        assert answer is Answer.TAKEN
        assert tokens(backend.holders(KEY)) == ["b"]

    @pytest.mark.parametrize("token", ["a", "b", "c"])
    def test_a_release_without_a_place_finds_it(self, backend: Backend, token: str) -> None:
        for other in ["a", "b", "c"]:
            backend.acquire(claim(other, limit=3))

        answer = backend.release(claim(token, limit=3), None)

        assert answer is Answer.DONE
        assert tokens(backend.holders(KEY)) == sorted({"a", "b", "c"} - {token})

    def test_a_release_without_a_place_touches_no_others(self, backend: Backend) -> None:
        for other in ["a", "b"]:
            backend.acquire(claim(other, limit=3))

        answer = backend.release(claim("d", limit=3), None)

        assert answer is Answer.TAKEN
        assert tokens(backend.holders(KEY)) == ["a", "b"]

    # Renew.

    def test_a_renewal_starts_the_ttl_afresh(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=5))

        answers = backend.renew([claim("a", ttl=30)], 1.0)

        assert answers == [Answer.DONE]
        assert 5 < backend.holders(KEY)[0].expires_in <= 30

    def test_a_lock_is_held_for_as_long_as_it_is_renewed(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=1.0))

        for _ in range(6):
            self.pass_time(0.25)
            assert backend.renew([claim("a", ttl=1.0)], 1.0) == [Answer.DONE]

        assert tokens(backend.holders(KEY)) == ["a"]

    def test_a_renewal_changes_neither_fence_nor_facts(self, backend: Backend) -> None:
        grant = granted(backend.acquire(claim("a", task_id="id-of-a")))

        backend.renew([claim("a")], 1.0)

        (holder,) = backend.holders(KEY)
        assert (holder.fence, holder.task_id) == (grant.fence, "id-of-a")
        assert holder.acquired_at == datetime.fromtimestamp(grant.since, UTC)

    def test_a_renewal_by_a_stranger_leaves_the_lock_alone(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=5))

        answers = backend.renew([claim("b", ttl=300)], 1.0)

        assert answers == [Answer.TAKEN]
        assert tokens(backend.holders(KEY)) == ["a"]
        assert backend.holders(KEY)[0].expires_in <= 5

    def test_a_lock_that_is_gone_is_not_made_again(self, backend: Backend) -> None:
        answers = backend.renew([claim("a")], 1.0)

        assert answers == [Answer.GONE]
        assert backend.holders(KEY) == []
        granted(backend.acquire(claim("b")))

    def test_a_released_lock_is_not_revived(self, backend: Backend) -> None:
        backend.acquire(claim("a"))
        backend.release(claim("a"), 1)

        answers = backend.renew([claim("a")], 1.0)

        assert answers == [Answer.GONE]
        assert backend.holders(KEY) == []

    def test_an_expired_lock_is_renewed_only_where_that_keeps_all_others_out(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=SHORT))
        self.let_expire(backend)

        (answer,) = backend.renew([claim("a", ttl=30)], 1.0)

        assert answer in (Answer.DONE, Answer.GONE)
        assert isinstance(backend.acquire(claim("b")), Conflict) is (answer is Answer.DONE)

    def test_a_lock_that_has_gone_to_another_is_not_revived(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=SHORT))
        self.let_expire(backend)
        backend.acquire(claim("b"))

        answers = backend.renew([claim("a")], 1.0)

        assert answers == [Answer.TAKEN]
        assert tokens(backend.holders(KEY)) == ["b"]

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_lock_that_another_had_in_between_is_not_revived(self, backend: Backend, limit: int) -> None:
        backend.acquire(claim("a", limit=limit, ttl=SHORT))
        self.let_expire(backend)
        backend.acquire(claim("b", limit=limit))
        backend.release(claim("b", limit=limit), 1)

        answers = backend.renew([claim("a", limit=limit)], 1.0)

        assert answers == [Answer.GONE]
        assert backend.holders(KEY) == []
        granted(backend.acquire(claim("c", limit=limit)))

    def test_a_lock_whose_data_the_store_has_lost_is_not_revived(
        self, backend: Backend, lose_all: Callable[[], object]
    ) -> None:
        backend.acquire(claim("a"))
        lose_all()

        answers = backend.renew([claim("a")], 1.0)

        assert answers == [Answer.GONE]
        granted(backend.acquire(claim("b")))

    def test_renewals_are_answered_one_by_one_in_their_order(self, backend: Backend) -> None:
        backend.acquire(claim("a", key=KEY))
        backend.acquire(claim("b", key=OTHER_KEY))

        answers = backend.renew(
            [
                claim("gone", key="singleton:v1:{nobody:00}"),
                claim("b", key=OTHER_KEY),
                claim("stranger", key=KEY),
                claim("a", key=KEY),
            ],
            1.0,
        )

        assert answers == [Answer.GONE, Answer.DONE, Answer.TAKEN, Answer.DONE]

    def test_very_many_renewals_are_answered_in_their_order(self, backend: Backend) -> None:
        claims = [claim(f"t{number}", key=f"singleton:v1:{{many:{number}}}", ttl=10) for number in range(250)]
        for mine in claims:
            granted(backend.acquire(mine))
        strange, gone = {0, 99, 100, 249}, {1, 101, 248}
        for number in gone:
            backend.release(claims[number], 1)
        renewals = [
            claim("stranger" if number in strange else mine.token, key=mine.key, ttl=30)
            for number, mine in enumerate(claims)
        ]

        answers = backend.renew(renewals, 1.0)

        expected = {**dict.fromkeys(strange, Answer.TAKEN), **dict.fromkeys(gone, Answer.GONE)}
        assert answers == [expected.get(number, Answer.DONE) for number in range(250)]
        assert backend.holders(claims[247].key)[0].expires_in > 10

    def test_no_renewals_have_no_answers(self, backend: Backend) -> None:
        assert backend.renew([], 1.0) == []

    # Expiry.

    def test_an_expired_lock_is_granted_to_the_next(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=SHORT))

        self.let_expire(backend)

        grant = granted(backend.acquire(claim("b")))
        assert tokens(backend.holders(KEY)) == ["b"]
        assert grant.took_over

    def test_a_lock_is_not_granted_before_its_deadline(self, backend: Backend) -> None:
        asked_at = self.now()
        granted(backend.acquire(claim("a", ttl=SHORT)))

        while isinstance(backend.acquire(claim("b")), Conflict):
            self.pass_time(0.01)

        assert self.now() >= asked_at + SHORT - CLOCKS_DIFFER_BY

    def test_a_conflict_says_how_long_the_lease_lasts(self, backend: Backend) -> None:
        backend.acquire(claim("a", ttl=10))
        first = refused(backend.acquire(claim("b"))).first.expires_in

        self.pass_time(0.2)
        later = refused(backend.acquire(claim("b"))).first.expires_in

        assert first - 5 < later <= first - 0.2

    def test_a_successor_of_a_holder_that_released_did_not_take_over(self, backend: Backend) -> None:
        backend.acquire(claim("a"))
        backend.release(claim("a"), 1)

        assert not granted(backend.acquire(claim("b"))).took_over

    def test_a_successor_has_nothing_of_the_holder_that_died(self, backend: Backend) -> None:
        facts = {"task_id": "id-of-a", "task_name": "shop.a", "hostname": "w1@host", "pid": "42", "attempt": "3"}
        backend.acquire(claim("a", ttl=SHORT, **facts))
        self.let_expire(backend)

        backend.acquire(claim("b"))

        (holder,) = backend.holders(KEY)
        assert holder.token == "b"
        assert (holder.task_id, holder.task_name, holder.hostname, holder.pid) == (None, None, None, None)
        assert holder.attempt == 0

    # Fences.

    def test_each_grant_has_a_greater_fence_than_those_before(
        self, backend: Backend, lose_all: Callable[[], object]
    ) -> None:
        fences = [granted(backend.acquire(claim("a"))).fence]

        backend.release(claim("a"), 1)
        fences.append(granted(backend.acquire(claim("after-a-release", ttl=SHORT))).fence)
        self.let_expire(backend)
        fences.append(granted(backend.acquire(claim("after-an-expiry", ttl=SHORT))).fence)
        self.pass_time(3 * SHORT)
        fences.append(granted(backend.acquire(claim("after-the-key-is-gone"))).fence)
        for number in range(50):
            backend.acquire(claim(f"t{number}", key=OTHER_KEY))
            backend.release(claim(f"t{number}", key=OTHER_KEY), 1)
        lose_all()
        fences.append(granted(backend.acquire(claim("after-a-loss-of-all-data"))).fence)

        assert fences == sorted(set(fences))

    def test_fences_grow_however_fast_they_are_given(self, backend: Backend) -> None:
        fences = []
        for number in range(200):
            fences.append(granted(backend.acquire(claim(f"t{number}"))).fence)
            backend.release(claim(f"t{number}"), 1)

        assert fences == sorted(set(fences))

    def test_holders_of_one_lock_have_fences_of_their_own(self, backend: Backend) -> None:
        fences = [granted(backend.acquire(claim(f"t{number}", limit=20))).fence for number in range(20)]

        assert fences == sorted(set(fences))

    # More than one place.

    def test_as_many_as_the_limit_hold_a_lock(self, backend: Backend) -> None:
        grants = [granted(backend.acquire(claim(token, limit=3))) for token in "abc"]

        conflict = refused(backend.acquire(claim("d", limit=3)))

        assert [grant.place for grant in grants] == [1, 2, 3]
        assert tokens(conflict.holders) == tokens(backend.holders(KEY)) == ["a", "b", "c"]

    def test_a_released_place_is_given_to_the_next(self, backend: Backend) -> None:
        for token in "abc":
            backend.acquire(claim(token, limit=3))

        backend.release(claim("b", limit=3), 2)

        assert granted(backend.acquire(claim("d", limit=3))).place == 2
        assert tokens(backend.holders(KEY)) == ["a", "c", "d"]
        refused(backend.acquire(claim("e", limit=3)))

    def test_each_holder_has_a_deadline_of_its_own(self, backend: Backend) -> None:
        backend.acquire(claim("long", limit=3, ttl=30))
        backend.acquire(claim("short", limit=3, ttl=SHORT))
        backend.acquire(claim("longer", limit=3, ttl=60))

        self.pass_time(1.5 * SHORT)

        assert [holder.token for holder in backend.holders(KEY)] == ["long", "longer"]
        grant = granted(backend.acquire(claim("next", limit=3)))
        assert (grant.place, grant.took_over) == (2, True)
        assert backend.renew([claim("long", limit=3), claim("short", limit=3)], 1.0) == [
            Answer.DONE,
            Answer.TAKEN,
        ]

    def test_a_short_holder_does_not_shorten_a_long_one(self, backend: Backend) -> None:
        backend.acquire(claim("long", limit=2, ttl=10 * SHORT))
        backend.acquire(claim("short", limit=2, ttl=SHORT))
        backend.renew([claim("short", limit=2, ttl=SHORT)], 1.0)

        self.pass_time(3 * SHORT)

        assert tokens(backend.holders(KEY)) == ["long"]

    def test_a_long_holder_that_leaves_does_not_take_a_short_one_with_it(self, backend: Backend) -> None:
        backend.acquire(claim("long", limit=2, ttl=30))
        backend.acquire(claim("short", limit=2, ttl=5))

        backend.release(claim("long", limit=2), 1)

        assert tokens(backend.holders(KEY)) == ["short"]
        assert backend.renew([claim("short", limit=2)], 1.0) == [Answer.DONE]

    def test_a_conflict_puts_the_holder_first_that_ends_first(self, backend: Backend) -> None:
        for token, ttl in [("a", 30), ("b", 10), ("c", 20)]:
            backend.acquire(claim(token, limit=3, ttl=ttl))

        conflict = refused(backend.acquire(claim("d", limit=3)))

        assert conflict.first.token == "b"
        assert [holder.token for holder in backend.holders(KEY)] == ["b", "c", "a"]

    @pytest.mark.parametrize(("held", "wanted"), [(1, 3), (3, 1), (3, 2)])
    def test_a_lock_that_is_held_under_another_limit_is_an_error_that_names_both(
        self, backend: Backend, held: int, wanted: int
    ) -> None:
        backend.acquire(claim("a", limit=held))

        with pytest.raises(ConfigurationError) as error:
            backend.acquire(claim("b", limit=wanted))

        assert f"lock_limit={held}" in str(error.value)
        assert f"lock_limit={wanted}" in str(error.value)
        assert KEY in str(error.value)
        assert tokens(backend.holders(KEY)) == ["a"]

    @pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
    def test_a_lock_that_nobody_holds_any_more_may_have_another_limit(
        self, backend: Backend, before: int, after: int
    ) -> None:
        fence = granted(backend.acquire(claim("dead", limit=before, ttl=SHORT))).fence
        self.let_expire(backend)

        grants = [granted(backend.acquire(claim(f"t{number}", limit=after))) for number in range(after)]

        assert [grant.place for grant in grants] == list(range(1, after + 1))
        assert all(grant.fence > fence for grant in grants)
        refused(backend.acquire(claim("one-more", limit=after)))

    @pytest.mark.parametrize("limit", [1, 3])
    def test_a_crowd_never_exceeds_the_limit(self, backend: Backend, limit: int) -> None:
        inside, most, turns = 0, 0, 0
        guard = threading.Lock()

        def take_turns(name: int) -> None:
            nonlocal inside, most, turns
            for turn in range(40):
                mine = claim(f"{name}-{turn}", limit=limit)
                answer = backend.acquire(mine)
                if isinstance(answer, Grant):
                    with guard:
                        inside, turns = inside + 1, turns + 1
                        most = max(most, inside)
                    time.sleep(0)  # let others try
                    with guard:
                        inside -= 1
                    assert backend.release(mine, answer.place) is Answer.DONE

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(take_turns, range(8)))

        assert most <= limit
        assert turns >= limit
        assert backend.holders(KEY) == []

    # Holders.

    def test_nobody_holds_a_lock_that_nobody_took(self, backend: Backend) -> None:
        assert backend.holders(KEY) == []

    def test_a_holder_is_described_as_it_described_itself(self, backend: Backend) -> None:
        grant = granted(
            backend.acquire(
                claim("a", task_id="id-of-a", task_name="shop.tasks.other", hostname="w1@höst", pid="42", attempt="3")
            )
        )

        (holder,) = backend.holders(KEY)

        assert (holder.key, holder.token, holder.fence) == (KEY, "a", grant.fence)
        assert (holder.task_id, holder.task_name) == ("id-of-a", "shop.tasks.other")
        assert (holder.hostname, holder.pid, holder.attempt) == ("w1@höst", 42, 3)
        assert 0 <= holder.age < 60

    def test_a_task_that_gives_no_name_has_that_of_the_lock(self, backend: Backend) -> None:
        backend.acquire(claim("a", task_id="id-of-a"))

        assert backend.holders(KEY)[0].task_name == "shop.tasks.sync"

    def test_a_holder_that_is_no_task_has_no_name(self, backend: Backend) -> None:
        backend.acquire(claim("a"))

        (holder,) = backend.holders(KEY)

        assert (holder.task_id, holder.task_name, holder.hostname, holder.pid) == (None, None, None, None)
        assert holder.attempt == 0


class TestMemoryBackend(BackendContract):
    """The contract, on a clock of its own."""

    @pytest.fixture(autouse=True)
    def clock_starts(self) -> None:
        self.time = time.time()

    @pytest.fixture
    def backend(self) -> MemoryBackend:  # type: ignore[override]
        return MemoryBackend(self.now)

    @pytest.fixture
    def lose_all(self, backend: MemoryBackend) -> Callable[[], object]:  # type: ignore[override]
        return backend.clear

    def now(self) -> float:
        return self.time

    def pass_time(self, seconds: float) -> None:
        self.time += seconds


class TestRedisBackend(BackendContract):
    """The contract, on each server, and what only a server has: keys."""

    @pytest.fixture
    def backend(self, server: Server) -> Iterator[Backend]:  # type: ignore[override]
        backend = RedisBackend(server.url, {})
        yield backend
        backend.close()

    @pytest.fixture
    def client(self, server: Server) -> Iterator[Any]:
        with server.client() as client:
            yield client

    @pytest.fixture
    def lose_all(self, client: "redis.Redis") -> Callable[[], object]:
        return client.flushall

    def test_a_lock_is_one_key(self, backend: Backend, client: Any) -> None:
        backend.acquire(claim("a", limit=3))
        backend.acquire(claim("b", limit=3))

        assert client.keys() == [KEY]

    def test_a_released_lock_leaves_no_key(self, backend: Backend, client: Any) -> None:
        backend.acquire(claim("a"))

        backend.release(claim("a"), 1)

        assert client.keys() == []

    @pytest.mark.parametrize("order", ["abc", "cba", "bac"])
    def test_the_last_of_several_holders_leaves_no_key(self, backend: Backend, client: Any, order: str) -> None:
        places = {token: granted(backend.acquire(claim(token, limit=3))).place for token in "abc"}

        left = []
        for token in order:
            backend.release(claim(token, limit=3), places[token])
            left.append(client.exists(KEY))

        assert left == [1, 1, 0]

    @pytest.mark.parametrize("limit", [1, 2])
    def test_every_key_expires_at_all_times(self, backend: Backend, client: Any, limit: int) -> None:
        steps: list[Callable[[], Any]] = [
            lambda: backend.acquire(claim("a", limit=limit)),
            lambda: backend.acquire(claim("a", limit=limit)),
            lambda: backend.renew([claim("a", limit=limit)], 1.0),
            lambda: backend.acquire(claim("b", limit=limit, ttl=5)),
            lambda: backend.renew([claim("b", limit=limit, ttl=5)], 1.0),
            lambda: backend.acquire(claim("c", limit=limit)),
            lambda: backend.release(claim("c", limit=limit), None),
            lambda: backend.release(claim("a", limit=limit), 1),
        ]

        seen = 0
        for step in steps:
            step()
            for key in client.scan_iter():
                seen += 1
                assert 0 < client.pttl(key) <= 60_000

        assert seen >= len(steps) - 1

    def test_the_key_of_a_dead_holder_is_gone_two_ttl_after_its_last_renewal(
        self, backend: Backend, client: Any
    ) -> None:
        backend.acquire(claim("a", ttl=SHORT))
        renewed = clock()
        backend.renew([claim("a", ttl=SHORT)], 1.0)

        self.let_expire(backend)
        still_there = client.exists(KEY)
        until(lambda: not client.exists(KEY), "the key is gone")

        assert still_there or clock() > renewed + 2 * SHORT
        assert clock() >= renewed + 2 * SHORT - CLOCKS_DIFFER_BY

    def test_a_renewal_moves_the_expiry_of_the_key(self, backend: Backend, client: Any) -> None:
        backend.acquire(claim("a", ttl=5))

        backend.renew([claim("a", ttl=30)], 1.0)

        assert 50_000 < client.pttl(KEY) <= 60_000

    def test_a_successors_key_does_not_outlive_it_by_the_ttl_of_the_dead(self, backend: Backend, client: Any) -> None:
        backend.acquire(claim("a", ttl=SHORT))
        client.pexpire(KEY, 600_000)
        self.let_expire(backend)

        backend.acquire(claim("b", ttl=5))

        assert client.pttl(KEY) <= 10_000

    def test_a_fence_is_the_servers_time_in_microseconds_or_more(self, backend: Backend, client: Any) -> None:
        seconds, microseconds = client.time()

        grant = granted(backend.acquire(claim("a")))

        assert grant.fence >= seconds * 1_000_000 + microseconds

    def test_a_fence_grows_even_where_the_clock_has_gone_back(self, backend: Backend, client: Any) -> None:
        backend.acquire(claim("a", ttl=SHORT))
        from_the_future = 2 * int(client.hget(KEY, "fence"))
        client.hset(KEY, "fence", from_the_future)
        self.let_expire(backend)

        assert granted(backend.acquire(claim("b"))).fence == from_the_future + 1

    def test_a_key_of_another_kind_is_left_alone(self, backend: Backend, client: Any) -> None:
        client.set(KEY, "somebody else's")

        with pytest.raises(BackendError, match="WRONGTYPE"):
            backend.acquire(claim("a"))

        assert client.get(KEY) == "somebody else's"

    def test_a_held_lock_takes_little_memory(self, backend: Backend, client: Any) -> None:
        key = "singleton:v1:{shop.tasks.synchronise:9f62a583b84f8227e6432bfe2c555eb2}"
        backend.acquire(
            claim(
                "x" * 16,
                key=key,
                task_id="0b0e7a0c-5d5b-4f0c-9d57-8a5d5f9d2f3b",
                hostname="celery@worker-1",
                pid="12345",
            )
        )

        assert client.memory_usage(key) <= 400
