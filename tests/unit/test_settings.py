"""Which store an app's locks are in, how it is opened, and that nobody reads its password."""

import socket
import ssl
from typing import Any

import pytest
from celery import Celery
from redis import CredentialProvider, SSLConnection, UnixDomainSocketConnection

from celery_singleton_lock import ConfigurationError, Lock, SingletonTask, StoreError
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.redis.connection import REPLY_TIMEOUT
from celery_singleton_lock.testing import memory_store
from tests.servers import free_port

SECRET = "hunter2"
NAMED = {"master_name": "mymaster"}
THREE = "sentinel://h1:1;h2:2;h3:3/0?master_name=mymaster"


def app_with(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return app


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(**settings))

    assert "\n" not in str(refused.value)
    assert SECRET not in repr(refused.value) + str(refused.value)
    return str(refused.value)


ADDRESSES: list[tuple[dict[str, Any], str]] = [
    (
        {"singleton_lock_url": "redis://a:1/2", "result_backend": "redis://b", "broker_url": "redis://c"},
        "redis://a:1/2",
    ),
    ({"result_backend": "redis://results:1/2", "broker_url": "redis://broker/0"}, "redis://results:1/2"),
    *[
        ({"result_backend": results, "broker_url": "redis://broker:1/2"}, "redis://broker:1/2")
        for results in (None, "rpc://", "db+sqlite:///results.db", "cache+memory://", "disabled://")
    ],
    ({"broker_read_url": "redis://read/0", "broker_write_url": "redis://write/0"}, "redis://write/0"),
    ({"broker_url": ["redis://one/0", "redis://two/0"]}, "redis://one/0"),
    ({"broker_url": "redis://one/0;redis://two/0"}, "redis://one/0"),
    ({"singleton_lock_url": "memory://", "broker_url": "redis://broker/0"}, "memory://"),
    # Blanks around a URL mean nothing.
    ({"singleton_lock_url": "  redis://a:1/0"}, "redis://a:1/0"),
    ({"singleton_lock_url": "\tredis://a:1/0\n"}, "redis://a:1/0"),
    # Sentinels, as Celery spells them for a broker and for results.
    ({"singleton_lock_url": "sentinel://h1:1;sentinel://h2:2;sentinel://h3:3/0?master_name=mymaster"}, THREE),
    ({"singleton_lock_url": "sentinel://h1:1;h2:2;h3:3/0?service_name=mymaster"}, THREE),
    ({"singleton_lock_url": "sentinel://h1:1/0; h2:2; h3:3;h3:3;", "singleton_lock_client_options": NAMED}, THREE),
    (
        {"broker_url": ["sentinel://h1:1/0", "sentinel://h2:2", "sentinel://h3:3"], "broker_transport_options": NAMED},
        THREE,
    ),
    (
        {"broker_url": "sentinel://h1;sentinel://h2/1", "broker_transport_options": NAMED},
        "sentinel://h1:26379;h2:26379/1?master_name=mymaster",
    ),
    (
        {"result_backend": "sentinel://h1;sentinel://[::1]:5/1", "result_backend_transport_options": NAMED},
        "sentinel://h1:6379;[::1]:5/1?master_name=mymaster",
    ),
    # Without the password.
    *[
        ({"singleton_lock_url": url.replace("SECRET", SECRET)}, address)
        for url, address in (
            ("redis://user:SECRET%40%2F@locks:1/2", "redis://locks:1/2"),
            ("redis://user:a@SECRET@locks", "redis://locks"),
            ("redis://locks/0?password=SECRET&client_name=shop", "redis://locks/0"),
            ("rediss://user:SECRET@locks/0?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=no", "rediss://locks/0"),
            ("valkey://:SECRET@locks/0", "redis://locks/0"),
            ("unix://:SECRET@/run/redis.sock?db=1", "unix:///run/redis.sock"),
            ("redis+socket://:SECRET@/run/redis.sock", "unix:///run/redis.sock"),
            ("sentinel://u:SECRET@h:1;h:2/0?master_name=a", "sentinel://h:1;h:2/0?master_name=a"),
            # Servers of a cluster.
            ("redis+cluster://one", "redis+cluster://one:6379"),
            ("redis+cluster://one:1;two:2", "redis+cluster://one:1;two:2"),
            ("redis+cluster://one:1/0;redis+cluster://two:2/0", "redis+cluster://one:1;two:2"),
            ("redis+cluster://shop:SECRET@one:1;two:2", "redis+cluster://one:1;two:2"),
            ("rediss+cluster://:SECRET@[::1]:1;one:1?ssl_cert_reqs=none", "rediss+cluster://[::1]:1;one:1"),
            ("redis+cluster://one:1;one:1", "redis+cluster://one:1"),
        )
    ],
]


