"""Connections to the server that Sentinel names as the master."""

import _thread
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.connection import to_bool
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis.answers import NotUsable, advice_about, none_of, not_connected
from celery_singleton_lock.stores.redis.connection import OURS, Address, Connections, hosts_of, settle, settled, where

_PORT = 26379
_EXAMPLE = "sentinel://host:port;host:port/database?master_name=name"
_WHERE = (
    "in singleton_lock_client_options, or in broker_transport_options or result_backend_transport_options if the URL "
    "is the broker's or the result backend's"
)
_NO_SENTINEL = "name the sentinels in the URL, with their ports (as a rule 26379), and not the servers they watch"
_NO_MASTER = f"let master_name be what the sentinels call the master (sentinel monitor <name> ...), {_WHERE}"
_PATIENCE = 0.5  # seconds for each sentinel
# Seconds between two looks for a new master. A former master takes writes for ten seconds more, and loses them.
_LOOK_AGAIN = 1.0


class SentinelConnections(Connections):
    """Believes the sentinel that knows the last failover. redis-py believes the first that answers."""

    pool: SentinelConnectionPool
    _known: Address | None = None

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        rest = dict(options)
        self._hosts, said = hosts_of(url, "sentinel", rest.pop("default_port", _PORT), _EXAMPLE)
        rest = {**said, **rest}
        address = f"sentinel://{';'.join(map(where, self._hosts))}/{rest.get('db', '')}"
        alias = rest.pop("service_name", None)
        name = rest.pop("master_name", alias)
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"singleton_lock_url: {address} does not say which master: set master_name, as the sentinels call it, "
                f"{_WHERE}; or let the URL end with ?master_name=..."
            )
        self._sentinels = self._connected(rest)
        has_tls = to_bool(rest.pop("ssl", None)) or any(option.startswith("ssl_") for option in rest)

        def make(**arguments: Any) -> SentinelConnectionPool:
            return SentinelConnectionPool(name, self, ssl=has_tls, **arguments)

        self._look_at = clock() + _LOOK_AGAIN
        super().__init__(settled(make, rest, address), f"{address}?master_name={name}")

    def _connected(self, options: dict[str, Any]) -> Sentinel:
        given = options.pop("sentinel_kwargs", None) or {}
        least = options.pop("min_other_sentinels", None) or 0
        try:
            own = {**given, "ssl": bool(to_bool(given.get("ssl"))), **OURS}
            own |= {"socket_timeout": _PATIENCE, "socket_connect_timeout": _PATIENCE}
            settle(own, has_tls=own["ssl"])
            return Sentinel(self._hosts, min_other_sentinels=int(least), sentinel_kwargs=own)
        except (AttributeError, TypeError, ValueError) as error:
            # The text of other errors may quote a password.
            why = f": {error}" if isinstance(error, TypeError) and isinstance(given, Mapping) else ""
            raise ConfigurationError(
                "sentinel_kwargs has to be a dict of arguments for redis-py's connections to the sentinels, such as "
                f"{{'password': '...'}}, and min_other_sentinels a number{why}"
            ) from error

    def call(self, key: str, commands: Sequence[bytes], until: float) -> list[Any]:
        if (now := clock()) >= self._look_at:
            self._look_at = now + _LOOK_AGAIN
            # No thread can start while the interpreter shuts down.
            with suppress(RuntimeError):
                _thread.start_new_thread(self._look, ())
        return super().call(key, commands, until)

    def _look(self) -> None:
        with suppress(exceptions.RedisError):
            self.pool.get_master_address()

    def discover_master(self, service_name: str) -> Address:
        """Called by redis-py's pool."""
        states = list[dict[str, Any]]()
        answers = dict[str, exceptions.RedisError]()
        for host, sentinel in zip(self._hosts, self._sentinels.sentinels, strict=True):
            try:
                # redis-py 6.3 to 7.0 cannot read the answer to SENTINEL MASTER.
                masters: Any = sentinel.sentinel_masters()
                state = masters[service_name]
            except exceptions.RedisError as error:
                answers[where(host)] = error
            except LookupError:
                answers[where(host)] = NotUsable("No such master with that name", _NO_MASTER)
            except (TypeError, ValueError) as error:
                answers[where(host)] = not_connected(error)
            else:
                states.append(state)
                others, least = state["num-other-sentinels"], self._sentinels.min_other_sentinels
                few = f"it knows of {others} other sentinels, but min_other_sentinels={least}"
                is_down = state["is_sdown"] or state["is_odown"]
                answers[where(host)] = NotUsable(f"{state['ip']}:{state['port']} is down" if is_down else few)

        def rank(state: Mapping[str, Any]) -> tuple[int, bool, bool]:
            # A sentinel that leads a failover names the new master later than the others.
            is_over = "failover_in_progress" not in state["flags"]
            return state["config-epoch"], self._sentinels.check_master_state(state, service_name), is_over

        best = max(states, key=rank, default=None)
        if best is not None and self._sentinels.check_master_state(best, service_name):
            before = self._known
            self._known = (best["ip"], best["port"])
            if before not in (None, self._known):
                self.tell_of_move(before, self._known)
                self.close()
            return self._known
        is_silence = not states and not any(map(advise, answers.values()))
        if is_silence and self._known is not None:
            # While all sentinels are silent, stay with the known master. A demoted master refuses writes.
            return self._known
        raise none_of(f"no sentinel knows a master {service_name}", answers, advise)


def advise(error: exceptions.RedisError) -> str | None:
    """As `advice_about`, for the error of a sentinel."""
    if isinstance(error, NotUsable):
        return error.advice
    if "unknown command" in str(error):
        return _NO_SENTINEL
    if advice_about(error) is not None:
        return (
            "give what the sentinels require, such as username, password, ssl and ssl_ca_certs, in sentinel_kwargs "
            f"{_WHERE}; their user needs the right +sentinel|masters"
        )
    return None
