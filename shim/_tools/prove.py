"""The command `shim prove`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shim._api import plan
from shim._errors import NotMetError, OptionError
from shim._matrix.load import load_matrix
from shim._planning.texts import nothing_installed
from shim._printing.printable import did_you_mean
from shim._releases.detect import PATCHED, detect
from shim._tools.fetching import fetched
from shim._tools.output import NOT_MET, OK, put
from shim._tools.progress import Progress

if TYPE_CHECKING:
    from shim._planning.plan import Plan
    from shim._proving.results import Result

__all__ = ["check_sides", "do_prove", "require_torch"]


def do_prove(arguments: argparse.Namespace) -> int:
    """Run proofs and print what came out. 0: nothing failed; 1: something did, or what was asked for cannot run."""
    _check(arguments)
    from shim._proving.report import as_data, as_markdown, as_text, heading_of

    with _against(arguments.against) as (verdicts, tree):
        made = plan()
        if missing := nothing_installed(made.environment):
            raise NotMetError(f"shim prove runs real releases: {missing}")
        unknown = [id for id in arguments.ids if id not in made.decisions]
        if unknown and not arguments.model:
            raise OptionError(
                f"no patch is called {', '.join(unknown)}; {did_you_mean(unknown[0], made.decisions)} (shim list)"
            )
        require_torch(arguments.device)
        results, overrides = _results(arguments, made, verdicts)
        releases = {name: found.raw for name, found in made.environment.installed.items()}
    heading = heading_of(releases, arguments.device, arguments.ranks, arguments.model or "", tree)
    said = [_line(override) for override in overrides]
    if arguments.html:
        from shim._proving.page import as_html

        try:
            Path(arguments.html).write_text(as_html(heading, results, said), "utf-8")
        except OSError as error:
            raise NotMetError(f"--html {arguments.html} cannot be written: {error}") from None
    if arguments.format == "markdown":
        text = as_markdown(heading, results, said)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        text = as_text(heading, results, said, width)
    put(as_data(heading, results, overrides), text, arguments.format == "json", arguments.format == "markdown")
    asked = any(result.verdict == "cannot run" for result in results) if arguments.ids else not results
    return NOT_MET if asked or any(result.failed for result in results) else OK


def _check(arguments: argparse.Namespace) -> None:
    if arguments.ranks is not None and arguments.ranks < 1:
        raise OptionError(f"--ranks {arguments.ranks} is no number of ranks")
    check_sides(arguments.jobs, arguments.timeout)
    if arguments.model and not all(arguments.model.partition(":")):
        raise OptionError(f"--model {arguments.model!r} names no function; write my_module:build")
    if arguments.model and arguments.against:
        raise OptionError("--model runs the generic proofs on installed releases; leave out --against")


def check_sides(jobs: int, timeout: float) -> None:
    """Raise OptionError for numbers with which no side of a proof runs, and NotMetError if no process can be forked."""
    if jobs < 1:
        raise OptionError(f"--jobs {jobs} runs nothing")
    if not timeout > 0:
        raise OptionError(f"--timeout {timeout:g} leaves no time")
    if not hasattr(os, "fork"):
        raise NotMetError("proofs run in forked processes, which this system does not have")


def require_torch(device: str) -> None:
    """Raise NotMetError if proofs cannot run on this device here."""
    if find_spec("torch") is None:
        raise NotMetError("torch is not installed, and proofs run real models; install it: pip install torch")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise NotMetError("--device cuda: torch sees no GPU here; without the option proofs run on the CPU")


def _results(
    arguments: argparse.Namespace, made: Plan, verdicts: dict[str, str]
) -> tuple[list[Result], list[dict[str, str]]]:
    from shim._proving.run import Request, prove, prove_model

    progress = Progress()
    numbers = (arguments.ranks, arguments.together, arguments.timeout, arguments.jobs)
    request = Request(tuple(arguments.ids), arguments.device, *numbers)
    try:
        if arguments.model:
            return prove_model(arguments.model, request, progress)
        found = prove(made, request, progress)
    finally:
        progress.done()
    return [replace(result, audit=verdicts.get(result.patch, "")) for result in found], []


@contextlib.contextmanager
def _against(target: str | None) -> Iterator[tuple[dict[str, str], str]]:
    """Put a source tree first on sys.path. Gives what `shim audit` says of each patch, and the tree in words."""
    if target is None:
        yield {}, ""
        return
    from shim._archives.trees import open_tree
    from shim._tools.audit import audit
    from shim._tools.fetching import first_on_path

    there = detect().installed
    with first_on_path(target) as tree:
        beside = [there[name].location for name in PATCHED if name in there and name not in tree.environment.installed]
        others = [open_tree(location, fetched) for location in beside]
        verdicts = {
            finding.id: f"{finding.words}: {finding.reason}"
            for finding in audit(load_matrix(), tree, fetched, others).findings
            if finding.verdict != "not-installed"
        }
        yield verdicts, tree.name + (f" at {tree.commit[:10]}" if tree.commit else "")


def _line(override: dict[str, str]) -> str:
    if not override["patch"]:
        return f"The overrides of this model could not be looked at: {override['reason']}"
    return f"{override['target']} ({override['patch']}): {override['state']}. {override['reason']}"
