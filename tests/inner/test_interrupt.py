"""An exception raised in a running body from another thread: where it arrives, and where it must not."""

import _thread
import gc
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_singleton_lock import LockLost
from celery_singleton_lock.leases import interrupt as interrupt_module
from celery_singleton_lock.leases.interrupt import Interrupt
from tests.waiting import until

LOST = LockLost("singleton:v3:{shop.tasks.sync:00}", "taken")
# Of `threading`: its name since Python 3.13, and before.
STARTS = next(name for name in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, name))


@pytest.fixture(autouse=True)
def signal_handler() -> Iterator[None]:
    """Leave the process as it was; the signal's default would end it, so it is ignored."""
    number = interrupt_module._SIGNAL
    assert number is not None
    signal.signal(number, signal.SIG_IGN)
    yield
    signal.signal(number, signal.SIG_IGN)


class Run:
    """A body under an interrupt, in a thread of its own, and how it ended."""

    def __init__(self, body: Callable[[], Any], interrupt: Interrupt | None = None) -> None:
        self.interrupt = interrupt or Interrupt()
        self.began = threading.Event()
        self.error: BaseException | None = None
        self._body = body
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.began.wait(20)

    def _run(self) -> None:
        try:
            with self.interrupt:
                self.began.set()
                self._body()
        except BaseException as error:  # noqa: BLE001 - whatever it was, it is looked at
            self.error = error

    def ended(self) -> BaseException | None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.error


def loop(seconds: float = 20.0) -> None:
    """Work in pure Python, which an interrupt ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(100))


def send_when(condition: Callable[[], object], interrupt: Interrupt) -> None:
    """Let another thread, like the heartbeat's, send `LOST` as soon as *condition* holds."""

    def watch() -> None:
        until(condition, "the body has come so far")
        interrupt.send(LOST)

    threading.Thread(target=watch).start()


def run_here(body: Callable[[Interrupt], Any]) -> BaseException | None:
    """How *body* ends in the thread that calls this."""
    interrupt = Interrupt()
    try:
        with interrupt:
            body(interrupt)
    except BaseException as error:  # noqa: BLE001 - whatever it was, it is looked at
        return error
    return None


def run_in_a_thread(body: Callable[[Interrupt], Any]) -> BaseException | None:
    """How *body* ends in a thread of its own."""
    interrupt = Interrupt()
    return Run(lambda: body(interrupt), interrupt).ended()


def is_in(function: str, thread: int) -> bool:
    # Python 3.11 lists the frames under a lock; a collection that begins meanwhile can lock it up for good.
    gc.disable()
    try:
        return sys._current_frames()[thread].f_code.co_name == function
    finally:
        gc.enable()


@pytest.fixture
def blocked() -> Iterator[Callable[[int], object]]:
    """Holds the signal up, or lets it through."""
    number = interrupt_module._SIGNAL
    assert number is not None

    yield lambda how: signal.pthread_sigmask(how, {number})

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


# The main thread.


def test_the_main_thread_is_interrupted_out_of_a_read_that_it_is_about_to_begin() -> None:
    # The signal may come after the interpreter has looked for signals, and before the kernel waits.
    for _ in range(200):
        ours, theirs = socket.socketpair()
        begins = threading.Event()

        def read(interrupt: Interrupt, begins: threading.Event = begins, ours: socket.socket = ours) -> None:
            threading.Thread(target=lambda: begins.wait() and interrupt.send(LOST)).start()
            ours.settimeout(10)
            begins.set()
            ours.recv(1)

        started = time.monotonic()
        with ours, theirs:
            assert run_here(read) is LOST
        assert time.monotonic() - started < 5, "it was heard only when the read had ended by itself"


def test_a_signal_that_has_ended_nothing_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def miss_the_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            kill(thread, number)

    def sleep(interrupt: Interrupt) -> None:
        send_when(lambda: True, interrupt)
        time.sleep(5)

    kill = signal.pthread_kill
    monkeypatch.setattr(signal, "pthread_kill", miss_the_first)

    assert run_here(sleep) is LOST
    assert len(sent) > 1


def test_an_outer_body_is_reached_through_an_inner_one() -> None:
    def nested(outer: Interrupt) -> None:
        with Interrupt():
            send_when(lambda: True, outer)
            loop()

    assert run_here(nested) is LOST


def test_a_signal_that_comes_after_the_body_raises_nothing(blocked: Callable[[int], object]) -> None:
    interrupt = Interrupt()

    with interrupt:
        blocked(signal.SIG_BLOCK)
        sent = interrupt.send(LOST)
    blocked(signal.SIG_UNBLOCK)
    loop(0.05)

    assert sent


def test_a_signal_that_comes_during_the_next_body_does_not_raise_in_it(blocked: Callable[[int], object]) -> None:
    first, second = Interrupt(), Interrupt()

    with first:
        blocked(signal.SIG_BLOCK)
        sent = first.send(LOST)
    with second:
        blocked(signal.SIG_UNBLOCK)
        loop(0.05)

    assert sent


# Any other thread.


def test_nothing_reaches_the_code_after_the_body() -> None:
    escaped: list[BaseException] = []

    def many(interrupt_of: list[Interrupt], done: threading.Event) -> None:
        try:
            for _ in range(300):
                interrupt = Interrupt()
                interrupt_of[:] = [interrupt]
                try:
                    with interrupt:
                        sum(range(50))
                except Exception:  # noqa: BLE001 - here anything may arrive
                    continue
                sum(range(50))
        except BaseException as error:  # noqa: BLE001 - here nothing may
            escaped.append(error)
        finally:
            done.set()

    current: list[Interrupt] = []
    done = threading.Event()
    thread = threading.Thread(target=many, args=(current, done))
    thread.start()
    while not done.is_set():
        for interrupt in current[:]:
            interrupt.send(LOST)
    thread.join(20)

    assert escaped == []


# In both.


both = pytest.mark.parametrize("run", [run_here, run_in_a_thread])


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_that_a_new_thread_has_got_is_sent_again(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    raise_in, strays = interrupt_module._raise_in, list[Any]()

    def stray_once(thread: int, error: type[Exception] | None) -> None:
        if strays or error is None:
            raise_in(thread, error)
        else:
            # As CPython does in a thread that the body has started; without a frame of Python's before its first step.
            strays.append(error() if has_begun else _thread.start_new_thread(error, ()))

    monkeypatch.setattr(interrupt_module, "_raise_in", stray_once)
    run = Run(loop)
    run.interrupt.send(LOST)

    assert run.ended() is LOST
    assert len(strays) == 1


@both
def test_what_comes_while_it_is_held_back_comes_when_that_has_returned(run: Callable[..., Any]) -> None:
    reached: list[str] = []

    def body(interrupt: Interrupt) -> None:
        with interrupt.held_back():
            interrupt.send(LOST)
            loop(0.2)
            reached.append("the end of what must not be broken off")
        reached.append("what comes after it")

    assert run(body) is LOST
    assert reached == ["the end of what must not be broken off"]
