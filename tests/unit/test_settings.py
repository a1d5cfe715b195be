"""Which store an app's locks are in, how it is opened, and that nobody reads its password."""

import socket
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, Lock, SingletonTask, StoreError
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.testing import memory_store
from tests.servers import free_port, running
from tests.waiting import until

SECRET = "hunter2"


def app_with(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return app


# Which URL.


def test_the_librarys_own_url_comes_first() -> None:
    app = app_with(
        singleton_lock_url="redis://locks:1/2", result_backend="redis://results/0", broker_url="redis://broker/0"
    )

    assert store_of(app).address == "redis://locks:1/2"


def test_the_result_backend_comes_second() -> None:
    app = app_with(result_backend="redis://results:1/2", broker_url="redis://broker/0")

    assert store_of(app).address == "redis://results:1/2"


@pytest.mark.parametrize("results", [None, "rpc://", "db+sqlite:///results.db", "cache+memory://", "disabled://"])
def test_the_broker_comes_third(results: str | None) -> None:
    app = app_with(result_backend=results, broker_url="redis://broker:1/2")

    assert store_of(app).address == "redis://broker:1/2"


def test_the_broker_is_the_one_that_is_written_to() -> None:
    app = app_with(broker_read_url="redis://read/0", broker_write_url="redis://write/0")

    assert store_of(app).address == "redis://write/0"


@pytest.mark.parametrize(
    "brokers", [["redis://one/0", "redis://two/0"], ("redis://one/0",), "redis://one/0;redis://two/0"]
)
def test_the_first_of_several_brokers_counts(brokers: Any) -> None:
    app = app_with(broker_url=brokers)

    assert store_of(app).address == "redis://one/0"


@pytest.mark.parametrize("brokers", ["amqp://localhost//", ["amqp://localhost//", "redis://two/0"], [], "memory://"])
def test_without_a_redis_an_app_is_told_what_to_set(brokers: Any) -> None:
    app = app_with(broker_url=brokers, result_backend="rpc://")

    with pytest.raises(ConfigurationError) as refused:
        store_of(app)

    for words in ("singleton_lock_url is not set", "result backend", "broker", "app.conf.singleton_lock_url"):
        assert words in str(refused.value)


def test_an_app_without_a_store_may_define_tasks() -> None:
    app = app_with(broker_url="amqp://localhost//")

    @app.task(base=SingletonTask, name="shop.tasks.sync", shared=False)
    def sync(x: Any) -> None: ...

    assert sync.lock_key_for(1).startswith("singleton:v3:")
    with pytest.raises(ConfigurationError, match="singleton_lock_url is not set"):
        sync.lock_holders(1)


def test_an_app_has_one_store_and_another_app_another() -> None:
    app, other = app_with(broker_url="redis://one/0"), app_with(broker_url="redis://one/0")

    assert store_of(app) is store_of(app)
    assert store_of(app) is not store_of(other)


def test_a_setting_that_was_wrong_can_be_put_right() -> None:
    app = app_with(singleton_lock_url="ftp://locks/0")
    with pytest.raises(ConfigurationError):
        store_of(app)

    app.conf.singleton_lock_url = "redis://locks/0"

    assert store_of(app).address == "redis://locks/0"


# Which kind of connection.


def test_memory_is_a_store_of_this_process_only() -> None:
    store = store_of(app_with(singleton_lock_url="memory://", broker_url="redis://broker/0"))

    assert isinstance(store, MemoryStore)
    assert store.address == "memory://"


def test_all_who_give_the_same_memory_url_share_their_locks() -> None:
    urls = ["memory://shared", "memory://shared", "memory://elsewhere"]

    one, other, elsewhere = (store_of(app_with(singleton_lock_url=url)) for url in urls)

    assert one is other
    assert one is not elsewhere


@pytest.mark.parametrize("scheme", ["redis+cluster", "rediss+cluster"])
@pytest.mark.parametrize("setting", ["broker_url", "broker_read_url", "broker_write_url"])
def test_a_broker_in_a_cluster_is_refused_wherever_the_locks_are(scheme: str, setting: str) -> None:
    for url in (f"{scheme}://locks:7000", ["redis://one/0", f"{scheme}://two"], f"{scheme}://one;{scheme}://two"):
        app = app_with(**{"broker_url": "memory://", setting: url, "singleton_lock_url": "redis://locks/0"})
        with pytest.raises(ConfigurationError) as refused:
            store_of(app)

        for words in ("broker_url", "localhost:6379", "singleton_lock_url='redis+cluster://"):
            assert words in str(refused.value)


def test_results_in_a_cluster_are_refused_if_the_locks_would_be_there() -> None:
    results = {"broker_url": "memory://", "result_backend": "redis+cluster://locks:7000"}
    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(**results))

    for words in ("result_backend", "single server", "singleton_lock_url='redis+cluster://"):
        assert words in str(refused.value)
    assert store_of(app_with(**results, singleton_lock_url="redis://locks/1")).address == "redis://locks/1"


