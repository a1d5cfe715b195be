import os
from collections.abc import AsyncIterator
from typing import Annotated

from celery import Celery
from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from celery_singleton_lock import Lease, Lock, LockHeld, SingletonTask
from tests.frameworks.feed import pages

REDIS = os.environ.get("SHOP_REDIS", "redis://localhost")

app = Celery("shop", broker=REDIS, backend=REDIS)
api = FastAPI()


@app.task(base=SingletonTask, lock_key=("supplier_id",), lock_mode="until_executed")
def import_catalogue(supplier_id: int) -> str:
    list(pages(supplier_id))
    return f"imported {supplier_id}"


@api.post("/suppliers/{supplier_id}/import", status_code=202)
def start(supplier_id: int) -> dict[str, str]:
    # No `async def`: FastAPI calls it in a thread.
    return {"task_id": import_catalogue.delay(supplier_id).id}


@api.post("/imports", status_code=202)
async def start_several(supplier_ids: list[int]) -> dict[str, list[str]]:
    started = [await run_in_threadpool(import_catalogue.delay, supplier_id) for supplier_id in supplier_ids]
    return {"task_ids": [result.id for result in started]}


@api.get("/imports/{task_id}")
def state(task_id: str) -> dict[str, str]:
    return {"state": app.AsyncResult(task_id).state}


prices = Lock("prices", app=app, timeout=1)


async def alone() -> AsyncIterator[Lease]:
    async with prices as lease:
        yield lease


@api.exception_handler(LockHeld)
def refuse(_: Request, error: LockHeld) -> Response:
    return Response(str(error), 409)


@api.put("/prices/{percent}")
async def set_prices(percent: int, lease: Annotated[Lease, Depends(alone)]) -> bool:
    return lease.held


@api.delete("/suppliers/{supplier_id}")
async def delete(supplier_id: int) -> str:
    keeps_imports_out = import_catalogue.lock_for(supplier_id)
    keeps_imports_out.timeout = 0
    async with keeps_imports_out:
        return "deleted"


@api.post("/orders")
async def order() -> bool:
    async with Lock("stock", app=app) as lease:
        return lease.held
