"""The meaning of an error: it passes, another server is the right one now, or a setting is wrong."""

import re
import ssl
from collections.abc import Iterable
from typing import Any

from redis import exceptions

_PASSING = (exceptions.ConnectionError, exceptions.TimeoutError)

_ELSEWHERE = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
# Errors to which redis-py gives no class, or which an older server wraps in an error of the script.
_SAYS_ELSEWHERE = re.compile(
    r"(?:^|-)(?:READONLY|LOADING|MASTERDOWN|UNBLOCKED|NOREPLICAS|CLUSTERDOWN|TRYAGAIN)\b"
    r"|^WAIT cannot be used with replica"
)

_UNKNOWN = (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)
# A server that wants a password first refuses commands as long as ours, and does not say why.
_SAYS_UNKNOWN = re.compile(r"^(?:NOAUTH|WRONGPASS)\b|unauthenticated")
_SAYS_SIGNED_OUT = re.compile(r"Authentication required")
_SAYS_FORBIDDEN = re.compile(r"(?:^|-)NOPERM\b|^ACL failure in script|user executing the script can't")
_NEVER = (
    (
        re.compile(r"DB index is out of range|invalid DB index", re.IGNORECASE),
        "let singleton_lock_url end with a database that the server has, which counts from /0",
    ),
    (
        re.compile(r"SELECT is not allowed in cluster mode"),
        "a server in cluster mode has one database: let singleton_lock_url be redis+cluster://host:port",
    ),
    (
        re.compile(r"^ASK\b|(?:^|-)CROSSSLOT\b"),
        "this server is one of a cluster: set singleton_lock_url='redis+cluster://host:port', with TLS rediss+cluster://",
    ),
    (
        re.compile(r"unknown (?:redis )?command [^,]*\bwait\b", re.IGNORECASE),
        "leave singleton_lock_replicas at 0: this server cannot say what its replicas have; or use one that has WAIT",
    ),
    (
        re.compile(r"unknown (?:redis )?command|unknown subcommand", re.IGNORECASE),
        (
            "let singleton_lock_url name a Redis, 7.0 or newer, or a Valkey with this command, or begin with "
            "sentinel:// if this is a sentinel; rename-command may hide it, and some managed services lack it"
        ),
    ),
    (
        re.compile(r"(?:^|-)WRONGTYPE\b"),
        "another program has a key of this name: give a singleton_lock_prefix that nobody else uses, or a database",
    ),
    (
        re.compile(r"^Client names cannot contain"),
        "give another client_name in singleton_lock_client_options",
    ),
)
# The arguments of AUTH have the password.
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
OVERWRITTEN = "WRONGTYPE"
"""A refusal that begins so is about one key alone: another program has written it."""
PROVIDED = "that credential_provider names"
"""Stands for the user's name if we do not know it."""
_OF_AUTHORITIES = re.compile(r"NO_CERTIFICATE_OR_CRL_FOUND|X509\] PEM lib")
_OF_TWO_FILES = re.compile(r"KEY_(?:VALUES|TYPE)_MISMATCH|NO_CERTIFICATE_ASSIGNED|PEM lib")
# As redis-py wraps it, what OpenSSL says about the options of TLS, or about the certificate of the other side.
_OF_TLS = (
    (
        re.compile(r"No cipher can be selected"),
        "give ssl_ciphers in singleton_lock_client_options as OpenSSL knows them, or leave it out",
    ),
    (
        _OF_AUTHORITIES,
        "in singleton_lock_client_options, let ssl_ca_certs be a file of certificates in PEM",
    ),
    (
        _OF_TWO_FILES,
        (
            "in singleton_lock_client_options, let ssl_certfile be a certificate and ssl_keyfile its key, both in PEM, "
            "and ssl_password the password of the key if it has one"
        ),
    ),
    (
        re.compile(r"CERTIFICATE|UNKNOWN_CA|no start line"),
        (
            "set ssl_ca_certs, and ssl_certfile and ssl_keyfile if the server asks for a certificate, "
            "in singleton_lock_client_options, and in singleton_lock_url the host that the server's certificate names"
        ),
    ),
)


