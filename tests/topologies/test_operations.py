"""What operators see and do when the locks are with Sentinel or in a cluster, all of whose servers are asked."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from celery import Celery

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Claim, Renewal
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.web import application
from tests.acceptance.conftest import operated
from tests.acceptance.test_doctor import AT_LEISURE, NOWHERE, examined
from tests.browsing import Visitor
from tests.clusters import Cluster, Node
from tests.sentinels import Deployment
from tests.waiting import until

MANY = 30


AppOf = Callable[[str], Celery]


def silence(node: Node) -> None:
    os.kill(node.pid, signal.SIGSTOP)


@pytest.fixture
def app_of(cleanup: ExitStack) -> AppOf:
    def make(url: str) -> Celery:
        app = Celery("shop", set_as_current=False)
        app.conf.update({"singleton_lock_url": url, **NOWHERE})
        cleanup.callback(app.close)

        @app.task(base=SingletonTask, name="sync", shared=False, lock_key=("shop_id",), time_limit=60)
        def sync(shop_id: int) -> None: ...

        return app

    return make


def held(app: Celery, store: Store) -> list[Claim]:
    keys = [app.tasks["sync"].lock_key_for(number) for number in range(MANY)]
    claims = [
        Claim(key, f"token {number}", 60.0, task_id=f"id-{number}", hostname="w1@web", pid=7)
        for number, key in enumerate(keys)
    ]
    for claim in claims:
        store.acquire(claim)
    return claims


def test_the_locks_of_all_servers_are_listed_shown_and_broken(cluster: Cluster, store: Store, app_of: AppOf) -> None:
    app = app_of(cluster.url)
    claims = held(app, store)

    rows = json.loads(operated(app)("list", "--json").stdout)
    assert {row["key"]: row["task_id"] for row in rows} == {claim.key: claim.task_id for claim in claims}
    assert len({cluster.owner(claim.key).port for claim in claims}) == len(cluster.masters)
    for number, claim in enumerate(claims[:6]):
        for arguments in ([claim.key], ["sync", "-a", f"[{number}]"], [claim.task_id]):
            assert claim.task_id in operated(app)("show", *arguments).stdout
        operated(app)("break", claim.key, "--yes", "--wait", "0", code=1)
    assert store.renew(claims[:7], 5.0) == [Renewal.BROKEN] * 6 + [Renewal.RENEWED]


def test_one_server_that_is_full_is_noticed_by_page_and_doctor_each_time(cluster: Cluster, app_of: AppOf) -> None:
    full = cluster.masters[1]
    with full.client() as client:
        client.config_set("maxmemory", 1)
    app = app_of(cluster.url)

    # A key that is tried is at any of the servers.
    for _ in range(4):
        health = Visitor(application(app)).get("/healthz")
        assert (health.status, "the store is full" in health.body) == (503, True)
    assert "locking" in examined(app, *AT_LEISURE).wrong
    with full.client() as client:
        client.config_set("maxmemory", 0)
    assert Visitor(application(app)).get("/healthz").status == 200


def test_all_is_well_in_a_cluster_and_nothing_is_left(cluster: Cluster, app_of: AppOf) -> None:
    diagnosis = examined(app_of(cluster.url), *AT_LEISURE)

    assert diagnosis.ok, diagnosis.text
    assert diagnosis.unseen == ["workers"]
    for node in cluster.masters:
        assert f"127.0.0.1:{node.port}" in diagnosis.of("store")[1]
        with node.client() as client:
            assert client.keys() == []
    # All say the same, which is told once; not so for how long each is up.
    assert "127.0.0.1" not in diagnosis.of("eviction")[1]


def test_a_deployment_with_sentinel_is_well_and_its_locks_are_shown(calm: Deployment, app_of: AppOf) -> None:
    calm.master.flush()
    app = app_of(calm.url)

    diagnosis = examined(app, *AT_LEISURE)
    assert (diagnosis.wrong, diagnosis.unseen) == ([], ["workers"])
    with app.tasks["sync"].lock_for(7) as lease:
        assert [row["key"] for row in json.loads(operated(app)("list", "--json").stdout)] == [lease.key]
        assert lease.key in Visitor(application(app)).get().body


@pytest.mark.parametrize("end", [Node.stop, silence], ids=["dead", "silent"])
def test_a_list_has_the_locks_of_the_servers_that_answer_and_names_the_one_that_does_not(
    shaken_cluster: Cluster, app_of: AppOf, cleanup: ExitStack, end: Callable[[Node], None]
) -> None:
    app, store = app_of(shaken_cluster.url), store_from_url(shaken_cluster.url)
    cleanup.callback(store.close)
    claims = held(app, store)
    # The first of the URL is as a rule the one that is asked first, so that it could keep the others from being asked.
    dead = shaken_cluster.masters[0]
    left = {claim.task_id for claim in claims if shaken_cluster.owner(claim.key).port != dead.port}
    assert 0 < len(left) < len(claims)
    end(dead)

    done = operated(app)("list", "--json", code=69)
    said = operated(app)("list", code=69)

    assert {row["task_id"] for row in json.loads(done.stdout)} == left
    assert all(task_id in said.stdout for task_id in left)
    for each in (done, said):
        # The URL has its address, too.
        assert each.stderr.count(f"127.0.0.1:{dead.port}") > shaken_cluster.url.count(f"127.0.0.1:{dead.port}")
        assert "failed: " in each.stderr
    assert operated(app)("list", "nothing", "--json", code=69).stdout == ""
    until(lambda: examined(app, "--timeout", "1").code == 69, "the doctor says so")
