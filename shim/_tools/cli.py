"""The command `shim`. All its commands but run take --json.

Exit codes: 0 fine, 1 a requirement is not met, 2 wrong usage. `run` exits with the code of its command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from shim._errors import MatrixError, OptionError, ShimError
from shim._tools import commands, prove
from shim._tools.output import NOT_MET, USAGE, complain, nobody_reads

__all__ = ["main"]


def _add_selection(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--only", metavar="IDS", help="only these patches; ids with commas between")
    sub.add_argument("--exclude", metavar="IDS", help="all patches but these")
    sub.add_argument("--require", metavar="IDS", help="exit 1 where one of these patches cannot be applied")
    sub.add_argument("--kinds", metavar="KINDS", help="only these kinds: correctness, compat, performance, feature")
    sub.add_argument("--strict", action="store_true", help="exit 1 where a correctness patch has drifted")
    sub.add_argument(
        "--on-drift",
        choices=("skip", "error", "apply", "known"),
        help="what to do with a patch that has drifted; default skip",
    )
    sub.add_argument("--options", metavar="JSON", help='options of patches: {"paged-stash": {"moe_paged_stash": true}}')
    sub.add_argument("--matrix", metavar="FILE", help="another version_matrix.yaml")
    sub.add_argument("--package", metavar="NAME", help="allow patch modules of that matrix in this package")


def _add_held(sub: argparse.ArgumentParser) -> None:
    _add_selection(sub)
    sub.add_argument("--lock", metavar="FILE", help="exit 1 where the plan here differs from this lock")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shim",
        description="Fixes and backports for megatron-core and Transformer Engine, applied in memory.",
        epilog="Begin with `shim plan`. The command is also called megatron-shim, and python -m shim.",
    )
    from shim._version import __version__

    parser.add_argument("--version", action="version", version=f"megatron-shim {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        sub = parsers.add_parser(name, help=summary, description=summary)
        if run not in (commands.do_run, commands.do_audit, prove.do_prove):  # run prints nothing of its own, two more
            sub.add_argument("--json", action="store_true", help="print JSON with stable keys (docs/cli.md)")
        sub.set_defaults(run=run)
        return sub

    plan = command(
        "plan", commands.do_plan, "print what shim.apply() would do here, and why; imports neither torch nor megatron"
    )
    explain = command(
        "explain", commands.do_explain, "print what a patch is for, how it is wired, and what was decided about it"
    )
    explain.add_argument("id", metavar="ID")
    listing = command(
        "list", commands.do_list, "print all patches by kind, each with what it does and the releases that get it"
    )
    status = command(
        "status", commands.do_status, "apply here, import the targets, print the state of every patch, and revert"
    )
    for sub in (plan, status):
        _add_held(sub)
        sub.add_argument("-v", "--verbose", action="store_true", help="add variant, targets and reason of every patch")
    command(
        "doctor",
        commands.do_doctor,
        "print what an issue report needs, as Markdown: places, versions, plan, surroundings",
    )
    run = command(
        "run",
        commands.do_run,
        "run a command in which every Python process applies shim: shim run -- torchrun train.py",
    )
    _add_held(run)
    run.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    pin = command(
        "pin",
        commands.do_pin,
        "write a lock of what is installed here (--lock); for developers of shim: measure the pins",
    )
    _add_selection(pin)
    pin.add_argument("--lock", metavar="FILE", help="record what is installed here, and what is applied to it")
    pin.add_argument("--check", action="store_true", help="only say whether the pins are current; fetches all releases")
    pin.add_argument(
        "--releases", action="store_true", help="fetch all supported releases and write their pins beside the matrix"
    )
    pin.add_argument(
        "--anew", action="store_true", help="with --releases: after a change of shim/_te, measure the names of TE again"
    )
    pin.add_argument(
        "--add",
        nargs="+",
        metavar=("X", "SOURCE"),
        help="for developers of shim: add a release (0.20.0, transformer-engine==2.21.0) or a commit to the matrix, "
        "with all that follows; SOURCE is a directory with its sources, or a git directory with the commit",
    )
    pin.add_argument("--of", metavar="TEXT", help="with --add COMMIT: its branch and who pins it (default main)")
    matrix = command(
        "matrix", commands.do_matrix, "check the matrix, and print which release gets which variant of each patch"
    )
    matrix.add_argument("--cells", action="store_true", help="print the releases a trainer should test, as JSON")
    matrix.add_argument(
        "--github", action="store_true", help="print these releases as the matrix of a GitHub workflow, in one line"
    )
    matrix.add_argument("--pairs", action="store_true", help="combine each release with the TE releases that differ")
    matrix.add_argument("--range", metavar="SPEC", help='only these releases of megatron-core: ">=0.16"')
    audit = command(
        "audit",
        commands.do_audit,
        "print what a release, archive, source tree or commit means for every patch, without running it",
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
    prove.add_arguments(
        command("prove", prove.do_prove, "reproduce each defect on the installed releases, on stock and with the patch")
    )
    new = command(
        "new-patch",
        commands.do_new_patch,
        "for developers of shim: write module, proof, matrix entry and test of a new patch",
    )
    new.add_argument("id", metavar="ID", help="lower-case words with hyphens between")
    new.add_argument(
        "--target", metavar="MODULE:NAME", action="append", required=True, help="what the patch binds; may be repeated"
    )
    new.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code. On wrong usage argparse itself exits with 2."""
    try:
        return _main(argv)
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            nobody_reads(sys.stdout)


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return USAGE
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (OptionError, MatrixError) as error:
        complain(error)
        return USAGE
    except ShimError as error:
        complain(error)
        return NOT_MET
