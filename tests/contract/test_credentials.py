"""Who we are to the server: passwords and tokens that change, sockets, certificates, and services that refuse much."""

from pathlib import Path

import pytest
from celery import Celery
from redis import CredentialProvider

from celery_singleton_lock import ConfigurationError, StoreError
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import RELEASED, Grant, Renewal
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.test_bounds import KEY, MINE
from tests.servers import Server, certificate, free_port, running
from tests.waiting import Watch

AT_ONCE = 4.0
"""Less than the bound of an acquire, on a machine with other things to do."""


class Tokens(CredentialProvider):
    def __init__(self, token: str = "first") -> None:
        self.token = token
        self.is_away = False
        self.asked = 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        if self.is_away:
            raise KeyError(self.token)
        return "shop", self.token


def take_only(server: Server, token: str) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", "resetpass", f">{token}", "~singleton:*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")


def assert_that_all_works(store: Store) -> None:
    assert isinstance(store.acquire(MINE), Grant)
    assert store.renew([MINE], 5.0) == [Renewal.RENEWED]
    assert store.release(MINE, 1) == RELEASED


def test_a_token_that_is_replaced_is_asked_for_again(own: Server) -> None:
    take_only(own, "first")
    provider = Tokens()
    store = Store(own.url, {"credential_provider": provider})
    assert_that_all_works(store)
    take_only(own, "second")
    provider.token = "second"
    with own.client() as client:
        # As a service does when a token expires.
        client.client_kill_filter(user="shop")

    assert_that_all_works(store)
    assert provider.asked == 2
    store.close()


def test_a_token_that_is_not_taken_is_told_at_the_first_try(own: Server) -> None:
    take_only(own, "another")
    provider = Tokens("s3cret")

    with Watch() as watch, pytest.raises(ConfigurationError) as refused:
        Store(own.url, {"credential_provider": provider}).acquire(MINE)

    assert watch.seconds < AT_ONCE
    assert provider.asked == 1
    assert "let credential_provider give a user and a password that the server takes" in str(refused.value)
    assert "s3cret" not in str(refused.value) + repr(refused.value)


def test_a_provider_that_fails_is_as_good_as_a_store_that_is_away(own: Server) -> None:
    take_only(own, "s3cret")
    provider = Tokens("s3cret")
    provider.is_away = True
    store = Store(own.url, {"credential_provider": provider})

    with pytest.raises(StoreError, match="credential_provider has failed with KeyError") as unanswered:
        store.renew([MINE], 2.0)
    assert not isinstance(unanswered.value, ConfigurationError)
    assert "s3cret" not in str(unanswered.value)

    provider.is_away = False
    assert_that_all_works(store)
    store.close()


@pytest.mark.prove
@pytest.mark.parametrize("url", ["redis+socket://{path}?virtual_host=3", "unix://{path}?db=3", "unix://{path}"])
def test_a_socket_with_a_user_and_a_database(url: str, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running("redis", "--unixsocket", str(path)) as server:
        take_only(server, "first")
        app = Celery("shop", backend=url.format(path=path), set_as_current=False)
        app.conf.update(redis_username="shop", redis_password="first", redis_db=3)
        store = store_of(app)
        Inventory(store).self_test(f"{KEY}:trial", 5.0)
        assert isinstance(store.acquire(MINE), Grant)
        with server.client(3) as client:
            assert client.exists(KEY)
        store.close()


@pytest.mark.prove
def test_a_server_that_asks_for_certificates_is_reached_by_the_settings_of_celery(tmp_path: Path) -> None:
    own, key = certificate(tmp_path)
    port = free_port()
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-ca-cert-file", str(own))
    ours = {"ssl_ca_certs": str(own), "ssl_certfile": str(own), "ssl_keyfile": str(key)}
    of_celery = {**ours, "ssl_cert_reqs": "CERT_REQUIRED"}
    url = f"rediss://127.0.0.1:{port}/0"
    in_the_url = "&".join(f"{name}={value}" for name, value in of_celery.items())
    with running("redis", "--tls-port", str(port), *files):
        for settings in (
            {"result_backend": url, "redis_backend_use_ssl": of_celery},
            {"result_backend": f"{url}?{in_the_url}"},
            {"broker_url": url, "broker_use_ssl": of_celery},
            {"broker_url": f"{url}?{in_the_url}"},
            {"singleton_lock_url": url, "singleton_lock_client_options": ours},
            {"singleton_lock_url": f"valkeys{url.removeprefix('rediss')}?{in_the_url}"},
        ):
            app = Celery("shop", broker="memory://", set_as_current=False)
            app.conf.update(settings)
            store = store_of(app)
            assert_that_all_works(store)
            store.close()
