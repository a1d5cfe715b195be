"""A thread that is there while there is something to do."""

import _thread
import threading
from collections.abc import Callable


class OneThread:
    """Runs something in a background thread, of which there is never more than one.

    Its methods are called under a lock of the owner's. A signal may raise anywhere
    in `ensure`: then the next call starts the thread, or finds that it runs.

    Arguments:
        name: What the thread is called.
        run: What it does, for as long as `goes_on` says.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name = name
        self._body = run
        self._ident: int | None = None

    @property
    def runs(self) -> bool:
        """The thread is there."""
        return self._ident is not None

    def ensure(self) -> None:
        """Start the thread unless it runs."""
        if self._ident is None:
            # Not threading.Thread, whose start() waits for an event: a signal that raises
            # meanwhile becomes another error, and the thread may hang before it has begun.
            self._ident = _thread.start_new_thread(self._run, ())

    def goes_on(self, has_work: bool) -> bool:
        """For the thread itself: whether it has to go on. If not, the next `ensure` starts another."""
        me = _thread.get_ident()
        if self._ident is None:
            # A signal has struck between its start and our knowing of it.
            self._ident = me
        if self._ident != me:
            return False
        if not has_work:
            self._ident = None
        return has_work

    def _run(self) -> None:
        try:
            threading.current_thread().name = f"singleton-lock-{self._name}"
            self._body()
        finally:
            if self._ident == _thread.get_ident():
                self._ident = None
