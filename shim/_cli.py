"""The command `shim`: status, plan, explain, doctor, matrix, pin; each with --json.

Exit codes: 0 fine, 1 something asked for is not met, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from shim._errors import MatrixError, OptionError, ShimError

__all__ = ["main"]

OK, NOT_MET, USAGE = 0, 1, 2


def _print(data: Any, text: str, as_json: bool) -> None:
    print(json.dumps(data, indent=2, default=str) if as_json else text)


def _selection(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of apply() that a command line can give; left out where not given, so that variables count."""
    chosen: dict[str, Any] = {}
    for name in ("only", "exclude", "require"):
        value = getattr(arguments, name)
        if value:
            chosen[name] = value.replace(",", " ").split()
    if arguments.strict:
        chosen["strict"] = True
    if arguments.on_drift:
        chosen["on_drift"] = arguments.on_drift
    if arguments.matrix:
        chosen["matrix"] = arguments.matrix
    return chosen


def _plan(arguments: argparse.Namespace) -> int:
    from shim._api import plan
    from shim._plan import enforce

    made = plan(**_selection(arguments))
    _print(made.to_dict(), str(made), arguments.json)
    enforce(made)
    return OK


def _status(arguments: argparse.Namespace) -> int:
    """Applies in this process, imports the targets, reads back, reverts: what a trainer started here would get."""
    import importlib

    from shim._api import apply, plan, revert, status
    from shim._fingerprint import split_target

    made = plan(**_selection(arguments))
    apply(**_selection(arguments))
    for module in dict.fromkeys(split_target(t)[0] for d in made.decisions.values() if d.wanted for t in d.targets):
        try:
            importlib.import_module(module)
        except ShimError:
            raise
        except Exception as error:  # noqa: BLE001 - upstream's import fails with whatever it likes without a GPU
            print(f"shim: {module} cannot be imported here: {type(error).__name__}: {error}", file=sys.stderr)
    report = status()
    revert()
    _print(report.to_dict(), str(report), arguments.json)
    amiss = ("pending", "drifted", "conflict", "failed", "shadowed")
    return NOT_MET if any(p.state in amiss for p in report.patches.values()) else OK


def _explain(arguments: argparse.Namespace) -> int:
    from shim._api import explain, plan

    text = explain(arguments.id)
    decision = plan()[arguments.id]
    _print({"text": text, **decision.to_dict()}, text, arguments.json)
    return OK


def _doctor(arguments: argparse.Namespace) -> int:
    from shim._doctor import as_text, examine

    found = examine()
    _print(found, as_text(found), arguments.json)
    return OK if not found["problems"] else NOT_MET


def _matrix(arguments: argparse.Namespace) -> int:
    from shim._docs import support, support_table
    from shim._matrix import load_matrix
    from shim._options import matrix_argument

    matrix = load_matrix(matrix_argument(arguments.matrix))
    _print(support(matrix), support_table(matrix), arguments.json)
    return OK


def _pin(arguments: argparse.Namespace) -> int:
    from shim._matrix import load_matrix
    from shim._options import matrix_argument
    from shim._pin import measure, render, write
    from shim.testing.releases import FetchError, fetch

    matrix = load_matrix(matrix_argument(arguments.matrix), pins=False)

    def say(distribution: str, release: str) -> None:
        print(f"{distribution} {release}", file=sys.stderr)

    try:
        pins = measure(matrix, lambda distribution, release: fetch(release, distribution), say)
    except FetchError as error:
        print(f"shim: {error}", file=sys.stderr)
        return NOT_MET
    text = render(pins)
    releases = {name: list(found) for name, found in pins.items()}
    if arguments.check:
        with open(matrix.path, encoding="utf-8") as file:
            stale = not file.read().endswith(text)
        _print(
            {"stale": stale, "releases": releases},
            "pins are stale; run shim pin" if stale else "pins are current",
            arguments.json,
        )
        return NOT_MET if stale else OK
    changed = write(matrix.path, text)
    what = "pins written to" if changed else "pins were current in"
    _print({"changed": changed, "matrix": matrix.path, "releases": releases}, f"{what} {matrix.path}", arguments.json)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shim", description="Fixes and backports for megatron-core and Transformer Engine, applied in memory."
    )
    from shim import __version__

    parser.add_argument("--version", action="version", version=f"megatron-shim {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.add_argument("--json", action="store_true", help="print JSON with stable keys (docs/cli.md)")
        sub.set_defaults(run=run)
        return sub

    for sub in (
        command("status", _status, "apply here, import the targets, read back, and print the state of every patch"),
        command("plan", _plan, "print what apply() would do here and why; imports neither torch nor megatron"),
    ):
        sub.add_argument("--only", help="patch ids, separated by commas")
        sub.add_argument("--exclude", help="patch ids")
        sub.add_argument("--require", help="patch ids that have to be applicable, else exit 1")
        sub.add_argument("--strict", action="store_true", help="exit 1 where a correctness patch has drifted")
        sub.add_argument("--on-drift", choices=("skip", "error", "apply"), help="what to do with unknown bodies")
        sub.add_argument("--matrix", help="another version_matrix.yaml")
    command("explain", _explain, "say what a patch is for and what was decided about it here").add_argument("id")
    command("doctor", _doctor, "print what an issue report needs: versions, places, plan, surroundings")
    command("matrix", _matrix, "check the matrix and print which release gets which patch").add_argument("--matrix")
    pin = command("pin", _pin, "fingerprint all supported releases from their wheels and write the pins")
    pin.add_argument("--matrix", help="the version_matrix.yaml to write")
    pin.add_argument("--check", action="store_true", help="only say whether the pins are current")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (argparse itself exits with 2 on wrong usage)."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (OptionError, MatrixError) as error:
        print(f"shim: {error}", file=sys.stderr)
        return USAGE
    except ShimError as error:
        print(f"shim: {error}", file=sys.stderr)
        return NOT_MET
