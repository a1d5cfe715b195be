"""The text for Prometheus: its form, its names, and what it tells though nothing has happened."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.operations.inventory import Row
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.web import metrics
from tests.servers import Server, free_port

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
ALERTS = (DOCS / "alerts.yml").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")
COUNTED = {
    "acquired::shop.sync": 5,
    "conflicts:skipped:shop.sync": 2,
    "held:0.1:shop.sync": 3,
    "held:10:shop.sync": 1,
    "held:+Inf:shop.sync": 1,
    "held:sum:shop.sync": 12_500_000,
    "acquired::": 7,
}


NAMES = {
    *(f"singleton_lock_{what}_total" for what in metrics.COUNTERS),
    *(f"singleton_lock_{what}_seconds_{end}" for what in metrics.HISTOGRAMS for end in ("bucket", "sum", "count")),
    *(name for name, _ in metrics.GAUGES.values()),
    *("singleton_lock_up", "singleton_lock_scan_seconds"),
}
Samples = dict[tuple[str, ...], float]


def sample(name: str, **labels: str) -> tuple[str, ...]:
    return name, *(f"{label}={value}" for label, value in sorted(labels.items()))


def read(text: str) -> Samples:
    """Each sample by its name and its labels."""
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


ROWS = [
    Row("singleton:v3:{shop.sync:00}", "held", 1, 30.0, held=4.5, task_name="shop.sync"),
    Row("singleton:v3:{shop.sync:01}", "held", 0, 30.0, held=1.0, task_name="shop.sync"),
    Row("singleton:v3:{shop.sync:02}", "queued", 0, 30.0, task_id="q", queued_for=600.0),
]


def told(app: Celery, counted: dict[str, int] | None = None, rows: Sequence[Row] | None = ROWS) -> Samples:
    if counted:
        store_of(app).count("singleton:v3:stats", counted, 5.0)
    return read(metrics.exposition(app, rows, 0.25).decode())


def test_counters_are_told_with_their_labels(app: Celery) -> None:
    samples = told(app, COUNTED)

    assert samples[sample("singleton_lock_acquired_total", task="shop.sync")] == 5
    assert samples[sample("singleton_lock_acquired_total", task="")] == 7
    assert samples[sample("singleton_lock_conflicts_total", task="shop.sync", outcome="skipped")] == 2


def test_what_has_not_happened_is_told_as_zero_so_that_a_first_event_is_a_rise(app: Celery) -> None:
    samples = told(app)

    for outcome in get_args(ConflictOutcome):
        assert samples[sample("singleton_lock_conflicts_total", task="shop.sync", outcome=outcome)] == 0
    assert samples[sample("singleton_lock_lost_total", task="shop.sync", reason="unreachable")] == 0
    assert samples[sample("singleton_lock_unanswered_total", task="shop.sync", policy="reschedule")] == 0
    assert samples[sample("singleton_lock_taken_over_total", task="shop.sync")] == 0


def test_the_buckets_of_a_histogram_add_up(app: Celery) -> None:
    samples = told(app, COUNTED)
    bucket = {
        bound: samples[sample("singleton_lock_held_seconds_bucket", task="shop.sync", le=bound)]
        for bound in ("0.01", "0.1", "1", "10", "7200", "+Inf")
    }

    assert bucket == {"0.01": 0, "0.1": 3, "1": 3, "10": 4, "7200": 4, "+Inf": 5}
    assert samples[sample("singleton_lock_held_seconds_count", task="shop.sync")] == 5
    assert samples[sample("singleton_lock_held_seconds_sum", task="shop.sync")] == 12.5


def test_what_is_held_now_is_told(app: Celery) -> None:
    samples = told(app, {"acquired::shop.other": 1})

    assert samples[sample("singleton_lock_holders", task="shop.sync")] == 2
    assert samples[sample("singleton_lock_waiters", task="shop.sync")] == 1
    assert samples[sample("singleton_lock_queued", task="shop.sync")] == 1
    assert samples[sample("singleton_lock_oldest_held_seconds", task="shop.sync")] == 4.5
    assert samples[sample("singleton_lock_oldest_queued_seconds", task="shop.sync")] == 600
    assert samples[sample("singleton_lock_holders", task="shop.other")] == 0
    assert samples[sample("singleton_lock_up")] == 1
    assert samples[sample("singleton_lock_scan_seconds")] == 0.25


def test_a_store_that_is_away_is_told_and_nothing_else(app: Celery) -> None:
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{free_port()}"

    assert told(app) == {sample("singleton_lock_up"): 0}


def test_counters_are_told_though_the_locks_cannot_be_walked(app: Celery) -> None:
    samples = told(app, COUNTED, rows=None)

    assert samples[sample("singleton_lock_acquired_total", task="shop.sync")] == 5
    assert not any(name == "singleton_lock_holders" for name, *_ in samples)


def test_what_a_newer_version_counts_breaks_nothing(app: Celery) -> None:
    samples = told(app, {"acquired::shop.sync": 1, "conflicts:postponed:shop.sync": 4, "invented::shop.sync": 1})

    assert samples[sample("singleton_lock_conflicts_total", task="shop.sync", outcome="postponed")] == 4


def test_the_list_of_names_is_that_of_what_is_told(app: Celery) -> None:
    samples = told(app, {**COUNTED, "waited:0.01:shop.sync": 5})

    assert {name for name, *_ in samples} == NAMES


# The docs.


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bsingleton_lock_[a-z_]+", text))


def expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if isinstance(node.get("expr"), str) else []
        return own + [each for value in node.values() for each in expressions(value)]
    return [each for value in node for each in expressions(value)] if isinstance(node, list) else []


def test_each_metric_that_the_dashboard_asks_for_exists() -> None:
    asked = names_in(json.dumps(DASHBOARD))

    assert asked <= NAMES
    assert len(asked) > 10


def test_each_panel_of_the_dashboard_asks_for_something_and_says_what() -> None:
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert expressions(panel), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "task"]


def test_each_metric_that_an_alert_asks_for_exists() -> None:
    asked = names_in(ALERTS)

    assert asked <= NAMES
    assert "singleton_lock_up" in asked


def test_each_alert_is_told_in_the_docs() -> None:
    alerts = re.findall(r"^ +- alert: (\w+)$", ALERTS, re.MULTILINE)

    assert len(alerts) == 8
    assert [alert for alert in alerts if f"`{alert}`" not in OPERATIONS] == []


def test_each_metric_is_told_in_the_docs() -> None:
    series = {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name) for name in NAMES}

    assert [name for name in series if f"`{name}`" not in OPERATIONS] == []


def test_each_outcome_that_an_alert_names_exists() -> None:
    (outcomes,) = re.findall(r'outcome=~"([^"]+)"', ALERTS)
    (reasons,) = re.findall(r'reason!~"([^"]+)"', ALERTS)

    assert set(outcomes.split("|")) <= set(get_args(ConflictOutcome))
    assert set(reasons.split("|")) == {"replaced", "broken"}


# Prometheus' own judgement, where Debian's `prometheus` is installed.

PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


@with_promtool
def test_prometheus_reads_the_text(app: Celery) -> None:
    store_of(app).count("singleton:v3:stats", COUNTED, 5.0)
    text = metrics.exposition(app, ROWS, 0.1).decode()

    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
def test_prometheus_reads_the_alerts() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(DOCS / "alerts.yml")], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
def test_prometheus_raises_the_alerts_where_it_should() -> None:
    rules = Path(__file__).with_name("alerts_test.yml")

    done = subprocess.run([str(PROMTOOL), "test", "rules", str(rules)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
@pytest.mark.parametrize("expression", expressions(DASHBOARD))
def test_prometheus_reads_what_the_dashboard_asks(expression: str, tmp_path: Path) -> None:
    plain = expression.replace("$__rate_interval", "5m").replace("$task", ".*")
    rules = tmp_path / "rules.yml"
    rule = {"record": "asked", "expr": plain}
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": [rule]}]}))

    done = subprocess.run([str(PROMTOOL), "check", "rules", str(rules)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
