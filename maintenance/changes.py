"""News of the next release: a fragment in changes/ for each change, which `make changelog` collects (towncrier)."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["FOLDER", "KINDS", "fragments", "unannounced", "wrong_fragments"]

FOLDER = "changes"
KINDS = ("added", "changed", "removed", "fixed")
PAGES = ("README.md", "template.md")
NAME = re.compile(rf"(?P<of>\+?[a-z0-9]+(?:-[a-z0-9]+)*)\.(?:{'|'.join(KINDS)})\.md")


def fragments(top: Path) -> list[Path]:
    """The files of changes/ that hold news, in the order of their names."""
    return [file for file in sorted((top / FOLDER).glob("*")) if file.name not in PAGES]


def wrong_fragments(top: Path, ids: Collection[str]) -> list[str]:
    """What is wrong with a fragment of the source tree `top`, a line each. `ids` are the patches."""
    found = []
    for file in fragments(top):
        place, named = f"{FOLDER}/{file.name}", NAME.fullmatch(file.name)
        text = file.read_text("utf-8").strip() if file.is_file() else ""
        if not named:
            found.append(f"{place}: no name of a fragment; PATCH.KIND.md or +WORDS.KIND.md, KIND {', '.join(KINDS)}")
        elif not named["of"].startswith("+") and named["of"] not in ids:
            found.append(f"{place}: there is no patch {named['of']}; +{file.name} if it is about no patch")
        elif not text:
            found.append(f"{place}: empty; write one or two sentences")
        elif text.startswith(("#", "- ", "* ")):
            found.append(f"{place}: begins with {text.split()[0]}; `make changelog` adds headings and bullets")
    return found


def unannounced(top: Path, id: str) -> list[str]:
    """A line if neither CHANGELOG.md nor a fragment of the source tree `top` is about the patch."""
    if any(file.name.startswith(f"{id}.") for file in fragments(top)):
        return []
    if re.search(rf"(?<![\w-]){re.escape(id)}(?![\w-])", (top / "CHANGELOG.md").read_text("utf-8")):
        return []
    return [f"{FOLDER}/{id}.added.md: missing; say in one or two sentences what the patch fixes"]
