"""The scripts: plain Lua files, called by their digests."""

import hashlib
import re
from functools import cached_property
from importlib import resources
from typing import Self

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)


class Script:
    """A Lua file of this package, called by its digest.

    A line `-- @include NAME` in it stands for `lua/parts/NAME.lua`. The parts are behind the usual answer, because a
    script runs from top to bottom each time.

    Arguments:
        verb: What it does; the name of the file.
    """

    def __init__(self, verb: str) -> None:
        folder = resources.files(__package__).joinpath("lua")

        def included(line: "re.Match[str]") -> str:
            return folder.joinpath(f"parts/{line[1]}.lua").read_text(encoding="utf-8")

        self._read(_INCLUDE.sub(included, folder.joinpath(f"{verb}.lua").read_text(encoding="utf-8")))

    def _read(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def sharded(self) -> Self:
        """The same for a cluster, where waiters listen at the server that has the key."""
        script = object.__new__(type(self))
        script._read(self.text.replace("'PUBLISH'", "'SPUBLISH'"))
        return script
