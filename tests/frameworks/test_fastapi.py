"""FastAPI: endpoints publish without blocking the event loop, and a duplicate is not published."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from celery_singleton_lock import Lock
from tests.frameworks.stage import visited
from tests.servers import free_port
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
    busy = client.delete("/suppliers/1")
    recorder.open_gate("the last page")
    for task_id in (first, other):
        until(lambda task_id=task_id: has_run(task_id), "it has run")
    later = start(1)
    until(lambda: has_run(later), "it has run")
    free = client.delete("/suppliers/1").status_code
    return {
        "deleted": [busy.status_code, first in busy.text, free],
        "ids": [first, again, third],
        "others": [other, later],
        "runs": len(recorder.events("enter")),
        "prices": set_prices(client),
    }


def test_a_duplicate_gets_the_id_of_the_other_call_and_a_dependency_holds_a_lock_for_its_request(
    env: dict[str, str],
) -> None:
    with workers(SHOP, env):
        told = visited(visit, env)

    assert len(set(told["ids"])) == 1
    assert len({*told["ids"], *told["others"]}) == 3
    assert told["runs"] == 3
    assert told["deleted"] == [409, True, 200]
    assert told["prices"] == [True, True, 409, True, 0]


def set_prices(client: Any) -> list[Any]:
    from tests.frameworks.fastapi_shop import app, prices

    told = [client.put(f"/prices/{percent}").json() for percent in (10, 20)]
    with Lock("prices", app=app):
        told.append(client.put("/prices/30").status_code)
    return [*told, client.put("/prices/40").json(), len(prices.state().holders)]


@contextmanager
def served(env: dict[str, str], log: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "uvicorn", f"{SHOP}:api", "--workers", "2", "--port", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, env={**os.environ, **env}, stdout=output, stderr=output)
    try:
        until(lambda: log.read_text().count("startup complete") == 2, "both have started", timeout=60)
        yield url
    finally:
        server.terminate()
        assert server.wait(60) is not None


def test_hundreds_of_requests_wait_for_one_lock_and_clients_that_hang_up_leave_nothing(
    env: dict[str, str], tmp_path: Path
) -> None:
    lock = Lock("stock", url=env["SHOP_REDIS"])

    async def visit(url: str) -> list[int]:
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(120)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
            async with lock:
                visits = [asyncio.create_task(client.post("/orders")) for _ in range(200)]
                await asyncio.to_thread(until, lambda: lock.state().waiting == len(visits), "all wait", 60)
                for hangs_up in visits[::4]:
                    hangs_up.cancel()
            answers = await asyncio.gather(*visits, return_exceptions=True)
        return [each.status_code for each in answers if isinstance(each, httpx.Response) and each.json() is True]

    log = tmp_path / "uvicorn"
    with served(env, log) as url:
        codes = asyncio.run(visit(url))
        until(lambda: not lock.state().holders and not lock.state().waiting, "nothing is held", timeout=60)

    assert codes == [200] * 150
    assert "Traceback" not in log.read_text()
