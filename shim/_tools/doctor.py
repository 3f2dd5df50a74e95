"""`shim doctor`: what an issue report needs, gathered without importing torch, megatron or a trainer."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shim
from shim._api import default_plan
from shim._errors import ShimError
from shim._matrix.load import matrix_path
from shim._planning.options import PREFIX, matrix_argument
from shim._planning.texts import nothing_installed
from shim._printing.markdown import code, inline
from shim._printing.masks import masked_data, masked_variable
from shim._releases.detect import detect
from shim._te.features import LostFeature, lost_features
from shim._tools import others as _others
from shim._tools.notes import notes_of
from shim._tools.surroundings import TRAINERS, has_core_library, machine, packages
from shim._version import __version__

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["as_text", "examine"]

# Prefixes of variables that change what runs. The report shows all of them.
PREFIXES = (PREFIX, "NVTE_", "NCCL_", "TORCH_NCCL_", "MINDSPEED_", "PRIMUS_", "VERL_")
OTHER_VARIABLES = (
    *("PYTHONPATH", "PYTHONOPTIMIZE", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "MEGATRON_LM_PATH"),
)


def examine() -> dict[str, Any]:
    """The findings, with stable keys. `problems` lists what is wrong, `notes` what some models need.

    They are made to be pasted: secrets and home directories are masked.
    """
    found = masked_data(_examined())
    assert isinstance(found, dict)
    return found


def _examined() -> dict[str, Any]:
    environment = detect()
    problems = [f"{i.distribution}: {text}" for i in environment.installed.values() for text in i.problems]
    decisions: dict[str, Any] = {}
    notes: list[str] = []
    lost: tuple[LostFeature, ...] | None = None
    digest, content = None, ""
    known = packages()
    others: list[dict[str, Any]] = []
    try:
        made = default_plan()
        content = made.matrix.content
        digest = made.digest
        others = _patches_of_others(made, known)
        problems += filter(None, [nothing_installed(made.environment)])
        for id, d in made.decisions.items():
            decisions[id] = {"action": d.action, "variant": d.variant, "reason": d.reason}
        # Measure an unknown pair here, where a second does not matter.
        lost = lost_features(environment, made.decisions, read_sources=True)
        problems += [
            f"{d.id} is {d.action}: {d.reason}. Remedy: {d.remedy}"
            for d in made.decisions.values()
            if d.kind == "correctness" and d.action in ("drifted", "conflict")
        ]
        notes = notes_of(made)
    except ShimError as error:
        problems.append(str(error))
    te = environment.installed.get("transformer-engine")
    if te is not None and te.location and not has_core_library(te.location):
        problems.append(
            f"{te.distribution} {te.raw or ''} has no core library (libtransformer_engine.so), so its import fails, "
            "and that of megatron.core with it. Remedy: install transformer-engine[core_cu12] or [core_cu13] of this "
            "version for a GPU; on a CPU uninstall it, or call shim.testing.transformer_engine_on_cpu() before it"
        )
    torch = environment.installed.get("torch")
    if torch is None and {"megatron-core", "transformer-engine"} & environment.installed.keys():
        problems.append(
            "torch is not installed here, so nothing that shim patches can be imported. Remedy: install torch, or run "
            "this command in the environment that trains"
        )
    hardware = machine(torch.location if torch else None)
    problems += filter(None, [hardware["problem"]])
    if sys.flags.optimize:
        problems.append("python -O strips upstream's assertions, which guard against wrong results: run without -O")
    deaf = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}
    flags = [flag for name, flag in deaf.items() if getattr(sys.flags, name)]
    if flags:
        problems.append(
            f"python {flags[0]} does not notice `shim run`, nor any variable with -I or -E: leave it out, or call "
            "shim.apply() in the program"
        )
    return {
        "shim": {
            "version": __version__,
            "location": str(Path(shim.__file__).parent),
            "matrix": str(matrix_argument(None) or matrix_path()),
            "matrix_content": content,
        },
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": _platform()},
        "installed": {name: i.to_dict() for name, i in environment.installed.items()},
        "variables": _variables(),
        "machine": hardware,
        "packages": known,
        "others": others,
        "import_hooks": [_finder(finder) for finder in sys.meta_path],
        "digest": digest,
        "plan": decisions,
        "notes": notes,
        "lost_features": None if lost is None else [feature.to_dict() for feature in lost],
        "problems": problems,
    }


def _patches_of_others(made: Plan, known: Mapping[str, Mapping[str, str | None]]) -> list[dict[str, Any]]:
    """Patches of others: `target`, `who`, `where`, the `patches` of shim on it, and whether it is `loaded` now."""
    concerned: dict[str, list[str]] = {}
    for d in made.decisions.values():
        for target in dict.fromkeys([*d.targets, *(d.fingerprints if d.wanted else ())]):
            concerned.setdefault(target, []).append(d.id)
    found = [
        {"target": target, "patches": concerned[target], "who": what, "where": "", "loaded": True}
        for target, what in _others.loaded_foreign(made)
    ]
    for name, package in known.items():
        if name in TRAINERS and package["location"]:
            for target, where in _others.assignments_in(package["location"], concerned):
                found.append(
                    {"target": target, "patches": concerned[target], "who": name, "where": where, "loaded": False}
                )
    return found


def _variables() -> dict[str, str]:
    shown = {name: value for name, value in os.environ.items() if name in OTHER_VARIABLES or name.startswith(PREFIXES)}
    return {name: masked_variable(name, value) for name, value in sorted(shown.items())}


def _platform() -> str:
    # Not platform.platform(), which starts `uname -p`.
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _finder(finder: Any) -> str:
    cls = finder if isinstance(finder, type) else type(finder)
    return f"{cls.__module__}.{cls.__qualname__}"


def as_text(found: dict[str, Any]) -> str:
    """The findings as Markdown, to be pasted into an issue."""
    lines = ["### shim doctor", "", "Problems:" if found["problems"] else "No problems found."]
    lines += [*(f"- {inline(problem)}" for problem in found["problems"]), "", "Where:"]
    lines.append(f"- shim {found['shim']['version']} from {code(found['shim']['location'])}")
    content = found["shim"]["matrix_content"]
    other = f" (not the one that ships; content {inline(content)})" if content else ""
    lines.append(f"- matrix {code(found['shim']['matrix'])}{other}, digest {found['digest']}")
    lines.append(f"- Python {found['python']['version']} on {inline(found['python']['platform'])}")
    for name, installed in found["installed"].items():
        version = inline(installed["version"])
        lines.append(f"- {name} {version} ({installed['origin']}) at {code(installed['location'])}")
    for name in ("megatron-core", "transformer-engine", "torch"):
        if name not in found["installed"]:
            lines.append(f"- {name}: not installed")
    lines += _machine_as_text(found["machine"])
    for name, package in found["packages"].items():
        place = f" at {code(package['location'])}" if package["location"] else ""
        lines.append(f"- {name} {inline(package['version'] or 'of unknown version')}{place}")
    lines += [f"- {code(f'{name}={value}')}" for name, value in found["variables"].items()]
    lines.append(f"- import hooks: {inline(', '.join(found['import_hooks']))}")
    lines += ["", "Patches:"]
    for id, d in found["plan"].items():
        variant = f", variant {inline(d['variant'])}" if d["variant"] else ""
        lines.append(f"- {id}: {d['action']}{variant}: {inline(d['reason'])}")
    lines += ["", "Notes:", *(f"- {inline(note)}" for note in found["notes"])] if found["notes"] else []
    lines += _others_as_text(found["others"])
    lines += _lost_as_text(found)
    return "\n".join(lines)


def _machine_as_text(machine: Mapping[str, Any]) -> list[str]:
    gpus = [f"- GPU {place}: {inline(gpu)}" for place, gpu in enumerate(machine["gpus"])] or [
        "- GPU: none that nvidia-smi shows"
    ]
    cuda = machine["cuda"]
    versions = [f"torch built for {inline(cuda['torch'])}" if cuda["torch"] else "no torch that is built for CUDA"]
    versions += [f"toolkit {inline(cuda['toolkit'])}"] if cuda["toolkit"] else []
    versions += [f"{name} {inline(version)}" for name, version in machine["libraries"].items()]
    return [*gpus, f"- driver {inline(machine['driver'] or 'unknown')}; {', '.join(versions)}"]


def _others_as_text(others: Sequence[Mapping[str, Any]]) -> list[str]:
    if not others:
        return []
    lines = [
        "",
        "Other code that replaces shim's targets (a line with a file counts only if that code runs):",
        "",
    ]
    for other in others:
        where = f" in {inline(other['where'])}" if other["where"] else ", which is loaded"
        lines.append(f"- {inline(other['who'])}{where}: {code(other['target'])} ({', '.join(other['patches'])})")
    return lines


def _lost_as_text(found: dict[str, Any]) -> list[str]:
    lost = found["lost_features"]
    if lost is None and {"megatron-core", "transformer-engine"} <= found["installed"].keys():
        return ["", "The features that megatron-core loses cannot be told, because a version is not known."]
    if not lost:
        return []
    lines = ["", "Features that this megatron-core does not get from this Transformer Engine:"]
    return lines + [
        f"- {code(feature['name'])}: {inline(feature['lost'])}; {inline(feature['outcome'])}" for feature in lost
    ]
