"""FastAPI: endpoints publish without blocking the event loop, and a duplicate is not published."""

from typing import Any

from tests.frameworks.stage import visited
from tests.gates import open_gate
from tests.waiting import until
from tests.workers import workers

SHOP = "tests.frameworks.fastapi_shop"


def visit() -> Any:
    from fastapi.testclient import TestClient

    from tests.frameworks.fastapi_shop import api
    from tests.frameworks.feed import recorder

    client = TestClient(api)

    def start(supplier_id: int) -> str:
        return str(client.post(f"/suppliers/{supplier_id}/import").json()["task_id"])

    def has_run(task_id: str) -> bool:
        return bool(client.get(f"/imports/{task_id}").json()["state"] == "SUCCESS")

    first = start(1)
    again, other = client.post("/imports", json=[1, 2]).json()["task_ids"]
    until(lambda: len(recorder.events("enter")) == 2, "both run")
    third = start(1)
    open_gate(recorder, "the last page")
    for task_id in (first, other):
        until(lambda task_id=task_id: has_run(task_id), "it has run")
    later = start(1)
    until(lambda: has_run(later), "it has run")
    return {"ids": [first, again, third], "others": [other, later], "runs": len(recorder.events("enter"))}


def test_a_duplicate_gets_the_id_of_the_call_that_is_queued_or_runs(env: dict[str, str]) -> None:
    with workers(SHOP, env):
        told = visited(visit, env)

    assert len(set(told["ids"])) == 1
    assert len({*told["ids"], *told["others"]}) == 3
    assert told["runs"] == 3


def set_prices() -> Any:
    from fastapi.testclient import TestClient

    from celery_singleton_lock import Lock
    from tests.frameworks.fastapi_shop import api, app, prices

    client = TestClient(api)
    told = [client.put(f"/prices/{percent}").json() for percent in (10, 20)]
    with Lock("prices", app=app):
        told.append(client.put("/prices/30").status_code)
    return [*told, client.put("/prices/40").json(), len(prices.state().holders)]


def test_a_dependency_holds_a_lock_for_its_request(env: dict[str, str]) -> None:
    assert visited(set_prices, env) == [True, True, 409, True, 0]
