"""The shop's tests for those who use no pytest; with Django, in a `TestCase` of Django's."""

from unittest import TestCase

from shop import app, import_catalogue

from celery_singleton_lock.testing import hold, memory_store, recorded


class ImportTest(TestCase):
    def setUp(self) -> None:
        self.enterContext(memory_store(app))
        self.locks = self.enterContext(recorded())

    def test_a_second_import_of_a_supplier_is_skipped(self) -> None:
        with hold(import_catalogue, 7):
            assert import_catalogue.apply((7,)).state == "REVOKED"

        assert [conflict.outcome for conflict in self.locks.conflicts] == ["skipped"]
