"""Ask the contracts of one variant about the release beside its own, and run the tests of the patch there with it.

    python maintenance/mutations/neighbours.py [--patches ID ...]    measure anew; writes neighbours.json
    python maintenance/mutations/neighbours.py --show                the table and the counts

What is asked is what a plan asks of a release that nobody has pinned: a body that some release of the variant has is
known, and every other one has to keep its contract. Then the variant is forced on that release, and the tests say
whether that was right.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MEASURED = HERE / "neighbours.json"
__all__ = ["asked", "neighbours", "verdict"]


def neighbours(matrix, patches=None):
    """(patch, variant, release): each variant with contracts on the supported releases beside its own."""
    for id, entry in matrix.patches.items():
        if patches and id not in patches:
            continue
        releases = matrix.supported[entry.distribution]
        having = [(pin := matrix.pins[entry.distribution].get(r, {}).get(id)) and pin.variant for r in releases]
        seen = set()
        for place in range(len(releases) - 1):
            for mine, other in ((place, place + 1), (place + 1, place)):
                name = having[mine]
                if name and name != having[other] and entry.variants[name].needs:
                    seen.add((id, name, releases[other]))
        yield from sorted(seen)


def asked(matrix, sources, id, name):
    """Why the variant would be drifted on a release: what breaks first, "" where it would be applied."""
    from shim._errors import SourceError
    from shim._planning.contract import breach, shows
    from shim._releases.fingerprint import fingerprint

    variant = matrix.patches[id].variants[name]
    known = matrix.known_bodies(id, name)
    for target in variant.bodies:
        body = target.partition(":")[2]
        try:
            value = fingerprint(sources, target, variant.inherits(target), target in variant.may_be_missing)
        except SourceError as error:
            return f"{body}: {error}"
        if value in known.get(target, ()):
            continue
        if target not in variant.needs:
            return f"{body}: its body is unknown, and has no contract"
        said = breach(sources, variant.inherits(target) or target, variant.needs[target])
        if said:
            return f"{body}: {said}"
    return next((f"fixed there: {sign.note}" for sign in matrix.patches[id].fixed if shows(sources, sign)), "")


def verdict(broken: str, found: dict) -> str:
    if found["tests"] == "pass":
        if not found["passed"]:
            return "not placed"  # no test is about that release
        return "false alarm" if broken else "right yes"
    return "right no" if broken else "WRONG YES"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", nargs="*")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from shim._matrix.load import load_matrix

    matrix = load_matrix()
    if options.here:
        return measure(matrix, options.here[0], options.here[1:])
    if not options.show:
        cells: dict[str, list[str]] = {}
        for id, name, release in neighbours(matrix, options.patches):
            cells.setdefault(cell_of(id, release), []).append(f"{id}:{name}")
        from shim.testing.cells import _fetch
        from shim.testing.releases import environment

        for cell, work in cells.items():
            command = [sys.executable, "-W", "ignore", str(HERE / "neighbours.py"), "--here", cell, *work]
            subprocess.run(command, cwd=ROOT, env=environment(_fetch(cell)), check=True)
    return show(matrix)


def cell_of(id: str, release: str) -> str:
    """The release, with a Transformer Engine of its time where the tests of the patch need one."""
    from selected import folder_of

    from shim.testing.cells import EVERYDAY_PAIRS

    if folder_of(id) == "cells":
        return release
    minor = release.rpartition(".")[0]
    engine = next(pair for pair in reversed(EVERYDAY_PAIRS) if pair.startswith(f"{minor}.")).partition("+")[2]
    return f"{release}+{engine}"


def read() -> dict:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def measure(matrix, cell: str, work: list[str]) -> int:
    sys.path[:0] = [str(ROOT / "tests/support")]
    from measure import SECONDS, _collected, _forked, _load, _tests, write
    from selected import tests_of

    _load(cell)
    for item in work:
        id, name = item.split(":")
        _collected(tests_of(id))

        def run(id=id, name=name):
            _force(matrix, id, name)
            with open(os.devnull, "w") as nowhere:
                return _tests(tests_of(id), nowhere)

        found = _forked(run, SECONDS)
        print(cell, id, name, found, flush=True)
        table = read()
        table.setdefault(id, {}).setdefault(name, {})[cell] = found
        write(table, MEASURED)
    return 0


def _force(matrix, id: str, name: str) -> None:
    """Whatever the release is, it has this variant of the patch."""
    import shim._planning.plan as plan
    from shim._planning.match import Match, match

    variant = matrix.patches[id].variants[name]

    def forced(entry, environment, given, *proved):
        if entry.id != id:
            return match(entry, environment, given, *proved)
        from shim._errors import SourceError
        from shim._releases.fingerprint import fingerprint

        def value(target):
            try:
                return fingerprint(
                    environment.sources, target, variant.inherits(target), target in variant.may_be_missing
                )
            except SourceError:
                return ""

        return Match("apply", "forced by a test", name, {target: value(target) for target in variant.bodies})

    plan.match = forced


def judged(matrix, table):
    """(patch, variant, cell, what breaks the contract, what was measured)."""
    from shim._releases.sources import Sources
    from shim.testing.releases import fetch

    held: dict = {}
    for id, variants in table.items():
        distribution = matrix.patches[id].distribution
        for name, cells in variants.items():
            for cell, found in cells.items():
                release = cell.split("+")[0]
                if release not in held:
                    held[release] = Sources([fetch(release, distribution)])
                yield id, name, cell, asked(matrix, held[release], id, name), found


def show(matrix) -> int:
    from collections import Counter

    counts: Counter = Counter()
    for id, name, cell, broken, found in judged(matrix, read()):
        said = verdict(broken, found)
        counts[said] += 1
        print(f"{said:12} {id} {name} on {cell}: {broken or 'kept'} | {found.get('first', found['tests'])}")
    print(dict(counts))
    return 1 if counts["WRONG YES"] else 0


if __name__ == "__main__":
    sys.exit(main())
