"""`shim info`: what is installed, what shim does to it, and which switches are set, in fifteen lines."""

from __future__ import annotations

import os
import platform
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shim._api import plan
from shim._errors import NotMetError
from shim._matrix.model import DISTRIBUTIONS
from shim._planning.options import PREFIX
from shim._planning.requirements import enforce
from shim._planning.texts import nothing_installed
from shim._printing.masks import masked_variable
from shim._printing.printable import one_line
from shim._version import __version__

__all__ = ["as_text", "gather"]

COLUMNS = 79
LABELS = {"transformer-engine": "TE"}
LONG = 2000  # characters of a problem, of which two lines are shown
SHOWN = 3  # switches; more are counted
AMISS = ("drifted", "conflict")


def gather() -> dict[str, Any]:
    """The findings, with stable keys. Imports neither torch nor megatron."""
    made = plan()
    problem = nothing_installed(made.environment)
    try:
        enforce(made)
    except NotMetError as error:
        problem = problem or str(error)
    installed = {name: found.raw for name, found in made.environment.installed.items()}
    return {
        "shim": __version__,
        "python": platform.python_version(),
        "installed": {name: installed.get(name) for name in (*DISTRIBUTIONS, "torch")},
        "supported": {name: [releases[0], releases[-1]] for name, releases in made.matrix.supported.items()},
        "disabled": made.options.disabled,
        "patches": dict(Counter(decision.action for decision in made.decisions.values())),
        "amiss": [id for id, decision in made.decisions.items() if decision.action in AMISS],
        "concerns": made.options.concerns,
        "lock": made.options.lock,
        "problem": problem,
        "switches": {name: masked_variable(name, value) for name, value in _switches().items()},
        "digest": made.digest,
    }


def _switches() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}


def as_text(found: Mapping[str, Any]) -> str:
    """The findings in at most fifteen lines."""
    rows = [("shim", f"{found['shim']} on Python {found['python']}, digest {found['digest']}")]
    for name, version in found["installed"].items():
        known = found["supported"].get(name)
        tested = f" (tested: {known[0]} to {known[1]})" if known else ""
        rows.append((LABELS.get(name, name), f"{version or 'not installed'}{tested}"))
    counts = sorted(found["patches"].items(), key=lambda pair: (pair[0] != "apply", -pair[1]))
    rows.append(("patches", ", ".join(f"{count} {state}" for state, count in counts)))
    if found["disabled"]:
        rows[-1] = ("patches", "off, because MEGATRON_SHIM_DISABLE is set")
    if found["amiss"]:
        rows.append(("to look at", f"{', '.join(found['amiss'])}: shim plan"))
    rows.append(("concerns", ", ".join(found["concerns"]) if found["concerns"] is not None else "every run"))
    rows.append(("lock", found["lock"] or "none"))
    rows += [("problem", found["problem"])] if found["problem"] else []
    switches = [f"{name}={value}" for name, value in found["switches"].items()]
    rows += [("switches" if not place else "", switch) for place, switch in enumerate(switches[:SHOWN])]
    if not switches:
        rows.append(("switches", f"none (variables that begin with {PREFIX})"))
    elif len(switches) > SHOWN:
        rows.append(("", f"and {len(switches) - SHOWN} more"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(line for name, value in rows for line in _lines(f"{name:<{width}}  ", one_line(value, LONG)))


def _lines(label: str, value: str) -> list[str]:
    """A row in one line, or two of those that matter most; the rest is cut."""
    room = COLUMNS - len(label)
    if not label.startswith(("patches", "problem")):
        return [label + (value if len(value) <= room else f"{value[: room - 3]}...")]
    found = textwrap.wrap(value, room, max_lines=2, placeholder=" ...", break_on_hyphens=False)
    return [f"{label if not place else ' ' * len(label)}{line}" for place, line in enumerate(found)]
