"""What an issue report needs, gathered without importing torch or megatron."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import shim
from shim._api import plan
from shim._detect import detect
from shim._errors import ShimError
from shim._features import LostFeature, lost_features
from shim._matrix import matrix_path
from shim._options import VARIABLES, matrix_argument
from shim._variables import concerning

__all__ = ["as_text", "examine"]

OTHER_VARIABLES = ("PYTHONPATH", "PYTHONOPTIMIZE", "NVTE_CPU_OFFLOAD_V1", "NVTE_PROJECT_BUILDING")


def examine() -> dict[str, Any]:
    """A dictionary with stable keys; `problems` holds what is wrong, `notes` what some models need."""
    environment = detect()
    problems = [f"{i.distribution}: {text}" for i in environment.installed.values() for text in i.problems]
    decisions: dict[str, Any] = {}
    notes: list[str] = []
    lost: tuple[LostFeature, ...] | None = None
    digest = None
    try:
        made = plan()
        digest = made.digest
        for id, d in made.decisions.items():
            decisions[id] = {"action": d.action, "variant": d.variant, "reason": d.reason}
        # A pair that nobody measured is looked through here, where a second does not matter.
        lost = lost_features(environment, made.decisions, read_sources=True)
        problems += [
            f"{d.id} is {d.action}: {d.reason}. Remedy: {d.remedy}"
            for d in made.decisions.values()
            if d.kind == "correctness" and d.action in ("drifted", "conflict")
        ]
        notes = [
            f"{id}: {variable} is not set, so {variable.without}. Remedy: set it for the process, or call "
            f"shim.apply(options={ {id: {variable.option: True}} }) before {variable.before} is imported"
            for id, variable in concerning(made)
            if os.environ.get(variable.name) != variable.value
        ]
    except ShimError as error:
        problems.append(str(error))
    if sys.flags.optimize:
        problems.append("python -O strips upstream's assertions, which guard against wrong results: run without -O")
    deaf = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}
    flags = [flag for name, flag in deaf.items() if getattr(sys.flags, name)]
    if flags:
        problems.append(
            f"python {flags[0]} does not notice `shim run`, nor variables with -I or -E: leave it out, or call "
            "shim.apply() in the program"
        )
    return {
        "shim": {
            "version": shim.__version__,
            "location": str(Path(shim.__file__).parent),
            "matrix": str(matrix_argument(None) or matrix_path()),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": _platform()},
        "installed": {name: i.to_dict() for name, i in environment.installed.items()},
        "variables": {n: os.environ[n] for n in (*VARIABLES, *OTHER_VARIABLES) if n in os.environ},
        "import_hooks": [_finder(finder) for finder in sys.meta_path],
        "digest": digest,
        "plan": decisions,
        "notes": notes,
        "lost_features": None if lost is None else [feature.to_dict() for feature in lost],
        "problems": problems,
    }


def _platform() -> str:
    # platform.platform() would start `uname -p`.
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _finder(finder: Any) -> str:
    cls = finder if isinstance(finder, type) else type(finder)
    return f"{cls.__module__}.{cls.__qualname__}"


def as_text(found: dict[str, Any]) -> str:
    """The examination as Markdown that can be pasted into an issue."""
    lines = ["### shim doctor", ""]
    lines.append(f"- shim {found['shim']['version']} from `{found['shim']['location']}`")
    lines.append(f"- matrix `{found['shim']['matrix']}`, digest {found['digest']}")
    lines.append(f"- Python {found['python']['version']} on {found['python']['platform']}")
    for name, installed in found["installed"].items():
        lines.append(f"- {name} {installed['version']} ({installed['origin']}) at `{installed['location']}`")
    for name in ("megatron-core", "transformer-engine", "torch"):
        if name not in found["installed"]:
            lines.append(f"- {name}: not installed")
    lines += [f"- `{name}={value}`" for name, value in found["variables"].items()]
    lines.append(f"- import hooks: {', '.join(found['import_hooks'])}")
    lines += ["", "| patch | action | variant | reason |", "|---|---|---|---|"]
    for id, d in found["plan"].items():
        cells = [id, d["action"], d["variant"] or "", d["reason"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    lines += ["", "Notes:", *(f"- {note}" for note in found["notes"])] if found["notes"] else []
    lines += _lost_as_text(found)
    lines += ["", "Problems:" if found["problems"] else "No problems found."]
    lines += [f"- {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def _lost_as_text(found: dict[str, Any]) -> list[str]:
    lost = found["lost_features"]
    if lost is None and {"megatron-core", "transformer-engine"} <= found["installed"].keys():
        return ["", "What megatron-core does not get from Transformer Engine cannot be told: a version is not known."]
    if not lost:
        return []
    lines = ["", "What this megatron-core does not get from this Transformer Engine:", ""]
    lines += ["| name | lost | remedy |", "|---|---|---|"]
    return lines + [f"| `{feature['name']}` | {feature['lost']} | {feature['outcome']} |" for feature in lost]