@pytest.mark.parametrize("scheme", ["amqp", "http", "Redis+ssl", "memcached"])
def test_an_unknown_scheme_is_refused_with_those_there_are(scheme: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(singleton_lock_url=f"{scheme}://locks/0"))

    allowed = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://", "redis+socket://")
    allowed += ("sentinel://", "redis+cluster://", "rediss+cluster://", "memory://")
    for words in ("singleton_lock_url", f"unknown scheme '{scheme.lower()}'", *allowed):
        assert words in str(refused.value)


@pytest.mark.parametrize("url", ["", "locks", "//locks/0"])
def test_a_url_without_a_scheme_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="singleton_lock_url: unknown scheme ''"):
        store_of(app_with(singleton_lock_url=url))


SEVERAL = [
    [f"redis://:{SECRET}@one/0", "redis://two/0", "redis://three/0"],
    ("redis://one/0", "redis://one/0"),
    ["redis://one/0", "rediss://two/0"],
    {"redis://one/0", "redis://two/0"},
    f"redis://:{SECRET}@one/0;redis://two/0;redis://three/0",
    "redis://one/0; valkeys://two/0",
    "memory://;redis://two/0",
]


@pytest.mark.parametrize("urls", SEVERAL)
def test_several_stores_are_refused_with_the_reason_and_what_to_use(urls: Any) -> None:
    for use in (lambda: store_of(app_with(singleton_lock_url=urls)), lambda: Lock("stock", url=urls)):
        with pytest.raises(ConfigurationError) as refused:
            use()

        for words in (
            "singleton_lock_url",
            "majority",
            "two holders",
            "give one URL",
            "sentinel://",
            "celery-singleton-lock/topologies/",
        ):
            assert words in str(refused.value)
        assert "\n" not in str(refused.value)
        assert SECRET not in str(refused.value) + repr(refused.value)


@pytest.mark.parametrize("url", [[], [f"redis://:{SECRET}@one/0"], ("redis://one/0",), 6379, {"url": SECRET}])
def test_a_url_that_is_no_text_is_refused_and_not_quoted(url: Any) -> None:
    for use in (lambda: store_of(app_with(singleton_lock_url=url)), lambda: Lock("stock", url=url)):
        with pytest.raises(
            ConfigurationError, match=r"singleton_lock_url=<a .* is not allowed: give one URL as text"
        ) as refused:
            use()
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("number", [-1, 1.0, "1", True, None, [1]])
def test_a_number_of_replicas_is_a_number(number: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(singleton_lock_url="redis://locks/0", singleton_lock_replicas=number))

    for words in (f"singleton_lock_replicas={number!r} is not allowed", "or 0"):
        assert words in str(refused.value)


def test_locks_in_memory_wait_for_no_replicas() -> None:
    """As in the tests of an app whose settings are those of its deployment."""
    app = app_with(singleton_lock_replicas=1)

    with memory_store(app) as store, Lock("stock", app=app) as lease:
        assert lease.store is store


@pytest.mark.parametrize("url", ["redis://u:p[w@locks/0", "redis://locks/abc"])
def test_a_url_that_cannot_be_parsed_raises_no_other_error_for_a_lock(url: str) -> None:
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        Lock("stock", url=url).acquire(timeout=0)


