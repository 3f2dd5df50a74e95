"""Ask the contracts about the mutants that have been measured, and count: right, wrong, false alarms, dead.

python maintenance/mutations/judge.py            the counts, and every wrong yes
python maintenance/mutations/judge.py --alarms   every false alarm, too
"""

import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from handwritten import handwritten
from mutants import Mutant, generate
from placing import Mutated

from shim._matrix.load import load_matrix
from shim._matrix.model import Variant
from shim._planning.contract import breach
from shim._releases.fingerprint import definitions, split_target
from shim._releases.sources import Sources
from shim.testing.releases import fetch

__all__ = ["VERDICTS", "judged", "judged_mutants", "mutants_of", "verdict"]

VERDICTS = ("right yes", "right no", "WRONG YES", "false alarm", "dead", "not placed")


def function_of(sources: Sources, body: str) -> ast.FunctionDef | None:
    """The only definition of a body, where it is a function."""
    module, qualname = split_target(body)
    try:
        found = definitions(sources.tree(module), qualname)
    except Exception:
        return None
    return found[0].node if len(found) == 1 and isinstance(found[0].node, ast.FunctionDef) else None


def mutants_of(sources: Sources, id: str, variant: Variant) -> list[tuple[str, Mutant]]:
    """(body, mutant) for all bodies with a contract, those written by hand first."""
    found = []
    for target in variant.needs:
        body = variant.inherits(target) or target
        function = function_of(sources, body)
        if function is not None:
            found += [(body, mutant) for mutant in (*handwritten(id, body, function), *generate(function))]
    return found


def spread(mutants: list[tuple[str, Mutant]], broken: Callable[[str, Mutant], str]) -> Iterator[tuple[str, Mutant]]:
    """The same mutants, so that the first ones are of all bodies and kinds, and as many keep the contract as break it.

    Which comes first of those that are alike, a hash of their text says.
    """
    left: dict[str, dict[bool, list[Mutant]]] = {}
    for body, mutant in sorted(mutants, key=lambda item: hashlib.sha256(item[1].text.encode()).digest()):
        if mutant.kind == "by hand":
            yield body, mutant
        else:
            left.setdefault(body, {True: [], False: []})[bool(broken(body, mutant))].append(mutant)
    seen: Counter = Counter()
    for turn in range(len(mutants)):
        for body, both in left.items():
            # Of those that keep the contract two in three: one of them can be a wrong yes.
            rest = both[turn % 3 == 2] or both[turn % 3 != 2]
            if rest:
                mutant = min(rest, key=lambda m: seen[body, m.kind])
                seen[body, mutant.kind] += 1
                rest.remove(mutant)
                yield body, mutant


class Reduced(Sources):
    """A release of which only these bodies are left: asking about thousands of mutants takes no time then."""

    def __init__(self, sources: Sources, bodies: Iterable[str]) -> None:
        super().__init__(sources._roots)
        for body in bodies:
            module, qualname = split_target(body)
            self.put(body, *(found.node for found in definitions(sources.tree(module), qualname)))

    def put(self, body: str, *nodes: ast.stmt) -> None:
        module, qualname = split_target(body)
        place = self._trees.setdefault(module, ast.Module([], [])).body
        for owner in qualname.split(".")[:-1]:
            held = next((n for n in place if isinstance(n, ast.ClassDef) and n.name == owner), None)
            if held is None:
                held = ast.parse(f"class {owner}:\n    pass").body[0]
                place.append(held)
            place = held.body
        place += nodes


def contract_on(reduced: Reduced, variant: Variant, body: str, mutant: Mutant) -> str:
    """How the mutant breaks a contract of the variant; "" where all hold."""
    mutated: Sources
    if mutant.told is None:
        mutated = Reduced(reduced, ())
        mutated.put(body, mutant.node)
    else:
        mutated = Mutated(reduced, body, mutant)
    for target, needs in variant.needs.items():
        judged = variant.inherits(target) or target
        if judged == body or mutant.told is not None:
            said = breach(mutated, judged, needs)
            if said and (judged == body or not breach(reduced, judged, needs)):
                return f"{split_target(judged)[1]}: {said}"
    return ""


def verdict(broken: str, found: dict) -> str:
    if found["stock"] != "works":
        return "not placed" if found["stock"].startswith("not placed") else "dead"
    if found["tests"] == "pass":
        return "false alarm" if broken else "right yes"
    return "right no" if broken else "WRONG YES"


def judged(table: dict):
    """(cell, patch, body, name, what breaks the contract, what was measured) of every mutant that still is the same."""
    for *said, _ in judged_mutants(table):
        yield tuple(said)


def judged_mutants(table: dict, ids: Iterable[str] | None = None):
    """The same with the mutants, of these patches or all."""
    from measure import digest

    matrix = load_matrix()
    for cell, patches in table.items():
        releases = dict(zip(("megatron-core", "transformer-engine"), cell.split("+")))
        for id, bodies in patches.items():
            if ids and id not in ids:
                continue
            entry = matrix.patches[id]
            release = releases[entry.distribution]
            variant = entry.variants[matrix.pins[entry.distribution][release][id].variant]
            sources = Sources([fetch(release, entry.distribution)])
            reduced = Reduced(sources, {variant.inherits(t) or t for t in variant.needs})
            known = {(body, m.name): m for body, m in mutants_of(sources, id, variant)}
            for body, mutants in bodies.items():
                for name, found in mutants.items():
                    mutant = known.get((body, name))
                    if mutant is not None and digest(mutant.text) == found["text"]:
                        yield cell, id, body, name, contract_on(reduced, variant, body, mutant), found, mutant


def main() -> int:
    from measure import read

    counts: dict[str, Counter] = {}
    for cell, id, body, name, broken, found in judged(read()):
        said = verdict(broken, found)
        counts.setdefault(f"{cell} {id}", Counter())[said] += 1
        if said == "WRONG YES" or (said == "false alarm" and "--alarms" in sys.argv):
            print(said, cell, id, body.split(":")[1], "|", name, "|", broken or found.get("first", ""))
    total: Counter = Counter()
    for which, count in counts.items():
        total += count
        print(f"{which:45}", *(f"{said} {count[said]:3}" for said in VERDICTS))
    print(f"{'all ' + str(sum(total.values())):45}", *(f"{said} {total[said]:3}" for said in VERDICTS))
    return 1 if total["WRONG YES"] else 0


if __name__ == "__main__":
    sys.exit(main())