@pytest.mark.parametrize(("settings", "address"), ADDRESSES)
def test_the_store_of_an_app_is_found(settings: dict[str, Any], address: str) -> None:
    assert store_of(app_with(**settings)).address == address


def test_an_app_has_one_store_and_another_app_another_unless_it_is_in_memory() -> None:
    app, other = app_with(broker_url="redis://one/0"), app_with(broker_url="redis://one/0")
    assert store_of(app) is store_of(app) is not store_of(other)

    one, two, three = (store_of(app_with(singleton_lock_url=f"memory://{name}")) for name in ("a", "a", "b"))
    assert one is two is not three


def test_an_app_that_takes_no_attributes_of_others_has_a_store() -> None:
    class Strict(Celery):
        def __setattr__(self, name: str, value: Any) -> None:
            assert "singleton" not in name
            super().__setattr__(name, value)

    app = Strict("shop", set_as_current=False)
    app.conf.singleton_lock_url = "redis://localhost"

    assert store_of(app) is store_of(app)


def test_an_app_without_a_store_may_define_tasks() -> None:
    app = app_with(broker_url="amqp://localhost//")

    @app.task(base=SingletonTask, name="shop.tasks.sync", shared=False)
    def sync(x: Any) -> None: ...

    assert sync.lock_key_for(1).startswith("singleton:v3:")
    with pytest.raises(ConfigurationError, match="singleton_lock_url is not set"):
        sync.lock_holders(1)


def test_a_task_moves_to_a_url_that_is_set_after_its_first_use() -> None:
    app = app_with(singleton_lock_url="redis://nowhere.invalid/0", task_always_eager=True)

    @app.task(base=SingletonTask, bind=True, lock_on_store_error="raise", shared=False)
    def fence(self: Any) -> bool:
        return bool(self.lock.held)

    with pytest.raises(StoreError):
        fence.lock_state()
    app.conf.singleton_lock_url = "ftp://locks"
    with pytest.raises(ConfigurationError):
        store_of(app)
    app.conf.singleton_lock_url = "memory://after its first use"
    assert fence.delay().get()


def test_what_is_assigned_goes_before_what_was_configured_in_a_namespace() -> None:
    app = Celery("shop", set_as_current=False)
    configured = {"URL": "redis://configured/0", "PREFIX": "configured", "TTL": 60}
    app.config_from_object({f"CELERY_SINGLETON_LOCK_{name}": it for name, it in configured.items()}, namespace="CELERY")

    @app.task(base=SingletonTask, name="shop.tasks.sync", shared=False)
    def sync() -> None: ...

    assert store_of(app).address == configured["URL"]

    app.conf.update(singleton_lock_prefix="assigned", singleton_lock_ttl=90)
    app.conf.singleton_lock_url = "redis://assigned/0"

    assert store_of(app).address == "redis://assigned/0"
    assert sync.lock_key_for().startswith("assigned:")
    assert sync.lock_options.ttl == 90
    with memory_store(app) as store:
        assert store_of(app) is store
    assert store_of(app).address == "redis://assigned/0"


def test_locks_in_memory_wait_for_no_replicas() -> None:
    """As in the tests of an app whose settings are those of its deployment."""
    app = app_with(singleton_lock_replicas=1)

    with memory_store(app) as store, Lock("stock", app=app) as lease:
        assert [holder.fence for holder in store.holders(lease.key)] == [lease.fence]


