"""The errors. Each keeps its arguments in `args`, so that it survives pickle and JSON result backends."""

from typing import Literal

DOCS = "https://celery-singleton-lock.github.io/celery-singleton-lock/"

LostReason = Literal["expired", "taken", "unreachable", "replaced", "broken"]
REASONS_TO_STOP: tuple[LostReason, ...] = ("replaced", "broken")
"""The holder was asked to stop, and still has its lease."""
NotHeldReason = Literal[LostReason, "released", "forked"]

LockHeldState = Literal["held", "cooldown", "queued", "ended"]
"""Why a key is not free."""

_STATES: dict[LockHeldState, str] = {
    "held": "is held by {}; its lease lasts another {:.1f} s unless it is renewed",
    "cooldown": "is in the cool-down of {}; that lasts another {:.1f} s",
    "queued": "goes first to {}, which is queued for another {:.1f} s at most",
    "ended": "was held by {}, which has just ended",
}


class SingletonLockError(Exception):
    """Base of all errors of this library."""


class LockHeld(SingletonLockError):
    """The key is not free.

    Arguments:
        key: The lock key.
        holder_task_id: Task id of the call that has the key, or goes first; None for a `Lock`.
        expires_in: Seconds until the first place is free if no holder renews.
        state: `held`, `cooldown`, `queued` (the other call goes first), or `ended` (the holder has just ended).
    """

    reason = "raised"
    """What `singleton show` prints as the reason, as it does for `CallRevoked` and `LockLost`."""

    def __init__(
        self, key: str, holder_task_id: str | None = None, expires_in: float = 0.0, state: LockHeldState = "held"
    ) -> None:
        super().__init__(key, holder_task_id, expires_in, *([] if state == "held" else [state]))
        self.key = key
        self.holder_task_id = holder_task_id
        self.expires_in = expires_in
        self.state = state

    def __str__(self) -> str:
        who = f"task_id={self.holder_task_id}" if self.holder_task_id else "a Lock"
        # A result from a later version may have an unknown state.
        state = _STATES.get(self.state, "is kept by {} for another {:.1f} s")
        return f"lock key={self.key} {state.format(who, self.expires_in)}"


class LockLost(SingletonLockError):
    """The lease ended, or its holder was asked to stop, before the work was done.

    Arguments:
        key: The lock key.
        reason: `expired` (the key has no holder now), `taken` (another holder may have it), `unreachable` (Redis gave
            no answer before the deadline), `replaced` (a successor waits), `broken` (a person has asked the holder to
            stop), `released`, or `forked` (a forked child holds nothing).
    """

    def __init__(self, key: str, reason: NotHeldReason = "expired") -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        if self.reason in REASONS_TO_STOP:
            return f"the lease on key={self.key} has to be given back ({self.reason}): the run was asked to stop"
        return f"the lease on key={self.key} was lost ({self.reason}); another run may have begun"


class StoreError(SingletonLockError):
    """The store gave no usable answer. The request may have succeeded.

    Arguments:
        store: Address of the store, without credentials.
        problem: What happened, in the words of the client library.
    """

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(store, problem)
        self.store = store
        self.problem = problem

    def __str__(self) -> str:
        return f"lock store {self.store} failed: {self.problem}"


class ConfigurationError(SingletonLockError, ValueError):
    """An option, a setting or an argument cannot work. The message says which, and what is allowed."""


class StoreRefused(StoreError, ConfigurationError):
    """The store refuses us, for example because of a wrong password. Retries do not help until that is changed.

    Arguments:
        store: Address of the store, without credentials.
        problem: What the store said, in the words of the client library.
        advice: What to set.
    """

    def __init__(self, store: str, problem: str, advice: str) -> None:
        super().__init__(store, problem)
        self.args: tuple[str, ...] = (store, problem, advice)
        self.advice = advice

    def __str__(self) -> str:
        return f"lock store {self.store} refuses us ({self.problem}): {self.advice}"
