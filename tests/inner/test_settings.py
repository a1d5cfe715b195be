"""With which options redis-py is opened: it looks into connections, and goes with the rebuilding of the stores."""

import ssl
from typing import Any

import pytest
from celery import Celery
from redis import Connection, CredentialProvider, SSLConnection, UnixDomainSocketConnection

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.redis.connection import REPLY_TIMEOUT
from celery_singleton_lock.stores.redis.store import RedisStore

SECRET = "hunter2"


def app_with(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return app


def redis_store_of(app: Celery) -> RedisStore:
    store = store_of(app)
    assert isinstance(store, RedisStore)
    return store


def connection_of(store: Any) -> Any:
    """A connection as the store would open it; nothing is sent."""
    pool = store._servers.pool
    connection = pool.connection_class(**pool.connection_kwargs)
    # It is text on the way to the server.
    connection.db = int(connection.db)
    return connection


# Which URL.


# Which kind of connection.


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://locks:1/2", Connection),
        ("rediss://locks:1/2", SSLConnection),
        ("valkey://locks:1/2", Connection),
        ("valkeys://locks:1/2", SSLConnection),
        ("unix:///run/redis.sock?db=2", UnixDomainSocketConnection),
        ("redis+socket:///run/redis.sock?virtual_host=2", UnixDomainSocketConnection),
    ],
)
def test_the_scheme_says_how_to_connect(url: str, kind: type) -> None:
    connection = connection_of(store_of(app_with(singleton_lock_url=url)))

    assert isinstance(connection, kind)
    assert isinstance(connection, SSLConnection) is (kind is SSLConnection)
    assert connection.db == 2
    if kind is UnixDomainSocketConnection:
        assert connection.path == "/run/redis.sock"
    else:
        assert (connection.host, connection.port) == ("locks", 1)


@pytest.mark.parametrize(
    ("url", "db"),
    [
        ("redis://locks", None),
        ("redis://locks/", None),
        ("redis://locks/3", 3),
        ("redis://locks/3/", 3),
        ("redis://locks/abc?db=3", 3),
        ("redis://locks/abc?virtual_host=3", 3),
    ],
)
def test_a_database_is_a_number_or_left_out(url: str, db: int | None) -> None:
    assert (connection_of(store_of(app_with(singleton_lock_url=url))).db or None) == db


@pytest.mark.parametrize("db", [3, "3"])
def test_a_database_may_be_given_as_an_option(db: Any) -> None:
    app = app_with(singleton_lock_url="redis://locks", singleton_lock_client_options={"db": db})

    assert str(connection_of(store_of(app)).db) == "3"


# Options of the client.


def test_client_options_reach_the_connection() -> None:
    app = app_with(
        singleton_lock_url="redis://locks/0",
        singleton_lock_client_options={"client_name": "shop", "username": "shop", "password": SECRET},
    )

    connection = connection_of(store_of(app))

    assert connection.client_name == "shop"
    assert (connection.username, connection.password) == ("shop", SECRET)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "singleton_lock_client_options": {
                "socket_timeout": 60,
                "socket_connect_timeout": 60,
                "health_check_interval": 5,
            }
        },
        {"singleton_lock_url": "redis://locks/0?socket_timeout=60&socket_connect_timeout=60&health_check_interval=5"},
    ],
    ids=["options", "url"],
)
def test_the_bounds_cannot_be_loosened(settings: dict[str, Any]) -> None:
    connection = connection_of(store_of(app_with(**{"singleton_lock_url": "redis://locks/0", **settings})))

    assert connection.socket_timeout == connection.socket_connect_timeout == REPLY_TIMEOUT
    assert connection.health_check_interval == 0
    assert connection.retry._retries == 0


# TLS.


def test_the_result_backends_tls_is_used_with_it() -> None:
    app = app_with(
        result_backend="redis://results/0",
        redis_backend_use_ssl={"ssl_cert_reqs": ssl.CERT_NONE, "ssl_check_hostname": False, "ssl_ca_certs": "ca.pem"},
    )

    connection = connection_of(store_of(app))

    assert isinstance(connection, SSLConnection)
    assert connection.cert_reqs == ssl.CERT_NONE
    assert connection.ca_certs == "ca.pem"


def test_what_is_no_text_goes_to_redis_py_as_it_is() -> None:
    several = {"socket_keepalive_options": {1: 2}, "ssl_check_hostname": False}
    app = app_with(result_backend="redis://results/0", redis_backend_use_ssl=several)

    assert connection_of(store_of(app)).socket_keepalive_options == {1: 2}


def test_the_brokers_tls_is_used_with_it() -> None:
    app = app_with(broker_url="redis://broker/0", broker_use_ssl={"ssl_ca_certs": "ca.pem", "ssl_keyfile": "key.pem"})

    connection = connection_of(store_of(app))

    assert isinstance(connection, SSLConnection)
    assert (connection.ca_certs, connection.keyfile) == ("ca.pem", "key.pem")