@pytest.mark.parametrize(
    "options",
    [
        {"db": SECRET},
        {"db": 1.5},
        {"db": True},
        {"credential_provider": SECRET},
        {"credential_provider": {"password": SECRET}},
        [("password", SECRET)],
        {"password": SECRET, "paswort": SECRET},
    ],
)
def test_options_of_redis_py_that_can_never_work_are_refused_without_their_values(options: Any) -> None:
    app = app_with(broker_url="memory://", singleton_lock_url="redis://locks", singleton_lock_client_options=options)

    @app.task(base=SingletonTask, name="task", shared=False, lock_mode="until_executed")
    def task() -> None: ...

    with pytest.raises(ConfigurationError) as refused:
        task.delay()

    assert "singleton_lock_" in str(refused.value)
    assert SECRET not in str(refused.value) + repr(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://locks:port/0",
        "redis://locks/0?db=one",
        "redis://u:p/w@locks/0",
        "redis://u:p[w@locks/0",
        "redis://:p]w@locks/0",
        "redis://[::1/0",
        "redis://locks/abc",
        "rediss://locks/0x1",
        "valkey://locks/1/2/x",
        "redis://locks/1/2",
        "redis://locks/ 1",
        "redis://locks#x",
        "redis://locks/0#x",
        "unix:///run/redis.sock#x",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_telling_how_to_write_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(singleton_lock_url=url))

    for words in ("singleton_lock_url cannot be read", "redis://user:password@host:port/database", "percent-encoded"):
        assert words in str(refused.value)


def test_a_url_that_is_set_again_counts_from_the_next_call_on() -> None:
    app = app_with(singleton_lock_url="redis://locks/0")
    before = store_of(app)

    app.conf.singleton_lock_url = "memory://moved"

    assert store_of(app) is not before
    assert store_of(app) is store_from_url("memory://moved")


def test_a_task_moves_to_a_url_that_is_set_after_its_first_use() -> None:
    app = app_with(singleton_lock_url="redis://nowhere.invalid/0", task_always_eager=True)

    @app.task(base=SingletonTask, bind=True, lock_on_store_error="raise", shared=False)
    def fence(self: Any) -> bool:
        return bool(self.lock.held)

    assert isinstance(fence.delay().result, StoreError)
    app.conf.singleton_lock_url = "memory://after its first use"
    assert fence.delay().get()


def test_a_url_with_an_unknown_argument_is_refused_naming_it() -> None:
    with pytest.raises(
        ConfigurationError, match=r"singleton_lock_url: redis://locks/0 cannot be used: .*unexpected.*colour"
    ):
        store_of(app_with(singleton_lock_url="redis://locks/0?colour=red"))


# Options of the client.


@pytest.mark.parametrize("value", ["x", None, ["db", 1], 5, [("password", SECRET)], f"password={SECRET}"])
def test_client_options_that_are_no_dict_are_refused_and_not_quoted(value: Any) -> None:
    app = app_with(singleton_lock_url="redis://locks/0", singleton_lock_client_options=value)

    told = rf"^singleton_lock_client_options=<a {type(value).__name__}> is not allowed: give a dict"
    with pytest.raises(ConfigurationError, match=told) as refused:
        store_of(app)
    assert SECRET not in str(refused.value)


def test_an_unknown_client_option_is_refused_by_name() -> None:
    app = app_with(singleton_lock_url="redis://locks/0", singleton_lock_client_options={"colour": "red"})

    with pytest.raises(ConfigurationError, match="colour"):
        store_of(app)


# TLS.


# User, password and database.


# Sentinel.


NAMED = {"master_name": "mymaster"}
THREE = "sentinel://h1:1;h2:2;h3:3/0?master_name=mymaster"


