"""Django with tenants: a task class of tenant-schemas-celery, and a key that has the schema in it."""

from typing import Any

from tests.frameworks.stage import visited
from tests.workers import workers

SHOP = "tests.frameworks.tenant_shop"


def visit() -> Any:
    from celery_singleton_lock import CallRevoked
    from celery_singleton_lock.testing import hold
    from tests.frameworks.tenant_shop import app, connection, queue, run

    def ended(result: Any) -> str:
        value = result.get(timeout=60, propagate=False)
        return value.reason if isinstance(value, CallRevoked) else str(value)

    told = {}
    connection.set_schema("north")
    queued = queue.apply_async((1,), countdown=600)
    told["queued again"] = queue.delay(1).id == queued.id
    connection.set_schema("south")
    told["queued in the south"] = ended(queue.delay(1))
    connection.set_schema("north")
    with hold(run, 1):
        told["north"] = ended(run.delay(1))
        told["north, by name"] = ended(app.send_task("shop.run", (1,)))
        connection.set_schema("south")
        told["south"] = ended(run.delay(1, retries=2))
        told["south, by name"] = ended(app.send_task("shop.run", (1,)))
    return told


def test_tenants_neither_skip_nor_drop_each_others_calls(env: dict[str, str]) -> None:
    with workers(SHOP, env):
        assert visited(visit, env) == {
            "queued again": True,
            "queued in the south": "south 1",
            "north": "skipped",
            "north, by name": "skipped",
            "south": "south 1 True",
            "south, by name": "south 1 True",
        }
