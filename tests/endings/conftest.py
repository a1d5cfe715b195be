import pytest

from tests.endings.app import app
from tests.recorder import Event, Recorder
from tests.servers import Server
from tests.waiting import until

APP = "tests.endings.app"


@pytest.fixture
def at_valkey(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    base = valkey.url.removesuffix("/0")
    app.conf.update(broker_url=valkey.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    monkeypatch.setenv("TEST_STORE", valkey.url)


def begun(recorder: Recorder, name: str = "enter") -> Event:
    return until(lambda: recorder.events(name), "the run has begun")[0]
