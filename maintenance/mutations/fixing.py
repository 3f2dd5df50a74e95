"""Measure fixes as upstream might write them: does a patch stay right on a release that has fixed the defect itself?

    python maintenance/mutations/fixing.py                             all of them, again; writes fixed.json
    python maintenance/mutations/fixing.py --patches ID ... [--add]    of these patches; --add: those that are missing
    python maintenance/mutations/fixing.py --show [--patches ID ...]   what was measured

In a fix some bodies of a release are changed. The proofs of the patch run on it twice: as it is, which says whether it
is a fix, and with the patch.
"""

import argparse
import ast
import fcntl
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from mutants import Mutant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MEASURED = HERE / "fixed.json"
SECONDS = 150  # for one side of one proof
__all__ = ["Fix", "fixes_of", "measured", "read", "with_fixes"]


@dataclass(frozen=True)
class Fix:
    """One way in which a release could fix what a patch fixes.

    release: of megatron-core, with the Transformer Engine of its time after a plus where proofs need one.
    nodes: body -> its changed definition.
    """

    patch: str
    what: str
    release: str
    nodes: dict[str, ast.stmt]

    @property
    def core(self) -> str:
        return self.release.partition("+")[0]

    @property
    def text(self) -> str:
        return "\n".join(f"{body}\n{ast.unparse(node)}" for body, node in sorted(self.nodes.items()))


def with_fixes() -> list[str]:
    """The patches for which fixes are written."""
    return [file.stem.replace("_", "-") for file in sorted((HERE / "fixes").glob("[a-z]*.py"))]


@cache
def _sources(release: str):
    from shim._releases.sources import Sources
    from shim.testing.releases import fetch

    return Sources([fetch(release)])


def fixes_of(id: str) -> list[Fix]:
    """Those written in fixes/<patch>.py: FIXES is what is done -> body -> [(text, text in its place), ...].

    RELEASE is that of all, and RELEASES has others by what is done. PROOFS names the proofs that a fix is about, where
    it is not about all. Fixes of a commit are left out where its sources are not at hand.
    """
    from handwritten import _changed

    from shim._releases.fingerprint import definitions, split_target
    from shim.testing.releases import at_hand

    try:
        written = import_module(f"fixes.{id.replace('-', '_')}")
    except ModuleNotFoundError:
        return []
    found = []
    for what, given in written.FIXES.items():
        release, nodes = getattr(written, "RELEASES", {}).get(what, written.RELEASE), {}
        if "." not in release and not at_hand(release, "megatron-core"):
            continue
        for body, changes in given.items():
            module, qualname = split_target(body)
            (there,) = definitions(_sources(release.partition("+")[0]).tree(module), qualname)
            text = ast.unparse(there.node)
            for old, new in changes:
                changed = _changed(text, old, new)
                if changed == text:
                    raise LookupError(f"{id}, {what}: {qualname} has no {old!r}")
                text = changed
            nodes[body] = ast.parse(text).body[0]
        found.append(Fix(id, what, release, nodes))
    return found


def variant_of(matrix, fix: Fix):
    entry = matrix.patches[fix.patch]
    return entry.variants[matrix.pins[entry.distribution][fix.core][fix.patch].variant]


def measured(patches=None):
    """(patch, what, what was measured) of each fix that was measured as it is."""
    from measure import digest

    table = read()
    for id in patches or table:
        for fix in fixes_of(id):
            found = table.get(id, {}).get(fix.what)
            if found is not None and found["text"] == digest(fix.text):
                yield id, fix.what, found


# ---- measuring


def measure_all(matrix, fixes: list[Fix]) -> None:
    """One process for each release loads it. Every fix is a fork of that process, in which functions are replaced."""
    from measure import _forked

    for release in dict.fromkeys(fix.release for fix in fixes):
        mine = [fix for fix in fixes if fix.release == release]
        said = _forked(lambda release=release, mine=mine: _measure_on(matrix, release, mine), 10 * SECONDS * len(mine))
        if "error" in said:
            print(release, said["error"])


def _measure_on(matrix, release: str, fixes: list[Fix]) -> dict:
    from measure import _forked, digest

    _load(release)
    for fix in fixes:
        found = _forked(lambda fix=fix: _sides(matrix, fix), 8 * SECONDS)
        if "stock" not in found:
            found = {"stock": {"": found.get("error", "no answer")}, "patched": {}}
        found = {"text": digest(fix.text), **{side: _said(found[side]) for side in ("stock", "patched")}}
        with open(os.environ.get("SHIM_FIXES_LOG", os.devnull), "a") as log:
            log.write(f"{fix.patch} | {fix.what} | {found}\n")
        _record(fix.patch, fix.what, found)
    return {}


