"""A task that receives a model of pydantic, for the workers of the acceptance tests."""

from typing import Any

import pydantic

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, note_process, recorder

__all__ = ["app"]


class Order(pydantic.BaseModel):
    supplier_id: int
    full: bool = False

    @pydantic.field_validator("supplier_id")
    @classmethod
    def on_record(cls, supplier_id: int) -> int:
        note_process("makers of models")
        return supplier_id


@app.task(base=SingletonTask, bind=True, pydantic=True)
def load(self: Any, order: Order) -> str:
    with recorder.body(order.supplier_id, self.request.id):
        return "ran"


@app.task(base=SingletonTask, bind=True, pydantic=True, lock_key="{order.supplier_id}", lock_mode="until_executed")
def load_once(self: Any, order: Order) -> str:
    with recorder.body(order.supplier_id, self.request.id):
        return "ran"
