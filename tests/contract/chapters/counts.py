"""Numbers to which processes add."""

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.counts import field_of_batches
from tests.contract.asking import Contract

COUNTS = "singleton:v2:stats"
TIMEOUT = 30.0


class Counts(Contract):
    """Numbers to which processes add."""

    def test_numbers_are_added_up(self, store: Store) -> None:
        assert store.counted(COUNTS) == {}

        store.count(COUNTS, "a", 1, {"acquired::shop.sync": 2, "held:sum:shop.sync": 1_500_000}, TIMEOUT)
        store.count(COUNTS, "b", 1, {"acquired::shop.sync": 3}, TIMEOUT)
        store.count(COUNTS, "a", 2, {"acquired::shop:sync": 4}, TIMEOUT)

        added = {"acquired::shop.sync": 5, "held:sum:shop.sync": 1_500_000, "acquired::shop:sync": 4}
        assert store.counted(COUNTS) == added

    def test_a_batch_that_comes_again_is_added_once(self, store: Store) -> None:
        for number in (1, 1, 2, 2):
            store.count(COUNTS, "a", number, {"acquired::shop.sync": 1}, TIMEOUT)

        assert store.counted(COUNTS) == {"acquired::shop.sync": 2}

    def test_processes_that_share_a_note_do_not_take_batches_for_those_of_the_other(self, store: Store) -> None:
        one, other = "ab", "ba"
        assert field_of_batches(one) == field_of_batches(other)

        for process in (one, other):
            store.count(COUNTS, process, 1, {"acquired::shop.sync": 1}, TIMEOUT)

        assert store.counted(COUNTS) == {"acquired::shop.sync": 2}

    def test_counts_are_no_lock(self, store: Store) -> None:
        store.count(COUNTS, "a", 1, {"acquired::shop.sync": 1}, TIMEOUT)

        assert list(store.keys("singleton:v2:{")) == []
