"""Processes that a trainer starts: an environment in which all of them apply shim, and Ray's runtime environment."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._errors import NotMetError, OptionError
from shim._options import PREFIX

__all__ = ["apply_in_ray_worker", "ray_runtime_env", "run", "run_environment", "variables_for"]

DIRECTORY = Path(__file__).with_name("_run")  # holds a sitecustomize.py
HOOK = "shim._workers.apply_in_ray_worker"
NEXT_HOOK = PREFIX + "RAY_NEXT_HOOK"


def variables_for(
    *,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    require: Iterable[str] | str = (),
    strict: bool = False,
    on_drift: str | None = None,
    matrix: str | os.PathLike[str] | None = None,
    lock: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """The MEGATRON_SHIM_ variables that say to another process what these arguments of `apply` say here."""
    lists = {"ONLY": only, "EXCLUDE": exclude, "REQUIRE": require}
    found = {name: ids if isinstance(ids, str) else ",".join(ids) for name, ids in lists.items() if ids}
    files = {"MATRIX": matrix, "LOCK": lock}
    found |= {name: os.path.abspath(path) for name, path in files.items() if path}
    if strict:
        found["STRICT"] = "1"
    if on_drift:
        found["ON_DRIFT"] = on_drift
    return {PREFIX + name: value for name, value in found.items()}


def run_environment(base: Mapping[str, str] | None = None, **options: Any) -> dict[str, str]:
    """`base` (this process's environment) changed so that every Python process started in it applies shim.

    Forked, spawned and torchrun's processes inherit it; `options` are those of `variables_for`. Python processes that
    take no notice of their environment (``python -I``, ``-E``, ``-S``) are out of reach.
    """
    environment = dict(os.environ if base is None else base)
    before = environment.get("PYTHONPATH")
    # An empty entry means the working directory, and is kept.
    kept = [entry for entry in before.split(os.pathsep) if not _is_ours(entry)] if before else []
    environment["PYTHONPATH"] = os.pathsep.join([str(DIRECTORY), *kept])
    return environment | variables_for(**options)


def _is_ours(entry: str) -> bool:
    return bool(entry) and os.path.abspath(entry) == str(DIRECTORY)


def run(command: Sequence[str], **options: Any) -> None:
    """Become `command`, in `run_environment`. Raises OptionError where there is no such command."""
    deaf = _deaf_flag(command)
    if deaf:
        raise NotMetError(
            f"{command[0]} {deaf} takes no notice of its environment, so shim would not be applied in it. Remedy: "
            f"leave {deaf} out, or call shim.apply() in the program."
        )
    try:
        os.execvpe(command[0], list(command), run_environment(**options))
    except OSError as error:
        raise OptionError(f"{command[0]} cannot be run: {error}") from None


def _deaf_flag(command: Sequence[str]) -> str:
    """The flag with which a Python that is called directly does not run sitecustomize; "" where there is none."""
    if not os.path.basename(command[0]).startswith("python"):
        return ""
    arguments = iter(command[1:])
    for argument in arguments:
        if not argument.startswith("-") or argument.startswith("--") or argument == "-":
            return ""
        for place, letter in enumerate(argument[1:], 2):
            if letter in "IES":
                return argument
            if letter in "cm":  # what follows is for the program
                return ""
            if letter in "WX":  # the rest is its value, or else the next argument
                if place == len(argument):
                    next(arguments, None)
                break
    return ""


def ray_runtime_env(runtime_env: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A runtime environment for Ray in which every worker process, on every node, applies shim when it starts.

        ray.init(runtime_env=shim.ray_runtime_env({"env_vars": {...}}, require=["mtp-recompute"]))

    Workers on other nodes inherit nothing of the driver's environment: `options` (of `variables_for`), and what of
    MEGATRON_SHIM_ is set here, travel in it. shim must be installed on every node; a worker where it is not, or where
    apply() raises, does not start. A worker_process_setup_hook that `runtime_env` has already is called afterwards; it
    must be named by its path, "module.function".
    """
    found = dict(runtime_env or {})
    here = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    variables = {**here, **variables_for(**options)}
    after = found.get("worker_process_setup_hook")
    if after is not None and after != HOOK:
        if not isinstance(after, str):
            raise OptionError(
                "name the worker_process_setup_hook by its path, module.function, so that shim can call it"
            )
        variables[NEXT_HOOK] = after
    found["worker_process_setup_hook"] = HOOK
    found["env_vars"] = {**variables, **found.get("env_vars", {})}
    return found


def apply_in_ray_worker() -> None:
    """What Ray calls in every worker process before anything else."""
    from shim._api import apply

    apply()
    after = os.environ.get(NEXT_HOOK)
    if after:
        module, _, name = after.rpartition(".")
        getattr(importlib.import_module(module), name)()
