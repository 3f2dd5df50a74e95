"""Ask the proofs about mutants and fixes that have been measured: does `shim pin --prove` decide rightly on such trees?

    python tests/mutations/proving.py --count N [--patches ID ...]    N more of each patch; writes proved.json
    python tests/mutations/proving.py --show                          the counts, without proving

Each tree is a copy of a release in which a function is changed. Those come first that the contracts refuse although the
patch is right there; of the rest those that break the patch.
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
# Tests that ask which object a function keeps. A tree on which one of them alone fails may train right with the patch.
STRUCTURE = ("test_checkpoints_keep_the_very_function",)
SECONDS = 900
PATIENCE = 120.0  # for one side of one proof
__all__ = ["Case", "cases", "read", "table", "truth_of", "verdict"]


@dataclass(frozen=True)
class Case:
    """A changed tree about which is known what a patch does there.

    cell: the releases that are changed. truth: "right" where the patch is right there, "wrong" where not, or "unknown".
    fixed: the tree is right without the patch. refused: why the contracts leave the patch out, "" where they do not.
    nodes: body -> its changed definition. mutant: for a change that callers are told about.
    """

    patch: str
    what: str
    cell: str
    truth: str
    fixed: bool
    refused: str
    text: str
    nodes: dict
    mutant: object = None

    @property
    def key(self) -> str:
        return f"{self.cell} {self.what}"


def verdict(found: dict) -> str:
    """What came out, by what stands in the table about one case.

    "Fixed" is a wrong yes where the patch is wrong. Where the tree is right without the patch, so is "right on stock".
    """
    said = found["verdict"]
    if said == "known":
        return "known"  # the fingerprint is that of the release: nothing was asked
    if found["truth"] == "unknown":
        return "unknown"
    if said == "fixed":
        return "WRONG YES" if found["truth"] == "wrong" else "right yes"
    if said == "right on stock":
        return "right no" if found["fixed"] else "right on stock"
    return "false alarm" if found["truth"] == "right" or found["fixed"] else "right no"


def read() -> dict:
    return json.loads(PROVED.read_text()) if PROVED.exists() else {}


def table(found: dict) -> Counter:
    """How often each outcome came; and of the cases that contracts refuse without need, how many are left."""
    counts: Counter = Counter()
    for cases in found.values():
        for case in cases.values():
            said = verdict(case)
            counts[said] += 1
            if case["refused"] and (case["truth"] == "right" or case["fixed"]):
                counts["drifted"] += 1
                counts["drifted still"] += said == "false alarm"
    return counts


def cases(patches=None) -> list[Case]:
    """All mutants and fixes that were measured as they are."""
    return [*_mutants(patches), *_fixes(patches)]


def _fixes(patches):
    import fixing

    from shim._matrix.load import load_matrix

    matrix, measured = load_matrix(), fixing.read()
    for id in patches or measured:
        written = {fix.what: fix for fix in fixing.fixes_of(id)} if id in measured else {}
        for id, what, refused, found in fixing.judged(matrix, measured, [id] if written else []):
            fix = written[what]
            if found["stock"] == "right":
                truth = "right" if found["patched"] == "right" else "wrong"
                yield Case(id, what, fix.release, truth, True, refused, found["text"], fix.nodes)


def _mutants(patches):
    import judge
    import measure

    for cell, id, body, name, refused, found, mutant in judge.judged_mutants(measure.read(), patches):
        if found["stock"] == "works" and not mutant.copies:
            truth = truth_of(found)
            what = f"{body.partition(':')[2]} | {name}"
            yield Case(id, what, cell, truth, False, refused, found["text"], {body: mutant.node}, mutant)


def truth_of(found: dict) -> str:
    """Of a mutant that was measured: "right" or "wrong" with the patch, or "unknown" if only its structure is another.

    The first failure is known, and no other.
    """
    if found["tests"] == "pass":
        return "right"
    return "unknown" if found.get("first", "").startswith(STRUCTURE) else "wrong"


def _needless(case: Case) -> bool:
    return bool(case.refused) and (case.truth == "right" or case.fixed)


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
    return {"text": case.text, "truth": case.truth, "fixed": case.fixed, "refused": bool(case.refused), **found}


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
    counts = table(found)
    print(dict(counts))
    return 1 if counts["WRONG YES"] else 0


def _prove_some(patches, count: int) -> None:
    """Of each patch so many needless refusals, so many that break it, and so many of the rest: in turns."""
    from measure import write

    known = read()
    left: dict[tuple[int, str], list[Case]] = {}
    for case in cases(patches):
        if known.get(case.patch, {}).get(case.key, {}).get("text") != case.text:
            kind = 0 if _needless(case) else 1 if case.truth == "wrong" else 2
            left.setdefault((kind, case.patch), []).append(case)
    for turn in range(count):
        for _, found in sorted(left.items(), key=lambda item: (item[0][0] == 2, item[0][1], item[0][0])):
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