def test_the_tls_of_one_store_is_not_used_for_another() -> None:
    app = app_with(
        result_backend="redis://results/0",
        broker_url="redis://broker/0",
        broker_use_ssl={"ssl_ca_certs": "ca.pem"},
    )

    assert not isinstance(connection_of(store_of(app)), SSLConnection)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_tls_settings_and_scheme_may_both_say_so(scheme: str) -> None:
    app = app_with(broker_url=f"{scheme}://broker/0", broker_use_ssl={"ssl_ca_certs": "ca.pem"})

    assert isinstance(connection_of(store_of(app)), SSLConnection)


REQUIREMENTS = [
    ("CERT_NONE", ssl.CERT_NONE),
    ("none", ssl.CERT_NONE),
    ("CERT_OPTIONAL", ssl.CERT_OPTIONAL),
    ("optional", ssl.CERT_OPTIONAL),
    ("CERT_REQUIRED", ssl.CERT_REQUIRED),
    ("required", ssl.CERT_REQUIRED),
]


@pytest.mark.parametrize(("spelling", "meaning"), REQUIREMENTS)
def test_celerys_spelling_of_a_certificate_check_is_understood_in_a_url(spelling: str, meaning: ssl.VerifyMode) -> None:
    app = app_with(result_backend=f"rediss://results/3?ssl_cert_reqs={spelling}&ssl_check_hostname=false")

    connection = connection_of(store_of(app))

    assert connection.cert_reqs == meaning
    assert connection.db == 3


def test_celerys_spelling_is_understood_wherever_a_url_is_given() -> None:
    by_app = store_of(app_with(singleton_lock_url="redis+socket:///run/redis.sock?virtual_host=2"))

    for store in (by_app, store_from_url("redis+socket:///run/redis.sock?virtual_host=2")):
        assert connection_of(store).db == 2
    for url in (
        "rediss://locks/3?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=false",
        "sentinel://h1;h2/3?master_name=a&ssl_cert_reqs=CERT_NONE&ssl_check_hostname=false",
    ):
        assert connection_of(store_from_url(url)).cert_reqs == ssl.CERT_NONE
    assert connection_of(store_from_url("redis://locks?client_name=a;b")).client_name == "a;b"


@pytest.mark.parametrize(("spelling", "meaning"), REQUIREMENTS)
def test_celerys_spelling_of_a_certificate_check_is_understood_in_settings(
    spelling: str, meaning: ssl.VerifyMode
) -> None:
    app = app_with(
        result_backend="rediss://results/0",
        redis_backend_use_ssl={"ssl_cert_reqs": spelling, "ssl_check_hostname": False},
    )

    connection = connection_of(store_of(app))

    assert connection.cert_reqs == meaning


# User, password and database.


class Vault(CredentialProvider):
    """As an app has it."""

    def get_credentials(self) -> tuple[str, str]:
        return "vault", SECRET


class Safe(Vault):
    """One that has to be told where it is."""

    def __init__(self) -> None:
        raise KeyError(SECRET)


PROVIDER = f"{__name__}.Vault"
USERS_OF_CELERY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of results": (
        {"result_backend": "redis://results/0", "redis_username": "shop", "redis_password": SECRET},
        {"username": "shop", "password": SECRET},
    ),
    "of results over TLS": (
        {"result_backend": "rediss://results/0?ssl_cert_reqs=none&ssl_check_hostname=no", "redis_password": SECRET},
        {"username": None, "password": SECRET},
    ),
    "of results at sentinels": (
        {
            "result_backend": "sentinel://h1/0",
            "result_backend_transport_options": {"master_name": "mymaster"},
            "redis_username": "shop",
            "redis_password": SECRET,
        },
        {"username": "shop", "password": SECRET},
    ),
    "of results at a socket": (
        {"result_backend": "redis+socket:///run/redis.sock", "redis_password": SECRET, "redis_db": 3},
        {"password": SECRET, "db": 3},
    ),
    "of results at a socket with a database": (
        {"result_backend": "redis+socket:///run/redis.sock?virtual_host=2", "redis_db": 3},
        {"db": 2},
    ),
    "the database of results over TCP is in the URL": ({"result_backend": "redis://results", "redis_db": 3}, {"db": 0}),
    "the URL goes before": (
        {"result_backend": f"redis://:{SECRET}@results/0", "redis_username": "shop", "redis_password": "other"},
        {"username": "shop", "password": SECRET},
    ),
    "of the broker": (
        {"broker_url": "redis://broker/0", "broker_user": "shop", "broker_password": SECRET, "redis_password": "other"},
        {"username": "shop", "password": SECRET},
    ),
    "ours": (
        {
            "result_backend": "redis://results/0",
            "redis_backend_credential_provider": Vault(),
            "singleton_lock_client_options": {"username": "shop", "password": SECRET},
        },
        {"username": "shop", "password": SECRET, "credential_provider": None},
    ),
}


