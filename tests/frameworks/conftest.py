from pathlib import Path

import pytest

from tests.servers import Server


@pytest.fixture
def env(valkey: Server, tmp_path: Path) -> dict[str, str]:
    return {
        "TEST_STORE": valkey.url,
        "SHOP_REDIS": valkey.url,
        "SHOP_DATABASE": str(tmp_path / "shop.sqlite3"),
        "FLASK_CELERY__broker_url": valkey.url,
        "FLASK_CELERY__result_backend": valkey.url,
    }
