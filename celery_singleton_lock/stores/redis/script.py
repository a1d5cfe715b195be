"""The scripts, which are plain concatenations of Lua files, called by their digests."""

import hashlib
from functools import cached_property
from importlib import resources
from typing import Self


class Script:
    """A Lua file of this package, behind the parts it needs, called by its digest.

    Arguments:
        verb: What it does; the name of the file.
        parts: The files in `lua/parts` that come before it, in this order.
    """

    def __init__(self, verb: str, *parts: str) -> None:
        files = [*(f"parts/{part}" for part in parts), verb]
        folder = resources.files(__package__).joinpath("lua")
        self._read("\n".join(folder.joinpath(f"{file}.lua").read_text(encoding="utf-8") for file in files))

    def _read(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def sharded(self) -> Self:
        """The same for a cluster, where waiters listen at the server that has the key."""
        script = object.__new__(type(self))
        script._read(self.text.replace("'PUBLISH'", "'SPUBLISH'"))
        return script
