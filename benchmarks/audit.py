"""CPU time of `shim audit`, diffs included, as ratios to parsing all sources of megatron-core once.

    python benchmarks/audit.py [--target DIR] [--runs N]

Whole processes run alternately, as in startup.py; user and system time come from the operating system. The worst case
is a copy of the newest release with one statement more in every function: no body is known, and each has a diff. DIR is
another source tree of megatron-core to measure. The other side is the cost of any tool that looks at all of it: a fresh
interpreter that parses each file.
"""

from __future__ import annotations

import argparse
import ast
import os
import tempfile
from pathlib import Path

from startup import TOP, compare, say

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
WORST_LIMIT = 1.5


def with_changed_bodies(release: Path, into: Path) -> Path:
    """A copy of the sources of megatron-core in which every function has one statement more."""
    for file in (release / "megatron" / "core").rglob("*.py"):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                node.body.append(ast.Pass())
        copy = into / file.relative_to(release)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(ast.unparse(tree), "utf-8")
    return into


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of an audit as ratios of CPU time.")
    parser.add_argument("--target", help="a source tree of megatron-core to measure as well")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    from shim.testing.releases import fetch

    newest, te = fetch(NEWEST), str(fetch(TE, "transformer-engine"))
    environ = {**os.environ, "PYTHONPATH": str(TOP)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code
    os.chdir(TOP)
    missed = False
    with tempfile.TemporaryDirectory() as scratch:
        changed = str(with_changed_bodies(newest, Path(scratch)))
        rows = [
            ("known", [str(newest)], LIMIT),
            ("known, beside TE", [str(newest), "--with", te], LIMIT),
            ("no body known", [changed], WORST_LIMIT),
            ("TE, beside that", [te, "--with", changed], LIMIT),
        ]
        rows += [("DIR", [arguments.target], WORST_LIMIT)] if arguments.target else []
        for name, named, limit in rows:
            program = AUDIT.format(arguments=["audit", *named])
            mine, other = compare(program, PARSING.format(target=str(newest)), arguments.runs, environ)
            missed |= say(f"audit: {name}", mine, "parse all of megatron/core", other, limit)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
