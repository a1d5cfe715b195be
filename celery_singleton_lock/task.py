"""`SingletonTask`: takes a lease before the body runs, and releases it afterwards."""

import time
from functools import cached_property, partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, cast

from celery import Celery, Task
from celery._state import get_current_task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.result import AsyncResult, EagerResult

from celery_singleton_lock.checks import check_definition, is_checked_at_start, options_of, request_class_of
from celery_singleton_lock.definition import options as option
from celery_singleton_lock.definition.keys import KeyMaker, start_of_keys
from celery_singleton_lock.definition.settings import check_call_options, check_name, store_of
from celery_singleton_lock.errors import ConfigurationError, LockLost
from celery_singleton_lock.leases.holding import NULL_LEASE, Holding
from celery_singleton_lock.leases.lease import Lease, current_holding, held_here
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.publish import leaves_its_key, options_by_name, publish, queue_by
from celery_singleton_lock.receivers import connect_postrun, listen_for, release_at_task_end
from celery_singleton_lock.runs import message
from celery_singleton_lock.runs.admission import admit
from celery_singleton_lock.runs.body import queued_until_its_workflow_ends, run_body
from celery_singleton_lock.runs.endings import TASKS_OF_ITEMS, Revoked, eager_result
from celery_singleton_lock.runs.policies import telling_joiners
from celery_singleton_lock.runs.run import ENDED, OVER, UNLOCKED, Phase, Run
from celery_singleton_lock.stores.records import Holder, LockState

if TYPE_CHECKING:
    from typing import Generic

    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R_co = TypeVar("R_co", covariant=True, default=Any)

    class TypedTask(Task[P, R_co], Generic[P, R_co]):
        """A task whose `run` takes P and returns R_co."""
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R_co = TypeVar("R_co", covariant=True)

    class TypedTask(Task):
        """Celery's task, which can be subscripted at run time. Celery's own can only since 5.7."""

        abstract = True
        __class_getitem__ = classmethod(GenericAlias)


