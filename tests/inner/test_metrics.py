"""The text for Prometheus: its form, its names, and what it tells though nothing has happened."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest

from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.web import metrics
from celery_singleton_lock.web.totals import Total

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
ALERTS = (DOCS / "alerts.yml").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\})? (\d+(?:\.\d+)?(?:e-\d+)?)')
COUNTED = {
    "acquired::shop.sync": 5,
    "conflicts:skipped:shop.sync": 2,
    "held:0.1:shop.sync": 3,
    "held:10:shop.sync": 1,
    "held:+Inf:shop.sync": 1,
    "held:sum:shop.sync": 12_500_000,
    "acquired::": 7,
}


def read(text: str) -> dict[tuple[str, ...], float]:
    """Each sample by its name and its labels."""
    samples: dict[tuple[str, ...], float] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(r"# (HELP [a-z_]+ [A-Z].*\.|TYPE [a-z_]+ (counter|gauge|histogram))", line), line
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, labels, value = found.groups()
        key = name, *re.findall(r'[a-z_]+="(?:[^"\\]|\\.)*"', labels or "")
        assert key not in samples, line
        samples[key] = float(value)
    return samples


def told(
    counted: dict[str, int] | None = None, tasks: tuple[str, ...] = ("shop.sync",)
) -> dict[tuple[str, ...], float]:
    totals = [Total("shop.sync", held=2, waiting=1, queued=3, longest=4.5)]
    return read(metrics.of_a_store(counted or {}, tasks, totals, 0.25))


def test_counters_are_told_with_their_labels() -> None:
    samples = told(COUNTED)

    assert samples["singleton_lock_acquired_total", 'task="shop.sync"'] == 5
    assert samples["singleton_lock_acquired_total", 'task=""'] == 7
    assert samples["singleton_lock_conflicts_total", 'task="shop.sync"', 'outcome="skipped"'] == 2


def test_what_has_not_happened_is_told_as_zero_so_that_a_first_event_is_a_rise() -> None:
    samples = told()

    for outcome in get_args(ConflictOutcome):
        assert samples["singleton_lock_conflicts_total", 'task="shop.sync"', f'outcome="{outcome}"'] == 0
    assert samples["singleton_lock_lost_total", 'task="shop.sync"', 'reason="unreachable"'] == 0
    assert samples["singleton_lock_unanswered_total", 'task="shop.sync"', 'policy="reschedule"'] == 0
    assert samples["singleton_lock_taken_over_total", 'task="shop.sync"'] == 0


def test_the_buckets_of_a_histogram_add_up() -> None:
    samples = told(COUNTED)
    bucket = {
        bound: samples["singleton_lock_held_seconds_bucket", 'task="shop.sync"', f'le="{bound}"']
        for bound in ("0.01", "0.1", "1", "10", "7200", "+Inf")
    }

    assert bucket == {"0.01": 0, "0.1": 3, "1": 3, "10": 4, "7200": 4, "+Inf": 5}
    assert samples["singleton_lock_held_seconds_count", 'task="shop.sync"'] == 5
    assert samples["singleton_lock_held_seconds_sum", 'task="shop.sync"'] == 12.5


def test_what_is_held_now_is_told() -> None:
    samples = told(tasks=("shop.sync", "shop.other"))

    assert samples["singleton_lock_holders", 'task="shop.sync"'] == 2
    assert samples["singleton_lock_waiters", 'task="shop.sync"'] == 1
    assert samples["singleton_lock_queued", 'task="shop.sync"'] == 3
    assert samples["singleton_lock_oldest_held_seconds", 'task="shop.sync"'] == 4.5
    assert samples["singleton_lock_holders", 'task="shop.other"'] == 0
    assert samples["singleton_lock_up",] == 1
    assert samples["singleton_lock_scan_seconds",] == 0.25


def test_a_store_that_is_away_is_told_and_nothing_else() -> None:
    assert read(metrics.of_a_store_that_is_away()) == {("singleton_lock_up",): 0}


def test_counters_are_told_though_the_locks_cannot_be_walked() -> None:
    samples = read(metrics.of_a_store(COUNTED, [], None, 0.0))

    assert samples["singleton_lock_acquired_total", 'task="shop.sync"'] == 5
    assert not any(name == "singleton_lock_holders" for name, *_ in samples)


def test_a_name_of_a_task_cannot_end_its_label() -> None:
    samples = told({'acquired::a"b\\c\nd': 1})

    assert samples["singleton_lock_acquired_total", r'task="a\"b\\c\nd"'] == 1


def test_what_a_newer_version_counts_breaks_nothing() -> None:
    samples = told({"acquired::shop.sync": 1, "conflicts:postponed:shop.sync": 4, "invented::shop.sync": 1})

    assert samples["singleton_lock_conflicts_total", 'task="shop.sync"', 'outcome="postponed"'] == 4


def test_the_list_of_names_is_that_of_what_is_told() -> None:
    samples = told({**COUNTED, "waited:0.01:shop.sync": 5})

    assert {name for name, *_ in samples} == set(metrics.names_of_metrics())


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

    assert asked <= set(metrics.names_of_metrics())
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

    assert asked <= set(metrics.names_of_metrics())
    assert "singleton_lock_up" in asked


def test_each_alert_is_told_in_the_docs() -> None:
    alerts = re.findall(r"^ +- alert: (\w+)$", ALERTS, re.MULTILINE)

    assert len(alerts) == 6
    assert [alert for alert in alerts if f"`{alert}`" not in OPERATIONS] == []


def test_each_metric_is_told_in_the_docs() -> None:
    series = {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name) for name in metrics.names_of_metrics()}

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
def test_prometheus_reads_the_text() -> None:
    text = metrics.of_a_store(COUNTED, ["shop.sync"], [Total("shop.sync", held=1)], 0.1)

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
