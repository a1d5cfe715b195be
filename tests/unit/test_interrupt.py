"""An exception raised in a running body from another thread: where it arrives, and where it must not."""

import _thread
import asyncio
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

LOST = LockLost("singleton:v2:{shop.tasks.sync:00}", "taken")
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
            with self.interrupt.allowed():
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
        with interrupt.allowed():
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


def test_the_main_thread_is_interrupted_out_of_a_sleep() -> None:
    main = threading.get_ident()
    started = time.monotonic()

    def asleep(interrupt: Interrupt) -> None:
        send_when(lambda: is_in("fast_asleep", main), interrupt)
        fast_asleep()

    def fast_asleep() -> None:
        time.sleep(30)

    assert run_here(asleep) is LOST
    assert time.monotonic() - started < 20


def test_the_main_thread_is_interrupted_out_of_a_loop() -> None:
    main = threading.get_ident()

    def busy(interrupt: Interrupt) -> None:
        send_when(lambda: is_in("loop", main), interrupt)
        loop()

    assert run_here(busy) is LOST


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
        with Interrupt().allowed():
            send_when(lambda: True, outer)
            loop()

    assert run_here(nested) is LOST


def test_a_signal_that_comes_after_the_body_raises_nothing(blocked: Callable[[int], object]) -> None:
    interrupt = Interrupt()

    with interrupt.allowed():
        blocked(signal.SIG_BLOCK)
        sent = interrupt.send(LOST)
    blocked(signal.SIG_UNBLOCK)
    loop(0.05)

    assert sent


def test_a_signal_that_comes_during_the_next_body_does_not_raise_in_it(blocked: Callable[[int], object]) -> None:
    first, second = Interrupt(), Interrupt()

    with first.allowed():
        blocked(signal.SIG_BLOCK)
        sent = first.send(LOST)
    with second.allowed():
        blocked(signal.SIG_UNBLOCK)
        loop(0.05)

    assert sent


# Any other thread.


def test_another_thread_is_interrupted_out_of_a_loop() -> None:
    run = Run(loop)

    sent = run.interrupt.send(LOST)

    assert sent
    assert run.ended() is LOST


def test_an_interrupt_that_meets_the_end_of_a_body_is_whole_or_not_raised_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = threading.Event()
    raise_in = interrupt_module._raise_in
    run = Run(lambda: end.wait(20))

    def at_the_last_moment(thread: int, error: Exception | None, interrupt: Interrupt) -> bool:
        if error is not None:
            end.set()
            until(lambda: is_in("end", thread), "the body has ended")
        return raise_in(thread, error, interrupt)

    monkeypatch.setattr(interrupt_module, "_raise_in", at_the_last_moment)
    run.interrupt.send(LOST)

    assert run.ended() in (None, LOST)


def test_only_the_thread_of_the_body_is_interrupted() -> None:
    end = threading.Event()
    bystander = Run(lambda: [loop(0.01) for _ in iter(end.is_set, True)])
    run = Run(loop)

    run.interrupt.send(LOST)
    run.ended()
    end.set()

    assert bystander.ended() is None


def test_nothing_reaches_the_code_after_the_body() -> None:
    escaped: list[BaseException] = []

    def many(interrupt_of: list[Interrupt], done: threading.Event) -> None:
        try:
            for _ in range(300):
                interrupt = Interrupt()
                interrupt_of[:] = [interrupt]
                try:
                    with interrupt.allowed():
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


@both
def test_a_body_that_nobody_interrupts_just_ends(run: Callable[..., Any]) -> None:
    assert run(lambda _: loop(0.01)) is None


@both
def test_a_body_that_handles_another_error_is_interrupted(run: Callable[..., Any]) -> None:
    def body(interrupt: Interrupt) -> None:
        try:
            raise KeyError("another")
        except KeyError:
            interrupt.send(LOST)
            loop()

    assert run(body) is LOST


