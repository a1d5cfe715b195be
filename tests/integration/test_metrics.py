"""The text for Prometheus: its form, its names, and what it tells though nothing has happened."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.keys import beat_key_of
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.web import application
from tests.browsing import Visitor
from tests.servers import Server

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
ALERTS = (DOCS / "alerts.yml").read_text(encoding="utf-8")
METRICS = (DOCS / "how-to" / "page-and-metrics.md").read_text(encoding="utf-8")
COUNTED = {
    "acquired::shop.sync": 5,
    "conflicts:skipped:shop.sync": 2,
    "held:0.1:shop.sync": 3,
    "held:10:shop.sync": 1,
    "held:+Inf:shop.sync": 1,
    "held:sum:shop.sync": 12_500_000,
    "acquired::": 7,
    "of a later version": 1,
}


Samples = dict[tuple[str, ...], float]


def sample(name: str, **labels: str) -> tuple[str, ...]:
    return name, *(f"{label}={value}" for label, value in sorted(labels.items()))


def read(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation[0].isupper(), family
        assert family.documentation[-1] == ".", family
        for each in family.samples:
            key = sample(each.name, **each.labels)
            assert key not in samples, each
            samples[key] = each.value
    return samples


@pytest.fixture
def app(valkey: Server) -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = valkey.url

    def sync() -> None: ...

    app.task(base=SingletonTask, name="shop.sync", shared=False)(sync)
    yield app
    store_of(app).close()
    app.close()


def told(app: Celery, counted: dict[str, int] | None = None) -> Samples:
    return read(text_of(app, counted))


def text_of(app: Celery, counted: dict[str, int] | None = None) -> str:
    store = store_of(app)
    store.acquire(Claim("singleton:v3:{shop.sync:00}", "a", 30.0, task_id="id-a"))
    store.acquire(Claim(beat_key_of(app), "b", 30.0, task_name="celery.beat", hostname="web-1", pid=7))
    store.mark_queued("singleton:v3:{shop.sync:01}", "q", 30.0, limit=0, cooldown=0.0)
    if counted:
        store.count("singleton:v3:stats", counted, 5.0)
    return Visitor(application(app)).get("/metrics").body


def test_what_has_not_happened_is_told_as_zero_so_that_a_first_event_is_a_rise(app: Celery) -> None:
    samples = told(app)

    for outcome in get_args(ConflictOutcome):
        assert samples[sample("singleton_lock_conflicts_total", task="shop.sync", outcome=outcome)] == 0
    assert samples[sample("singleton_lock_lost_total", task="shop.sync", reason="unreachable")] == 0
    assert samples[sample("singleton_lock_unanswered_total", task="shop.sync", policy="reschedule")] == 0
    assert samples[sample("singleton_lock_taken_over_total", task="shop.sync")] == 0
    assert samples[sample("singleton_lock_holder_died_total", task="shop.sync")] == 0


def test_who_holds_and_what_is_queued_is_told_and_the_lease_of_a_beat_is_that_of_no_task(app: Celery) -> None:
    samples = told(app)

    assert samples[sample("singleton_lock_up")] == 1
    assert samples[sample("singleton_lock_holders", task="shop.sync")] == 1
    assert samples[sample("singleton_lock_queued", task="shop.sync")] == 1
    assert samples[sample("singleton_lock_beat_leads")] == 1
    assert not [name for name, *labels in samples if "task=celery.beat" in labels]


def test_the_buckets_of_a_histogram_add_up_and_a_lock_has_no_task(app: Celery) -> None:
    samples = told(app, COUNTED)
    assert samples[sample("singleton_lock_acquired_total", task="")] == 7
    bucket = {
        bound: samples[sample("singleton_lock_held_seconds_bucket", task="shop.sync", le=bound)]
        for bound in ("0.01", "0.1", "1", "10", "7200", "+Inf")
    }

    assert bucket == {"0.01": 0, "0.1": 3, "1": 3, "10": 4, "7200": 4, "+Inf": 5}
    assert samples[sample("singleton_lock_held_seconds_count", task="shop.sync")] == 5
    assert samples[sample("singleton_lock_held_seconds_sum", task="shop.sync")] == 12.5


def test_docs_dashboard_and_alerts_know_what_is_told_and_nothing_else(app: Celery) -> None:
    names = {name for name, *_ in told(app, {**COUNTED, "waited:0.01:shop.sync": 5})}
    series = {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name) for name in names}
    alerts = re.findall(r"^ +- alert: (\w+)$", ALERTS, re.MULTILINE)
    asked = set(re.findall(r"\bsingleton_lock_[a-z_]+", json.dumps(DASHBOARD) + ALERTS))

    assert len(asked) > 10
    assert asked <= names
    assert alerts
    assert [each for each in (*series, *alerts) if f"`{each}`" not in METRICS] == []


PROMTOOL = shutil.which("promtool")
SERIES = {
    'lost_total{task="lost", reason="expired"}': "0x20 1x200",
    'lost_total{task="replaced", reason="replaced"}': "0x20 1x200",
    **dict.fromkeys(
        (f'conflicts_total{{task="{task}", outcome="skipped"}}' for task in ("starved", "well")), "0+1x200"
    ),
    'acquired_total{task="starved"}': "0x200",
    'acquired_total{task="well"}': "0+1x200",
    # Well: `until_executing`, and `lock_on_store_error="run"` while the store was away.
    'conflicts_total{task="queued", outcome="unpublished"}': "0+1x200",
    'acquired_total{task="queued"}': "0x200",
    'conflicts_total{task="unlocked", outcome="skipped"}': "0+1x200",
    'acquired_total{task="unlocked"}': "20x200",
    **dict.fromkeys((f'unlocked_total{{task="{task}"}}' for task in ("queued", "unlocked")), "0+1x200"),
    'unanswered_total{task="unlocked", policy="run"}': "0+1x30 30x170",
    'unanswered_total{task="silent", policy="reschedule"}': "0+1x200",
    "beat_leads": "1x20 0x4 1x20 0x200",
    'oldest_held_seconds{task="stuck"}': "0+60x200",
    'held_seconds_sum{task="stuck"}': "0+10x200",
    'oldest_held_seconds{task="slow"}': "3000x200",
    'held_seconds_sum{task="slow"}': "0+3600x200",
    **dict.fromkeys((f'held_seconds_count{{task="{task}"}}' for task in ("stuck", "slow")), "0+1x200"),
    'oldest_queued_seconds{task="orphaned"}': "0+60x200",
    **dict.fromkeys((f'oldest_queued_seconds{{task="{task}"}}' for task in ("busy", "queued")), "60x200"),
    'holder_died_total{task="killed"}': "0+1x200",
    "up": "1x20 0x200",
}
# The counters stand still, and afterwards the workers add theirs in one jump.
OUTAGE = {
    "up": "1x40 0x40 1x80",
    'unanswered_total{task="waited", policy="reschedule"}': "0x82 600x80",
    'unanswered_total{task="well", policy="reschedule"}': "7x160",
}
# A first run that hangs, and one of every week that has ended once: neither has a usual time.
ENDLESS = {
    **dict.fromkeys((f'oldest_held_seconds{{task="{task}"}}' for task in ("first", "weekly")), "0+60x2000"),
    'held_seconds_count{task="weekly"}': "7x2000",
    'held_seconds_sum{task="weekly"}': "100x2000",
}
Firing = list[tuple[str, str, list[str]]]
ALERTED: list[tuple[str, dict[str, str], Firing]] = [
    (
        "1m",
        SERIES,
        [
            ("25m", "Lost", ['severity="warn", task="lost", reason="expired"']),
            *(("24m", "NoBeat", []), ("55m", "NoBeat", ['severity="page"'])),
            ("150m", "NeverRuns", ['severity="page", task="starved"']),
            ("60m", "HeldLong", ['severity="warn", task="stuck"']),
            ("60m", "HolderDied", ['severity="warn", task="killed"']),
            ("60m", "Unanswered", ['severity="page", task="silent"']),
            # Within a minute of the first scrape that says so.
            *(("15m", "StoreDown", []), ("21m", "StoreDown", ['severity="page"'])),
            *(("18m", "QueuedLong", []), ("30m", "QueuedLong", ['severity="warn", task="orphaned"'])),
            ("30m", "NotScraped", []),
        ],
    ),
    (
        "15s",
        OUTAGE,
        [
            *(("10m", "StoreDown", []), ("11m", "StoreDown", ['severity="page"']), ("21m", "StoreDown", [])),
            *(("20m", "Unanswered", []), ("22m", "Unanswered", ['severity="page", task="waited"'])),
            ("35m", "Unanswered", []),
        ],
    ),
    ("1m", {"up": "1x20 _x40"}, [("20m", "NotScraped", []), ("40m", "NotScraped", ['severity="page"'])]),
    (
        "1m",
        ENDLESS,
        [
            ("20h", "HeldLong", []),
            ("30h", "HeldLong", ['severity="warn", task="first"', 'severity="warn", task="weekly"']),
        ],
    ),
]


def in_promtools_words(interval: str, series: dict[str, str], firing: Firing) -> dict[str, Any]:
    return {
        "interval": interval,
        "input_series": [{"series": f"singleton_lock_{name}", "values": said} for name, said in series.items()],
        "promql_expr_test": [
            {
                "eval_time": at,
                "expr": f'sum without (alertstate) (ALERTS{{alertname="SingletonLock{alert}", alertstate="firing"}})',
                "exp_samples": [
                    {"labels": f'{{alertname="SingletonLock{alert}", {each}}}', "value": 1} for each in fires
                ],
            }
            for at, alert, fires in firing
        ],
    }


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_reads_the_text_the_alerts_and_the_dashboard_and_raises_each_alert_where_it_should(
    app: Celery, tmp_path: Path
) -> None:
    text = text_of(app, COUNTED)
    asked = set(re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', json.dumps(DASHBOARD)))
    plain = [json.loads(each).replace("$__rate_interval", "5m").replace("$task", ".*") for each in asked]
    rules = [{"record": f"asked:{number}", "expr": each} for number, each in enumerate(plain)]
    dashboard = tmp_path / "dashboard.yml"
    dashboard.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert len(rules) > 10

    def promtool(*command: object, text: str = "") -> None:
        done = subprocess.run([str(PROMTOOL), *map(str, command)], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("check", "metrics", text=text)
    promtool("check", "rules", DOCS / "alerts.yml", dashboard)
    tests = [in_promtools_words(*each) for each in ALERTED]
    alerted = tmp_path / "alerts_test.yml"
    alerted.write_text(
        json.dumps({"rule_files": [str(DOCS / "alerts.yml")], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", alerted)
