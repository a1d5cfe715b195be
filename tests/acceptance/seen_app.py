from typing import Any

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, recorder

__all__ = ["app"]


def importing(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=f"seen: {name}", lock_key=("supplier",), **options)
    def import_catalogue(self: Any, supplier: str, number: int = 0, waits: bool = False, **_: Any) -> int:
        with recorder.body(supplier, self.request.id):
            if waits:
                recorder.wait_at(supplier)
        return number

    return import_catalogue


skip = importing("skip")
reschedule = importing("reschedule", lock_on_conflict="reschedule")
rerun = importing("rerun", lock_on_conflict="rerun")
replace = importing("replace", lock_on_conflict="replace")
unique = importing("unique", lock_mode="until_executed")
