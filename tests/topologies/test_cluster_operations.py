"""What operators see and do when the locks are in a cluster: all servers are asked."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.operations.cli import singleton
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Claim, Facts
from celery_singleton_lock.web import application
from tests.acceptance.test_doctor import AT_LEISURE, NOWHERE, Diagnosis
from tests.acceptance.test_watch import Watch
from tests.browsing import Visitor
from tests.clusters import Cluster, Node, clustered
from tests.topologies.test_cluster_settings import RIGHTS, SECRET
from tests.waiting import until

MANY = 30
"""Locks, so that each server has some."""


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    store = store_from_url(cluster.url)
    yield store
    store.close()


AppOf = Callable[[str], Celery]


def silence(node: Node) -> None:
    os.kill(node.pid, signal.SIGSTOP)


@pytest.fixture
def app_of(cleanup: ExitStack) -> AppOf:
    """Makes an app with one task, whose locks are where one says."""

    def make(url: str) -> Celery:
        app = Celery("shop", set_as_current=False)
        app.conf.update({"singleton_lock_url": url, **NOWHERE})
        cleanup.callback(app.close)

        @app.task(base=SingletonTask, name="sync", shared=False, lock_key=("shop_id",), time_limit=60)
        def sync(shop_id: int) -> None: ...

        return app

    return make


def operate(app: Celery, *arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(singleton, arguments, obj=CLIContext(app, no_color=True, workdir=None))
    assert done.exit_code == code, (done.output, done.stderr, done.exception)
    return done


def examined(app: Celery, *arguments: str) -> Diagnosis:
    done = CliRunner().invoke(
        singleton, ["doctor", "--json", *(arguments or AT_LEISURE)], obj=CLIContext(app, no_color=True, workdir=None)
    )
    assert isinstance(done.exception, SystemExit | None), done.exception
    return Diagnosis(done.stdout, done.exit_code)


def held(app: Celery, store: Store) -> list[Claim]:
    """Locks at all servers."""
    keys = [app.tasks["sync"].lock_key_for(number) for number in range(MANY)]
    claims = [
        Claim(key, f"token {number}", 60.0, facts=Facts(f"id-{number}", hostname="w1@web", pid=7))
        for number, key in enumerate(keys)
    ]
    for claim in claims:
        store.acquire(claim)
    return claims


def test_the_locks_of_all_servers_are_listed_and_each_is_shown(cluster: Cluster, store: Store, app_of: AppOf) -> None:
    app = app_of(cluster.url)
    claims = held(app, store)

    rows = json.loads(operate(app, "list", "--json").stdout)
    assert {row["key"]: row["task_id"] for row in rows} == {claim.key: claim.facts.task_id for claim in claims}
    assert len({cluster.owner(claim.key).port for claim in claims}) == len(cluster.masters)
    for number, claim in enumerate(claims[:6]):
        for arguments in ([claim.key], ["sync", "-a", f"[{number}]"], [claim.facts.task_id]):
            assert claim.facts.task_id in operate(app, "show", *arguments).stdout


def test_each_lock_can_be_broken_and_freed(cluster: Cluster, store: Store, app_of: AppOf) -> None:
    app = app_of(cluster.url)
    claims = held(app, store)

    for claim in claims[:6]:
        # There is no body that could hear of it.
        operate(app, "break", claim.key, "--yes", "--wait", "0", code=1)
    for claim in claims[6:12]:
        operate(app, "break", claim.key, "--yes", "--force")

    assert list(store.renew(claims[:12], 30.0)) == [Answer.BROKEN] * 6 + [Answer.GONE] * 6


def test_a_watch_tells_of_each_server(cluster: Cluster, store: Store, app_of: AppOf, cleanup: ExitStack) -> None:
    claims = held(app_of(cluster.url), store)
    env = {"TEST_BROKER": "redis://127.0.0.1:1/0", "TEST_CLUSTER": cluster.url, "TEST_RECORD": "redis://127.0.0.1:1/0"}
    watching = Watch(env, "--json", app="tests.topologies.cluster_app")
    cleanup.callback(watching.close)

    assert sorted(watching.told(MANY)) == sorted(("acquired", claim.facts.task_id) for claim in claims)
    for claim in claims:
        store.release(claim, 1)

    assert {event for event, _ in watching.told(2 * MANY)[MANY:]} == {"released"}
    assert watching.interrupted() == 0


def test_the_page_shows_the_locks_of_all_servers_and_breaks_one(cluster: Cluster, store: Store, app_of: AppOf) -> None:
    app = app_of(cluster.url)
    claims = held(app, store)
    operator = Visitor(application(app, allow_break=True))

    page = operator.get()

    assert all(claim.key in page.body for claim in claims)
    form = {"key": claims[3].key, "csrf_token": page.token(), "holder": claims[3].facts.task_id}
    assert operator.send("/break", form, HTTP_COOKIE=page.cookie()).status == 303
    assert list(store.renew(claims[2:5], 30.0)) == [Answer.DONE, Answer.BROKEN, Answer.DONE]


# The doctor.


def test_all_is_well_in_a_cluster_and_nothing_is_left(cluster: Cluster, app_of: AppOf) -> None:
    diagnosis = examined(app_of(cluster.url))

    assert diagnosis.ok, diagnosis.text
    assert diagnosis.unseen == ["workers"]
    for node in cluster.masters:
        assert f"127.0.0.1:{node.port}" in diagnosis.of("store")[1]
        with node.client() as client:
            assert client.keys() == []
    for name in ("server", "eviction", "persistence"):
        # All say the same, which is told once.
        assert "127.0.0.1" not in diagnosis.of(name)[1]


def test_the_one_server_that_is_not_well_is_named(cluster: Cluster, app_of: AppOf, cleanup: ExitStack) -> None:
    well, ill, *_ = cluster.masters
    cleanup.callback(may_drop_locks, ill, "0", "noeviction")
    may_drop_locks(ill, "1gb", "allkeys-lru")

    diagnosis = examined(app_of(cluster.url))

    assert diagnosis.wrong == ["eviction"]
    detail = diagnosis.of("eviction")[1]
    assert f"127.0.0.1:{ill.port}: maxmemory-policy allkeys-lru" in detail
    assert str(well.port) not in detail


def may_drop_locks(node: Node, memory: str, policy: str) -> None:
    with node.client() as client:
        client.config_set("maxmemory", memory)
        client.config_set("maxmemory-policy", policy)


def test_a_key_that_never_ends_is_found_at_whichever_server(cluster: Cluster, app_of: AppOf) -> None:
    app = app_of(cluster.url)
    keys = [app.tasks["sync"].lock_key_for(number) for number in range(MANY)]
    chosen = {cluster.owner(key).port: key for key in keys}
    for key in chosen.values():
        with cluster.owner(key).client() as client:
            client.hset(key, "a", "1")

    diagnosis = examined(app)

    assert diagnosis.wrong == ["expiry"]
    assert all(key in diagnosis.of("expiry")[1] for key in chosen.values())


def test_who_may_do_no_more_than_runs_do_is_not_told_that_something_is_wrong(app_of: AppOf, cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL SETUSER", "shop", *RIGHTS)

    diagnosis = examined(app_of(f"redis+cluster://shop:{SECRET}@{cluster.hosts[0]}"))

    assert diagnosis.wrong == []
    assert set(diagnosis.unseen) >= {"server", "eviction", "persistence", "connections", "expiry"}
    assert diagnosis.of("locking")[0]


def test_a_server_that_refuses_a_list_is_named(shaken_cluster: Cluster, app_of: AppOf) -> None:
    node = shaken_cluster.masters[0]
    with node.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-scan")

    said = operate(app_of(shaken_cluster.url), "list", code=69).stderr

    assert f"127.0.0.1:{node.port}) refuses us (NoPermissionError" in said


@pytest.mark.parametrize("end", [Node.stop, silence], ids=["dead", "silent"])
def test_a_list_has_the_locks_of_the_servers_that_answer_and_names_the_one_that_does_not(
    shaken_cluster: Cluster, app_of: AppOf, cleanup: ExitStack, end: Callable[[Node], None]
) -> None:
    app, store = app_of(shaken_cluster.url), store_from_url(shaken_cluster.url)
    cleanup.callback(store.close)
    claims = held(app, store)
    # The first of the URL is as a rule the one that is asked first, so that it could keep the others from being asked.
    dead = shaken_cluster.masters[0]
    left = {claim.facts.task_id for claim in claims if shaken_cluster.owner(claim.key).port != dead.port}
    assert 0 < len(left) < len(claims)
    end(dead)

    done = operate(app, "list", "--json", code=69)
    said = operate(app, "list", code=69)

    assert {row["task_id"] for row in json.loads(done.stdout)} == left
    assert all(task_id in said.stdout for task_id in left)
    for each in (done, said):
        # Its address is behind those that the URL has.
        assert each.stderr.count(f"127.0.0.1:{dead.port}") == shaken_cluster.url.count(f"127.0.0.1:{dead.port}") + 1
        assert "did not answer" in each.stderr
    assert operate(app, "list", "nothing", "--json", code=69).stdout == ""
    until(lambda: examined(app, "--timeout", "1").code == 69, "the doctor says so")
