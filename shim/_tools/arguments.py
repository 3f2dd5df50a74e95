"""The arguments of the command `shim`: what each command takes, and what it says of them in --help."""

from __future__ import annotations

import argparse
import os
from typing import Any

from shim._errors import OptionError
from shim._planning.options import ON_DRIFT, from_json
from shim._tools.output import Parser
from shim._version import __version__

__all__ = ["add_selection", "command_line", "held", "selection"]

PROVE_FORMATS = ("json", "markdown")


def add_selection(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--only", metavar="IDS", help="only these patches; ids with commas between")
    sub.add_argument("--exclude", metavar="IDS", help="all patches but these")
    sub.add_argument("--require", metavar="IDS", help="exit 1 if one of these patches cannot be applied")
    sub.add_argument("--kinds", metavar="KINDS", help="only these kinds: correctness, compat, performance, feature")
    sub.add_argument("--strict", action="store_true", help="exit 1 if a correctness patch has drifted")
    sub.add_argument(
        "--concerns",
        metavar="WORDS",
        help="only what concerns such a run: packed,lora,mtp,moe,tp,..., or a FILE of a trainer's own arguments",
    )
    sub.add_argument(
        "--rounding",
        action="store_true",
        help="also what changes rounding where stock is right, to save memory or time",
    )
    sub.add_argument(
        "--on-drift",
        choices=ON_DRIFT,
        help="how to treat a patch that has drifted; default skip",
    )
    sub.add_argument("--options", metavar="JSON", help='options of patches: {"paged-stash": {"moe_paged_stash": true}}')
    sub.add_argument("--matrix", metavar="FILE", help="another version_matrix.yaml")
    sub.add_argument("--package", metavar="NAME", help="allow patch modules of that matrix in this package")


def _add_held(sub: argparse.ArgumentParser) -> None:
    add_selection(sub)
    sub.add_argument("--lock", metavar="FILE", help="exit 1 if the plan here differs from this lock")


def _add_bisecting(sub: argparse.ArgumentParser) -> None:
    add_selection(sub)
    sub.add_argument(
        "--metric",
        metavar="REGEX",
        help="compare a number that the command prints: the group of the last match, or what follows the match",
    )
    sub.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="T",
        help="take numbers for the same that differ by no more, relative to the larger: 1e-4; default 0",
    )
    sub.add_argument(
        "--timeout", type=float, metavar="S", help="end a run after these seconds, and count that as its end"
    )
    sub.add_argument(
        "--dir", default="shim-bisect", metavar="DIR", help="where runs are remembered and logged; default shim-bisect"
    )
    sub.add_argument("--refresh", dest="anew", action="store_true", help="forget the runs that DIR remembers")
    sub.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def _add_proving(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("ids", nargs="*", metavar="ID", help="only these patches; with --model only these proofs")
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the proofs; default cpu")
    sub.add_argument(
        "--ranks", type=int, metavar="N", help="ranks for proofs that need several (default 2); 1 for none"
    )
    sub.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each side (default 120)")
    sub.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="sides at once")
    sub.add_argument("--together", action="store_true", help="apply all patches on the patched side, not one alone")
    sub.add_argument("--model", metavar="MODULE:BUILD", help="run the generic proofs on the model that BUILD() builds")
    sub.add_argument(
        "--against", metavar="TREE", help="run on these sources (a checkout) and name the verdicts of audit"
    )
    sub.add_argument("--html", metavar="FILE", help="also write a page with a picture of each defect")
    formats = sub.add_mutually_exclusive_group()
    for name in PROVE_FORMATS:
        words = "JSON with stable keys (docs/cli.md)" if name == "json" else "Markdown to paste into an issue"
        formats.add_argument(f"--{name}", dest="format", action="store_const", const=name, help=f"print {words}")


