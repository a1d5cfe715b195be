import os
from typing import Any

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, body

app.conf.singleton_lock_log_labels = "TEST_LOG_LABELS" in os.environ


def task_with(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=f"labels.{name}", **options)
    def runs(self: Any, key: str, supplier_id: int, seconds: float = 0.0) -> str:
        body(self, key, seconds)
        return "ran"

    return runs


LABEL = "supplier {supplier_id}"
labelled = task_with("labelled", lock_label=LABEL)
unlabelled = task_with("unlabelled")
queued = task_with("queued", lock_label=LABEL, lock_mode="until_executed")
failing = task_with("failing", lock_label="{supplier_id.name}")
failing_in_the_queue = task_with("failing_in_the_queue", lock_label="{supplier_id.name}", lock_mode="until_executed")
