"""The commands of `shim` that need a source tree: `new-patch`, and `pin` but for --lock. shim._tools.cli calls them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shim._errors import OptionError
from shim._matrix import load
from shim._matrix.load import load_matrix
from shim._planning.evidence import evidence_in
from shim._planning.lock import read_lock
from shim._planning.options import matrix_argument
from shim._tools import fetching
from shim._tools.output import NOT_MET, OK, put, tell
from shim._tools.progress import Progress
from shim.testing.releases import at_hand

from .changes import unannounced, wrong_fragments
from .new_patch import propose, said, unfilled, write_patch
from .pin import write
from .pin_add import add, parse_new, seconds
from .pin_all import measure_all, write_all
from .pin_some import left_to_do, measure_some

__all__ = ["do_new_patch", "do_pin", "unfilled_places"]


def unfilled_places() -> list[str]:
    """What new patches of this source tree lack: places that still hold template text, and fragments of changes/."""
    top, ids = load.PACKAGE.parent, load_matrix().patches
    return [*unfilled(top), *wrong_fragments(top, ids), *(line for id in ids for line in unannounced(top, id))]


def do_new_patch(arguments: argparse.Namespace) -> int:
    """Write the skeleton of a patch, and its pins. Returns the exit code."""
    top = load.PACKAGE.parent
    matrix, progress = load_matrix(), Progress()

    def fetch(distribution: str, release: str) -> Path:
        progress(f"{distribution} {release}")
        return fetching.fetched(distribution, release)

    found = propose(arguments.id, arguments.target, matrix, fetch)
    written = write_patch(found, matrix, top, arguments.dry_run)
    if not arguments.dry_run:
        # Without the commits: `shim pin --patch` adds those that are at hand.
        measured = measure_some(load_matrix(), [found.id], fetch, lambda *_: False, lambda _: None)
        write(measured.matrix.path, measured.pins)
    progress.done()
    left = [] if arguments.dry_run else unfilled(top)
    put(
        {**found.to_dict(), "files": [str(path.relative_to(top)) for path in written], "unfilled": left},
        said(found, {path.relative_to(top): text for path, text in written.items()}, left, arguments.dry_run),
        arguments.json,
    )
    return OK


def do_pin(arguments: argparse.Namespace) -> int:
    """`shim pin` with --releases, --check, --patch or --add. Returns the exit code."""
    if arguments.anew and not arguments.releases:
        raise OptionError("--refresh belongs to --releases")
    if arguments.of is not None and not arguments.add:
        raise OptionError("--note belongs to --add")
    if arguments.proved is not None and (
        arguments.check or not (arguments.add or arguments.patch or arguments.releases)
    ):
        raise OptionError("--proved belongs to --add, --patch or --releases")
    if arguments.add:
        if arguments.check or arguments.releases:
            raise OptionError("--add pins one release more; leave out --check and --releases")
        return _add(arguments)
    if arguments.patch:
        if arguments.check or arguments.releases:
            raise OptionError("--patch pins single patches; leave out --check and --releases")
        return _patch(arguments)
    matrix = load_matrix(matrix_argument(arguments.matrix), check_ranges=True, pins=False)
    releases = {name: list(matrix.names(name)) for name in {**matrix.supported, **matrix.commits}}
    total, what = sum(map(len, releases.values())), "compares them with" if arguments.check else "rewrites"
    path = Path(matrix.path).absolute()
    tell(f"shim: fetches those of {total} releases that the cache lacks, and {what} the pins of {path}")
    progress = Progress()
    anew = arguments.anew or arguments.check
    found = measure_all(matrix, fetching.fetched, progress, anew=anew, proved=evidence_in(_proved(arguments)))
    progress.done()
    for line in found.missing.values():
        tell(f"shim: {line}")
    told = {"releases": releases, "not_at_hand": list(found.missing)}
    if arguments.check:
        stale = found.stale()
        current = "pins are stale; run shim pin --releases" if stale else "pins are current"
        put({"stale": stale, **told}, current, arguments.json)
        return NOT_MET if stale else OK
    changed = write_all(found)
    done = "pins written beside" if changed else "pins were current beside"
    put({"changed": changed, "matrix": matrix.path, **told}, f"{done} {matrix.path}", arguments.json)
    return OK


def _patch(arguments: argparse.Namespace) -> int:
    matrix = load_matrix(matrix_argument(arguments.matrix), check_ranges=True, pins=False)
    progress = Progress()

    def there(distribution: str, name: str) -> bool:
        return at_hand(name, distribution)

    proved = evidence_in(_proved(arguments))
    found = measure_some(matrix, arguments.patch, fetching.fetched, there, progress, proved)
    changed = write_all(found)
    progress.done()
    for line in (*found.missing.values(), *filter(None, [found.lacking])):
        tell(f"shim: {line}")
    left = []
    if matrix.shipped:
        left = [line for id in arguments.patch for line in left_to_do(load.PACKAGE.parent, load_matrix(), id)]
    told = {"changed": changed, "matrix": matrix.path, "not_at_hand": list(found.missing), "left": left}
    lines = [f"pins {'written' if changed else 'were current'} beside {matrix.path}"]
    lines += ["", "Left to do:", *(f"  {line}" for line in left)] if left else []
    put(told, "\n".join(lines), arguments.json)
    return NOT_MET if found.lacking else OK


def _proved(arguments: argparse.Namespace) -> dict[str, Any]:
    """The lock with the verdicts of proofs, or {}."""
    return {} if arguments.proved is None else read_lock(arguments.proved)


def _add(arguments: argparse.Namespace) -> int:
    if len(arguments.add) > 2:
        raise OptionError("--add takes a release or a commit, and at most one SOURCE")
    new, source = parse_new(arguments.add[0]), Path(arguments.add[1]).expanduser() if arguments.add[1:] else None
    if source is not None and not source.is_dir():
        raise OptionError(f"SOURCE {source} is no directory; put a wheel into the cache instead (docs/new-release.md)")
    if arguments.of is not None and not new.is_commit:
        raise OptionError("--note belongs to a commit")
    if arguments.proved is not None and new.is_commit:
        raise OptionError(
            "--proved belongs to a release; the proofs of a commit ship (docs/new-release.md, known trees)"
        )
    matrix = load_matrix(matrix_argument(arguments.matrix), check_ranges=False)
    about = seconds(matrix, new, lambda distribution, release: at_hand(release, distribution), matrix.shipped)
    tell(f"shim: adds {new.distribution} {new.name} to {matrix.path}; takes about {about:.0f} s")
    progress = Progress()
    top = load.PACKAGE.parent if matrix.shipped else None
    found = add(
        matrix,
        new,
        fetching.fetched,
        progress,
        source=source,
        of=arguments.of or "main",
        top=top,
        proved=_proved(arguments),
    )
    progress.done()
    put(found.to_dict(), str(found), arguments.json)
    return NOT_MET if found.decide else OK
