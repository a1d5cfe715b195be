"""The headers of the scripts: they name what a script is given, and what it answers."""

import re
from pathlib import Path

import pytest

import celery_singleton_lock

FILES = {
    file.stem: file.read_text(encoding="utf-8")
    for file in Path(celery_singleton_lock.__file__).parent.rglob("*.lua")
    if file.parent.name != "parts"
}
every_script = pytest.mark.parametrize("name", sorted(FILES))


def header_of(text: str) -> str:
    return text[: text.index("\n\n")]


def code_of(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def arguments_in(text: str) -> set[str]:
    """`KEYS[1]`, `ARGV[3i-1]`, ...; of a loop over the rest of ARGV only where it begins."""
    used = {re.sub(r"[ *]", "", argument) for argument in re.findall(r"(?:KEYS|ARGV)\[[^]]+\]", text)}
    for start in re.findall(r"for i = (\d+), #ARGV|unpack\(ARGV, (\d+)\)", text):
        used = used - {"ARGV[i]", "ARGV[i+1]"} | {f"ARGV[{''.join(start)}]"}
    if "ipairs(KEYS)" in text:
        used = used - {"KEYS[1]"} | {"KEYS[i]"}
    return used


def test_there_are_scripts() -> None:
    assert FILES


@every_script
def test_a_header_opens_with_a_sentence_and_names_what_the_script_is_given_and_answers(name: str) -> None:
    header, code = header_of(FILES[name]), code_of(FILES[name])

    assert re.match(r"-- [A-Z][^\n]*\.\n--\n", header)
    assert "-- Returns  " in header
    assert arguments_in(code) <= arguments_in(header)
    assert all(line.startswith("--") for line in header.splitlines())


@every_script
def test_a_script_is_a_plain_one_without_flags(name: str) -> None:
    # A script with a shebang is refused altogether when the server is out of memory.
    assert not FILES[name].startswith("#!")
