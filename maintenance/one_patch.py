"""All that belongs to one patch, made and run on few releases: `make patch ID=...`, for developers of shim.

Its pins, its tests, its proofs with their results, its page; and what it still lacks. Releases that get the same of
it, a variant or none, are represented by the newest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shim._errors import ShimError
from shim._matrix import load
from shim._matrix.load import load_matrix
from shim._matrix.model import Matrix
from shim._tools import fetching
from shim._tools.output import tell
from shim.testing.cells import EVERYDAY_PAIRS
from shim.testing.releases import at_hand

from .docs import patch_pages
from .pin_all import write_all
from .pin_some import left_to_do, measure_some
from .prove_all import of_its_time, prove_on

__all__ = ["main", "representatives", "files_about"]


def representatives(matrix: Matrix, id: str, pairs: bool = False) -> list[str]:
    """The newest release of megatron-core for each thing that the patch gives; the newest pairs with a TE release."""
    core = matrix.supported["megatron-core"]
    cells = EVERYDAY_PAIRS if pairs else [f"{release}+{of_its_time(release)}" for release in core]
    place = 0 if matrix.patches[id].distribution == "megatron-core" else 1
    newest = {matrix.wanted(id, cell.split("+")[place]): cell for cell in cells}
    return [cell if pairs else cell.partition("+")[0] for cell in cells if cell in newest.values()]


def files_about(top: Path, matrix: Matrix, id: str) -> list[Path]:
    """The files of tests that bear the name of the patch; without one, those that name it in ABOUT."""
    named, about = [], []
    for file in sorted(file for kind in ("cells", "pairs") for file in (top / "tests" / kind).rglob("test_*.py")):
        stem = file.stem.removeprefix("test_").replace("_", "-")
        if max((other for other in matrix.patches if f"{stem}-".startswith(f"{other}-")), key=len, default="") == id:
            named.append(file)
        elif re.search(rf'(?m)^ABOUT = \[[^]]*"{id}"', file.read_text("utf-8")):
            about.append(file)
    return named or about


def _run_tests(matrix: Matrix, id: str, files: Sequence[Path]) -> bool:
    """Run those in tests/cells on releases and those in tests/pairs on pairs. Returns whether all passed."""
    passed = True
    for kind in ("cells", "pairs"):
        mine = [str(file) for file in files if kind in file.parts]
        cells = ",".join(representatives(matrix, id, kind == "pairs"))
        if mine:
            options = ["--releases", cells, "--", "-q", "-p", "no:warnings", *mine]
            passed &= subprocess.run([sys.executable, "-m", "shim.testing.cells", *options]).returncode == 0
    return passed


def _pin(id: str) -> Matrix:
    """Measure and write the pins. Returns the matrix with them."""
    matrix = load_matrix(check_ranges=True, pins=False)

    def there(distribution: str, name: str) -> bool:
        return at_hand(name, distribution)

    found = measure_some(matrix, [id], fetching.fetched, there, lambda _: None)
    changed = write_all(found)
    for line in (*found.missing.values(), *filter(None, [found.lacking])):
        tell(f"shim: {line}")
    print(f"pins {'written' if changed else 'were current'}", flush=True)
    return load_matrix()


def main(argv: Sequence[str] | None = None) -> int:
    """Do all of it. Returns 1 if a test or a proof failed, 2 if the matrix cannot be read or has no such patch."""
    parser = argparse.ArgumentParser(prog="python -m shim.maintenance.one_patch", description=__doc__)
    parser.add_argument("id", metavar="ID")
    id, top, began = parser.parse_args(argv).id, load.PACKAGE.parent, time.monotonic()
    try:
        matrix = _pin(id)
    except ShimError as error:
        tell(f"shim: {error}")
        return 2
    releases, files = representatives(matrix, id), files_about(top, matrix, id)
    passed = _run_tests(matrix, id, files)
    for release in releases:
        passed &= not prove_on(matrix, release, [id])
    for path, text in patch_pages(top, matrix, [id]).items():
        path.write_text(text, "utf-8")
        print(f"wrote {path.relative_to(top)}")
    left = left_to_do(top, matrix, id)
    left += [] if files else [f"tests: no file is about {id}"]
    left += [] if passed else ["a test or a proof has failed, see above"]
    print(f"\n{id} on {', '.join(releases)}: {time.monotonic() - began:.0f} s")
    print("\n".join(["Left to do:", *(f"  {line}" for line in left)] if left else ["Nothing is left to do."]))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
