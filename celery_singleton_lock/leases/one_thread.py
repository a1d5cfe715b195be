"""A thread that lives while there is something to do."""

import _thread
import threading
from collections.abc import Callable, Iterator


class OneThread:
    """Runs something in a background thread, of which there is never more than one.

    Its methods are called under a lock of the owner's. A signal may raise anywhere
    in `ensure`: then the next call starts the thread, or finds that it runs. An
    exception may be raised in the thread from outside: then another one goes on.

    Arguments:
        name: What the thread is called.
        run: What it does, for as long as `goes_on` says.
        lock: The owner's.
    """

    def __init__(self, name: str, run: Callable[[], None], lock: threading.RLock) -> None:
        self._name = name
        self._body = run
        self._lock = lock
        self._ident: int | None = None

    @property
    def runs(self) -> bool:
        """The thread is there."""
        return self._ident is not None

    def ensure(self) -> None:
        """Start the thread unless it runs."""
        if self._ident is None:
            life = self._live()
            next(life)
            # Not threading.Thread, whose start() waits for an event: a signal that raises
            # meanwhile becomes another error, and the thread may hang before it has begun.
            self._ident = _thread.start_new_thread(next, (life, None))

    def goes_on(self, has_work: bool) -> bool:
        """For the thread itself: whether it has to go on. If not, the next `ensure` starts another."""
        me = _thread.get_ident()
        if self._ident is None:
            # A signal has interrupted `ensure` after the start of the thread and before its number was stored.
            self._ident = me
        if self._ident != me:
            return False
        if not has_work:
            self._ident = None
        return has_work

    def _live(self) -> Iterator[None]:
        """A generator, so that the thread begins inside the `try`: a function may be broken off before that."""
        try:
            yield
            threading.current_thread().name = f"singleton-lock-{self._name}"
            self._body()
        except Exception:
            # Raised from outside.
            with self._lock:
                if self._ident in (None, _thread.get_ident()):
                    self._ident = None
                    self.ensure()
            raise
        finally:
            if self._ident == _thread.get_ident():
                self._ident = None
