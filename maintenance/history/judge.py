"""The proofs of some patches on one commit, in a process that has the commit on its path: what a lock would say."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import shim
from shim._proving.decide import decide
from shim._proving.kept import Kept
from shim._proving.run import Request
from shim._releases.detect import PATCHED
from shim._tools.fetching import first_on_path
from shim._tools.pin_prove import inputs_of, proved_part

PATIENCE = 240.0  # seconds for each side: the command runs for hours beside other work, at low priority


def main(argv: Sequence[str] | None = None) -> int:
    """Write to `file` what the proofs show, as `shim pin --prove` writes it into a lock."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("tree", help="a directory with the sources of the commit")
    parser.add_argument("ids", help="patches, with commas between")
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(argv)
    with first_on_path(options.tree):
        made = shim.plan(lock=None)
        kept = Kept(options.file.with_suffix(".proving"), inputs_of(made))
        ids = tuple(options.ids.split(","))
        request = Request(ids=ids, jobs=options.jobs, timeout=PATIENCE, kept=kept, complete=True)
        decided = decide(made, request, lambda said: None)
        releases = {name: found.raw for name, found in made.environment.installed.items() if name in PATCHED}
        told = {"releases": releases, "proved": proved_part(made, decided)}
    options.file.write_text(json.dumps(told), "utf-8")
    kept.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
