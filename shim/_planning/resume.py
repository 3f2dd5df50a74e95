"""The part of a training checkpoint about its patches, and its differences from the patches in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shim._planning.digest import differing_parts
from shim._planning.lock import SHIM, locked
from shim._planning.plan import Plan

__all__ = ["differs", "state_of"]


def state_of(plan: Plan) -> dict[str, Any]:
    """The data to store: plain, of a few kB, as in a lock, without the bodies."""
    whole = locked(plan)
    parts = ("variant", "options", "code")
    patches = {id: {part: p[part] for part in parts} for id, p in whole["patches"].items()}
    kept = ("digest", "releases", "code", "packages")
    return {**{name: whole[name] for name in kept}, "patches": patches}


def differs(saved: Mapping[str, Any] | str | None, plan: Plan) -> str:
    """Every difference between `saved` (a `state_of`, or just a digest) and the plan, in words. "" for none."""
    here = state_of(plan)
    if isinstance(saved, str):
        return "" if saved == here["digest"] else f"digest {saved} then, {here['digest']} now"
    if not isinstance(saved, Mapping):
        return f"nothing was recorded then, digest {here['digest']} now"
    found = []
    for part in ("releases", "patches"):
        then, now = saved.get(part), here[part]
        then = then if isinstance(then, Mapping) else {}
        for name in sorted({*then, *now}, key=str):
            one, other = then.get(name), now.get(name)
            if one != other:
                code = isinstance(one, Mapping) and isinstance(other, Mapping) and one.get("code") != other["code"]
                differs_in_code = " (its code differs)" if code else ""
                found.append(f"{name}: {_shown(one)} then, {_shown(other)} now{differs_in_code}")
    found += _code_that_differs(saved, here)
    found += (f"{key!r} then, which this megatron-shim does not know" for key in saved if key not in here)
    if not found and saved.get("digest") != here["digest"]:
        found.append(f"digest {saved.get('digest')} then, {here['digest']} now (bodies, or the matrix, differ)")
    return "; ".join(found)


def _code_that_differs(saved: Mapping[Any, Any], here: Mapping[str, Any]) -> Iterator[str]:
    then, now = (side if isinstance(side, Mapping) else {} for side in (saved.get("releases"), here["releases"]))
    shim = f"{SHIM} {_shown(then.get(SHIM))} then, {now[SHIM]} now"
    if parts := differing_parts(saved.get("code"), here["code"]):
        yield f"shim's own code differs ({', '.join(parts)}; {shim})"
    if packages := differing_parts(saved.get("packages"), here["packages"]):
        yield f"files of {', '.join(packages)} differ"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        given = value.get("options")
        options = "".join(f", {name}={given[name]!r}" for name in given) if isinstance(given, Mapping) else ""
        return f"variant {value.get('variant')}{options}"
    return str(value)
