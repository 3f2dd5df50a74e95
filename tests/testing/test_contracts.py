"""The contracts of the matrix against the bodies of real releases: kept by all that are known, and no term is idle."""

import ast
from dataclasses import replace

import pytest
from edited_sources import sources_of
from judge import Reduced, contract_on, function_of
from mutants import OWN, Mutant, change_attribute, generate
from recording import NO_SOURCES
from thorough import in_full

from shim._errors import SourceError
from shim._matrix.load import load_matrix
from shim._matrix.model import RIGHT
from shim._planning.contract import breach
from shim._planning.evidence import shipped_evidence
from shim._releases.phrases import parsed, stands_in
from shim.testing.releases import at_hand

pytestmark = pytest.mark.xdist_group("sources")
MATRIX = load_matrix()
# (patch, variant, target) of every contract.
CONTRACTS = [
    (id, variant.name, target)
    for id, entry in MATRIX.patches.items()
    for variant in entry.variants.values()
    for target in variant.needs
]


def bodies_of(id, variant, target):
    """(release, sources) of one release or commit for each body that is pinned with this variant, the newest last.

    The sources of commits are not everywhere: none, where only commits have the variant and none is at hand. A commit
    whose proofs gave it the variant of a release need not keep its contracts.
    """
    distribution = MATRIX.patches[id].distribution
    having = [(release, pin) for release, pin in MATRIX.known(id) if pin.variant == variant]
    released = [(release, pin) for release, pin in having if release in MATRIX.supported[distribution]]
    proved = {name for said in shipped_evidence(id) for name in said.trees} if released else set()
    found = {}
    for release, pin in having:
        if (release, pin) in released or (at_hand(release, distribution) and release not in proved):
            found[pin.fingerprints.get(target)] = release
    return [(release, sources_of(distribution, release)) for release in found.values()]


def require_bodies(id):
    """Skip the test of a patch whose contracts only commits keep, if the sources of none are there."""
    if not any(bodies_of(id, name, target) for patch, name, target in CONTRACTS if patch == id):
        distribution = MATRIX.patches[id].distribution
        commits = [name for name, _ in MATRIX.known(id) if name not in MATRIX.supported[distribution]]
        pytest.skip(f"{NO_SOURCES}{distribution} at commit {' or '.join(commits)}")


def test_there_are_contracts():
    assert len(CONTRACTS) > 30


@pytest.mark.parametrize("id", sorted({id for id, _, _ in CONTRACTS}))
def test_a_contract_is_kept_by_every_release_of_its_variant(id):
    broken = []
    require_bodies(id)
    for patch, name, target in CONTRACTS:
        if patch == id:
            variant = MATRIX.patches[id].variants[name]
            for release, sources in bodies_of(id, name, target):
                said = breach(sources, variant.inherits(target) or target, variant.needs[target])
                broken += [f"{release} {name} {target}: {said}"] if said else []
    assert broken == []


def terms_of(needs):
    """What a contract says, term by term, in the words in which a breach names it."""
    yield from (("parameters", name) for name in needs.parameters if name not in OWN)
    yield from (("has", phrase) for phrase in needs.has)
    yield from (("lacks", phrase) for phrase in needs.lacks)
    yield from (("keeps", name) for name in needs.keeps)
    yield from (("confined", expression) for expression in needs.confined)
    yield from (("decorators", text) for text in needs.decorators)
    yield from ((name, "") for name in ("first", "exact", "returns") if getattr(needs, name))


def said_of(term, text):
    """How a breach of this term begins."""
    return {
        "parameters": f"it has no parameter {text if text.startswith('*') else repr(text)}",
        "has": f"it lacks `{text}`",
        "lacks": f"it has `{text}`",
        "keeps": f"it binds {text} to something else",
        "confined": f"it also uses `{text}` elsewhere",
        "decorators": f"it lacks the decorator {text}",
        "first": "its parameters do not begin with",
        "exact": "it has a parameter more",
        "returns": "it returns",
    }[term]


