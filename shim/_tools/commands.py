"""The commands of `shim`. shim._tools.cli has the arguments."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shim._api import apply, explain, plan, revert, status
from shim._errors import NotMetError, OptionError, ShimError
from shim._matrix.concerns import run_named
from shim._matrix.load import load_matrix
from shim._planning.lock import write_lock
from shim._planning.options import matrix_argument
from shim._planning.requirements import enforce
from shim._planning.texts import nothing_installed
from shim._releases.fingerprint import split_target
from shim._tools.arguments import held, selection
from shim._tools.checkout import in_checkout, maintenance
from shim._tools.fetching import fetched
from shim._tools.listing import list_text, listed
from shim._tools.notes import notes_of
from shim._tools.output import NOT_MET, OK, put, say, tell
from shim._tools.progress import Progress, hushed

if TYPE_CHECKING:
    from shim._matrix.concerns import Run
    from shim._matrix.model import Matrix
    from shim._planning.plan import Plan


__all__ = [
    "do_audit",
    "do_doctor",
    "do_explain",
    "do_info",
    "do_list",
    "do_matrix",
    "do_new_patch",
    "do_pin",
    "do_plan",
    "do_status",
]


def do_plan(arguments: argparse.Namespace) -> int:
    made = plan(**held(arguments))
    run = _run(arguments, "transformer-engine" in made.environment.installed)
    notes = notes_of(made)
    about = ", ".join(dict.fromkeys(note.partition(":")[0] for note in notes))
    said = ["", "Notes:", *(f"  {note}" for note in notes)] if arguments.verbose else ["", f"Notes about {about} (-v)"]
    text = [made.text(arguments.verbose, run), *(said if notes else [])]
    put({**made.to_dict(run), "notes": notes}, "\n".join(text), arguments.json)
    enforce(made)
    return NOT_MET if nothing_installed(made.environment) else OK


def _run(arguments: argparse.Namespace, te_is_installed: bool) -> Run | None:
    """What --for and --config say of the run to come."""
    if arguments.config:
        from shim._configs.trainer_config import run_of_configs  # here, because most plans need no table of settings

        return run_of_configs(arguments.config, te_is_installed, arguments.config_path, arguments.training)
    if arguments.config_path:
        raise OptionError("--config-path belongs to --config FILE")
    return None if arguments.training is None else run_named(arguments.training, te_is_installed)


def do_status(arguments: argparse.Namespace) -> int:
    """Apply in this process, import the targets, read back, and revert: the report of a trainer started here."""
    made = plan(**held(arguments))
    missing = nothing_installed(made.environment)
    apply(**held(arguments))
    _import_targets(made, arguments.verbose)
    report = status()
    revert()
    text = missing or report.text(arguments.verbose, pending_is_amiss=True)
    put(report.to_dict(), text, arguments.json)
    amiss = ("pending", "unknown", "drifted", "conflict", "failed", "shadowed")
    return NOT_MET if missing or any(p.state in amiss for p in report.patches.values()) else OK


def _import_targets(made: Plan, verbose: bool) -> None:
    """Import every module that the plan patches. `verbose` shows what upstream prints meanwhile."""

    progress = Progress()
    modules = list(dict.fromkeys(split_target(t)[0] for d in made.decisions.values() if d.wanted for t in d.targets))
    failures: dict[str, list[str]] = {}
    for place, module in enumerate(modules, 1):
        progress(f"importing {module} ({place} of {len(modules)})")
        try:
            with contextlib.nullcontext() if verbose else hushed():
                importlib.import_module(module)
        except ShimError:
            raise
        except Exception as error:  # noqa: BLE001 - without a GPU, upstream's imports raise errors of any kind
            failures.setdefault(f"{type(error).__name__}: {error}", []).append(module)
    progress.done()
    for what, failed in failures.items():
        first, more = failed[0], f" and {len(failed) - 1} more modules" if failed[1:] else ""
        tell(f"shim: {first}{more} cannot be imported here: {what}")


def do_list(arguments: argparse.Namespace) -> int:
    matrix = load_matrix(matrix_argument(arguments.matrix))
    put(listed(matrix), list_text(matrix), arguments.json)
    return OK


def do_explain(arguments: argparse.Namespace) -> int:
    text = explain(arguments.id, arguments.verbose)
    decision = plan()[arguments.id]
    put({"text": text, **decision.to_dict()}, text, arguments.json)
    return OK


def do_doctor(arguments: argparse.Namespace) -> int:
    from shim._tools.doctor import as_text, examine

    found = examine()
    put(found, as_text(found), arguments.json)
    return OK if not found["problems"] else NOT_MET


def do_info(arguments: argparse.Namespace) -> int:
    from shim._tools.info import as_text, gather

    found = gather()
    put(found, as_text(found), arguments.json)
    return NOT_MET if found["problem"] else OK


def do_matrix(arguments: argparse.Namespace) -> int:
    from shim._tools.support import support, support_text

    matrix = load_matrix(matrix_argument(arguments.matrix), check_ranges=True)
    if (arguments.pairs or arguments.range) and not (arguments.cells or arguments.github):
        raise OptionError("--pairs and --range belong to --cells or --github")
    if arguments.cells or arguments.github:
        from shim._matrix.cells import cells

        found = cells(matrix, arguments.range, pairs=arguments.pairs)
        say(json.dumps({"include": found} if arguments.github else found, indent=None if arguments.github else 2))
        return OK
    put(support(matrix), support_text(matrix), arguments.json)
    complaints = [*_stale_pins(matrix), *_unfilled(matrix)]
    for complaint in complaints:
        tell(f"shim: {complaint}")
    return NOT_MET if complaints else OK


def _stale_pins(matrix: Matrix) -> list[str]:
    """Where the pins disagree with the rules and the supported list, and the remedy."""
    from shim._tools.support import stale

    command = "make pins" if matrix.shipped else f"shim pin --releases --matrix {matrix.path}"
    found = stale(matrix) if matrix.pinned else ["the matrix has no pins"]
    return [*found, f"Remedy: run {command}."] if found else []


def _unfilled(matrix: Matrix) -> list[str]:
    """The places of new patches that still hold template text, if `matrix` is that of a source tree."""
    return maintenance("shim matrix").unfilled_places() if in_checkout() and matrix.shipped else []


def do_new_patch(arguments: argparse.Namespace) -> int:
    return maintenance("shim new-patch").do_new_patch(arguments)


def do_audit(arguments: argparse.Namespace) -> int:
    from shim._archives.trees import open_tree
    from shim._tools.audit import audit
    from shim._tools.audit_report import as_markdown, as_text

    matrix = load_matrix(matrix_argument(arguments.matrix))
    tree = open_tree(arguments.target, fetched, arguments.ref)
    others = [open_tree(other, fetched) for other in arguments.others]
    with _uncollected():
        found = audit(matrix, tree, fetched, others)
    text = as_markdown(found) if arguments.format == "markdown" else as_text(found)
    put(found.to_dict(), text, arguments.format == "json", whole=arguments.format == "markdown")
    return OK if found.clean else NOT_MET


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Turns the cyclic collector off. In syntax trees, which hold no cycles, it would take as long as all else."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def do_pin(arguments: argparse.Namespace) -> int:
    if arguments.lock is not None:
        if arguments.releases or arguments.add or arguments.patch:
            raise OptionError("--lock writes a lock of the installed packages; leave out --releases, --add and --patch")
        return _lock(arguments)
    proving = [name for name in ("prove", "against", "also", "markdown") if getattr(arguments, name)]
    if proving:
        raise OptionError(f"--{proving[0]} belongs to --lock FILE, the file that the verdicts go into")
    if selection(arguments).keys() - {"matrix", "packages"}:  # no patch module is imported here
        raise OptionError("pins cover all patches; a selection belongs to --lock FILE")
    wanted = [f"--{name}" for name in ("add", "patch", "releases", "check", "anew") if getattr(arguments, name)]
    wanted += [] if arguments.of is None else ["--note"]
    wanted += [] if arguments.proved is None else ["--proved"]
    if not wanted:
        raise OptionError(
            "name an option. shim pin --lock FILE records the installed packages: trainers need that one. "
            "shim pin --releases is for developers of shim: it fetches every supported release and rewrites the pins "
            "in version_matrix.lock.json; shim pin --check also fetches them, and only compares the pins."
        )

    return maintenance(f"shim pin {wanted[0]}", " For a job, use shim pin --lock FILE.").do_pin(arguments)


def _lock(arguments: argparse.Namespace) -> int:
    if not arguments.lock:
        raise OptionError("--lock is empty; name a file")
    if arguments.prove or arguments.check:
        from shim._tools.pin_prove import do_pin_prove

        return do_pin_prove(arguments, selection(arguments))
    if arguments.against or arguments.also or arguments.markdown:
        raise OptionError("--against, --append and --markdown belong to --prove")
    made = plan(**{**selection(arguments), "lock": None})
    missing = nothing_installed(made.environment)
    if missing:
        raise NotMetError(f"{missing} No lock was written.")
    content = write_lock(arguments.lock, made)
    put(content, f"wrote {arguments.lock}: digest {made.digest}", arguments.json)
    return OK
