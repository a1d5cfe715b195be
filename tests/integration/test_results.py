"""docs/how-to/results.md: its example, as it stands there, run on a real server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import CallRevoked
from tests.servers import Server
from tests.tracing import traced

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "results.md"


@pytest.fixture
def shop(valkey: Server) -> Iterator[dict[str, Any]]:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    shop: dict[str, Any] = {"__name__": "shop"}
    exec(example, shop)
    base = valkey.url.removesuffix("/0")
    conf = {"broker_url": valkey.url, "result_backend": "cache+memory://", "singleton_lock_url": f"{base}/2"}
    shop["app"].conf.update(conf)
    yield shop
    shop["app"].close()


def test_a_page_leads_to_the_call_that_is_queued(shop: dict[str, Any]) -> None:
    status, place = shop["start"](7)

    assert status == 202
    assert shop["start"](7) == (409, place)
    assert shop["start"](8)[0] == 202


def test_a_page_leads_to_the_call_that_this_one_was_refused_for(shop: dict[str, Any]) -> None:
    task = shop["import_catalogue"]
    _, place = shop["start"](7)

    sent, _ = traced(task, 7)

    assert task.AsyncResult(sent).state == "FAILURE"
    assert shop["show"](sent) == (303, place)


@pytest.mark.parametrize(("holder", "answer"), [("another", (303, "/imports/another")), (None, (200, "REVOKED"))])
def test_a_page_leads_to_the_call_that_runs_in_place_of_this_one(
    shop: dict[str, Any], holder: str | None, answer: tuple[int, str]
) -> None:
    error = CallRevoked("text", "key", holder, "superseded" if holder else "unanswered")
    shop["app"].backend.store_result("this", error, "REVOKED")

    assert shop["show"]("this") == answer


def test_a_page_shows_the_state_of_any_other_call(shop: dict[str, Any]) -> None:
    _, place = shop["start"](7)

    assert shop["show"](place.rpartition("/")[2]) == (200, "PENDING")
