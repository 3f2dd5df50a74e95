"""The identity of a plan: the releases, the matrix, shim's code, and the bodies and code of every patch to apply."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from shim._matrix.model import Matrix
from shim._planning.decision import Decision
from shim._planning.own_code import own_code
from shim._planning.patch_code import Code, code_of_package
from shim._releases.detect import Environment
from shim._version import __version__

__all__ = ["digest_of", "identity_of"]

SHIPPED = "shipped"  # stands for the hash of the matrix that ships


def identity_of(
    decisions: Mapping[str, Decision], matrix: Matrix, environment: Environment, packages: Iterable[str] = ()
) -> dict[str, Any]:
    """Plain data that is equal in two processes with the same files and arguments.

    Neither what they have imported nor what others have patched in them changes it.
    packages: those that the caller names; all their files count as soon as a patch lies outside of shim.patches.
    """
    code, patches, is_foreign = Code(packages), {}, False
    for id, decision in ((id, decision.without_conflict or decision) for id, decision in decisions.items()):
        if decision.wanted:
            module = matrix.patches[id].module
            is_foreign |= not module.startswith("shim.")
            patches[decision.id] = {
                "variant": decision.variant,
                "fingerprints": dict(decision.fingerprints),
                "options": _plain(decision.options),
                "module": module,
                "code": code.of(module),
                "own": code.own(module),
            }
    installed = {name: i.raw for name, i in environment.installed.items()}
    return {
        "releases": {"megatron-shim": __version__, **installed},
        "matrix": matrix.content or SHIPPED,
        "code": own_code(),
        "packages": {name: code_of_package(name) for name in sorted(packages)} if is_foreign else {},
        "patches": patches,
    }


def digest_of(identity: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a file would give them back: what JSON does not know becomes text."""
    return json.loads(json.dumps(dict(options), default=str))