def test_opening_a_store_makes_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        store_of(app_with(singleton_lock_url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0"))

        with pytest.raises(BlockingIOError):
            listener.accept()


SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://", "redis+socket://", "sentinel://")
SCHEMES += ("redis+cluster://", "rediss+cluster://", "memory://")
UNREADABLE = ("singleton_lock_url cannot be read", "redis://user:password@host:port/database", "percent-encoded")
SEVERAL = ("singleton_lock_url", "majority", "two holders", "give one URL", "sentinel://", "/topologies/")
URLS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "no scheme": (["locks", "//locks/0"], ("singleton_lock_url: unknown scheme ''",)),
    "another scheme": ([f"amqp://user:{SECRET}@locks/0", "http://a", "redis ://a"], ("unknown scheme '", *SCHEMES)),
    "empty": (["", " "], ("singleton_lock_url=<an empty text>", "give one URL as text", "result backend")),
    "several": (
        [
            [f"redis://:{SECRET}@one/0", "redis://two/0"],
            ("redis://one/0", "redis://one/0"),
            {"redis://one/0", "redis://two/0"},
            f"redis://:{SECRET}@one/0;redis://two/0;redis://three/0",
            "memory://;redis://two/0",
        ],
        SEVERAL,
    ),
    "no text": ([[], ("redis://one/0",), 6379, {"url": SECRET}], ("singleton_lock_url=<a ", "give one URL as text")),
    "unreadable": (
        [
            "redis://locks:port/0",
            f"redis://user:{SECRET}@locks/0?db=one",
            f"redis://user:1/{SECRET}@locks/0",
            f"redis://user:{SECRET}/@locks/0",
            f"redis://user:{SECRET}#@locks/0",
            "redis://u:p[w@locks/0",
            "redis://[::1/0",
            "rediss://locks/0x1",
            "redis://locks/1/2",
            "redis://locks/0#x",
            "unix:///run/redis.sock#x",
            "red\nis://h/0",
            "redis:\t//h/0",
            "redis://h\r/0",
        ],
        UNREADABLE,
    ),
    "an unknown argument": ([f"redis://u:{SECRET}@locks/0?colour=red"], ("redis://locks/0 cannot be used", "colour")),
}


@pytest.mark.parametrize("fault", URLS)
def test_a_url_that_cannot_be_used_is_refused_with_what_to_write(fault: str) -> None:
    urls, told = URLS[fault]
    for url in urls:
        for words in told:
            assert words in refusal(singleton_lock_url=url)
        with pytest.raises(ConfigurationError, match="singleton_lock_url"):
            Lock("stock", url=url).acquire(timeout=0)


LOCKS: dict[str, Any] = {"singleton_lock_url": "redis://locks"}
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no redis": ({"broker_url": "amqp://a", "result_backend": "rpc://"}, ("singleton_lock_url is not set", "broker")),
    "no broker": ({"broker_url": [], "result_backend": "rpc://"}, ("singleton_lock_url is not set",)),
    **{
        f"{number!r} replicas": ({**LOCKS, "singleton_lock_replicas": number}, (f"={number!r} is not allowed", "0 to"))
        for number in (-1, 1.0, "1", True, None)
    },
    **{
        f"{number!r} events": (
            {**LOCKS, "singleton_lock_history": number},
            (f"={number!r} is not allowed", "from 0 to 10000"),
        )
        for number in (-1, 1.0, "1", True, None, 10_001)
    },
    **{
        f"options {value!r}": ({**LOCKS, "singleton_lock_client_options": value}, ("client_options=<a ", "give a dict"))
        for value in (None, 5, [("password", SECRET)], f"password={SECRET}")
    },
    **{
        f"option {value!r}": ({**LOCKS, "singleton_lock_client_options": value}, ("singleton_lock_",))
        for value in ({"db": SECRET}, {"db": 1.5}, {"db": True}, {"credential_provider": SECRET}, {"colour": SECRET})
    },
    **{
        f"a provider {text}": (
            {"result_backend": "redis://results/0", "redis_backend_credential_provider": text},
            ("the dotted path of a provider class", "dotted path"),
        )
        for text in ("nowhere.Vault", f"{__name__}.Safe", f"{__name__}.SECRET", "vault")
    },
}


class Safe:
    def __init__(self) -> None:
        raise KeyError(SECRET)


@pytest.mark.parametrize("fault", SETTINGS)
def test_settings_that_cannot_work_are_refused_with_what_to_set(fault: str) -> None:
    settings, told = SETTINGS[fault]

    for words in told:
        assert words in refusal(**settings)