def command_line() -> argparse.ArgumentParser:
    """The parser of the whole command line. `command` in what it parses names the command."""
    parser = Parser(
        prog="shim",
        description="Fixes and backports for megatron-core and Transformer Engine, applied in memory.",
        epilog="Begin with `shim plan`. The command is also called megatron-shim, and python -m shim.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-shim {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        sub = parsers.add_parser(name, help=summary, description=summary)
        if name not in ("run", "audit", "prove"):  # run prints nothing of its own, the others have more formats
            sub.add_argument("--json", action="store_true", help="print JSON with stable keys (docs/cli.md)")
        return sub

    command("info", "print releases, patches by state, lock and switches, in at most fifteen lines")
    plan = command("plan", "print the decisions of shim.apply() here, with reasons; imports neither torch nor megatron")
    plan.add_argument(
        "--for",
        dest="training",
        metavar="WORDS",
        help="put what concerns such a run first: packed,lora,mtp,moe,tp,...; an unknown word prints all",
    )
    plan.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="the same for a trainer's arguments: YAML or JSON, or a script with --flags or a.b=c; may be repeated, "
        "and later files win; --for adds words to them",
    )
    plan.add_argument(
        "--config-path",
        metavar="DIR",
        action="append",
        default=[],
        help="with --config: also look here for files that FILE names; may be repeated",
    )
    explain = command("explain", "print what a patch is for, what was decided about it here, and how to leave it out")
    explain.add_argument("id", metavar="ID")
    explain.add_argument(
        "-v", "--verbose", action="store_true", help="add how it works, its releases, variants and targets"
    )
    listing = command("list", "print all patches by kind, each with what it does and the releases that get it")
    status = command("status", "apply here, import the targets, print the state of every patch, and revert")
    for sub in (plan, status):
        _add_held(sub)
        sub.add_argument("-v", "--verbose", action="store_true", help="add variant, targets and reason of every patch")
    command(
        "doctor",
        "print versions, paths and plan for a bug report, as Markdown",
    )
    run = command(
        "run",
        "run a command in which every Python process applies shim: shim run -- torchrun train.py",
    )
    _add_held(run)
    run.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    _add_bisecting(
        command(
            "bisect",
            "find the patch that changes a result of a command: its exit status or a number",
        )
    )
    pin = command(
        "pin",
        "write a lock of the installed packages (--lock); for developers of shim: measure the pins",
    )
    add_selection(pin)
    pin.add_argument("--lock", metavar="FILE", help="record the installed packages and the patches that apply to them")
    pin.add_argument(
        "--prove",
        action="store_true",
        help="with --lock: run the proofs of all patches whose bodies are unknown here, and let them decide",
    )
    pin.add_argument("--against", metavar="TREE", help="with --prove: run on these sources (a checkout)")
    pin.add_argument(
        "--append", dest="also", action="store_true", help="with --prove: keep the other trees that the lock holds"
    )
    pin.add_argument("--markdown", action="store_true", help="with --prove: print Markdown for a pull request")
    pin.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each side of a proof")
    pin.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="sides at once")
    pin.add_argument(
        "--check",
        action="store_true",
        help="only say whether the pins are current, which fetches all releases; with --lock: run the proofs again, "
        "and say whether the lock holds",
    )
    pin.add_argument(
        "--releases", action="store_true", help="fetch all supported releases and write their pins beside the matrix"
    )
    pin.add_argument(
        "--patch",
        metavar="ID",
        action="append",
        help="write the pins of this patch only, in seconds, and say what else it lacks; may be repeated",
    )
    pin.add_argument(
        "--refresh",
        dest="anew",
        action="store_true",
        help="with --releases: after a change of shim/_te, measure the names of TE again",
    )
    pin.add_argument(
        "--add",
        nargs="+",
        metavar=("X", "SOURCE"),
        help="for developers of shim: add a release (0.20.0, transformer-engine==2.21.0) or a commit to the matrix, "
        "with all that follows; SOURCE is a directory with its sources, or a git directory with the commit",
    )
    pin.add_argument(
        "--note", dest="of", metavar="TEXT", help="with --add COMMIT: its branch and its users (default main)"
    )
    pin.add_argument(
        "--proved",
        metavar="FILE",
        help="with --add, --patch or --releases: a lock of shim pin --prove, whose verdicts count for a new release",
    )
    diff = command("diff", "print which patches differ between two locks, or a lock and what is installed")
    diff.add_argument("old", metavar="OLD.lock", help="a lock of shim pin --lock")
    diff.add_argument("new", metavar="NEW.lock", nargs="?", help="a newer lock; without it, what is installed here")
    add_selection(diff)
    matrix = command("matrix", "check the matrix, and print which release gets which variant of each patch")
    matrix.add_argument("--cells", action="store_true", help="print the releases a trainer should test, as JSON")
    matrix.add_argument(
        "--github", action="store_true", help="print these releases as the matrix of a GitHub workflow, in one line"
    )
    matrix.add_argument("--pairs", action="store_true", help="combine each release with the TE releases that differ")
    matrix.add_argument("--range", metavar="SPEC", help='only these releases of megatron-core: ">=0.16"')
    audit = command(
        "audit",
        "check all patches against other sources (a release, archive, source tree or commit), without running them",
    )
    audit.add_argument(
        "target",
        metavar="TARGET",
        help="megatron-core==X or short ==X, transformer-engine==X, a wheel, an sdist, a directory",
    )
    audit.add_argument("--ref", metavar="REF", help="audit this branch, tag or commit of TARGET, a git directory")
    audit.add_argument(
        "--with",
        metavar="OTHER",
        dest="others",
        action="append",
        default=[],
        help="judge it beside this, a TARGET with the other distribution; may be repeated",
    )
    formats = audit.add_mutually_exclusive_group()
    formats.add_argument("--format", choices=("text", "markdown", "json"), help="default text")
    formats.add_argument(
        "--json", dest="format", action="store_const", const="json", help="print JSON with stable keys (docs/cli.md)"
    )
    formats.add_argument(
        "--markdown", dest="format", action="store_const", const="markdown", help="print Markdown for a pull request"
    )
    for sub in (listing, matrix, audit):
        sub.add_argument("--matrix", metavar="FILE", help="another version_matrix.yaml")
    _add_proving(command("prove", "reproduce each defect on the installed releases, on stock and with the patch"))
    new = command(
        "new-patch",
        "for developers of shim: write module, proof, matrix entry and test of a new patch",
    )
    new.add_argument("id", metavar="ID", help="lower-case words with hyphens between")
    new.add_argument(
        "--target", metavar="MODULE:NAME", action="append", required=True, help="a target of the patch; may be repeated"
    )
    new.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    return parser


# What the arguments say to apply()


def selection(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of apply() that the command line gives. The others are left out, so that their variables count."""
    chosen: dict[str, Any] = {}
    for name in ("only", "exclude", "require"):
        value = getattr(arguments, name)
        if value:
            chosen[name] = value.replace(",", " ").split()
    for name in ("strict", "rounding"):
        if getattr(arguments, name):
            chosen[name] = True
    if arguments.on_drift:
        chosen["on_drift"] = arguments.on_drift
    if arguments.matrix:
        chosen["matrix"] = arguments.matrix
    for name in ("kinds", "concerns"):
        if getattr(arguments, name):
            chosen[name] = getattr(arguments, name)
    if arguments.package:
        chosen["packages"] = arguments.package
    if arguments.options:
        chosen["options"] = from_json("--options", arguments.options)
    return chosen


def held(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same with --lock, for commands that take one."""
    if arguments.lock == "":
        raise OptionError("--lock is empty; name a file")
    return {**selection(arguments), **({"lock": arguments.lock} if arguments.lock else {})}