def _load(release: str) -> None:
    """Put a release first on sys.path, and import what most proofs need of it."""
    from shim._proving.worker import _NoTransformerEngine
    from shim.testing.releases import fetch

    core, _, engine = release.partition("+")
    sys.path[:0] = [str(fetch(core))]
    if engine:
        from shim import testing

        sys.path[1:1] = [str(fetch(engine, "transformer-engine"))]
        testing.transformer_engine_on_cpu()
    else:
        sys.meta_path.insert(0, _NoTransformerEngine())
    import megatron.core.models.gpt.gpt_model  # noqa: F401


def _said(found: dict[str, str]) -> str:
    wrong = {name: text for name, text in found.items() if text != "right"}
    return "; ".join(f"{name}: {text}" if name else text for name, text in wrong.items()) or "right"


def _sides(matrix, fix: Fix) -> dict[str, dict[str, str]]:
    """Runs in a process of its own: each proof that is about this variant and this fix, on both sides."""
    from placing import place

    from shim.testing.proof import proofs_of

    for body, node in fix.nodes.items():
        import_module(body.partition(":")[0])
        place(_sources(fix.core), body, Mutant("by hand", fix.what, node))
    entry, variant = matrix.patches[fix.patch], variant_of(matrix, fix)
    names = getattr(import_module(f"fixes.{fix.patch.replace('-', '_')}"), "PROOFS", {}).get(fix.what)
    about = [
        proof
        for proof in proofs_of(entry.module)
        if (not proof.variants or variant.name in proof.variants)
        and "cpu" in proof.devices
        and (not names or proof.name in names)
        and (not proof.te or "+" in fix.release)
    ]
    sides = {
        side: {proof.name: _measured(matrix, fix, proof, side == "patched") for proof in about}
        for side in ("stock", "patched")
    }
    return sides if about else {side: {"": "no proof is about it"} for side in sides}


def _measured(matrix, fix: Fix, proof, patched: bool) -> str:
    from measure import _forked

    from shim.testing.proof import Here, measure

    def run():
        ids = [*([fix.patch] if patched else []), *proof.beside]
        if ids:
            _apply(matrix, ids, fix, {fix.patch: dict(proof.options)} if proof.options and patched else None)
        side = measure(proof, Here("cpu", proof.ranks, proof.te))
        if os.environ.get("SHIM_SHOW"):
            print(side.details)
        return {"said": "right" if side.state == "right" else f"{side.state}: {side.text}"}

    answer = _forked(run, SECONDS)
    return answer.get("said") or answer.get("error", "no answer")


def _apply(matrix, ids: list[str], fix: Fix, options) -> None:
    """Apply these patches, with the variants that they have on the release without the fix."""
    import shim._api as api

    pins = {id: matrix.pins[matrix.patches[id].distribution].get(fix.core, {}).get(id) for id in ids}
    variants = {id: pin.variant for id, pin in pins.items() if pin is not None and pin.variant is not None}
    api.load_matrix = lambda *_: matrix  # while this runs somebody may edit the file
    api.apply_on_trial(variants, only=ids, require=ids, options=options)


def read() -> dict:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def _record(id: str, what: str, found: dict) -> None:
    """Several processes may measure at once."""
    from measure import write

    with open(HERE / "fixing.py") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        table = read()
        table.setdefault(id, {})[what] = found
        write(table, MEASURED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", nargs="*")
    parser.add_argument("--add", action="store_true", help="those alone that were not measured as they are")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    from measure import digest

    from shim._matrix.load import load_matrix

    matrix = load_matrix()
    if not options.show:
        import torch

        import shim.testing.proof  # noqa: F401

        torch.set_num_threads(1)
        torch._dynamo.config.disable = True  # compiling takes most of the time
        fixes = [fix for id in options.patches or with_fixes() for fix in fixes_of(id)]
        table = read()
        known = {(id, what): found["text"] for id, whats in table.items() for what, found in whats.items()}
        measure_all(matrix, [f for f in fixes if not options.add or known.get((f.patch, f.what)) != digest(f.text)])
    return show(options.patches)


def show(patches=None) -> int:
    """Print what was measured. 1 if one is no fix: it is not right on stock."""
    dead = 0
    for id, what, found in measured(patches):
        dead += found["stock"] != "right"
        print(f"{id} | {what} | stock {found['stock']} | patched {found['patched']}")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
