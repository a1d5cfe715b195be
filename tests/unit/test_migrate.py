"""The snippets of docs/migrate.md, executed."""

import re
from pathlib import Path

import pytest
from celery import Celery

from celery_singleton_lock import SingletonTask

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_snippets_for_each_library() -> None:
    assert len(SNIPPETS) == 5
    assert re.findall(r"^## From (.*)$", PAGE, re.MULTILINE) == ["celery-singleton", "celery-once", "celery-heimdall"]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_does_what_the_page_says(snippet: str) -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = f"memory://{hash(snippet)}"
    # Celery gives an app the tasks of all others as well.
    known = set(app.tasks)
    exec(snippet, {"app": app})

    (task,) = [task for name, task in app.tasks.items() if isinstance(task, SingletonTask) and name not in known]
    first = task.delay("one")
    if task.lock_on_conflict == "raise":
        with pytest.raises(Exception, match=first.id):
            task.delay("one")
    else:
        assert task.delay("one").id in (first.id, task.delay("one").id)


def test_every_option_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\block_(?!expiry)\w+", PAGE)) - {"lock_ttl"}
    assert all(hasattr(SingletonTask, name) for name in named), named


def test_the_leftovers_that_the_page_deletes_are_those_of_celery_singleton() -> None:
    from celery_singleton.util import generate_lock

    (pattern,) = re.findall(r"--pattern '(\w+)\*'", PAGE)

    assert generate_lock("shop.sync", task_args=[1]).startswith(pattern)
