"""For `make docs`: a page may link to a file beside the docs, which is not on the site but in the repository."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]+)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with what a page says, before its links are checked."""
    docs = Path(config.docs_dir).resolve()
    here = Path(page.file.abs_src_path).resolve().parent

    def leads(link: re.Match[str]) -> str:
        target = (here / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            # What does not exist stays as it is, for mkdocs to complain of.
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        path = target.relative_to(docs.parent).as_posix()
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{path}{link['anchor'] or ''})"

    return _LINK.sub(leads, markdown)
