"""CPU time of `shim audit`, diffs included, as ratios to parsing all sources of megatron-core once.

    python benchmarks/audit.py [--target DIR] [--runs N]

Whole processes run alternately, as in startup.py; user and system time come from the operating system. DIR is a source
tree that shim has no pins for, so that many patches have a diff; by default a commit of main, if that is at hand.
The other side is what everybody pays who looks at all of megatron-core: a fresh interpreter that parses each file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from startup import TOP, compare, say

COMMIT = "d98e8a64dd"
NEWEST, TE = "0.19.2", "2.20.2"
PARSING = """
import ast, pathlib
for file in pathlib.Path({target!r}, "megatron", "core").rglob("*.py"):
    ast.parse(file.read_bytes())
"""
AUDIT = """
import os, sys
from shim._tools.cli import main
sys.stdout = open(os.devnull, "w")
assert main({arguments!r}) in (0, 1)
"""
LIMIT = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of an audit as ratios of CPU time.")
    parser.add_argument("--target", help=f"a source tree of megatron-core; default: commit {COMMIT}")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    from shim.testing.releases import FetchError, fetch

    te = str(fetch(TE, "transformer-engine"))
    newest = str(fetch(NEWEST))
    try:
        target = arguments.target or str(fetch(COMMIT))
    except FetchError as error:
        print(f"only {NEWEST}: {str(error).splitlines()[0]}")
        target = ""
    environ = {**os.environ, "PYTHONPATH": str(TOP)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code
    os.chdir(Path(TOP))
    rows = [(f"audit {NEWEST}", newest, [newest])]
    if target:
        rows += [
            ("audit a tree", target, [target]),
            ("audit it beside TE", target, [target, "--with", te]),
            ("audit TE beside it", target, [te, "--with", target]),
        ]
    missed = False
    for name, core, named in rows:
        program = AUDIT.format(arguments=["audit", *named])
        mine, other = compare(program, PARSING.format(target=core), arguments.runs, environ)
        missed |= say(name, mine, "parse all of megatron/core", other, LIMIT)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
