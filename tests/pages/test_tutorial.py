"""docs/tutorial.md, as its reader does it: a worker is killed, and the key comes free."""

import pytest

from celery_singleton_lock import CallRevoked
from tests.pages.conftest import ROOT, Program, StartWorker
from tests.waiting import until

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_a_worker_is_killed_and_the_key_comes_free(shop: Program, worker: StartWorker) -> None:
    task = shop("docs/tutorial.md").import_catalogue
    one = worker()
    first = task.delay(7)
    until(lambda: task.lock_holders(7), "the first call runs", timeout=30)

    second = task.delay(7)
    with pytest.raises(CallRevoked, match=f"is held by task_id={first.id}"):
        second.get(timeout=30)
    assert second.state == "REVOKED"
    assert second.result.holder_task_id == first.id
    alone = task.delay(8, pages=1).get(timeout=30)
    assert "outcome=skipped" in one.log()

    one.kill()
    left = task.lock_holders(7)[0].expires_in
    assert 0 < left <= 12
    until(lambda: not task.lock_holders(7), "its lease ends", timeout=30)

    worker()
    taken_over = task.delay(7, pages=1).get(timeout=30)

    for told in (alone, taken_over):
        assert f"'{told}'" in PAGE
    assert taken_over.endswith("True")