def test_nothing_is_raised_in_a_body_until_a_thread_that_it_starts_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    at_it, goes_on = threading.Event(), threading.Event()
    asked: list[bool] = []
    raised: list[Any] = []
    start, raise_in = getattr(threading, STARTS), interrupt_module._raise_in
    started_by = interrupt_module.started_by

    def slow_start(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "body":
            at_it.set()
            goes_on.wait(20)
        return start(*arguments, **options)

    def body() -> None:
        threading.current_thread().name = "body"
        threading.Thread(target=int).start()
        loop()

    def answer(thread: int) -> threading.Thread | None:
        child = started_by(thread)
        asked.append(child is not None)
        return child

    def note(thread: int, error: Exception | None, interrupt: Interrupt) -> bool:
        raised.append(error)
        return raise_in(thread, error, interrupt)

    monkeypatch.setattr(threading, STARTS, slow_start)
    monkeypatch.setattr(interrupt_module, "started_by", answer)
    monkeypatch.setattr(interrupt_module, "_raise_in", note)
    run = Run(body)
    assert at_it.wait(20)
    run.interrupt.send(LOST)
    until(lambda: raised or len(asked) >= 3, "it has been tried a few times")
    too_early = list(raised)
    goes_on.set()

    assert run.ended() is LOST
    assert too_early == []


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_that_a_new_thread_has_got_is_sent_again(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    raise_in, strays = interrupt_module._raise_in, list[Any]()

    def stray_once(thread: int, error: Exception | None, interrupt: Interrupt) -> bool:
        if strays or error is None:
            return raise_in(thread, error, interrupt)
        # As CPython does in a thread that the body has started; without a frame of Python's before its first step.
        made = interrupt_module._class_of(error, interrupt)
        strays.append(made() if has_begun else _thread.start_new_thread(made, ()))
        return True

    monkeypatch.setattr(interrupt_module, "_raise_in", stray_once)
    run = Run(loop)
    run.interrupt.send(LOST)

    assert run.ended() is LOST
    assert len(strays) == 1


def test_a_body_is_interrupted_though_a_thread_that_it_starts_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    start, is_at_it = getattr(threading, STARTS), threading.Event()

    def dies_at_once(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name != "body":
            return start(*arguments, **options)
        is_at_it.set()
        return None

    def body() -> None:
        threading.current_thread().name = "body"
        child = threading.Thread(target=int)
        child.start()
        child.join()
        loop()

    monkeypatch.setattr(threading, STARTS, dies_at_once)
    run = Run(body)
    assert is_at_it.wait(20)
    run.interrupt.send(LOST)

    assert run.ended() is LOST


def test_a_body_that_starts_threads_is_interrupted_and_none_of_them_is() -> None:
    # Until a new thread runs, CPython takes it for the one that has started it; and that one waits for it to begin.
    def starts_threads() -> None:
        while True:
            child = threading.Thread(target=int)
            child.start()
            child.join()

    for _ in range(20):
        run = Run(starts_threads)
        run.interrupt.send(LOST)
        assert run.ended() is LOST


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


@both
def test_what_is_held_back_may_end_by_an_error_of_its_own(run: Callable[..., Any]) -> None:
    own = ValueError("mine")

    def body(interrupt: Interrupt) -> None:
        with interrupt.held_back():
            interrupt.send(LOST)
            loop(0.1)
            raise own

    assert run(body) is own


@both
def test_what_was_held_back_for_good_is_known_to_have_been_sent(run: Callable[..., Any]) -> None:
    known: list[tuple[bool, bool]] = []

    def body(interrupt: Interrupt) -> None:
        try:
            with interrupt.held_back():
                interrupt.send(LOST)
                loop(0.1)
                raise ValueError("mine")
        finally:
            known.append((interrupt.delivered, interrupt.was_sent))

    run(body)
    assert known == [(False, True)]


@both
@pytest.mark.parametrize(
    "error", [ValueError("mine"), LockLost("another key", "expired"), KeyboardInterrupt(), SystemExit(3)]
)
def test_the_bodys_own_error_passes_unchanged(run: Callable[..., Any], error: BaseException) -> None:
    def fail(_: Interrupt) -> None:
        raise error

    assert run(fail) is error


@both
def test_a_body_may_catch_the_interrupt_and_read_it(run: Callable[..., Any]) -> None:
    caught: list[LockLost] = []

    def careful(interrupt: Interrupt) -> None:
        try:
            send_when(lambda: True, interrupt)
            loop()
        except LockLost as error:
            caught.append(error)

    assert run(careful) is None
    assert [error is LOST for error in caught] == [True]


@both
def test_an_error_the_body_makes_of_the_interrupt_passes_unchanged(run: Callable[..., Any]) -> None:
    own = ValueError("the body's way to say it")

    def translate(interrupt: Interrupt) -> None:
        try:
            send_when(lambda: True, interrupt)
            loop()
        except LockLost as error:
            raise own from error

    assert run(translate) is own


@both
def test_an_interrupt_after_the_body_is_refused(run: Callable[..., Any]) -> None:
    interrupts: list[Interrupt] = []

    run(interrupts.append)

    assert interrupts[0].send(LOST) is False


def test_an_interrupt_before_the_body_is_refused() -> None:
    assert Interrupt().send(LOST) is False


def test_an_interrupt_after_a_failed_body_is_refused() -> None:
    interrupt = Interrupt()
    with pytest.raises(ZeroDivisionError), interrupt.allowed():
        _ = 1 / 0

    assert interrupt.send(LOST) is False


# An event loop in the body.


async def that_goes_on() -> None:
    while True:
        await asyncio.sleep(0.01)
        loop(0.05)


def with_a_loop_that_is_busy(interrupt: Interrupt) -> None:
    """The body of a coroutine that waits for another, which is there to be hit and whose end nobody looks at."""

    here = threading.get_ident()

    async def main() -> None:
        beside = [asyncio.create_task(that_goes_on()) for _ in range(2)]
        send_when(lambda: is_in("loop", here), interrupt)
        await asyncio.sleep(10)
        assert beside

    asyncio.run(main())


def with_a_callback_that_is_busy(interrupt: Interrupt) -> None:
    hits: list[object] = []

    async def main() -> None:
        def again() -> None:
            loop(0.5)
            events.call_soon(again)

        def hit(*_: object) -> None:
            hits.append(_)
            events.call_soon(again)

        events, here = asyncio.get_running_loop(), threading.get_ident()
        events.call_soon(again)
        events.set_exception_handler(hit)
        send_when(lambda: is_in("loop", here), interrupt)
        await asyncio.sleep(15)

    try:
        asyncio.run(main())
    finally:
        # Then it comes between two callbacks.
        assert len(hits) <= 3


@pytest.mark.parametrize(
    ("run", "body"),
    [
        (run_here, with_a_loop_that_is_busy),
        (run_here, with_a_callback_that_is_busy),
        (run_in_a_thread, with_a_loop_that_is_busy),
        (run_in_a_thread, with_a_callback_that_is_busy),
    ],
)
def test_what_hits_a_bystander_in_an_event_loop_ends_the_body_all_the_same(
    run: Callable[..., Any], body: Callable[[Interrupt], None]
) -> None:
    assert run(body) is LOST


def test_what_a_bystander_was_hit_by_is_raised_between_two_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupt, "_raise", lambda *_: True)

    async def main(interrupt: Interrupt) -> None:
        interrupt.send(LOST)
        asyncio.get_running_loop().call_soon(lambda: interrupt.lands(sys._getframe()))
        await asyncio.sleep(10)

    assert run_here(lambda interrupt: asyncio.run(main(interrupt))) is LOST


@both
def test_a_coroutine_that_waits_is_interrupted_once(run: Callable[..., Any]) -> None:
    cleaned: list[str] = []

    async def main(interrupt: Interrupt) -> None:
        try:
            send_when(lambda: True, interrupt)
            loop(0.3)
            await asyncio.sleep(4)
        finally:
            await asyncio.sleep(1.5)
            cleaned.append("in peace")

    assert run(lambda interrupt: asyncio.run(main(interrupt))) is LOST
    assert cleaned == ["in peace"]


def test_a_loop_around_the_body_is_none_of_its_own() -> None:
    bodies: list[Interrupt] = []

    async def beside() -> BaseException | None:
        return run_here(lambda interrupt: (bodies.append(interrupt), send_when(lambda: True, interrupt), loop(3)))

    async def main() -> BaseException | None:
        return await asyncio.create_task(beside())

    assert asyncio.run(main()) is LOST
    assert bodies[0]._has_landed