SENTINEL_FAULTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "no name": (
        "sentinel://h1;h2/0",
        {},
        ("sentinel://h1:26379;h2:26379/0", "master_name", "broker_transport_options"),
    ),
    "an empty name": ("sentinel://h1", {"master_name": ""}, ("master_name=''", "not allowed")),
    "a number": ("sentinel://h1", {"service_name": 1}, ("service_name=1", "not allowed")),
    "two names": ("sentinel://h1", {"service_name": "a", "master_name": "b"}, ("service_name='a'", "master_name='b'")),
    "mixed schemes": ("sentinel://h1;redis://h2", NAMED, ("redis://", "sentinel://host:port")),
    "no host": ("sentinel://:26379", NAMED, ("names no host",)),
    "no number": ("sentinel://h1:port", NAMED, ("cannot be read", "sentinel://host:port;host:port/database")),
    "commas": ("sentinel://h1:1,h2:2/0", NAMED, ("cannot be read", "semicolons", "master_name=")),
    "commas without ports": ("sentinel://h1,h2/0", NAMED, ("cannot be read", "semicolons", "master_name=")),
    "a name in the path": ("sentinel://h1,h2/mymaster/0", NAMED, ("cannot be read", "sentinel://", "master_name=")),
    "no database": ("sentinel://h1/one", NAMED, ("cannot be read", "master_name=")),
    "a hash": ("sentinel://h1/0#x", NAMED, ("cannot be read",)),
    "a hash behind an argument": ("sentinel://h1/0?master_name=a#x", {}, ("cannot be read",)),
    "an unknown option": ("sentinel://h1", {**NAMED, "colour": "red"}, ("sentinel://h1:26379", "colour")),
    "an unknown argument": ("sentinel://h1?colour=red", NAMED, ("sentinel://h1:26379", "colour")),
    "of sentinels": ("sentinel://h1", {**NAMED, "sentinel_kwargs": {"colour": 1}}, ("sentinel_kwargs", "colour")),
    "no dict": ("sentinel://h1", {**NAMED, "sentinel_kwargs": SECRET}, ("sentinel_kwargs=<a str>", "give a dict")),
    "how many": ("sentinel://h1", {**NAMED, "min_other_sentinels": "some"}, ("min_other_sentinels='some'",)),
}


@pytest.mark.parametrize("fault", SENTINEL_FAULTS)
def test_sentinels_that_cannot_work_are_refused_in_one_line(fault: str) -> None:
    url, options, words = SENTINEL_FAULTS[fault]

    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(singleton_lock_url=url, singleton_lock_client_options=options))

    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)


# Secrets.


