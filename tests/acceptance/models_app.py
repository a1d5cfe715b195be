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


def body(self: Any, order: Order) -> str:
    with recorder.body(order.supplier_id, self.request.id):
        return "ran"


load, load_once = (
    app.task(base=SingletonTask, bind=True, pydantic=True, name=f"load-{mode}", lock_mode=mode, lock_key=key)(body)
    for mode, key in (("while_executing", None), ("until_executed", "{order.supplier_id}"))
)
