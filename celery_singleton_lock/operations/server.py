"""A server's report about itself, and the settings in it that harm locks."""

from collections.abc import Mapping

from celery_singleton_lock.operations.finding import Finding

NAMES = ("server", "eviction", "persistence", "connections")

_OLDEST = 7
_NEARLY_ALL = 0.8


def about_servers(said: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """One finding for each of the names, in their order; of several servers, it names those with a fault."""
    looks = _version, _eviction, _persistence, _connections
    by_name = zip(NAMES, looks, strict=True)
    return [_of_all(name, {where: look(each) for where, each in said.items()}) for name, look in by_name]


def _of_all(name: str, found: Mapping[str, tuple[bool, str]]) -> Finding:
    by_detail: dict[str, list[str]] = {}
    is_well = all(ok for ok, _ in found.values())
    for where, (ok, detail) in found.items():
        if ok == is_well:
            by_detail.setdefault(detail, []).append(where)
    if len(found) == 1 or (len(by_detail) == 1 and is_well):
        return Finding(name, is_well, next(iter(by_detail)))
    told = [f"{', '.join(sorted(where))}: {detail}" for detail, where in by_detail.items()]
    return Finding(name, is_well, "; ".join(told))


def _version(said: Mapping[str, str]) -> tuple[bool, str]:
    version = said.get("redis_version", "")
    name = f"Valkey {said['valkey_version']}" if "valkey_version" in said else f"Redis {version}"
    if int(version.partition(".")[0] or _OLDEST) < _OLDEST:
        return False, f"{name}: the scripts need Redis {_OLDEST}.0 or newer, or Valkey"
    if said.get("role", "master") != "master":
        return False, f"{name}, a replica: let singleton_lock_url name the master, or use sentinel://"
    return True, f"{name}, a master"


def _eviction(said: Mapping[str, str]) -> tuple[bool, str]:
    limit, policy, evicted = (said.get(name, "0") for name in ("maxmemory", "maxmemory_policy", "evicted_keys"))
    if limit != "0" and policy != "noeviction":
        return False, (
            f"maxmemory-policy {policy} drops locks once {limit} bytes are in use, for they all have an expiry; set it "
            "to noeviction, or give the locks a server of their own"
        )
    if evicted != "0":
        return False, (
            f"{evicted} keys were evicted, and locks may have been among them; if the cause is gone, CONFIG RESETSTAT "
            "forgets it"
        )
    return True, "maxmemory is not set" if limit == "0" else f"maxmemory {limit}, noeviction: if full, it refuses"


def _persistence(said: Mapping[str, str]) -> tuple[bool, str]:
    has_file, replicas = said.get("aof_enabled") == "1", int(said.get("connected_slaves", "0"))
    if has_file and said.get("aof_last_write_status") != "ok":
        return False, "the append-only file cannot be written, so the server refuses to write; look after its disk"
    told = []
    if not has_file:
        told.append("there is no append-only file, so a restart can grant twice")
    if replicas:
        told.append(f"replicas ({replicas}) hear of a lease a moment later, so a failover can grant twice")
    return True, f"{'; '.join(told)}: use the fence" if told else "an append-only file"


def _connections(said: Mapping[str, str]) -> tuple[bool, str]:
    used, most = int(said.get("connected_clients", "0")), int(said.get("maxclients", "0"))
    if most and used > _NEARLY_ALL * most:
        return False, f"{used} of {most} are in use; raise maxclients, or have fewer processes"
    return True, f"{used} of {most or 'any number'} are in use"
