"""What a server's errors mean, and retries until it answers."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from redis import exceptions

from celery_singleton_lock.errors import DOCS, StoreError, StoreRefused
from celery_singleton_lock.stores.clock import ServerClock, clock

# Match the text, because redis-py has no class for some errors, and older servers wrap others in a script's error.
_ELSEWHERE = re.compile(
    r"^(?:ReadOnly|BusyLoading|ClusterDown|MasterDown|TryAgain)Error\b"
    r"|(?:: |-)(?:READONLY|LOADING|MASTERDOWN|UNBLOCKED|NOREPLICAS|CLUSTERDOWN|TRYAGAIN)\b"
    r"|: WAIT cannot be used with replica"
)
_ADVICE = {
    # Before AUTH some servers refuse long commands, and say only "unauthenticated".
    r"Authentication(?:WrongNumberOfArgs)?Error|: (?:NOAUTH|WRONGPASS)\b|unauthenticated": (
        "give the password of the user {user} in singleton_lock_client_options (username, password), or in "
        "singleton_lock_url (redis://user:password@host:port/database), or let credential_provider give a user and "
        "a password that the server takes"
    ),
    r"NoPermissionError|NOPERM\b|ACL failure in script|user executing the script can't": (
        "give the user {user} that right with ACL SETUSER, or let singleton_lock_url name a user who has it; "
        f"{DOCS}reference/start/ lists all that are needed"
    ),
    # The numbers are the errno of an unreadable certificate file. Unix sockets have the same errno, so exclude them.
    r"CERTIFICATE|UNKNOWN_CA|no start line|PEM lib|KEY_\w+_MISMATCH|Error (?:2|13|20|21) connecting to (?!/|unix)": (
        "set ssl_ca_certs in singleton_lock_client_options. If the server asks for a certificate, set ssl_certfile "
        "and ssl_keyfile too, and ssl_password if the key has one. All are files in PEM that belong together. The "
        "server's certificate has to name the host in singleton_lock_url"
    ),
    r"(?i)DB index is out of range|invalid DB index": (
        "let singleton_lock_url end with the number of a database that the server has; the first is /0"
    ),
    r"in cluster mode|MovedError|AskError|ClusterCrossSlotError|: (?:MOVED|ASK)\b|CROSSSLOT\b": (
        "this server is one of a cluster: set singleton_lock_url='redis+cluster://host:port', with TLS "
        "rediss+cluster://, and without a database"
    ),
    r"cluster support disabled": (
        "it is in no cluster: let singleton_lock_url begin with redis://, or rediss:// with TLS"
    ),
    r"(?i)unknown (?:redis )?command [^,]*\bwait\b": (
        "leave singleton_lock_replicas at 0, or use a server that has WAIT: this one cannot say what its replicas have"
    ),
    r"(?i)unknown (?:redis )?command|unknown subcommand|wrong number of arg": (
        "let singleton_lock_url name a Redis, 7.0 or newer, or a Valkey with this command. If this is a sentinel, "
        "let the URL begin with sentinel://. rename-command may hide a command, and some managed services lack it"
    ),
    r"WRONGTYPE\b": (
        "another program has a key of this name: give a singleton_lock_prefix that nobody else uses, or a database"
    ),
}
_IN_SHORT = {
    r"OutOfMemoryError|\bOOM\b": "the store is full, and refuses to write",
    r"\bMISCONF\b": "the store cannot save to its disk, and refuses to write",
    r"NOREPLICAS|acknowledged by": "too few replicas have what is written",
    r"ReadOnlyError|READONLY|MASTERDOWN": "the store is read-only: a replica, or a master that was demoted",
    r"NoPermissionError|NOPERM": "the user of the store lacks a right that this library needs",
    r"Authentication|NOAUTH|WRONGPASS|credential_provider": "the store refuses the password",
    r"BusyLoadingError|LOADING": "the store is loading its data",
    r"max number of clients": "the store takes no more connections",
    r"TimeoutError": "the store does not answer",
    r"ConnectionError|NotUsable|CLUSTERDOWN": "the store cannot be reached",
}
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
# How a connection may end if only one side speaks TLS.
_HANGS_UP = re.compile("Connection closed by server|Connection reset|Broken pipe|EOF occurred|Timeout connecting")
_WITH_TLS = "If this port is one with TLS, its URL begins with rediss, not redis"
_WITHOUT_TLS = (
    "If this port has no TLS, its URL begins with redis, not rediss. If this server asks for certificates, give "
    "ssl_certfile and ssl_keyfile in singleton_lock_client_options"
)


class NotUsable(exceptions.ConnectionError):
    """Without *advice*, the problem may pass, and the request is retried."""

    def __init__(self, problem: str, advice: str | None = None) -> None:
        super().__init__(problem)
        self.advice = advice


def not_connected(error: TypeError | ValueError) -> NotUsable:
    if isinstance(error, UnicodeError):
        return NotUsable("the host name is not valid: a part of it is empty or too long")
    # The text of a ValueError may quote a secret.
    text = f": {error}" if isinstance(error, TypeError) else ""
    return NotUsable(
        f"redis-py could not connect with its options ({type(error).__name__}{text})",
        "correct singleton_lock_client_options, or the arguments in singleton_lock_url: redis-py or Python's ssl "
        "cannot use one of them. For example, ssl_keyfile needs ssl_certfile, and ssl_min_version an ssl.TLSVersion",
    )


def is_elsewhere(error: exceptions.RedisError) -> bool:
    """The address of the master must be looked up again."""
    return _ELSEWHERE.search(problem_of(error)) is not None


def is_passing(error: exceptions.RedisError) -> bool:
    is_away = isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError)
    return is_elsewhere(error) or (is_away and advice_about(error) is None)


def advice_about(error: exceptions.RedisError, user: str = "default") -> str | None:
    """What the user can change, or None if that is unknown or the error may pass."""
    if isinstance(error, NotUsable):
        return error.advice
    text = problem_of(error)
    return next((advice.format(user=user) for pattern, advice in _ADVICE.items() if re.search(pattern, text)), None)


def none_of(
    problem: str,
    answers: Mapping[str, exceptions.RedisError],
    advise: Callable[[exceptions.RedisError], str | None] = advice_about,
) -> NotUsable:
    lines = "; ".join(f"{who}: {problem_of(error).partition(': ')[2]}" for who, error in answers.items())
    advice = [each for error in answers.values() if (each := advise(error)) is not None]
    # Give advice only if every server refuses. A single refusal may be the fault of that server.
    return NotUsable(f"{problem} ({lines})", advice[0] if advice and len(advice) == len(answers) else None)


def in_short(problem: str) -> str:
    """The problem for strangers, who must not learn the address of the store."""
    return next(
        (words for pattern, words in _IN_SHORT.items() if re.search(pattern, problem)),
        "the store refuses the requests of this library",
    )


def problem_of(error: exceptions.RedisError) -> str:
    """The error's text without the command's arguments, which may be a password or look like an error."""
    return f"{type(error).__name__}: {_ARGUMENTS.sub('', str(error)).rstrip('. ')}"


class Part:
    """The health and the clock of one server."""

    silent_until: float = 0.0  # on `clock()`; until then, background releases do not try the server

    def __init__(self, address: str, arguments: Mapping[str, Any]) -> None:
        self.is_away: bool = False  # an acquire failed, and no request was answered since
        self.has_answered: bool = False  # so its URL is right about TLS
        self._address = address
        is_provided = arguments.get("credential_provider") is not None
        self.user: str = "that credential_provider names" if is_provided else arguments.get("username") or "default"
        self.clock: ServerClock = ServerClock()

    def persist(self, ask: Callable[[float], Any], bound: float) -> tuple[Any, float, int]:
        """Return the answer of *ask*, when its try began, and the number of tries.

        *ask* gets a deadline on `clock()`. A `StoreError` is raised after *bound* seconds, or at a refusal.
        """
        sent_at = clock()
        give_up_at = sent_at + bound
        pause = _FIRST_PAUSE
        problem = None
        tries = 0
        while True:
            tries += 1
            try:
                answer = ask(give_up_at)
            except exceptions.RedisError as error:
                # A timeout replaces no other error, because the last try may have had too little time.
                if problem is None or not isinstance(error, exceptions.TimeoutError):
                    problem = error
                if not is_passing(error) or clock() + pause >= give_up_at:
                    raise self.unanswered(problem) from error
            else:
                self.is_away = False
                self.has_answered = True
                return answer, sent_at, tries
            time.sleep(pause)
            sent_at = clock()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def unanswered(self, error: exceptions.RedisError) -> StoreError:
        problem = problem_of(error)
        advice = advice_about(error, self.user)
        if advice is not None:
            return StoreRefused(self._address, problem, advice)
        if not self.has_answered and _HANGS_UP.search(problem):
            problem = f"{problem}. {_WITHOUT_TLS if self._address.startswith('rediss') else _WITH_TLS}"
        return StoreError(self._address, problem)