@pytest.mark.parametrize("case", USERS_OF_CELERY)
def test_user_and_password_are_found_as_celery_finds_them(case: str) -> None:
    settings, expected = USERS_OF_CELERY[case]

    connection = connection_of(store_of(app_with(**settings)))

    assert {name: getattr(connection, name) or (0 if name == "db" else None) for name in expected} == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"result_backend": "redis://results/0", "redis_backend_credential_provider": Vault()},
        {"result_backend": "redis://results/0", "redis_backend_credential_provider": PROVIDER},
        {"result_backend": f"redis://results/0?credential_provider={PROVIDER}"},
        {"result_backend": f"redis://u:p@results/0?credential_provider={PROVIDER}", "redis_password": "other"},
        {"broker_url": f"redis://broker/0?credential_provider={PROVIDER}"},
        {"broker_url": f"redis+socket:///run/redis.sock?credential_provider={PROVIDER}"},
        {
            "broker_url": f"sentinel://u:p@h1/0?credential_provider={PROVIDER}",
            "broker_transport_options": {"master_name": "mymaster"},
        },
        {"singleton_lock_url": "redis://locks/0", "singleton_lock_client_options": {"credential_provider": Vault()}},
        {
            "singleton_lock_url": "rediss://u:p@locks/0",
            "singleton_lock_client_options": {"credential_provider": PROVIDER.replace(".Vault", ":Vault")},
        },
    ],
)
def test_a_credential_provider_is_found_as_celery_finds_it_and_stands_for_user_and_password(settings: Any) -> None:
    connection = connection_of(store_of(app_with(**settings)))

    assert type(connection.credential_provider).__name__ == "Vault"
    assert (connection.username, connection.password) == (None, None)


@pytest.mark.parametrize(
    "provider", ["nowhere.Vault", f"{__name__}.Nowhere", f"{__name__}.Safe", f"{__name__}.SECRET", "vault", ".", ""]
)
def test_a_credential_provider_that_cannot_be_made_is_refused(provider: str) -> None:
    app = app_with(result_backend="redis://results/0", redis_backend_credential_provider=provider)
    if not provider:
        assert connection_of(store_of(app)).credential_provider is None
        return

    with pytest.raises(
        ConfigurationError, match=r"credential_provider cannot be made of the text .* dotted path"
    ) as error:
        store_of(app)
    assert SECRET not in str(error.value)


# Sentinel.


def deployment_of(app: Celery) -> Any:
    """Where the sentinels are, and a connection to the master as it would be opened."""
    store = redis_store_of(app)
    return store.address, connection_of(store)


NAMED = {"master_name": "mymaster"}


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://shop:s%40cret@h1/2;sentinel://h2",
        "sentinel://h1;sentinel://shop:s%40cret@h2/2",
        "sentinel://shop:s%40cret@h1;shop:s%40cret@h2/2?client_name=shop",
        "sentinel://shop:s%40cret@h1?client_name=shop;sentinel://h2?db=2",
    ],
)
def test_user_password_and_database_are_those_of_the_first_part_that_has_them(url: str) -> None:
    address, connection = deployment_of(app_with(broker_url=url, broker_transport_options=NAMED))

    assert (connection.username, connection.password, connection.db) == ("shop", "s@cret", 2)
    assert connection.client_name == ("shop" if "client_name" in url else None)
    assert address == "sentinel://h1:26379;h2:26379/2?master_name=mymaster"


def test_tls_of_the_broker_is_the_masters_and_that_of_the_sentinels_is_their_own() -> None:
    app = app_with(
        broker_url="sentinel://h1",
        broker_use_ssl={"ssl_cert_reqs": "CERT_OPTIONAL", "ssl_check_hostname": False},
        broker_transport_options={**NAMED, "sentinel_kwargs": {"ssl": True, "ssl_ca_certs": "ca.pem"}},
    )
    _, connection = deployment_of(app)
    (client,) = redis_store_of(app)._servers._sentinels.sentinels  # type: ignore[attr-defined]
    pool = client.connection_pool
    sentinel = pool.connection_class(**pool.connection_kwargs)

    assert (connection.cert_reqs, connection.ca_certs) == (ssl.CERT_OPTIONAL, None)
    assert (sentinel.cert_reqs, sentinel.ca_certs) == (ssl.CERT_REQUIRED, "ca.pem")


@pytest.mark.parametrize(
    ("options", "has_tls"),
    [({}, False), ({"ssl": False}, False), ({"ssl": True}, True), ({"ssl_ca_certs": "ca.pem"}, True)],
)
def test_options_of_the_client_say_whether_the_master_speaks_tls(options: dict[str, Any], has_tls: bool) -> None:
    app = app_with(singleton_lock_url="sentinel://h1", singleton_lock_client_options={**NAMED, **options})

    _, connection = deployment_of(app)

    assert isinstance(connection, SSLConnection) is has_tls


# Secrets.


# Nothing happens yet.
