"""Every canvas ends, wherever in it a run is skipped."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_singleton_lock import ConfigurationError
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder
from tests.waiting import SOON, until

valkey, worker = one_worker(6, autouse=True)


@pytest.fixture
def held(recorder: Recorder) -> Iterator[None]:
    holders = [task.delay("held", 1, gate="held") for task in (combined.by_policy["skip"], combined.ignoring)]
    until(lambda: len(recorder.events("enter")) > 1, "the holders run")
    yield
    recorder.open_gate("held")
    holders[0].get(timeout=SOON)
    until(lambda: len(recorder.events("leave")) > 1, "the holders have left")
    recorder._client.flushdb()


def skipped() -> Any:
    return combined.by_policy["skip"].si("held")


def ignored() -> Any:
    """Skipped as well; nobody keeps its result."""
    return combined.ignoring.si("held")


def plain(number: int = 0) -> Any:
    return combined.plain.si(number)


CANVASES = {
    "a group behind it": lambda: skipped() | group(plain(1), plain(2)),
    "a chord behind it": lambda: skipped() | chord([plain(1), plain(2)], combined.collect.s()),
    "a group behind it in a chord header": lambda: chord([skipped() | group(plain(1), plain(2))], combined.collect.s()),
    "a group behind it beside another in a chord header": lambda: chord(
        [skipped() | group(plain(1), plain(2)), plain(3)], combined.collect.s()
    ),
    "a group in the middle": lambda: plain() | skipped() | group(plain(1), plain(2)),
    "a chain in a chord header": lambda: chord([skipped() | plain(1), plain(2)], combined.collect.s()),
    "ignored, a step behind it": lambda: ignored() | plain(),
    "ignored, in the middle": lambda: plain() | ignored() | plain(),
    "ignored, in a group": lambda: group(ignored() | plain(1), plain(2)),
    "ignored, in a chord body": lambda: chord([plain(1), plain(2)], ignored() | plain()),
    "ignored, in a chord header": lambda: chord([ignored() | plain(1), plain(2)], combined.collect.s()),
    "ignored, a group behind it": lambda: ignored() | group(plain(1), plain(2)),
    "ignored, a chord behind it": lambda: ignored() | chord([plain(1), plain(2)], combined.collect.s()),
    "ignored by the call": lambda: skipped().set(ignore_result=True) | plain(),
    "ignored, in a nested chain": lambda: chain(plain(), chain(ignored(), plain()), plain()),
}


BEHIND_IT = {
    "a chord": lambda: chord([plain(1), plain(2)], combined.collect.s()),
    "a group and a step": lambda: group(plain(1), plain(2)) | plain(3),
    "a chain in a chord header": lambda: chord([plain(1) | plain(2), plain(3)], combined.collect.s()),
    "a group in a chord header": lambda: chord([plain(1) | group(plain(2), plain(3)), plain(4)], combined.collect.s()),
    "a chord in a chord header": lambda: chord([chord([plain(1), plain(2)], combined.collect.s())], plain(3)),
    "a chord with a chord for a body": lambda: chord([plain(1)], chord([plain(2), plain(3)], combined.collect.s())),
}


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("name", BEHIND_IT)
def test_every_task_behind_a_skipped_run_ends(name: str) -> None:
    result = chain(skipped(), BEHIND_IT[name]()).apply_async()

    while result is not None:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=SOON)
        result = result.parent


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_with_a_skipped_run_ends(recorder: Recorder, name: str) -> None:
    result = CANVASES[name]().apply_async()

    # A TimeoutError would be the hang.
    with suppress(TaskRevokedError, ChordError):
        result.get(timeout=SOON)
    assert len(recorder.events("enter")) == 2, "only the holders have run"


NO_KEYS = {
    "the second step of a chain": lambda keyed, bad: (combined.echo.si(bad) | keyed.s()).delay(),
    "a step in the middle": lambda keyed, bad: (combined.echo.si(bad) | keyed.s() | combined.echo.si(1)).delay(),
    "a member of a group": lambda keyed, bad: group(keyed.si(bad), combined.echo.si(1)).delay(),
    "a member of a chord": lambda keyed, bad: chord([keyed.si(bad), combined.echo.si(1)])(combined.collect.s()),
    "the body of a chord": lambda keyed, bad: chord([plain(1), plain(2)])(keyed.si(bad)),
    "a retry": lambda keyed, bad: keyed.delay(1, retry_with=bad),
    "a message of somebody else": lambda keyed, bad: combined.app.send_task(keyed.name, [bad]),
}
"""Calls whose key cannot be made, published by nobody who could be told."""


def without_keys() -> Iterator[Any]:
    bads = {"raises": "a text", "returns None": ["a list"]}
    for name, (reason, bad), mode in product(NO_KEYS, bads.items(), combined.keyed):
        is_shown = name == "a member of a chord" or (reason, mode) == ("raises", "until_executed")
        marks = [] if is_shown else [pytest.mark.prove]
        yield pytest.param(mode, bad, name, marks=marks, id=f"{mode}-{reason}-{name}")


@pytest.mark.parametrize(("mode", "bad", "name"), [*without_keys()])
def test_a_call_without_a_key_fails_and_its_canvas_ends(recorder: Recorder, mode: str, bad: Any, name: str) -> None:
    keyed = combined.keyed[mode]
    result = NO_KEYS[name](keyed, bad)

    with pytest.raises((ConfigurationError, ChordError), match=r"lock_key=.*(no number|returned None)"):
        result.get(timeout=SOON)
    assert repr(bad) not in [event.key for event in recorder.events("enter")]
    # Until a first attempt has ended, its call stands for the next one, and so does its failure.
    until(lambda: not keyed.lock_state(1).holders, "the key is free")
    assert keyed.delay(1).get(timeout=SOON) == 1
