"""Ask the proofs about mutants and fixes that have been measured: does `shim pin --prove` decide rightly on such trees?

    python maintenance/mutations/proving.py --count N [--patches ID ...]    N more of each patch; writes proved.json
    python maintenance/mutations/proving.py --show                          the counts, without proving

Each tree is a copy of a release in which a function is changed. Mutants on which the patch is right come first, then
fixes, then mutants that break the patch.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROVED = HERE / "proved.json"
# Mutants on which a test of a patch fails for what upstream itself does there. The other tests of the patch pass: of
# mtp-packed-sequences those of selected.py, else all. By patch and digest of the mutant's text: the test that
# measure.py met first.
#
# 938039f345fc, CheckpointFunction.forward | wraps what it recomputes: the tests say that a patch that has nothing to do
# puts no other object in the place of the function that a checkpoint keeps. Upstream puts a partial there itself.
# 184206c91653, _checkpointed_forward | change a constant: upstream asserts recompute_num_layers == 2, and so refuses 1,
# for rows without packing also without the patch.
RIGHT_BUT_FOR_STOCK = {
    ("config-override", "938039f345fc"): "test_checkpoints_keep_the_very_function",
    ("fp8-fp4-recompute", "938039f345fc"): "test_outside_of_any_region_nothing_changes",
    ("mtp-packed-sequences", "184206c91653"): "test_unpacked_rows_keep_every_bit[False-recompute]",
}
# Mutants that fix what the patch fixes. fixes/ has the same changes in other words, which have been measured.
FIXES_AMONG_MUTANTS = {
    "75cf4e4ae968": "expert-bias-padding, gives the mask a column",
    "0f2b0ffa8a4f": "expert-bias-padding, gives the mask a column by view",
    "62f6f39c8552": "mla-rope-table, computes whenever the length differs",
    # It also keeps the graph of a block with nothing to train. The patch does not change that.
    "d20ab0b0aff3": "frozen-recompute, makes the states require a gradient itself",
}
SECONDS = 900
PATIENCE = 120.0  # for one side of one proof
COUNTED = ("trees", "patches", "right yes", "right on stock", "right no", "WRONG YES", "false alarm")
__all__ = ["Case", "cases", "read", "table", "truth_of", "verdict"]


@dataclass(frozen=True)
class Case:
    """A changed tree about which is known what a patch does there.

    cell: the releases that are changed. truth: "right" where the patch is right there, "wrong" where not.
    fixed: the tree is right without the patch.
    nodes: body -> its changed definition. mutant: for a change that callers are told about.
    """

    patch: str
    what: str
    cell: str
    truth: str
    fixed: bool
    text: str
    nodes: dict
    mutant: object = None

    @property
    def key(self) -> str:
        return f"{self.cell} {self.what}"


def verdict(found: dict) -> str:
    """What came out, by what stands in the table about one case.

    "Fixed" is a wrong yes if the patch is wrong there, and "right on stock" if the tree has the defect.
    """
    said = found["verdict"]
    fixed = found["fixed"] or found["text"] in FIXES_AMONG_MUTANTS
    if said == "known":
        return "known"  # the fingerprint is that of the release: nothing was asked
    if said == "fixed":
        return "WRONG YES" if found["truth"] == "wrong" else "right yes"
    if said == "right on stock":
        return "right on stock" if fixed else "WRONG YES"
    return "false alarm" if found["truth"] == "right" or fixed else "right no"


def read() -> dict:
    return json.loads(PROVED.read_text()) if PROVED.exists() else {}


def table(found: dict) -> dict[str, Counter]:
    """How often each outcome came, of mutants and of fixes; how many trees and patches there are."""
    counts = {kind: Counter(dict.fromkeys(COUNTED, 0)) for kind in ("mutants", "fixes")}
    for cases in found.values():
        for kind, count in counts.items():
            mine = [case for case in cases.values() if case["fixed"] == (kind == "fixes")]
            count["patches"] += bool(mine)
            for case in mine:
                said = verdict(case)
                count["trees"] += 1
                count[said] += 1
    return counts


def cases(patches=None) -> list[Case]:
    """All mutants and fixes that were measured as they are."""
    return [*_mutants(patches), *_fixes(patches)]


def _fixes(patches):
    import fixing

    known = fixing.read()
    for id in known if patches is None else [id for id in patches if id in known]:
        written = {fix.what: fix for fix in fixing.fixes_of(id)}
        for _, what, found in fixing.measured([id]):
            fix = written[what]
            if found["stock"] == "right":
                truth = "right" if found["patched"] == "right" else "wrong"
                yield Case(id, what, fix.release, truth, True, found["text"], fix.nodes)


def _mutants(patches):
    import measure

    for cell, id, body, name, found, mutant in measure.measured_mutants(patches):
        if found["stock"] == "works" and not mutant.copies:
            truth = truth_of(id, found)
            what = f"{body.partition(':')[2]} | {name}"
            yield Case(id, what, cell, truth, False, found["text"], {body: mutant.node}, mutant)


def truth_of(id: str, found: dict) -> str:
    """Of a mutant that was measured: whether the patch is "right" or "wrong" there."""
    only = RIGHT_BUT_FOR_STOCK.get((id, found["text"]))
    return "right" if found["tests"] == "pass" or (only and found["first"].startswith(only)) else "wrong"


def _kind(case: Case) -> int:
    """Mutants on which the patch is right; fixes; mutants that it breaks."""
    return 1 if case.fixed else 2 if case.truth == "wrong" else 0


def _tree(case: Case, into: Path) -> list[Path]:
    """Copies of the releases of a case, in which its functions are changed."""
    from placing import Mutated, swapped

    from shim._releases.fingerprint import split_target
    from shim._releases.sources import Sources
    from shim.testing.releases import fetch

    core, _, te = case.cell.partition("+")
    releases = [fetch(core), *([fetch(te, "transformer-engine")] if te else [])]
    copies = []
    for number, release in enumerate(releases):
        copies.append(into / str(number))
        shutil.copytree(release, copies[-1], copy_function=os.link)
    sources = Sources(releases)
    trees: dict[str, ast.Module] = {}
    for body, node in case.nodes.items():
        module, qualname = split_target(body)
        if case.mutant is None:
            trees[module] = swapped(trees.get(module, sources.tree(module)), qualname, node)
            continue
        mutated = Mutated(sources, body, case.mutant)
        told = _told(sources, qualname) if case.mutant.told is not None else []
        trees |= {name: mutated.tree(name) for name in (module, *told)}
    for module, tree in trees.items():
        file = Path(sources.path(module))
        copy = next(c / file.relative_to(r) for r, c in zip(releases, copies) if file.is_relative_to(r))
        copy.unlink()  # it is a link to the file of the release
        copy.write_text(ast.unparse(ast.fix_missing_locations(tree)), "utf-8")
    return copies


def _told(sources, qualname: str) -> list[str]:
    """The modules of megatron-core in which something may call the function by its name."""
    name = qualname.rpartition(".")[2]
    if name.startswith("__") or name in ("forward", "backward"):
        return []
    top = Path(sources.path("megatron.core")).parent
    files = [file for file in top.rglob("*.py") if f"{name}(" in file.read_text("utf-8")]
    named = (file.relative_to(top.parents[1]).with_suffix("").parts for file in files)
    return [".".join(parts).removesuffix(".__init__") for parts in named]


def prove(case: Case) -> dict:
    from shim.testing.releases import environment

    with tempfile.TemporaryDirectory(prefix="shim-mutant-") as directory:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "proving.py"), "--here", case.patch],
            env=environment([*_tree(case, Path(directory)), ROOT]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    if done.returncode:
        raise SystemExit(f"{case.patch}, {case.what}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {"text": case.text, "truth": case.truth, "fixed": case.fixed, **found}


def _here(id: str) -> int:
    """Decide about one patch on the installed releases, with those that its proofs need beside it."""
    import shim
    from shim._proving.decide import decide
    from shim._proving.run import Request
    from shim.testing.proof import proofs_of

    matrix = shim.plan(lock=None).matrix
    beside = {other for proof in proofs_of(matrix.patches[id].module) for other in proof.beside}
    decided = decide(shim.plan(only=[id, *sorted(beside)], lock=None), Request(timeout=PATIENCE), lambda said: None)
    found = {judgement.id: judgement for judgement in decided.judgements}
    said = (
        {"verdict": found[id].verdict, "shown": found[id].shown} if id in found else {"verdict": "known", "shown": ""}
    )
    print(json.dumps(said))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", nargs="*")
    parser.add_argument("--count", type=int, default=1, help="of each patch and kind (default 1)")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return _here(options.here)
    if not options.show:
        _prove_some(options.patches, options.count)
    found = read()
    for id, known in found.items():
        for key, case in known.items():
            if verdict(case) in ("WRONG YES", "false alarm"):
                print(verdict(case), id, "|", key, "|", case["verdict"], "|", case["shown"])
    for kind, counts in table(found).items():
        print(kind, dict(counts))
    return 1 if any(counts["WRONG YES"] for counts in table(found).values()) else 0


def _prove_some(patches, count: int) -> None:
    """Of each patch and kind so many, in turns."""
    from measure import write

    known = read()
    left: dict[tuple[str, int], list[Case]] = {}
    for case in cases(patches):
        if known.get(case.patch, {}).get(case.key, {}).get("text") != case.text:
            left.setdefault((case.patch, _kind(case)), []).append(case)
    for turn in range(count):
        for _, found in sorted(left.items()):
            if turn < len(found):
                case = found[turn]
                said = prove(case)
                measured = read()
                measured.setdefault(case.patch, {})[case.key] = said
                write(measured, PROVED)
                told = (verdict(said), case.patch, case.key, said["verdict"], said["shown"])
                print(" | ".join(told), flush=True)


if __name__ == "__main__":
    sys.exit(main())
