"""Numbers to which processes add."""

from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Contract

COUNTS = "singleton:v3:stats"
TIMEOUT = 30.0


class Counts(Contract):
    """Numbers to which processes add."""

    def test_numbers_are_added_up(self, store: Store) -> None:
        assert Inventory(store).counted(COUNTS) == {}

        store.count(COUNTS, {"acquired::shop.sync": 2, "held:sum:shop.sync": 1_500_000}, TIMEOUT)
        store.count(COUNTS, {"acquired::shop.sync": 3}, TIMEOUT)
        store.count(COUNTS, {"acquired::shop:sync": 4}, TIMEOUT)

        added = {"acquired::shop.sync": 5, "held:sum:shop.sync": 1_500_000, "acquired::shop:sync": 4}
        assert Inventory(store).counted(COUNTS) == added

    def test_counts_are_no_lock(self, store: Store) -> None:
        store.count(COUNTS, {"acquired::shop.sync": 1}, TIMEOUT)

        assert list(Inventory(store).keys("singleton:v3:{")) == []
