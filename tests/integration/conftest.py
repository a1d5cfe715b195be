"""An app with its locks on a server of each kind, in turn."""

from collections.abc import Iterator

import pytest
from celery import Celery, uuid

from tests.servers import Server


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    app = Celery("integration", broker="memory://", backend="cache+memory://", set_as_current=False)
    # Queues in memory are those of the process.
    app.conf.update(singleton_lock_url=server.url, task_default_queue=uuid())
    yield app
    app.close()