class Unfit(exceptions.ConnectionError):
    """redis-py cannot connect with the options that it was given, whoever answers.

    Arguments:
        error: What it has stumbled over; its text may hold a value, so it is not told.
    """

    advice = (
        "correct singleton_lock_client_options, or the arguments in singleton_lock_url: one of them is of a type or a "
        "value that redis-py or Python's ssl cannot use, such as an ssl_keyfile without ssl_certfile, or an "
        "ssl_min_version that is no ssl.TLSVersion"
    )

    def __init__(self, error: Exception) -> None:
        super().__init__(f"redis-py could not connect with its options ({type(error).__name__})")


class NoMaster(exceptions.ConnectionError):
    """The sentinels do not say who the master is.

    Arguments:
        problem: What they say.
        advice: What to set; None if they may say it without that.
        is_silence: It is only that none of them can be reached.
        errors: What they have answered.
    """

    def __init__(
        self,
        problem: str,
        advice: str | None = None,
        *,
        is_silence: bool = False,
        errors: Iterable[exceptions.RedisError] = (),
    ) -> None:
        super().__init__(problem)
        self.advice = advice
        self.is_silence = is_silence
        self.may_pass = any(map(_is_half_written, errors))


def accepted(replies: list[Any], spared: str) -> list[Any]:
    """The same replies; raise the first error that does not begin with *spared*."""
    for reply in replies:
        if isinstance(reply, exceptions.RedisError) and not str(reply).startswith(spared):
            raise reply
    return replies


def is_elsewhere(error: exceptions.RedisError) -> bool:
    """It is no master, or not yet, or not any more: the same address may lead to another one by now."""
    return isinstance(error, _ELSEWHERE) or _SAYS_ELSEWHERE.search(str(error)) is not None


def is_unknown(error: exceptions.RedisError) -> bool:
    """The server does not know who we are, or does not believe it."""
    return isinstance(error, _UNKNOWN) or _SAYS_UNKNOWN.search(str(error)) is not None


def is_signed_out(error: exceptions.RedisError) -> bool:
    """The server does not know who we are. If it knew before, a token has expired; a new connection gets a new one."""
    return isinstance(error, exceptions.AuthenticationError) and _SAYS_SIGNED_OUT.search(str(error)) is not None


def is_silence(error: exceptions.RedisError) -> bool:
    """There was no answer, not even from a kernel."""
    return isinstance(error, exceptions.TimeoutError) or (isinstance(error, NoMaster) and error.is_silence)


def is_passing(error: exceptions.RedisError) -> bool:
    """The next try may work."""
    if _is_half_written(error):
        return True
    return is_elsewhere(error) or (isinstance(error, _PASSING) and what_to_set(error) is None)


def what_to_set(error: exceptions.RedisError, user: str = "default") -> str | None:
    """The setting that would prevent *error*; None if the error may pass without a change."""
    text = str(error)
    if isinstance(error, NoMaster | Unfit):
        return error.advice
    if is_unknown(error):
        if user == PROVIDED:
            return "let credential_provider give a user and a password that the server takes"
        return (
            f"give the password of the user {user} in singleton_lock_url (redis://user:password@host:port/database) "
            "or in singleton_lock_client_options (username, password)"
        )
    if isinstance(error, exceptions.NoPermissionError) or _SAYS_FORBIDDEN.search(text):
        whom = user if user == PROVIDED else f"{user} of singleton_lock_url"
        return (
            f"give the user {whom} that right with ACL SETUSER, or let singleton_lock_url name a "
            "user who has it; docs/reference/start.md lists all that are needed"
        )
    # redis-py turns it into an error of the connection.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLError) and (advice := _first(_OF_TLS, str(cause))) is not None:
        return advice
    if isinstance(error, exceptions.AskError):
        # redis-py has cut off the first word, which is ASK or MOVED.
        text = f"ASK {text}"
    return _first(_NEVER, text)


def problem_of(error: exceptions.RedisError) -> str:
    """The event in the words of the server or of redis-py, without the arguments that we have sent."""
    return f"{type(error).__name__}: {_ARGUMENTS.sub('', str(error))}"


def _is_half_written(error: BaseException) -> bool:
    """Certificates and their key may be written anew at this moment, one after the other."""
    if isinstance(error, NoMaster):
        return error.may_pass
    cause = error.__cause__ or error.__context__
    return isinstance(cause, ssl.SSLError) and any(each.search(str(cause)) for each in (_OF_AUTHORITIES, _OF_TWO_FILES))


def _first(known: Iterable[tuple[re.Pattern[str], str]], text: str) -> str | None:
    return next((advice for says, advice in known if says.search(text)), None)