SENTINELS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "no name": ("sentinel://h1;h2/0", {}, ("sentinel://h1:26379;h2:26379/0", "master_name")),
    "an empty name": ("sentinel://h1", {"master_name": ""}, ("set master_name",)),
    "a number": ("sentinel://h1", {"service_name": 1}, ("set master_name",)),
    "mixed schemes": (f"sentinel://h1;redis://u:{SECRET}@h2", NAMED, ("hosts of one scheme", "sentinel://host:port")),
    "no host": ("sentinel://:26379", NAMED, ("give sentinel://host:port",)),
    "no number": ("sentinel://h1:port", NAMED, ("cannot be read", "sentinel://host:port;host:port/database")),
    "commas": ("sentinel://h1:1,h2:2/0", NAMED, ("cannot be read", "semicolons", "master_name=")),
    "a name in the path": ("sentinel://h1,h2/mymaster/0", NAMED, ("cannot be read", "sentinel://", "master_name=")),
    "a hash": ("sentinel://h1/0#x", NAMED, ("cannot be read",)),
    "a slash": (f"sentinel://user:{SECRET}/@locks/0?master_name=a", {}, ("cannot be read",)),
    "an unknown option": ("sentinel://h1", {**NAMED, "colour": "red"}, ("sentinel://h1:26379", "colour")),
    "of sentinels": ("sentinel://h1", {**NAMED, "sentinel_kwargs": {"colour": 1}}, ("sentinel_kwargs", "colour")),
    "no dict": ("sentinel://h1", {**NAMED, "sentinel_kwargs": SECRET}, ("sentinel_kwargs has to be a dict",)),
    "how many": ("sentinel://h1", {**NAMED, "min_other_sentinels": "some"}, ("min_other_sentinels a number",)),
}


@pytest.mark.parametrize("fault", SENTINELS)
def test_sentinels_that_cannot_work_are_refused_in_one_line(fault: str) -> None:
    url, options, told = SENTINELS[fault]

    for words in told:
        assert words in refusal(singleton_lock_url=url, singleton_lock_client_options=options)


def test_an_error_of_the_store_has_no_credentials() -> None:
    url = f"redis://user:{SECRET}@127.0.0.1:{free_port()}/0?client_name={SECRET}"

    with pytest.raises(StoreError) as unanswered:
        Lock("stock", url=url).state()

    assert "127.0.0.1" in str(unanswered.value)
    assert SECRET not in repr(unanswered.value) + str(unanswered.value)