class SingletonTask(option.Lockable, TypedTask[P, R_co]):
    """A Celery task that runs once at a time for each lock key.

    A run holds a lease in Redis, and renews it until the body ends. If the worker dies, the key is free within one TTL.
    A direct call, `task(...)`, takes no lock of its own. Celery's own tasks are never locked.

    An option that is None takes the app's `singleton_lock_*` setting, or else the default.

    Attributes:
        lock_mode: `"while_executing"` (default): one run at a time. `"until_executing"`: one call in the queue, whose
            body runs without a lock. `"until_executed"`: one call, queued or running. `"until_and_while_executing"`:
            one call in the queue, and one run at a time.
        lock_key: The arguments that make the key: None (default) for all, a list of parameter names, `()` for none, a
            format string such as `"{customer_id}"`, or a callable `(*args, **kwargs)`.
        lock_name: First part of the key (default: the task's name). Tasks with the same name exclude each other.
        lock_ttl: Seconds that a lease lasts without renewal, at least 1 (default 30).
        lock_limit: How many runs may hold the lock at once (default 1).
        lock_on_conflict: `"skip"` (default) or `"raise"`. `"reschedule"`: waits for its turn. `"wait"`: the same, in
            its pool slot. `"join"`: ends with the holder's result or error. `"rerun"`: the call published last runs
            after the present run. `"replace"`: the same, and the holder is asked to stop.
        lock_skip_result: What a skipped run returns. If this is unset, the run ends as REVOKED.
        lock_wait_timeout: Seconds after which a waiting call fails with `LockHeld`, or with `StoreError` if the store
            does not answer (default: never). With `"rerun"` and `"replace"` in a queue mode: how long newer calls may
            delay a run.
        lock_min_hold: Seconds for which the key stays taken at least, from the start of a run or, in a queue mode, from
            the publication (default 0).
        lock_min_hold_on_failure: False frees the key at once if a run fails, dies or loses its lease (default True).
        lock_on_lost: `"abort"` (default) raises `LockLost` in the body. `"warn"` only logs the loss and sends
            the signal `lock_lost`. `"kill"` kills the pool process at the deadline (prefork on Linux).
        lock_on_store_error: What a run does if Redis gives no answer within 5 s: `"reschedule"` (default), `"raise"`,
            `"run"` without a lock, or `"skip"`. A publisher waits for 2 s.
        lock_queue_ttl: Seconds for which a call counts as queued if its message is lost (default 3600).
        lock_label: A format string such as `"supplier {supplier_id}"`, shown to operators beside the key.
    """

    abstract = True
    Request = "celery_singleton_lock.worker:SingletonRequest"
    # The user's `track_started`. Celery's own is off: otherwise a refused copy would store STARTED over the result of
    # the run.
    stores_started: bool = False
    # Task id of the last run that ended as `OVER`. For that id, `after_return` skips a slow look-up: nothing is left to
    # finish. If a later run with that id is not `OVER`, the receiver of `task_postrun` finishes the run.
    _just_over: str | None = None

    lock_mode: option.Mode | None
    lock_key: option.KeyChoice
    lock_name: str | None
    lock_limit: int | None
    lock_ttl: option.Duration | None
    lock_on_conflict: option.OnConflict | None
    lock_skip_result: Any
    lock_wait_timeout: option.Duration | None
    lock_on_lost: option.OnLost | None
    lock_on_store_error: option.OnStoreError | None
    lock_min_hold: option.Duration | None
    lock_min_hold_on_failure: bool | None
    lock_queue_ttl: option.Duration | None
    lock_label: str | None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the body under a lease, or do what the options say."""
        try:
            run = self._new_run(args, kwargs)
        except BaseException:
            connect_postrun()
            raise
        if run is None:
            return cast(R_co, super().__call__(*args, **kwargs))
        try:
            with run:
                answer = admit(run)
                if isinstance(answer, Phase):
                    run.begins(answer)
                    result: R_co = run_body(run, self.run if self._calls_body_itself else super().__call__)
                else:
                    result = answer.unwrap()
        except Revoked as revoked:
            run.store_revoked(revoked.error)
            raise
        finally:
            if run.phase is not OVER:
                connect_postrun()
        if run.phase is OVER:
            # Skips our slow `__setattr__`.
            vars(self)["_just_over"] = run.task_id
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        check_name(self, name)
        super().__setattr__(name, value)
        self._forget(name)
        if name == "__trace__":
            # Celery sets this when a worker starts.
            listen_for(self)
        elif name == "track_started" and self.is_lockable:
            vars(self).update(track_started=False, stores_started=bool(value))

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        if name in option.NAMES:
            for made in ("lock_options", "_lock_keys", "_leaves_its_key"):
                vars(self).pop(made, None)

    @property
    def lock(self) -> Lease:
        """The lease of the running body; `held` is False if there is none."""
        run = message.run_of(self.request)
        lease = run.lease if run is not None else current_holding()
        if lease is None or not (self._runs_under(lease) if run is None else run.phase is not UNLOCKED):
            return NULL_LEASE
        return lease.view if lease.was_granted and lease.unreleased else NULL_LEASE

    @cached_property
    def lock_options(self) -> option.LockOptions:
        """The options of this task, with the app's settings and the defaults filled in."""
        option.wait_until_bound(self)
        return options_of(self)

    @cached_property
    def _lock_keys(self) -> KeyMaker:
        return KeyMaker(self, self.lock_options.prefix)

    @cached_property
    def _leaves_its_key(self) -> bool:
        """Whether the worker, not the publisher, makes the key of a call with plain arguments."""
        options = self.lock_options
        return not (options.unique_in_queue or options.newest_wins) and self._lock_keys.needs_only_plain

    @cached_property
    def _usual_queue(self) -> str:
        """The queue of calls that name no queue. A later `conf.update` does not change it."""
        return queue_by(self, {})

    @cached_property
    def _calls_body_itself(self) -> bool:
        """Whether `super().__call__` is Celery's own. If so, we call `run` ourselves, which is faster."""
        behind = type(self).__mro__[type(self).__mro__.index(SingletonTask) + 1 :]
        return bool(next(cls for cls in behind if "__call__" in vars(cls)).__module__ == Task.__module__)

    def lock_key_for(self, *args: Any, **kwargs: Any) -> str:
        """The lock key of a call with these arguments.

        Raises:
            TypeError: The task cannot be called like this.
            ConfigurationError: An argument that counts cannot be serialised.
            pydantic.ValidationError: An argument does not fit the task's model.
        """
        keys = self._lock_keys
        try:
            return keys.key(args, kwargs)
        except ConfigurationError as error:
            raise ConfigurationError(f"task {self.name}: {error}") from error

    def lock_key_of_some(self, *args: Any, **kwargs: Any) -> str:
        """As `lock_key_for`; needs only the arguments that make the key."""
        keys = self._lock_keys
        try:
            return keys.key_of_some(args, kwargs)
        except (TypeError, ConfigurationError) as error:
            raise type(error)(f"task {self.name}: {error}") from error

    def lock_key_in(self, notes: message.Notes) -> str:
        """The lock key in the notes of a message; empty if it has another prefix or version."""
        return notes.key if notes.key.startswith(start_of_keys(self.lock_options.prefix)) else ""

    def lock_key_without_user_code(self, args: Any, kwargs: Any) -> str | None:
        """The lock key; None if a callable, a format or a model of the user has to make it."""
        keys = self._lock_keys
        return None if keys.runs_user_code else keys.key(args, kwargs)

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """A `Lock` that keeps out all runs of a call; only the arguments in the key are needed.

        The lock is granted once no run holds a place, whatever `lock_limit` is. While it waits, no later call begins.

        Raises:
            TypeError: The arguments make no key.
            ConfigurationError: The arguments make no key, or the mode is `until_executing`, whose runs take no lock.
        """
        key = self.lock_key_of_some(*args, **kwargs)
        options = self.lock_options
        if options.mode == "until_executing":
            raise ConfigurationError(
                f"task {self.name}: lock_for(...) would keep no run out, because with lock_mode='until_executing' a "
                "body runs without a lock; use another mode, or lock_state(...) to see which call is queued"
            )
        lock = Lock("task", app=self.app, ttl=options.ttl)
        lock._key = key  # noqa: SLF001 (it is this library's)
        lock._is_whole = True  # noqa: SLF001
        return lock

    def lock_state(self, *args: Any, **kwargs: Any) -> LockState:
        """The state of a call's lock. Raises `StoreError` if the store gives no answer within 2 s."""
        return store_of(self.app).survey([self.lock_key_of_some(*args, **kwargs)])[0]

    def lock_holders(self, *args: Any, **kwargs: Any) -> list[Holder]:
        """The holders of a call's lock, and its cool-downs. Raises as `lock_state`."""
        return store_of(self.app).holders(self.lock_key_of_some(*args, **kwargs))

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> "AsyncResult[R_co]":
        """As Celery's; but in a queue mode (any but `while_executing`) it asks the store first.

        Raises:
            ConfigurationError: The arguments make no lock key; or the store refuses the request.
            LockHeld: In a queue mode, another call runs in place of this one, and `lock_on_conflict` is `raise`.
            StoreError: In a queue mode, the store did not answer, and `lock_on_store_error` is `raise`.
        """
        if rest:
            options = options_by_name(*rest, **options)
        if options:
            check_call_options(self.name, options)
        if self.is_lockable:
            if not leaves_its_key(self, args, kwargs, options):
                return publish(self, args, kwargs, options, partial(super().apply_async, args, kwargs))
            options["headers"] = {message.HEADER: time.time_ns() // 1000}
        return super().apply_async(args, kwargs, **options)

    def apply(self, *args: Any, **kwargs: Any) -> "EagerResult[R_co]":
        """As Celery's; a call whose body does not run ends as in a worker."""
        check_call_options(self.name, kwargs)
        listen_for(self)
        return eager_result(self, super().apply(*args, **kwargs), throw=kwargs.get("throw"))

    def retry(self, args: Any = None, kwargs: Any = None, exc: Any = None, *rest: Any, **options: Any) -> Any:
        """As Celery's; but it may raise `LockLost`.

        Raises:
            LockLost: The body was interrupted before, because its run was asked to stop. Or it is interrupted while the
                retry is published, because its run is asked to stop or has lost its lease.
        """
        run = message.run_of(self.request)
        if run is None:
            return super().retry(args, kwargs, exc, *rest, **options)
        run.check_not_replaced()
        run.retry_error, run.stored_retry = exc, None
        try:
            with telling_joiners(run):
                return super().retry(args, kwargs, exc, *rest, **options)
        except Reject as rejected:
            # Celery takes a `LockLost` during publishing for an error of the broker, and would store no result.
            if isinstance(rejected.reason, LockLost):
                raise rejected.reason from None
            raise

    def replace(self, sig: Any) -> Any:
        """As Celery's; but raises `LockLost` if the body was interrupted because its run was asked to stop.

        In `until_executed`, the call counts as queued until *sig* ends.
        """
        run = message.run_of(self.request)
        if run is None:
            return super().replace(sig)
        run.check_not_replaced()
        origin = message.Origin(run.key, run.lease.fence, run.notes.first_published)
        with telling_joiners(run), queued_until_its_workflow_ends(run), message.replacing(origin):
            return super().replace(sig)

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """As in Celery since 5.5: a pushed request inherits the fields of the present one."""
        self.request_stack.push(self._request_inside(*args, **kwargs))

    def _request_inside(self, *args: Any, **kwargs: Any) -> Context:
        outer = self.request
        # If `headers` were None, Celery would take each unknown field for a header, and a retry would publish it.
        return Context(*args, **{**vars(outer), "headers": outer.headers or {}, **kwargs})

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """As Celery's; finishes a run that is not `OVER`."""
        if self._just_over != task_id:
            release_at_task_end(self, status, retval)
        super().after_return(status, retval, task_id, args, kwargs, einfo)

    def start_strategy(self, app: Celery, consumer: Any, **kwargs: Any) -> Any:
        """As Celery's, with our request class and timer."""
        vars(self)["Request"] = request_class_of(self)
        messages = getattr(consumer, "waiting_messages", None)
        if messages is None:
            return super().start_strategy(app, consumer, **kwargs)
        # The strategy keeps the timer and the request class that it reads during this call. Restore both afterwards:
        # other tasks share the consumer's timer.
        timer, request = consumer.timer, self.Request
        consumer.timer = messages
        vars(self)["Request"] = messages.requests_of(self)
        try:
            return super().start_strategy(app, consumer, **kwargs)
        finally:
            consumer.timer = timer
            vars(self)["Request"] = request

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options as soon as the task exists."""
        super().on_bound(app)
        if cls.track_started and cls.is_lockable:
            cls.track_started = False
            cls.stores_started = True
        if cls.is_lockable and not is_checked_at_start(app):
            # `register_task` names the object, so its class may have no name.
            check_definition(cls, cls.name or app.gen_task_name(cls.__name__, cls.__module__))

    def _new_run(self, args: Any, kwargs: Any) -> Run | None:
        """The run of this call; None if the call takes no lock of its own."""
        if not self.is_lockable:
            return None
        request = message.request_of(self)
        if request.called_directly:
            caller = get_current_task()
            if caller is None or caller.name not in TASKS_OF_ITEMS:
                return None
            state = message.RequestState()
            state.request_id = request.id
            state.map = caller
            # An item of a map stays `called_directly`: otherwise its `retry` would publish the message of the map.
            request = self._request_inside(singleton_state=state, hostname=caller.request.hostname)
        else:
            known = message.state_of(request)
            if known is not None and known.run is not None:
                self._refuse_second_call(known.run)
                return None
        notes = message.notes_of(request)
        # Prefer the publisher's key: a queued call has left marks under it, even if a deploy has changed keys.
        key = (notes.key and self.lock_key_in(notes)) or self.lock_key_for(*args, **kwargs)
        if request.is_eager and (lease := held_here(key)) is not None and self._runs_under(lease):
            request.singleton_state = state = message.RequestState()
            state.request_id = request.id
            state.origin = message.Origin(key, lease.fence, lease.claim.published)
            return None
        request.singleton_state = run = Run(self, request, notes, key, args, kwargs)
        return run

    def _refuse_second_call(self, run: Run) -> None:
        """Raise if a subclass's `__call__` calls ours again after the run: the body would run without a lock."""
        # A body may call its own task. If no subclass overrides `__call__`, a later call comes from a hook of the user,
        # such as `on_success`, and is allowed too.
        if run.phase < ENDED or type(self).__call__ is SingletonTask.__call__:
            return
        if run.was_passed_on:
            raise Ignore("its call was passed on to another message")
        raise ConfigurationError(
            f"task {self.name}: {type(self).__call__.__qualname__} calls super().__call__() again after the run has "
            "ended, and its lease with it; use autoretry_for"
        )

    def _runs_under(self, lease: Holding) -> bool:
        """Whether this call continues the run with *lease*, for example an eager `replace` in the run's body."""
        state = message.state_of(self.request)
        if lease.claim.task_id == self.request.id or (state is not None and state.origin is not None):
            return True
        origin = message.origin_here()
        return origin is not None and (origin.key, origin.fence) == (lease.key, lease.fence)