def test_an_error_of_the_store_has_no_credentials() -> None:
    store = store_from_url(f"redis://user:{SECRET}@127.0.0.1:{free_port()}/0?client_name={SECRET}")

    with pytest.raises(StoreError) as unanswered:
        store.release(Claim("key", "token", 30.0), 1, bound=0.1)

    assert "127.0.0.1" in str(unanswered.value)
    assert SECRET not in repr(unanswered.value) + str(unanswered.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@locks:port/0",
        f"redis://user:{SECRET}@locks/0?colour=red",
        f"redis://user:{SECRET}@locks/0?db=one",
        f"redis://user:1/{SECRET}@locks/0",
        f"redis://locks/0?colour=red&password={SECRET}",
        f"sentinel://user:{SECRET}@locks/0",
        f"sentinel://user:{SECRET}/@locks/0?master_name=a",
        f"sentinel://locks;redis://user:{SECRET}@locks/0",
        f"amqp://user:{SECRET}@locks/0",
        [f"redis://user:{SECRET}@locks/0", "redis://other/0"],
        pytest.param(f"redis://user:{SECRET}/@locks/0", id="unescaped slash in the password"),
        pytest.param(f"redis://user:{SECRET}#@locks/0", id="unescaped hash in the password"),
    ],
)
def test_a_refused_url_is_not_quoted_with_its_credentials(url: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        store_of(app_with(singleton_lock_url=url))

    assert SECRET not in repr(refused.value) + str(refused.value)


# Nothing happens yet.


def test_opening_a_store_makes_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        app = app_with(singleton_lock_url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0")

        store_of(app)

        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_check_that_stumbles_is_told_as_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def stumble(_: Any) -> None:
        raise KeyError("vault")

    with running("valkey") as server:
        options = {"redis_connect_func": stumble}
        app = app_with(broker_url="memory://", singleton_lock_url=server.url, singleton_lock_client_options=options)

        @app.task(base=SingletonTask, name="task", shared=False)
        def task() -> None: ...

        task.delay()

        until(lambda: "lock." in caplog.text, "it is told")
    (record,) = [record for record in caplog.records if record.name == "celery_singleton_lock"]
    assert record.getMessage().startswith("lock.unchecked")
    assert record.exc_info is not None


THREE = "sentinel://h1:1;h2:2;h3:3/0?master_name=mymaster"


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"singleton_lock_url": "sentinel://h1:1;sentinel://h2:2;sentinel://h3:3/0?master_name=mymaster"}, THREE),
        ({"singleton_lock_url": "sentinel://h1:1;h2:2;h3:3/0?service_name=mymaster"}, THREE),
        (
            {"singleton_lock_url": "sentinel://h1:1/0; h2:2; h3:3;h3:3;", "singleton_lock_client_options": NAMED},
            THREE,
        ),
        (
            {
                "broker_url": ["sentinel://h1:1/0", "sentinel://h2:2/0", "sentinel://h3:3/0"],
                "broker_transport_options": NAMED,
            },
            THREE,
        ),
        (
            {"broker_url": "sentinel://h1;sentinel://h2/1", "broker_transport_options": NAMED},
            "sentinel://h1:26379;h2:26379/1?master_name=mymaster",
        ),
        (
            # Celery's result backend takes it so.
            {"result_backend": "sentinel://h1;sentinel://[::1]:5/1", "result_backend_transport_options": NAMED},
            "sentinel://h1:6379;[::1]:5/1?master_name=mymaster",
        ),
        (
            {
                "result_backend": "sentinel://results:1",
                "result_backend_transport_options": {"master_name": "a"},
                "broker_url": "sentinel://broker:1",
                "broker_transport_options": {"master_name": "b"},
            },
            "sentinel://results:1/?master_name=a",
        ),
        (
            {
                "broker_url": "sentinel://h1:1",
                "broker_transport_options": NAMED,
                "singleton_lock_client_options": {"service_name": "mymaster"},
            },
            "sentinel://h1:1/?master_name=mymaster",
        ),
    ],
)
def test_sentinels_are_found_as_celery_spells_them(settings: dict[str, Any], address: str) -> None:
    told = store_of(app_with(**settings)).address

    assert told == address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (f"redis://:{SECRET}@locks:1/2", "redis://locks:1/2"),
        (f"redis://user:{SECRET}@locks", "redis://locks"),
        (f"redis://user:{SECRET}%40%2F@locks/0", "redis://locks/0"),
        (f"redis://user:a@{SECRET}@locks/0", "redis://locks/0"),
        (f"redis://locks/0?password={SECRET}&client_name=shop", "redis://locks/0"),
        (f"rediss://user:{SECRET}@locks/0?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=no", "rediss://locks/0"),
        (f"valkey://:{SECRET}@locks/0", "redis://locks/0"),
        (f"unix://:{SECRET}@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        (f"redis+socket://:{SECRET}@/run/redis.sock", "unix:///run/redis.sock"),
        (f"sentinel://u:{SECRET}@h:1;h:2/0?master_name=a", "sentinel://h:1;h:2/0?master_name=a"),
        (f"sentinel://h:1;h:2/0?master_name=a&password={SECRET}", "sentinel://h:1;h:2/0?master_name=a"),
    ],
)
def test_an_address_has_no_credentials(url: str, address: str) -> None:
    store = store_of(app_with(singleton_lock_url=url))

    assert store.address == address


class Safe:
    """One that has to be told where it is."""

    def __init__(self) -> None:
        raise KeyError(SECRET)


@pytest.mark.parametrize("provider", ["nowhere.Vault", f"{__name__}.Safe", f"{__name__}.SECRET", "vault"])
def test_a_credential_provider_that_cannot_be_made_is_refused(provider: str) -> None:
    app = app_with(result_backend="redis://results/0", redis_backend_credential_provider=provider)

    with pytest.raises(ConfigurationError, match=r"cannot be made of the text .* dotted path") as error:
        store_of(app)
    assert SECRET not in str(error.value)