def with_phrase(function, phrase):
    """A body that has the phrase too, each gap filled."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node):
            return ast.Name("filled", node.ctx) if node.id == "_" else node

        def visit_Call(self, node):
            self.generic_visit(node)
            node.args = [a for a in node.args if not (isinstance(a, ast.Constant) and a.value is ...)]
            return node

    made = Fill().visit(ast.parse(ast.unparse(parsed(phrase))).body[0])
    changed = ast.parse(ast.unparse(function)).body[0]
    changed.body.insert(0, made)
    return Mutant("add a phrase", phrase, ast.fix_missing_locations(changed))


def without_decorators(function):
    """One mutant for each decorator, without it."""
    for place in range(len(function.decorator_list)):
        changed = ast.parse(ast.unparse(function)).body[0]
        del changed.decorator_list[place]
        yield Mutant("drop a decorator", str(place), changed)


def with_another_first(function):
    changed = ast.parse(ast.unparse(function)).body[0]
    changed.args.args.insert(0, ast.arg("before"))
    return Mutant("add a parameter", "in front", changed)


def with_another_in_place(function, is_it):
    """A body that has another statement or name at the first place where `is_it` holds of a node."""

    class Replace(ast.NodeTransformer):
        done = False

        def visit(self, node):
            if self.done or not is_it(node):
                return self.generic_visit(node)
            self.done = True
            if isinstance(node, ast.arg):
                return ast.arg("other")
            if isinstance(node, ast.Return):
                return ast.Return(ast.Name("other", ast.Load()))
            return ast.Pass() if isinstance(node, ast.stmt) else ast.Name("other", ast.Load())

    changed = Replace().visit(ast.parse(ast.unparse(function)).body[0])
    return Mutant("replace", "the first", ast.fix_missing_locations(changed))


def likely_mutants(function, needs):
    """For each term the one that should break it."""
    yield from (*without_decorators(function), with_another_first(function))
    yield from (with_phrase(function, phrase) for phrase in (*needs.lacks, *needs.confined))
    yield from (with_phrase(function, f"{name} = _") for name in needs.keeps)
    for phrase in needs.has:
        yield with_another_in_place(function, lambda node: stands_in(phrase, [node]))
    for name in needs.parameters:
        yield with_another_in_place(function, lambda node: isinstance(node, ast.arg) and node.arg == name.lstrip("*"))
    yield with_another_in_place(function, lambda node: isinstance(node, ast.Return))


def mutants_for(function, needs):
    yield from likely_mutants(function, needs)
    yield from change_attribute(function)
    yield from generate(function)


def unbroken(function, reduced, variant, target):
    """The terms of a contract that no mutant of a body which keeps it breaks."""
    needs = variant.needs[target]
    body = variant.inherits(target) or target
    alone = replace(variant, needs={target: needs})
    left = set(terms_of(needs))
    for mutant in mutants_for(function, needs):
        said = contract_on(reduced, alone, body, mutant).partition(": ")[2]
        left = {term for term in left if not said.startswith(said_of(*term))}
        if not left:
            break
    return left


@in_full
@pytest.mark.parametrize("id", sorted({id for id, _, _ in CONTRACTS}))
def test_every_term_of_a_contract_is_broken_by_some_mutant(id):
    idle, done = {}, set()
    require_bodies(id)
    for patch, name, target in CONTRACTS:
        variant = MATRIX.patches[patch].variants[name]
        if patch != id or (target, variant.needs[target]) in done:
            continue
        done.add((target, variant.needs[target]))
        known = bodies_of(id, name, target)
        if not known:
            continue
        _, sources = known[-1]
        body = variant.inherits(target) or target
        left = unbroken(function_of(sources, body), Reduced(sources, [body]), variant, target)
        if left:
            idle[name, target] = left
    assert idle == {}


# Contracts that a release keeps although it is right. Where a sign shows, nobody asks them (test_signs.py).
# Where none does, the patch is harmless: it sends an alias of what the schedule waits for anyway, or names the sharding
# that megatron's own training names.
HARMLESS = {"pipeline-send-buffers", "optimizer-sharding-default"}


def keeps(sources, id, variant):
    """Whether the bodies would get the variant if nobody knew the release."""
    known = MATRIX.known_bodies(id, variant.name)
    for target in variant.bodies:
        try:
            body = variant.fingerprint(sources, target)
        except SourceError:
            return False
        if target in variant.needs:
            if breach(sources, variant.inherits(target) or target, variant.needs[target]):
                return False
        elif body not in known.get(target, ()):
            return False
    return True


@in_full
@pytest.mark.parametrize(
    "id", [id for id, entry in MATRIX.patches.items() if any(r.variant is None for r in entry.rules)]
)
def test_no_release_that_is_right_keeps_the_contracts_of_a_variant(id):
    """Where only the version says that a release is right, contracts are asked. A yes there fixes twice."""
    distribution = MATRIX.patches[id].distribution
    kept = [
        f"{release} keeps {variant.name}"
        for release in MATRIX.names(distribution)
        if MATRIX.wanted(id, release) in RIGHT
        and (release in MATRIX.supported[distribution] or at_hand(release, distribution))
        for variant in MATRIX.patches[id].variants.values()
        if keeps(sources_of(distribution, release), id, variant)
    ]
    assert bool(kept) is (id in HARMLESS), kept
