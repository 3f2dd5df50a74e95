"""An environment in which all processes of a trainer apply shim, and the runtime environment for Ray."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shim._errors import NotMetError, OptionError
from shim._planning.options import (  # noqa: F401 - two of them for get_type_hints()
    PREFIX,
    SAID,
    Arguments,
    Given,
    Ids,
    PatchOptions,
    checked_concerns,
    is_true,
    takes_arguments,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CommandError", "apply_in_ray_worker", "ray_runtime_env", "refuse_to_be_ignored", "run", "run_environment"]

DIRECTORY = Path(__file__).with_name("run")  # holds a sitecustomize.py
# Start of an entry of PYTHONPATH below DIRECTORY that names the packages that may hold patch modules. It is not a
# variable: a user who can set PYTHONPATH can run any code anyway, and one who can set another variable must not.
ALLOWED = "packages="
HOOK = "shim._workers.environment.apply_in_ray_worker"
CONCERNS = PREFIX + "CONCERNS"
NEXT_HOOK = PREFIX + "RAY_NEXT_HOOK"
# Options of Python in front of -c, -m or the program; and those of them with -I or -E (no PYTHONPATH) or -S (no site).
OPTION = re.compile(r"-[^-cm].*")
IGNORES = re.compile(r"-[bBdhiOPqRsuvVx]*[IES].*")
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the driver of a submitted job
RAY_PACKAGES = PREFIX + "RAY_PACKAGES"  # only HOOK reads it, and only a runtime environment sets HOOK


@takes_arguments
def run_environment(
    base: Mapping[str, str] | None = None,
    **given: Unpack[Given],
) -> dict[str, str]:
    """A copy of `base` in which every Python process applies shim. The default of `base` is this process's environment.

    Forked and spawned processes and those of torchrun inherit it. The other arguments are those of `apply`. They
    outrank the MEGATRON_SHIM_ variables of `base`, except _DISABLE and _EXCLUDE. Python processes that ignore
    their environment (``python -I``, ``-E``, ``-S``) are out of reach. Raises OptionError for arguments that are not
    usable.
    """
    asked = Arguments(**given)
    environment = dict(os.environ if base is None else base)
    before = environment.get("PYTHONPATH")
    # An empty entry stands for the working directory, so it is kept.
    entries = before.split(os.pathsep) if before else []
    ours = [entry for entry in entries if _is_ours(entry)]
    allowed = [name for entry in ours for name in os.path.basename(entry).partition(ALLOWED)[2].split(",") if name]
    packages = ",".join(dict.fromkeys([*allowed, *asked.package_names]))
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(DIRECTORY), *([str(DIRECTORY / (ALLOWED + packages))] if packages else [])]
        + [entry for entry in entries if entry not in ours]
    )
    said = asked.variables()
    return {**environment, **said, **_of_the_operator(environment, said)}


def _of_the_operator(*sources: Mapping[str, str]) -> dict[str, str]:
    """The variables that always win. Each source can add to them, and none can take one back."""
    exclude, disable = PREFIX + "EXCLUDE", PREFIX + "DISABLE"
    excluded = ",".join(filter(None, (source.get(exclude, "").strip() for source in sources)))
    off = any(is_true(disable, source.get(disable, "")) for source in sources)
    found = {exclude: excluded} if excluded else {}
    return {**found, disable: "1"} if off else found


def _is_ours(entry: str) -> bool:
    return bool(entry) and str(DIRECTORY) in (path := os.path.abspath(entry), os.path.dirname(path))


def refuse_to_be_ignored(command: Sequence[str]) -> None:
    """Raise NotMetError if `command` is a Python with -I, -E or -S, which keep it from applying shim."""
    words = list(command[1:]) if command and os.path.basename(command[0]).startswith("python") else []
    while words and OPTION.fullmatch(word := words.pop(0)):
        if IGNORES.fullmatch(word):
            raise NotMetError(
                f"{command[0]}: with {word} Python ignores shim's environment, so shim would not be "
                f"applied. Remedy: leave {word} out, or call shim.apply() in the program."
            )
        del words[: word in ("-W", "-X")]  # the next word is its value


class CommandError(OptionError):
    """A command cannot be run. `exit_code` is the one that a shell would return."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(command: Sequence[str], **arguments: Any) -> None:
    """Replace this process by `command`, in `run_environment(**arguments)`. CommandError if it cannot run."""
    refuse_to_be_ignored(command)
    environment = run_environment(**arguments)
    environment.pop(SAID, None)  # it is a job of its own
    try:
        os.execvpe(command[0], list(command), environment)
    except (OSError, ValueError) as error:  # ValueError: a null character
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        why = getattr(error, "strerror", None) or error  # not the whole OSError: it names only the last file tried
        raise CommandError(f"{command[0]} cannot be run: {why}", 127 if missing else 126) from None


@takes_arguments
def ray_runtime_env(
    runtime_env: Mapping[str, Any] | None = None,
    **given: Unpack[Given],
) -> dict[str, Any]:
    """A runtime environment for Ray in which every worker process, on every node, applies shim when it starts.

        ray.init(runtime_env=shim.ray_runtime_env({"env_vars": {...}}, require=["mtp-recompute"]))

    Workers on other nodes do not inherit the environment of the driver. The runtime environment carries the arguments,
    which are those of `apply`, and the MEGATRON_SHIM_ variables of this process, but for those that the submission of
    its job carries. shim must be installed on every node: a worker without it does not start, nor one in which apply()
    raises. shim calls the worker_process_setup_hook of `runtime_env` afterwards, which must be named by its path,
    "module.function". Raises OptionError for arguments that are not usable.
    """
    asked = Arguments(**given)
    found = dict(runtime_env or {})
    theirs = dict(found.get("env_vars") or {})
    here = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for name in (PREFIX + "MATRIX", PREFIX + "LOCK"):
        if here.get(name):
            here[name] = os.path.abspath(here[name])  # a worker has another working directory
    if here.get(CONCERNS):
        here[CONCERNS] = ",".join(checked_concerns(CONCERNS, here[CONCERNS]) or ())  # and not the file that it may name
    said = asked.variables()
    variables = {**here, **said, **theirs, **_of_the_operator(here, said, theirs)}
    packages = asked.package_names
    variables |= {RAY_PACKAGES: ",".join(packages)} if packages else {}
    after = found.get("worker_process_setup_hook")
    if after is not None and after != HOOK:
        if not isinstance(after, str):
            raise OptionError(
                "name the worker_process_setup_hook by its path, module.function, so that shim can call it"
            )
        variables[NEXT_HOOK] = after
    found["worker_process_setup_hook"] = HOOK
    of_job = _variables_of_job()
    found["env_vars"] = {
        name: value for name, value in variables.items() if name in theirs or of_job.get(name) != value
    }
    return found


def _variables_of_job() -> dict[str, Any]:
    """The env_vars that `ray job submit` was given for the job of this driver. {} outside of one.

    Workers get them anyway, and Ray refuses a variable that the driver's ray.init names as well.
    """
    try:
        found = json.loads(os.environ.get(RAY_JOB, "")).get("runtime_env", {}).get("env_vars", {})
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def apply_in_ray_worker() -> None:
    """Ray calls this in every worker process before anything else."""
    from shim._api import apply

    if not os.environ.get("RANK"):
        os.environ[SAID] = "1"  # the workers of a job are many, and none of them is the first
    apply(packages=os.environ.get(RAY_PACKAGES, ""))
    after = os.environ.get(NEXT_HOOK)
    if after:
        module, _, name = after.rpartition(".")
        getattr(importlib.import_module(module), name)()
