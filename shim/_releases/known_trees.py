"""Commits and forks that trainers run: what the proofs of patches have shown there, and the bodies in their files.

known_trees.json is made of locks that `shim pin --prove` has written (docs/evidence.md):

    trees: {name: {of, releases, date, torch, python, where}}
    patches: {patch id: [{trees, verdict, variant, fingerprints, shown, dropped}]}, trees with the same bodies together
    files: as in known_files.json, for files that no release has
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["FILE", "known_trees"]

FILE = Path(__file__).with_name("known_trees.json")


@lru_cache(maxsize=1)
def known_trees() -> Mapping[str, Any]:
    """The table that ships with shim. It is read on first use: a plan on a release does not need it."""
    return json.loads(FILE.read_text("utf-8"))
