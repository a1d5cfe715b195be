"""`join` needs results that a worker can read, and says so where there are none."""

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, SingletonTask
from tests.servers import Server


@pytest.mark.parametrize("results", [None, "disabled://", "rpc://"])
def test_join_is_refused_where_no_worker_can_read_results(valkey: Server, results: str | None) -> None:
    app = Celery("joining", broker=valkey.url, backend=results, set_as_current=False)
    app.conf.singleton_lock_url = valkey.url.removesuffix("/0") + "/2"

    @app.task(base=SingletonTask, lock_on_conflict="join")
    def task() -> None: ...

    try:
        with pytest.raises(ConfigurationError, match="join"):
            task.delay()
    finally:
        app.close()
