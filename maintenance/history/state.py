"""The record of the history: which sets of bodies were seen first on which commit, and which no proof can judge.

What proofs have shown is in shim/_releases/known_trees.json, which ships with shim. This record does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shim._matrix.model import PatchEntry
from shim._planning.evidence import shipped_evidence

from ..pin import replace_file
from .walk import Commit, Found

__all__ = ["FILE", "State"]

FILE = Path(__file__).with_name("state.json")
PARTS = ("sets", "unjudged", "runs", "broken")


class State:
    """The record of one distribution.

    sets: by patch the digest of each set of bodies that no release has, with the first commit that has it.
    unjudged: by patch the sets that no proof can judge, with the commit on which they were tried, and the reason.
    runs: the commits on which proofs have run, with the number of sets and the CPU seconds.
    broken: the commits on which no proof can run at all, with the reason.
    """

    def __init__(self, distribution: str, file: Path = FILE) -> None:
        self._file = file
        self._distribution = distribution
        said: dict[str, Any] = self._read().get(distribution, {})
        self.sets: dict[str, dict[str, str]] = said.get("sets", {})
        self.unjudged: dict[str, dict[str, str]] = said.get("unjudged", {})
        self.runs: dict[str, list[int]] = said.get("runs", {})
        self.broken: dict[str, str] = said.get("broken", {})

    def _read(self) -> dict[str, Any]:
        return json.loads(self._file.read_text("utf-8")) if self._file.is_file() else {}

    def see(self, commit: Commit, found: Found) -> bool:
        """Record the set, with its first commit. Returns whether it is new."""
        sets = self.sets.setdefault(found.entry.id, {})
        if found.digest in sets:
            return False
        sets[found.digest] = " ".join(filter(None, (commit.short, commit.date, commit.number)))
        return True

    def judged(self, found: Found) -> bool:
        """Whether proofs have judged these bodies, or cannot."""
        return found.digest in self.unjudged.get(found.entry.id, {}) or known(found)

    def forget_others(self, seen: dict[str, set[str]]) -> None:
        """Drop sets that no commit has any more: the names that their patches bind or read have changed."""
        for part in (self.sets, self.unjudged):
            for id in list(part):
                part[id] = {digest: said for digest, said in part[id].items() if digest in seen.get(id, ())}
                if not part[id]:
                    del part[id]

    def write(self) -> None:
        whole = {**self._read(), self._distribution: {name: getattr(self, name) for name in PARTS}}
        parts = []
        for distribution, said in whole.items():
            lines = [f'  "{name}": {_lines(said[name])}' for name in PARTS]
            parts.append(f' "{distribution}": {{\n' + ",\n".join(lines) + "\n }")
        replace_file(self._file, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def known(found: Found) -> bool:
    """Whether the evidence that ships with shim speaks for these bodies."""
    return any(found.digest_of(_variant(found.entry, said.variant)) == said.bodies for said in _evidence(found.entry))


def _evidence(entry: PatchEntry) -> Any:
    return [said for said in shipped_evidence(entry.id) if said.variant is None or said.variant in entry.variants]


def _variant(entry: PatchEntry, name: str | None) -> Any:
    return None if name is None else entry.variants[name]


def _lines(part: dict[str, Any]) -> str:
    inner = ",\n".join(f"   {json.dumps(key)}: {json.dumps(said)}" for key, said in sorted(part.items()))
    return "{\n" + inner + "\n  }" if part else "{}"
