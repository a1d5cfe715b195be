"""The last events, of which so many are kept."""

from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Contract

HISTORY = "singleton:v3:history"
TIMEOUT = 30.0


class History(Contract):
    """The last events, of which so many are kept."""

    def test_the_last_so_many_are_kept_however_they_come(self, store: Store) -> None:
        store.history = 5
        try:
            for number in range(0, 6, 2):
                store.record(HISTORY, [str(number), str(number + 1)], TIMEOUT)
            kept = store.fields(HISTORY)
            store.record(HISTORY, [f"new {number}" for number in range(8)], TIMEOUT)
            after = store.fields(HISTORY)
        finally:
            del store.history

        assert sorted(value for name, value in kept.items() if name != "last") == ["1", "2", "3", "4", "5"]
        assert {value for name, value in after.items() if name != "last"} == {f"new {each}" for each in range(3, 8)}

    def test_it_has_an_expiry_and_is_no_lock(self, store: Store) -> None:
        store.record(HISTORY, ["an event"], TIMEOUT)

        assert 29 * 24 * 3600 * 1000 < store.call("PTTL", HISTORY) <= 30 * 24 * 3600 * 1000
        assert list(Inventory(store).keys("singleton:v3:{")) == []
