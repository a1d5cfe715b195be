"""The files of the scripts: what they are made of, and what their headers say."""

import re
from importlib import resources

import pytest

from celery_singleton_lock.stores import redis as redis_store
from celery_singleton_lock.stores.redis import inventory as inventory_module
from celery_singleton_lock.stores.redis import store as store_module
from celery_singleton_lock.stores.redis import two_keys

SCRIPTS = {
    "acquire": store_module.ACQUIRE,
    "release": store_module.RELEASE,
    "renew": store_module.RENEW,
    "look": store_module.LOOK,
    "mark_queued": store_module.MARK_QUEUED,
    "succeed": store_module.SUCCEED,
    "unmark": store_module.UNMARK,
    "mark_done": store_module.MARK_DONE,
    "claim_slot": store_module.CLAIM_SLOT,
    "survey": inventory_module.SURVEY,
    "break": inventory_module.BREAK,
    "is_done": two_keys.IS_DONE,
    "count": inventory_module.COUNT,
}
LUA = resources.files(redis_store.__package__).joinpath("lua")
FILES = {file.name.removesuffix(".lua"): file.read_text() for file in LUA.iterdir() if file.is_file()}
PARTS = {file.name.removesuffix(".lua"): file.read_text() for file in LUA.joinpath("parts").iterdir()}
every_file = pytest.mark.parametrize("name", sorted(FILES))
every_part = pytest.mark.parametrize("name", sorted(PARTS))


def header_of(text: str) -> str:
    return text[: text.index("\n\n")]


def code_of(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def parts_of(name: str) -> list[str]:
    """The parts that a script is made of; it begins with them."""
    text = SCRIPTS[name].text
    return sorted((part for part in PARTS if PARTS[part] in text), key=lambda part: text.index(PARTS[part]))


def documented_arguments(text: str) -> set[str]:
    return set(re.findall(r"^-- ((?:KEYS|ARGV)\[[^]]+\])  ", header_of(text), re.MULTILINE))


def used_arguments(text: str) -> set[str]:
    """`KEYS[1]`, `ARGV[3i-1]`, ...; of a loop over the rest of ARGV only where it begins."""
    code = code_of(text)
    used = {re.sub(r"[ *]", "", argument) for argument in re.findall(r"(?:KEYS|ARGV)\[[^]]+\]", code)}
    for start in re.findall(r"for i = (\d+), #ARGV|unpack\(ARGV, (\d+)\)", code):
        used = used - {"ARGV[i]", "ARGV[i+1]"} | {f"ARGV[{''.join(start)}]"}
    if "ipairs(KEYS)" in code:
        used = used - {"KEYS[1]"} | {"KEYS[i]"}
    return used


def test_there_is_one_file_per_verb() -> None:
    assert set(FILES) == set(SCRIPTS)


@every_file
def test_a_script_is_its_parts_and_then_its_verb(name: str) -> None:
    parts = [PARTS[part] for part in parts_of(name)]

    assert SCRIPTS[name].text == "\n".join([*parts, FILES[name]])


@every_part
def test_a_part_is_used(name: str) -> None:
    assert any(name in parts_of(script) for script in SCRIPTS)


@every_file
def test_the_header_names_the_arguments_that_the_script_uses(name: str) -> None:
    assert documented_arguments(FILES[name]) == used_arguments(SCRIPTS[name].text)


@every_file
def test_the_header_opens_with_a_sentence_and_has_all_its_parts(name: str) -> None:
    header = header_of(FILES[name])

    assert re.match(r"-- [A-Z][^\n]*\.\n--\n", header)
    assert all(part in header for part in ("-- KEYS[", "-- Returns  "))
    assert ("-- ARGV[" in header) == bool(re.search(r"ARGV", code_of(SCRIPTS[name].text)))
    assert all(line.startswith("--") for line in header.splitlines())


@every_part
def test_a_part_opens_with_a_sentence(name: str) -> None:
    assert re.match(r"-- [A-Z][^\n]*[.:`]", PARTS[name])


@every_part
def test_a_part_has_no_argument_but_in_the_usual_case(name: str) -> None:
    # It is told by its caller what it is about; a shortcut is a script of its own that may not apply.
    assert not used_arguments(PARTS[name]) or name.startswith("usual_")


@every_file
def test_a_script_has_the_parts_whose_functions_it_calls(name: str) -> None:
    definition = r"local function (\w+)"
    everywhere = set(re.findall(definition, "".join([*PARTS.values(), *FILES.values()])))
    text = code_of(SCRIPTS[name].text)

    called = everywhere & set(re.findall(r"(\w+)\(", text))

    assert called <= set(re.findall(definition, text))


@every_file
def test_the_script_is_a_plain_one_without_flags(name: str) -> None:
    # A script with a shebang is refused altogether when the server is out of memory.
    assert not SCRIPTS[name].text.startswith("#!")


@every_file
def test_the_script_touches_no_key_but_those_it_was_given(name: str) -> None:
    calls = re.findall(r"\bp?call\('(\w+)'(?:, ([\w[\]]+(?: \.\. ':')?))?", code_of(SCRIPTS[name].text))

    assert calls
    keys = {key for command, key in calls if command not in ("TIME", "PUBLISH")}
    assert keys <= {"key", "marker", "KEYS[1]", "KEYS[2]"}
    assert {key for command, key in calls if command == "PUBLISH"} <= {"key .. ':'"}
    markers = set(re.findall(r"(?:read|write)_marker\(([\w[\]]+)", code_of(FILES[name])))
    assert markers <= {"KEYS[2]" if name != "mark_done" else "KEYS[1]"}