class Vault(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return "vault", SECRET


PROVIDER = f"{__name__}.Vault"
RESULTS: dict[str, Any] = {"result_backend": "redis://results/0"}
OURS: dict[str, Any] = {"username": "shop", "password": SECRET}
TIGHT = {"socket_timeout": REPLY_TIMEOUT, "socket_connect_timeout": REPLY_TIMEOUT, "health_check_interval": 0}
LOOSE = {"socket_timeout": 60, "socket_connect_timeout": 60, "health_check_interval": 5}
UNCHECKED = {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
CONNECTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Scheme and database.
    ({"singleton_lock_url": "redis://locks:1/2"}, {"tls": False, "host": "locks", "port": 1, "db": 2}),
    ({"singleton_lock_url": "rediss://locks:1/2"}, {"tls": True, "db": 2}),
    ({"singleton_lock_url": "valkeys://locks"}, {"tls": True, "db": 0}),
    ({"singleton_lock_url": "unix:///run/redis.sock?db=2"}, {"path": "/run/redis.sock", "db": 2}),
    ({"singleton_lock_url": "redis+socket:///run/redis.sock?virtual_host=2"}, {"path": "/run/redis.sock", "db": 2}),
    ({"singleton_lock_url": "redis://locks/abc?virtual_host=3"}, {"db": 3}),
    ({**LOCKS, "singleton_lock_client_options": {"db": "3"}}, {"db": 3}),
    # Options of the client; the bounds cannot be loosened.
    ({**LOCKS, "singleton_lock_client_options": {**OURS, "client_name": "me"}}, {**OURS, "client_name": "me"}),
    ({**LOCKS, "singleton_lock_client_options": LOOSE}, TIGHT),
    ({"singleton_lock_url": "redis://locks/0?socket_timeout=60&socket_connect_timeout=60"}, TIGHT),
    # TLS, of the store that is used, in Celery's spelling.
    ({**RESULTS, "redis_backend_use_ssl": {**UNCHECKED, "ssl_ca_certs": "a"}}, {"tls": True, "ca_certs": "a"}),
    ({"broker_url": "redis://broker", "broker_use_ssl": {"ssl_keyfile": "k"}}, {"tls": True, "keyfile": "k"}),
    ({"broker_url": "rediss://broker", "broker_use_ssl": {"ssl_keyfile": "k"}}, {"tls": True, "keyfile": "k"}),
    ({**RESULTS, "broker_url": "redis://broker", "broker_use_ssl": {"ssl_ca_certs": "a"}}, {"tls": False}),
    *[
        (settings, {"cert_reqs": meaning})
        for spelling, meaning in (
            ("CERT_NONE", ssl.CERT_NONE),
            ("none", ssl.CERT_NONE),
            ("optional", ssl.CERT_OPTIONAL),
        )
        for settings in (
            {"result_backend": f"rediss://results/3?ssl_cert_reqs={spelling}&ssl_check_hostname=false"},
            {**RESULTS, "redis_backend_use_ssl": {**UNCHECKED, "ssl_cert_reqs": spelling}},
        )
    ],
    # User and password.
    ({**RESULTS, "redis_username": "shop", "redis_password": SECRET}, OURS),
    ({"result_backend": "redis+socket:///run/redis.sock", "redis_password": SECRET, "redis_db": 3}, {"db": 3}),
    ({"result_backend": "redis://results", "redis_db": 3}, {"db": 0}),
    ({"result_backend": f"redis://:{SECRET}@a", "redis_username": "shop", "redis_password": "other"}, OURS),
    ({"broker_url": "redis://broker/0", "broker_user": "shop", "broker_password": SECRET}, OURS),
    (
        {**RESULTS, "redis_backend_credential_provider": Vault(), "singleton_lock_client_options": OURS},
        {**OURS, "provider": None},
    ),
    # A provider stands for user and password.
    *[
        (settings, {"provider": ("vault", SECRET), "username": None, "password": None})
        for settings in (
            {**RESULTS, "redis_backend_credential_provider": Vault()},
            {**RESULTS, "redis_backend_credential_provider": PROVIDER},
            {"result_backend": f"redis://u:p@results/0?credential_provider={PROVIDER}", "redis_password": "other"},
            {"broker_url": f"redis+socket:///run/redis.sock?credential_provider={PROVIDER}"},
            {"broker_url": f"sentinel://u:p@h/0?credential_provider={PROVIDER}", "broker_transport_options": NAMED},
            {**LOCKS, "singleton_lock_client_options": {"credential_provider": PROVIDER.replace(".Vault", ":Vault")}},
        )
    ],
    # The master behind sentinels, of the first part of the URL that says so.
    (
        {"broker_url": "sentinel://h1;sentinel://shop:s%40cret@h2/2", "broker_transport_options": NAMED},
        {"username": "shop", "password": "s@cret", "db": 2},
    ),
    (
        {
            "broker_url": "sentinel://h1",
            "broker_use_ssl": {"ssl_cert_reqs": "CERT_OPTIONAL", "ssl_check_hostname": False},
            "broker_transport_options": {**NAMED, "sentinel_kwargs": {"ssl": True, "ssl_ca_certs": "ca.pem"}},
        },
        {"tls": True, "cert_reqs": ssl.CERT_OPTIONAL, "ca_certs": None},
    ),
    ({"singleton_lock_url": "sentinel://h", "singleton_lock_client_options": {**NAMED, "ssl": True}}, {"tls": True}),
    ({"singleton_lock_url": "sentinel://h", "singleton_lock_client_options": {**NAMED, "ssl": False}}, {"tls": False}),
]


@pytest.mark.parametrize(("settings", "expected"), CONNECTIONS)
def test_a_connection_is_opened_as_the_settings_of_celery_say(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    # Nothing shows it from outside without a server of each kind.
    pool: Any = store_of(app_with(**settings)).servers.pool  # type: ignore[attr-defined]
    connection = pool.connection_class(**pool.connection_kwargs)
    seen = {name: getattr(connection, name, None) for name in expected}
    seen |= {"db": int(connection.db or 0), "tls": isinstance(connection, SSLConnection)}
    provider = connection.credential_provider
    seen["provider"] = provider and provider.get_credentials()

    assert {name: seen[name] for name in expected} == expected
    assert isinstance(connection, UnixDomainSocketConnection) is ("redis.sock" in str(settings))
