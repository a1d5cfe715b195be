"""What an error means: that it passes, that another server is the right one now, or that a setting is wrong."""

import re
import ssl

from redis import exceptions

_PASSING = (exceptions.ConnectionError, exceptions.TimeoutError)

_ELSEWHERE = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
# Those that redis-py gives no class of their own, or that an older server wraps into an error of the script.
_SAYS_ELSEWHERE = re.compile(
    r"(?:^|-)(?:READONLY|LOADING|MASTERDOWN|UNBLOCKED|NOREPLICAS|CLUSTERDOWN|TRYAGAIN)\b"
    r"|^WAIT cannot be used with replica"
)

_UNKNOWN = (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)
# A server that wants a password first takes no command as long as ours, and does not say why.
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
        "a server in cluster mode has one database: let singleton_lock_url end with /0",
    ),
    (
        re.compile(r"^ASK\b|(?:^|-)CROSSSLOT\b"),
        "a cluster cannot be used in this version: let singleton_lock_url name a server that is not in cluster mode",
    ),
    (
        re.compile(r"unknown (?:redis )?command [^,]*\bwait\b", re.IGNORECASE),
        "leave singleton_lock_replicas at 0: this server cannot say what its replicas have; or use one that has WAIT",
    ),
    (
        re.compile(r"unknown (?:redis )?command|unknown subcommand", re.IGNORECASE),
        (
            "let singleton_lock_url name a Redis, 7.0 or newer, or a Valkey with this command; rename-command may hide "
            "it, and some managed services lack it"
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
# Of which the password is one, if the command is AUTH.
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
PROVIDED = "that credential_provider names"
"""Instead of the user's name, if that is not known to us."""
_CERTIFICATE = re.compile(r"CERTIFICATE|UNKNOWN_CA")


class NoMaster(exceptions.ConnectionError):
    """The sentinels do not say who the master is.

    Arguments:
        problem: What they say.
        advice: What to set; None if they may say it without that.
        is_silence: It is only that none of them can be reached.
    """

    def __init__(self, problem: str, advice: str | None = None, *, is_silence: bool = False) -> None:
        super().__init__(problem)
        self.advice = advice
        self.is_silence = is_silence


def is_elsewhere(error: exceptions.RedisError) -> bool:
    """It is no master, or not yet, or not any more: the same address may lead to another one by now."""
    return isinstance(error, _ELSEWHERE) or _SAYS_ELSEWHERE.search(str(error)) is not None


def is_unknown(error: exceptions.RedisError) -> bool:
    """The server does not know who we are, or does not believe it."""
    return isinstance(error, _UNKNOWN) or _SAYS_UNKNOWN.search(str(error)) is not None


def is_signed_out(error: exceptions.RedisError) -> bool:
    """The server does not know who we are. If it has known, a token has expired, and a new connection has another."""
    return isinstance(error, exceptions.AuthenticationError) and _SAYS_SIGNED_OUT.search(str(error)) is not None


def is_silence(error: exceptions.RedisError) -> bool:
    """There was no answer, also none of a kernel."""
    return isinstance(error, exceptions.TimeoutError) or (isinstance(error, NoMaster) and error.is_silence)


def is_passing(error: exceptions.RedisError) -> bool:
    """The next try may work."""
    return is_elsewhere(error) or (isinstance(error, _PASSING) and what_to_set(error) is None)


def what_to_set(error: exceptions.RedisError, user: str = "default") -> str | None:
    """What has to be set so that *error* does not come again; None if it may be gone without that."""
    text = str(error)
    if isinstance(error, NoMaster):
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
    if _is_about_certificates(error):
        return (
            "set ssl_ca_certs, and ssl_certfile and ssl_keyfile if the server asks for a certificate, "
            "in singleton_lock_client_options, and in singleton_lock_url the host that the server's certificate names"
        )
    if isinstance(error, exceptions.AskError):
        # Or MOVED, which redis-py has cut off.
        text = f"ASK {text}"
    return next((advice for says, advice in _NEVER if says.search(text)), None)


def problem_of(error: exceptions.RedisError) -> str:
    """What happened, in the words of the server or of redis-py, without what we have sent."""
    return f"{type(error).__name__}: {_ARGUMENTS.sub('', str(error))}"


def _is_about_certificates(error: BaseException) -> bool:
    # redis-py makes an error of the connection of it.
    cause = error.__cause__ or error.__context__
    return isinstance(cause, ssl.SSLError) and _CERTIFICATE.search(str(cause)) is not None
