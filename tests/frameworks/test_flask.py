"""Flask: a task has the context of its app, and runs once at a time."""

from typing import Any

from tests.frameworks.stage import visited
from tests.waiting import until
from tests.workers import workers

SHOP = "tests.frameworks.flask_shop"


def visit() -> Any:
    from tests.frameworks.feed import recorder
    from tests.frameworks.flask_shop import flask_app

    client = flask_app.test_client()

    def start(supplier_id: int) -> str:
        return str(client.post(f"/suppliers/{supplier_id}/import").json["task_id"])

    def ended(task_id: str) -> Any:
        def seen() -> Any:
            told = client.get(f"/imports/{task_id}").json
            return told if told["state"] in ("SUCCESS", "FAILURE", "REVOKED") else None

        return until(seen, "it has ended")

    holder = start(1)
    until(lambda: recorder.events("enter"), "it runs")
    duplicate = ended(start(1))
    recorder.open_gate("the last page")
    return {"holder": holder, "first": ended(holder), "duplicate": duplicate, "other": ended(start(2))}


def test_a_duplicate_is_skipped_and_each_body_has_the_context_of_the_app(env: dict[str, str]) -> None:
    with workers(SHOP, env):
        told = visited(visit, env)

    ran = {"state": "SUCCESS", "result": "imported, prices in EUR"}
    assert told["first"] == told["other"] == ran
    assert told["duplicate"]["state"] == "REVOKED"
    assert told["holder"] in told["duplicate"]["result"]
