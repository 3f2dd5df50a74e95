"""Locks: files that record an environment and its plan. A process under a lock accepts nothing else.

A lock may hold several environments, and for each what the proofs have shown on it (`shim pin --prove`). It names no
code, and nothing of it is run: an edited verdict changes at most which patches of shim apply.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shim._errors import NotMetError, OptionError
from shim._matrix.concerns import words_named
from shim._matrix.model import KINDS
from shim._planning.digest import differing_parts
from shim._planning.evidence import VERDICTS, tree_for, trees_of
from shim._planning.options import words_of
from shim._printing.printable import one_line
from shim._releases.files import UnsafeFileError, read_bounded, read_json
from shim._version import __version__

if TYPE_CHECKING:
    from shim._planning.plan import Decision, Plan

__all__ = [
    "HELD",
    "SHIM",
    "VERDICT_KEYS",
    "differences",
    "enforce_lock",
    "locked",
    "read_lock",
    "words_of_lock",
    "write_lock",
]

FORMAT = 7
HELD = "this process is held to the lock"  # the error of a process that differs from its lock
SHIM = "megatron-shim"
FEW, WIDE = 4, 160  # differences in an error, and characters of one; after an upgrade there may be a hundred
MAX_BYTES = 4_000_000  # a lock of a hundred patches has 100 kB
# The keys of a lock and of a patch in it, each with its type. All of a lock is compared: a reviewer may
# trust what he reads.
KEYS: dict[str, type] = {
    "code": dict,
    "digest": str,
    "drifted": list,
    "format": int,
    "kinds": list,
    "matrix": str,
    "packages": dict,
    "patches": dict,
    "releases": dict,
}
# A tree of a lock may have these as well: what its proofs have shown, and the words of `concerns`.
TREE_KEYS: dict[str, type] = {"concerns": list, "proved": dict}
PROVED_KEYS: dict[str, Any] = {
    "date": str,
    "files": dict,
    "generic": dict,
    "patches": dict,
    "python": str,
    "torch": str,
    "where": str,
}
VERDICT_KEYS: dict[str, Any] = {
    "fingerprints": dict,
    "proofs": dict,
    "shown": str,
    "variant": (str, type(None)),
    "verdict": str,
}
# A verdict may have this as well: the targets without which the patch was accepted.
MORE_VERDICT_KEYS: dict[str, Any] = {"dropped": list}
PATCH_KEYS: dict[str, type] = {
    "code": str,
    "fingerprints": dict,
    "module": str,
    "options": dict,
    "variant": str,
}
NAMES = {dict: "mapping", list: "list", str: "text", int: "number"}


def locked(plan: Plan) -> dict[str, Any]:
    """The content of a lock: the identity of the plan, its digest, the kinds that were asked for, and what has drifted.

    A patch that the release does not need is not in the identity. If other code edits the release, it drifts.
    """
    kinds = [kind for kind in KINDS if plan.options.kinds is None or kind in plan.options.kinds]
    drifted = sorted(id for id, d in plan.decisions.items() if _has_drifted(d.without_conflict or d))
    asked = {} if plan.options.concerns is None else {"concerns": list(plan.options.concerns)}
    return {"format": FORMAT, **plan.identity, "kinds": kinds, **asked, "drifted": drifted, "digest": plan.digest}


def _has_drifted(decision: Decision) -> bool:
    return decision.action == "drifted" or bool(decision.dropped)


def write_lock(
    path: str | os.PathLike[str],
    plan: Plan,
    proved: Mapping[str, Any] | None = None,
    also: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Write the lock of `plan`, whole or not at all, and return its content.

    proved: what the proofs have shown on this tree.    also: further trees that the lock accepts.
    OptionError if it cannot be written, or shim is disabled.
    """
    if plan.options.disabled:
        raise OptionError("MEGATRON_SHIM_DISABLE is set, so there is nothing to lock; unset it")
    file = Path(path)
    scratch = file.parent / f".{file.name}.{os.getpid()}"
    content = locked(plan)
    if proved is not None:
        content["proved"] = proved
    if others := list(also):
        content["also"] = others
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    try:
        if file.exists() and not file.is_file():
            raise OSError("the path is not a regular file")  # os.replace would take its place
        # `read_lock` accepts this mode, whatever the umask is.
        opened = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(opened, "w", encoding="utf-8") as written:
            written.write(text)
        os.replace(scratch, file)
    except OSError as error:
        raise OptionError(f"the lock {file} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    return content


def read_lock(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a lock. OptionError if the file is none, or has a key twice, or one that means nothing."""
    file = Path(path)
    remedy = "Remedy: write a new lock with `shim pin --lock FILE`."
    try:
        content = read_bounded(file, MAX_BYTES)
        if len(content) > MAX_BYTES:
            raise OptionError(f"the lock {file} is larger than {MAX_BYTES} bytes. {remedy}")
        found = read_json(content)
    except FileNotFoundError:
        raise OptionError(f"there is no lock {file}. {remedy}") from None
    except UnsafeFileError as error:
        raise OptionError(f"the lock {file} {error}.") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"the lock {file} cannot be read: {error}. {remedy}") from None
    written = found.get("format") if isinstance(found, dict) else None
    if type(written) is int and written != FORMAT:
        raise OptionError(
            f"{file} is a lock of format {written}, and megatron-shim {__version__} reads format {FORMAT}. {remedy}"
        )
    if odd := _ill_formed(found):
        raise OptionError(f"{file} is not a lock of format {FORMAT}: {odd}. {remedy}")
    return found


def words_of_lock(path: str, content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The words of `concerns` that a lock keeps, None for every run. They name no file."""
    what, words = f"the lock {path}", content.get("concerns")
    return None if words is None else words_named(",".join(words_of(what, words)), what)


def _ill_formed(found: Any) -> str:
    """What is missing, of another type or not known in a lock; "" if nothing is."""
    odd = _ill_formed_tree(found, "it", {**TREE_KEYS, "also": list})
    for place, tree in enumerate(found.get("also", ()) if not odd else ()):
        odd = odd or _ill_formed_tree(tree, f"also.{place}", TREE_KEYS)
    return odd


def _ill_formed_tree(tree: Any, what: str, more: Mapping[str, Any]) -> str:
    if odd := _odd(tree, what, KEYS, more):
        return odd
    if tree["format"] != FORMAT:
        return f"'format' of {what} is {tree['format']}"
    within, proved = "" if what == "it" else f"{what}.", tree.get("proved")
    odd = _odd_members(tree["patches"], f"{within}patches", PATCH_KEYS)
    return odd or ("" if proved is None else _odd_proofs(proved, f"{within}proved"))


def _odd_proofs(proved: Any, what: str) -> str:
    odd = _odd(proved, what, PROVED_KEYS)
    odd = odd or _odd_members(proved["patches"], f"{what}.patches", VERDICT_KEYS, MORE_VERDICT_KEYS)
    if odd:
        return odd
    for id, said in proved["patches"].items():
        if said["verdict"] not in VERDICTS:
            return f"{said['verdict']!r} is no verdict of {what}.patches.{id}"
    for module, digests in proved["files"].items():
        if not isinstance(digests, dict) or not all(isinstance(bodies, dict) for bodies in digests.values()):
            return f"{what}.files.{module} is no mapping of mappings"
    return ""


def _odd_members(found: Mapping[str, Any], what: str, *keys: Mapping[str, Any]) -> str:
    return next(filter(None, (_odd(member, f"{what}.{name}", *keys) for name, member in found.items())), "")


def _odd(found: Any, what: str, keys: Mapping[str, Any], more: Mapping[str, Any] = MappingProxyType({})) -> str:
    """What keeps a value from being a mapping with all of `keys`, and perhaps some of `more`; "" if nothing does."""
    if not isinstance(found, dict):
        return f"{what} is no mapping"
    known = {**keys, **more}
    for key in keys:
        if key not in found:
            return f"{what} lacks {key!r}"
    for key, value in found.items():
        if key not in known:
            return f"unknown key {key!r} in {what}; known are {', '.join(known)}"
        if type(value) not in (known[key] if isinstance(known[key], tuple) else (known[key],)):
            return f"{key!r} of {what} is no {NAMES.get(known[key], 'text')}"
    return ""


def differences(lock: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Every difference between two locks, each with both sides.

    What another release brings with it is only counted: bodies, and of another megatron-shim the code of patches.
    """
    found: list[str] = []
    for name in sorted({*lock["releases"], *here["releases"]}):
        found += _differing(name, lock["releases"].get(name), here["releases"].get(name), "not installed")
    other = {line.partition(":")[0] for line in found}
    if parts := differing_parts(lock["code"], here["code"]):
        theirs, ours = (f"{SHIM} {side['releases'].get(SHIM)}" for side in (lock, here))
        code_of = f"that of {theirs} in the lock, other code of {ours} here"
        found.append(f"shim's own code differs ({', '.join(parts)}): {code_of}")
    for name in sorted({*lock["packages"], *here["packages"]}):
        theirs, ours = lock["packages"].get(name), here["packages"].get(name)
        found += _differing(f"files of the package {name}", theirs, ours, "none")
    found += _differing("matrix", lock.get("matrix"), here["matrix"], "none")
    found += _differing("kinds", _listed(lock["kinds"]), _listed(here["kinds"]), "none")
    theirs, ours = (_listed(side.get("concerns") or ["all runs"]) for side in (lock, here))
    found += _differing("concerns", theirs, ours, "none")
    found += _differing("drifted", _listed(lock["drifted"]), _listed(here["drifted"]), "none")
    bodies: list[str] = []
    code: list[str] = []
    for id in sorted({*lock["patches"], *here["patches"]}):
        theirs, ours = lock["patches"].get(id), here["patches"].get(id)
        if theirs is None or ours is None:
            found.append(f"{id}: {_applied(theirs)} in the lock, {_applied(ours)} here")
            continue
        for part in ("variant", "module"):
            found += _differing(f"{id}: {part}", theirs.get(part), ours[part], "none")
        code += _differing(f"{id}: code", theirs["code"], ours["code"], "none")
        for part, what, lines in (("fingerprints", "body of", bodies), ("options", "option", found)):
            for name in sorted({*theirs[part], *ours[part]}):
                lines += _differing(f"{id}: {what} {name}", theirs[part].get(name), ours[part].get(name), "none")
    found += [f"bodies: {len(bodies)} in the lock, others here"] if bodies and other - {SHIM} else bodies
    found += [f"code of patches: {len(code)} in the lock, others here"] if code and SHIM in other else code
    return found or _differing("digest", lock["digest"], here["digest"], "none")


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(name if isinstance(name, str) and "," not in name else _exact(name) for name in names) or "none"


def _applied(patch: Mapping[str, Any] | None) -> str:
    return "not applied" if patch is None else f"applied (variant {patch.get('variant')})"


def _differing(what: str, theirs: Any, ours: Any, missing: str) -> list[str]:
    if _exact(theirs) == _exact(ours):
        return []
    shown = [missing if side is None else str(side) for side in (theirs, ours)]
    if shown[0] == shown[1]:  # the text "4" and the number 4
        shown = [_exact(side) for side in (theirs, ours)]
    return [f"{what}: {shown[0]} in the lock, {shown[1]} here"]


def _exact(value: Any) -> str:
    """Text that is the same for values that a reader of JSON takes for the same. To Python, 1 and true are equal."""
    return json.dumps(value, sort_keys=True)


def enforce_lock(plan: Plan) -> None:
    """Raise NotMetError, with the first differences, if the plan is not that of its lock."""
    path = plan.options.lock
    if path is None or plan.options.disabled:
        return
    lock = plan.options.lock_content
    if lock is None:
        lock = read_lock(path)
    tree = tree_for(lock, plan.environment)
    found = differences(tree, locked(plan))
    if found:
        shown = "; ".join(one_line(difference, WIDE) for difference in found[:FEW])
        if len(found) > FEW:
            shown += f"; and {len(found) - FEW} more"
        if more := len(trees_of(lock)) - 1:
            shown += (
                f" ({more} more tree{'s' if more > 1 else ''} in the lock {'are' if more > 1 else 'is'} less like it)"
            )
        left_out = [id for id in tree["patches"] if id in plan.options.exclude]
        first = f"take {', '.join(left_out[:FEW])} out of MEGATRON_SHIM_EXCLUDE and `exclude`; or " if left_out else ""
        raise NotMetError(
            f"{HELD} {path}, but differs from it: {shown}. Nothing was applied. Remedy: {first}see `shim diff {path}`, "
            "then install what the lock names, or write a new lock with `shim pin --lock FILE`."
        )
