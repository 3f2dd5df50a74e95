"""Locks: files that record one environment and its plan. A process under a lock accepts nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shim._errors import NotMetError, OptionError
from shim._matrix.model import KINDS
from shim._releases.files import UnsafeFileError, read_bounded

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["differences", "enforce_lock", "locked", "read_lock", "write_lock"]

FORMAT = 2
SHIM = "megatron-shim"
MAX_BYTES = 4_000_000  # a lock of a hundred patches has 100 kB


def locked(plan: Plan) -> dict[str, Any]:
    """The content of a lock: the identity of the plan, its digest, and the kinds that were asked for."""
    kinds = [kind for kind in KINDS if plan.options.kinds is None or kind in plan.options.kinds]
    return {"format": FORMAT, **plan.identity, "kinds": kinds, "digest": plan.digest}


def write_lock(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the lock of `plan`, whole or not at all. OptionError where it cannot be written, or shim is disabled."""
    if plan.options.disabled:
        raise OptionError("MEGATRON_SHIM_DISABLE is set, so there is nothing to lock; unset it")
    file = Path(path)
    scratch = file.parent / f".{file.name}.{os.getpid()}"
    text = json.dumps(locked(plan), indent=2, sort_keys=True) + "\n"
    try:
        if file.exists() and not file.is_file():
            raise OSError("the path is not a regular file")  # os.replace would take its place
        # `read_lock` accepts this mode, whatever the umask is.
        opened = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(opened, "w", encoding="utf-8") as written:
            written.write(text)
        os.replace(scratch, file)
    except OSError as error:
        raise OptionError(f"the lock {file} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def read_lock(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a lock. OptionError where the file is none."""
    file = Path(path)
    remedy = "Remedy: write it anew with `shim pin --lock FILE`."
    try:
        text = read_bounded(file, MAX_BYTES)
        if len(text) > MAX_BYTES:
            raise OptionError(f"the lock {file} is larger than {MAX_BYTES} bytes. {remedy}")
        found = json.loads(text)
    except FileNotFoundError:
        raise OptionError(f"there is no lock {file}. {remedy}") from None
    except UnsafeFileError as error:
        raise OptionError(f"the lock {file} {error}.") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"the lock {file} cannot be read: {error}. {remedy}") from None
    if not _well_formed(found):
        raise OptionError(f"{file} is not a lock of format {FORMAT}. {remedy}")
    return found


def _well_formed(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("digest"), str):
        return False
    releases, patches = found.get("releases"), found.get("patches")
    return (
        isinstance(releases, dict)
        and isinstance(found.get("kinds"), list)
        and isinstance(patches, dict)
        and all(
            isinstance(p, dict)
            and "variant" in p
            and isinstance(p.get("fingerprints"), dict)
            and isinstance(p.get("options"), dict)
            for p in patches.values()
        )
    )


def differences(lock: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Every difference between two locks, each with both sides.

    What another release brings with it is only counted: bodies, and of another megatron-shim the code of patches.
    """
    found: list[str] = []
    for name in sorted({*lock["releases"], *here["releases"]}):
        found += _differing(name, lock["releases"].get(name), here["releases"].get(name), "not installed")
    other = {line.partition(":")[0] for line in found}
    found += _differing("matrix", lock.get("matrix"), here["matrix"], "none")
    found += _differing("kinds", _listed(lock["kinds"]), _listed(here["kinds"]), "none")
    bodies: list[str] = []
    code: list[str] = []
    for id in sorted({*lock["patches"], *here["patches"]}):
        theirs, ours = lock["patches"].get(id), here["patches"].get(id)
        if theirs is None or ours is None:
            found.append(f"{id}: {_applied(theirs)} in the lock, {_applied(ours)} here")
            continue
        for part in ("variant", "module"):
            found += _differing(f"{id}: {part}", theirs.get(part), ours[part], "none")
        code += _differing(f"{id}: code", theirs.get("code"), ours["code"], "none")
        for part, what, lines in (("fingerprints", "body of", bodies), ("options", "option", found)):
            for name in sorted({*theirs[part], *ours[part]}):
                lines += _differing(f"{id}: {what} {name}", theirs[part].get(name), ours[part].get(name), "none")
    for what, lines, brought in (("bodies", bodies, other - {SHIM}), ("code of patches", code, other & {SHIM})):
        found += [f"{what}: {len(lines)} in the lock, others here"] if brought and lines else lines
    return found or _differing("digest", lock["digest"], here["digest"], "none")


def _listed(kinds: Iterable[Any]) -> str:
    return ", ".join(map(str, kinds)) or "none"


def _applied(patch: Mapping[str, Any] | None) -> str:
    return "not applied" if patch is None else f"applied (variant {patch.get('variant')})"


def _differing(what: str, theirs: Any, ours: Any, missing: str) -> list[str]:
    if theirs == ours:
        return []
    shown = [missing if side is None else str(side) for side in (theirs, ours)]
    return [f"{what}: {shown[0]} in the lock, {shown[1]} here"]


def enforce_lock(plan: Plan) -> None:
    """Raise NotMetError, with every difference, where the plan is not that of its lock."""
    path = plan.options.lock
    if path is None or plan.options.disabled:
        return
    found = differences(read_lock(path), locked(plan))
    if found:
        shown = "; ".join(found)
        raise NotMetError(
            f"this process is held to the lock {path}, but differs from it: {shown}. Nothing was applied. Remedy: "
            "install what the lock names, or write it anew with `shim pin --lock FILE` after a review."
        )
