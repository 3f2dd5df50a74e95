"""`make release-of R=0.20.0 [DIR=...]`: a new release in the matrix, as far as no person is needed.

Runs the proofs of every patch that the release could concern, beside the newest release of the other distribution, adds
the release with its pins, and writes each range that bodies or proofs give. Prints what is left to decide. Files of
patches and documents stay as they are.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._errors import OptionError, ShimError
from shim._matrix.load import PACKAGE, load_matrix
from shim._matrix.model import DISTRIBUTIONS, Matrix
from shim._planning.evidence import CANNOT_RUN, FIXED, LACKING, NOT_FIXED, RIGHT
from shim._planning.lock import read_lock
from shim._tools import fetching
from shim._tools.pin_prove import AGAINST
from shim._tools.progress import Progress
from shim.testing.releases import environment

from .pin_add import Added, New, add, parse_new, tree_of

__all__ = ["main"]

WIDTH, SHOWN = 120, 20  # columns, and decisions that are printed
TODO = {  # of a patch with this verdict, if its ranges could not be written
    FIXED: "give the variant a range",
    RIGHT: "give `upstream` a range",
    LACKING: "give `not_needed` a range",
    NOT_FIXED: "write a variant",
    CANNOT_RUN: "read the diff: a range, or a variant",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prove, add, and print what is left. 1 if anything is."""
    parser = argparse.ArgumentParser(prog="make release-of", description=__doc__)
    parser.add_argument("release", help="0.20.0, or transformer-engine==2.21.0")
    parser.add_argument("source", nargs="?", type=Path, help="a directory with its sources (default: it is downloaded)")
    parser.add_argument("--proved", type=Path, metavar="LOCK", help="what the proofs have shown; they do not run again")
    parser.add_argument("--jobs", type=int, default=2, help="sides of proofs at once (default 2)")
    options = parser.parse_args(argv)
    new, matrix, progress = parse_new(options.release), load_matrix(check_ranges=False), Progress()
    if new.is_commit:
        raise OptionError("a commit is added by `shim pin --add`")
    started = time.monotonic()
    source = options.source or fetching.fetched(new.distribution, new.name)
    tree_of(new, source)  # an error for another release, before minutes of proofs
    report = PACKAGE.parent / "build" / f"release-of-{new.name}.txt"
    report.parent.mkdir(exist_ok=True)
    file = options.proved or report.with_suffix(".lock")
    said = "" if options.proved else _prove(matrix, new, source, file, options.jobs)
    lock = read_lock(file)
    top = PACKAGE.parent
    found = add(
        matrix, new, fetching.fetched, progress, source=source, top=top, proved=lock, ranges=True, documents=False
    )
    progress.done()
    report.write_text(f"{said}\n{found}\n", "utf-8")
    against = said.partition(f"{AGAINST}\n")[2].splitlines()
    print(summary(found, lock["proved"], against, report, time.monotonic() - started))
    return 1 if found.decide or against else 0


def _prove(matrix: Matrix, new: New, source: Path, lock: Path, jobs: int) -> str:
    """Write a lock with what the proofs show on the sources, beside the newest release of the other distribution.

    Returns what `shim pin --prove` prints.
    """
    other = next(name for name in DISTRIBUTIONS if name != new.distribution)
    beside = fetching.fetched(other, matrix.supported[other][-1])
    command = ["pin", "--prove", "--against", str(source), "--lock", str(lock), "--jobs", str(jobs)]
    env = environment([beside, PACKAGE.parent])
    done = subprocess.run([sys.executable, "-m", "shim", *command], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def summary(found: Added, proved: Mapping[str, Any], against: Sequence[str], report: Path, seconds: float) -> str:
    """At most 30 lines: what was written, and a line for each decision. against: contradictions to the matrix."""
    patches = proved["patches"]
    verdicts = Counter(said["verdict"] for said in patches.values())
    decide = [*(f"{line.strip()}" for line in against), *(_line(text, patches) for text in found.decide)]
    lines = [
        f"{found.new.distribution} {found.name} is in the matrix, after {seconds / 60:.1f} minutes",
        f"{len(patches)} patches have bodies that no release has: "
        + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()),
        f"Ranges written: {len(found.widened)} wider ones, new ones of "
        + (", ".join(f"{id} ({gives})" for id, gives in found.ranges.items()) or "no patch"),
        f"To decide, {len(decide)}; {report} has the diffs:",
        *(f"  {line}" for line in decide[:SHOWN] or ["nothing"]),
        *([f"  and {len(decide) - SHOWN} more"] if len(decide) > SHOWN else []),
        "Then make docs-all, the tests, and a fragment: docs/new-release.md",
    ]
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..." for line in lines)


def _line(text: str, patches: Mapping[str, Any]) -> str:
    """What is to decide about a patch, in one line: what its proofs say, or else why its range is not clear."""
    id = re.split(r"[ :]", text, maxsplit=1)[0]
    said = patches.get(id)
    if said is None:
        return text
    tried = f" by {said['variant']}" if said["variant"] else ""
    return f"{id}: {TODO[said['verdict']]} ({said['verdict']}{tried}: {said['shown']})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ShimError as error:
        sys.exit(f"{error}")
