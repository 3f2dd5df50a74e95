"""The rules of a matrix: version_matrix.yaml, read and checked, with file and line in every error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from shim._matrix.concerns import WORDS
from shim._matrix.coverage import check_coverage
from shim._matrix.model import (
    CHANGES,
    DISTRIBUTIONS,
    KINDS,
    NOT_NEEDED,
    RIGHT,
    SYMPTOMS,
    UPSTREAM,
    Matrix,
    PatchEntry,
    Pinned,
    Rule,
    Variant,
)
from shim._matrix.pins import read_pins
from shim._matrix.reader import Reader, compose, read_commits, read_decided, read_declared
from shim._releases.detect import DISTRIBUTIONS as KNOWN
from shim._releases.known_files import known_trees

if TYPE_CHECKING:
    from shim._matrix.load import Described, Descriptions

__all__ = ["read_matrix"]

PACKAGES = {name: known.package for name, known in KNOWN.items()}  # what a leading dot stands for in a target
# Environment variables list ids with commas and spaces between, and say "none" for an empty list.
PATCH_ID = re.compile(r"(?!none$)[A-Za-z0-9_-]+")

TOP_KEYS = {"supported": True, "commits": False, "patches": True}
# The description of a patch, in its patch.yaml or, with RULES, in the matrix.
DESCRIPTION = {
    "summary": True,
    "without": False,
    "kind": True,
    "changes": True,
    "effects": False,
    "symptom": False,
    "concerns": False,
    "per_model": False,
    "outside_of": False,
    "cost": False,
    "distribution": False,
    "targets": False,
    "reads": False,
    "variants": True,
    "references": False,
    "met_by": False,
    "delete_when": False,
    "options": False,
    "before": False,
    "decided": False,
    "pairs": False,
    "probe": False,
}
PATCH_KEYS = {
    **DESCRIPTION,
    "distribution": True,
    "module": True,
    **dict.fromkeys(("applies", "upstream", "not_needed"), False),
}
DESCRIBED_VARIANT = {"targets": False, "reads": False}
VARIANT_KEYS = {"applies": False, **DESCRIBED_VARIANT}
FLAGS = ("optional", "added", "alone", "wraps")
TARGET_KEYS = {"target": True, "inherits": False, **dict.fromkeys(FLAGS, False), "without": False, "reached_by": False}
READ_KEYS = {"read": True, "reached_by": True}
RULE_KEYS = {**dict.fromkeys(DISTRIBUTIONS, False), "note": False}


def _variant(
    read: Reader, name: str, node: yaml.Node, entries: Mapping[str, yaml.Node], of_patch: Mapping[str, yaml.Node]
) -> Variant:
    """of_patch: the entries of the patch, whose `targets` and `reads` its variants inherit.

    A variant without the key has all of it. One that only names a target or a read has what is said of it there.
    """
    entries = {**{key: of_patch[key] for key in ("targets", "reads") if key in of_patch}, **entries}
    targets: list[str] = []
    inherited: dict[str, str] = {}
    skippable: dict[str, str] = {}
    reached_by: dict[str, tuple[str, ...]] = {}
    flags: dict[str, set[str]] = {flag: set() for flag in FLAGS}
    for module, item in _inheriting(read, entries, of_patch, "targets", name):
        if isinstance(item, yaml.MappingNode):
            given = read.mapping(item, "a target", TARGET_KEYS)
            target = read.target(given["target"], "target", module)
            if "inherits" in given:
                inherited[target] = read.target(given["inherits"], "inherits", module)
            if "without" in given:
                skippable[target] = read.text(given["without"], "without")
            if "reached_by" in given:
                reached_by[target] = _ways(read, given["reached_by"], module)
            for flag in flags.keys() & given.keys():
                if read.flag(given[flag], flag):
                    flags[flag].add(target)
            if target in inherited and target in flags["added"]:
                raise read.fail(item, f"target {target} cannot be both inherited and added")
        else:
            target = read.target(item, "a target", module)
        if target in targets:
            raise read.fail(item, f"target {target} stands twice in variant {name}")
        targets.append(target)
    if not targets:
        raise read.fail(node, f"variant {name} has no target")
    if len(targets) == 1 and skippable:
        raise read.fail(node, f"variant {name} can do without each of its targets")
    depends_on: list[str] = []
    for module, item in _inheriting(read, entries, of_patch, "reads", name):
        if isinstance(item, yaml.MappingNode):
            given = read.mapping(item, "a read", READ_KEYS)
            item = given["read"]
            reached_by[read.target(item, "a read", module)] = _ways(read, given["reached_by"], module)
        depends_on.append(read.target(item, "a read", module))
    return Variant(
        name,
        tuple(targets),
        tuple(depends_on),
        inherited,
        optional=frozenset(flags["optional"]),
        may_be_missing=frozenset(flags["added"]),
        no_aliases=frozenset(flags["alone"]),
        wraps_any=frozenset(flags["wraps"]),
        skippable=skippable,
        reached_by=reached_by,
    )


def _inheriting(
    read: Reader, entries: Mapping[str, yaml.Node], of_patch: Mapping[str, yaml.Node], key: str, name: str
) -> Iterator[tuple[str, yaml.Node]]:
    """The entries of `targets` or `reads`; in the place of a name alone, the mapping that the patch has for it."""
    known: dict[str, tuple[str, yaml.Node]] = {}
    what = key.removesuffix("s")
    for module, item in _by_module(read, of_patch[key], key) if key in of_patch else ():
        if isinstance(item, yaml.MappingNode):
            given = read.mapping(item, f"a {what}", TARGET_KEYS if key == "targets" else READ_KEYS)
            known[read.target(given[what], what, module)] = module, item
    for module, item in _by_module(read, entries[key], f"{key} of {name}") if key in entries else ():
        alone = not isinstance(item, yaml.MappingNode)
        yield known.get(read.target(item, f"a {what}", module), (module, item)) if alone and known else (module, item)


def _by_module(read: Reader, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node]]:
    """The entries of a list, or of a mapping of modules to lists, each with its module ("" in a list)."""
    if isinstance(node, yaml.MappingNode):
        for module, items in read.mapping(node, what).items():
            yield from ((module, item) for item in read.sequence(items, f"{what} in {module}"))
    else:
        yield from (("", item) for item in read.sequence(node, what))


def _ways(read: Reader, node: yaml.Node, module: str) -> tuple[str, ...]:
    return tuple(read.target(way, "a function or method", module) for way in read.sequence(node, "reached_by"))


def _probed(read: Reader, node: yaml.Node, variants: Iterable[Variant]) -> tuple[str, ...]:
    """The functions and methods that the probe of a patch tries, each a target, or on the way to one."""
    targets = {name for v in variants for name in v.targets}
    ways = {way for v in variants for ways in v.reached_by.values() for way in ways}
    found = []
    for item in read.sequence(node, "probe"):
        found.append(read.target(item, "a function or method"))
        if found[-1] not in targets | ways:
            raise read.fail(item, f"{found[-1]} is no function that the patch binds, and none that leads to one")
    return tuple(found)


def _modules(read: Reader, node: yaml.Node) -> Iterator[str]:
    """The modules before whose code a patch acts."""
    found: set[str] = set()
    for item in read.sequence(node, "before"):
        module = read.text(item, "a module")
        if not all(name.isidentifier() for name in module.split(".")):
            raise read.fail(item, f"{module!r} is not the name of a module")
        if module in found:
            raise read.fail(item, f"module {module} stands twice in before")
        found.add(module)
        yield module


def _rules(read: Reader, node: yaml.Node, what: str, variants: Collection[str] = ()) -> Iterator[Rule]:
    """The rules in a list. Each names one of `variants`. Without `variants` it lists releases that are right."""
    for item in read.sequence(node, what):
        entries = read.mapping(item, "a rule", {**RULE_KEYS, "variant": True} if variants else RULE_KEYS)
        name = read.text(entries["variant"], "variant") if variants else None
        if name is not None and name not in variants:
            known = ", ".join(variants)
            raise read.fail(entries["variant"], f"there is no variant {name!r}; known are {known}")
        yield _rule(read, item, entries, name, NOT_NEEDED if what == "not_needed" else UPSTREAM)


def _rules_of(read: Reader, variant: str, node: yaml.Node) -> Iterator[Rule]:
    """The rules in the `applies` of a variant: one rule, or a list of them."""
    items = read.sequence(node, "applies") if isinstance(node, yaml.SequenceNode) else [node]
    for item in items:
        yield _rule(read, item, read.mapping(item, f"applies of {variant}", RULE_KEYS), variant)


def _short_rules(
    read: Reader, given: Mapping[str, yaml.Node], distribution: str, variants: Collection[str]
) -> Iterator[Rule]:
    """The rules of a patch whose description lies in its folder: variant, "upstream" or "not_needed" -> ranges.

    A range alone is one over the distribution that the patch is of.
    """
    for name, node in given.items():
        if name not in (*variants, "upstream", "not_needed"):
            raise read.fail(node, f"there is no variant {name!r}; known are {', '.join(variants)}")
        variant = name if name in variants else None
        right = NOT_NEEDED if name == "not_needed" else UPSTREAM
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(item, yaml.ScalarNode):
                yield Rule({distribution: read.range(item, name)}, variant, "", item.start_mark.line + 1, right)
            else:
                yield _rule(read, item, read.mapping(item, f"ranges of {name}", RULE_KEYS), variant, right)


def _pairs(read: Reader, node: yaml.Node) -> Iterator[Rule]:
    for item in read.sequence(node, "pairs"):
        entries = read.mapping(item, "an entry of pairs", {**dict.fromkeys(DISTRIBUTIONS, True), "note": True})
        yield _rule(read, item, entries, None)


def _rule(
    read: Reader, item: yaml.Node, entries: Mapping[str, yaml.Node], variant: str | None, right: str = UPSTREAM
) -> Rule:
    ranges = {d: read.range(entries[d], d) for d in DISTRIBUTIONS if d in entries}
    if not ranges:
        raise read.fail(item, f"a rule needs a range over one of {', '.join(DISTRIBUTIONS)}")
    note = read.text(entries["note"], "note") if "note" in entries else ""
    return Rule(ranges, variant, note, item.start_mark.line + 1, right)


def _check_targets(read: Reader, node: yaml.Node, entry: PatchEntry, matrix: Matrix) -> None:
    """Raise MatrixError if no release has a variant, or an upstream release has all bodies of a variant.

    Before the first `shim pin` there is nothing to check.
    """
    pinned = [pin for _, pin in matrix.known(entry.id)]
    for release, right in matrix.known(entry.id):
        for release_too, pin in matrix.known(entry.id) if right.variant is None else ():
            if pin.variant and pin.fingerprints.items() <= right.fingerprints.items():
                what = (
                    f"{release} is right without {entry.id}, but its bodies are those of {release_too}, which needs it"
                )
                raise read.fail(node, f"{what}; name what upstream changed among the reads of variant {pin.variant}")
    for variant in entry.variants.values() if pinned else ():
        if all(pin.variant != variant.name for pin in pinned):
            gone = ", ".join(variant.targets)
            raise read.fail(node, f"no release of the supported list has the targets of variant {variant.name}: {gone}")


def _patch(
    read: Reader, id: str, node: yaml.Node, module_exists: Callable[[str], bool], descriptions: Descriptions
) -> PatchEntry:
    """A patch: its rules are in the matrix, and what it says of itself is there too or in its patch.yaml."""
    if not PATCH_ID.fullmatch(id):
        raise read.fail(node, f"{id!r} is not a patch id: letters, digits and hyphens")
    given = read.mapping(node, f"patch {id}")
    written = None
    if "variants" in given:
        entries = read.mapping(node, f"patch {id}", PATCH_KEYS)
        module = read.text(entries["module"], "module")
        distribution = read.text(entries["distribution"], "distribution", DISTRIBUTIONS)
    else:
        written = _described(read, id, node, given.pop("module", None), descriptions)
        module = written.module
        document = compose(written.file, written.content)
        keys = {**DESCRIPTION, "distribution": not written.distribution}
        entries = read.mapping(document, f"patch {id}", keys)
        distribution = written.distribution or read.text(entries["distribution"], "distribution", DISTRIBUTIONS)
        if written.distribution and "distribution" in entries:
            raise read.fail(entries["distribution"], "the folder of a patch of shim says its distribution")
    read = Reader(read.path, PACKAGES[distribution])
    variants: dict[str, Variant] = {}
    rules: list[Rule] = []
    for name, item in read.mapping(entries["variants"], f"variants of {id}").items():
        variant = read.mapping(item, f"variant {name}", VARIANT_KEYS if written is None else DESCRIBED_VARIANT)
        if name in RIGHT:
            raise read.fail(item, f"no variant can be called {name}: that is said of releases that are right")
        variants[name] = _variant(read, name, item, variant, entries)
        rules += _rules_of(read, name, variant["applies"]) if "applies" in variant else ()
    if not variants:
        raise read.fail(entries["variants"], f"patch {id} has no variant")
    if written is not None:
        rules += _short_rules(read, given, distribution, variants)
    rules += _rules(read, entries["applies"], "applies", variants) if "applies" in entries else ()
    for key in ("upstream", "not_needed"):
        rules += _rules(read, entries[key], key) if key in entries else ()
    if not module_exists(module):
        place = entries.get("module", node)
        raise read.fail(place, f"there is no module {module} among the patches of shim, nor to import")
    options = read.mapping(entries["options"], f"options of {id}") if "options" in entries else {}
    declared = {name: read_declared(read, name, value) for name, value in options.items()}
    return PatchEntry(
        id=id,
        summary=read.text(entries["summary"], "summary"),
        without=read.text(entries["without"], "without") if "without" in entries else "",
        kind=read.text(entries["kind"], "kind", KINDS),
        changes=read.text(entries["changes"], "changes", CHANGES),
        effects=_effects(read, entries["effects"], str(entries["changes"].value)) if "effects" in entries else {},
        symptom=read.text(entries["symptom"], "symptom", SYMPTOMS) if "symptom" in entries else "",
        concerns=tuple(_concerns(read, entries["concerns"])) if "concerns" in entries else (),
        per_model=_per_model(read, entries["per_model"]) if "per_model" in entries else {},
        outside_of=_outside_of(read, entries["outside_of"]) if "outside_of" in entries else {},
        cost=read.text(entries["cost"], "cost") if "cost" in entries else "",
        distribution=distribution,
        module=module,
        variants=variants,
        rules=tuple(rules),
        references=read.texts(entries["references"], "references") if "references" in entries else (),
        met_by=read.texts(entries["met_by"], "met_by") if "met_by" in entries else (),
        delete_when=read.text(entries["delete_when"], "delete_when") if "delete_when" in entries else "",
        options={name: option.default for name, option in declared.items()},
        declared=declared,
        before=tuple(_modules(read, entries["before"])) if "before" in entries else (),
        decided=tuple(read_decided(read, entries["decided"], variants)) if "decided" in entries else (),
        pairs=tuple(_pairs(read, entries["pairs"])) if "pairs" in entries else (),
        line=node.start_mark.line,
        probe=_probed(read, entries["probe"], variants.values()) if "probe" in entries else (),
    )


def _concerns(read: Reader, node: yaml.Node) -> Iterator[tuple[str, ...]]:
    """Each entry is words that hold together, with + between them; the entries are alternatives."""
    for item in read.sequence(node, "concerns"):
        words = tuple(read.text(item, "an entry of concerns").split("+"))
        odd = [word for word in words if word not in WORDS]
        if odd:
            raise read.fail(item, f"there is no word {odd[0]!r}; known are {', '.join(WORDS)}")
        yield words


def _per_model(read: Reader, node: yaml.Node) -> dict[str, str]:
    given = read.mapping(node, "per_model", {"own": False, "process": False})
    return {key: read.text(value, key) for key, value in given.items()}


def _outside_of(read: Reader, node: yaml.Node) -> dict[str, str]:
    return {id: read.text(why, f"outside_of {id}") for id, why in read.mapping(node, "outside_of").items()}


def _described(
    read: Reader, id: str, node: yaml.Node, module: yaml.Node | None, descriptions: Descriptions
) -> Described:
    found = descriptions.of(id, None if module is None else read.text(module, "module"))
    if found is None:
        where = f"in the folder of the module {module.value}" if module is not None else "among the patches of shim"
        raise read.fail(
            node,
            f"patch {id} has neither variants here nor a patch.yaml {where}; a patch outside of shim needs module:",
        )
    return found


def _effects(read: Reader, node: yaml.Node, changes: str) -> dict[str, str]:
    """The effects of a patch with several, by the kind of the change. `changes` is the most of them."""
    found = {kind: read.text(given, kind) for kind, given in read.mapping(node, "effects").items()}
    unknown = [kind for kind in found if kind not in CHANGES[1:]]
    if unknown:
        raise read.fail(node, f"effects says {unknown[0]!r}; it must be one of {', '.join(CHANGES[1:])}")
    if changes != max(found, key=CHANGES.index, default=""):
        raise read.fail(node, f"the strongest of effects is not {changes}, the value of changes")
    return found


def _given(entry: PatchEntry) -> set[str | None]:
    """The variants that a rule gives to some release, or that proofs have shown to fix a commit or a fork."""
    shown = known_trees()["patches"].get(entry.id, ())
    return {rule.variant for rule in entry.rules} | {said["variant"] for said in shown}


def read_matrix(
    file: Path,
    content: bytes,
    lock: tuple[Path, bytes] | None,
    *,
    module_exists: Callable[[str], bool],
    descriptions: Descriptions,
    check_ranges: bool,
) -> Matrix:
    """The matrix in `content`, the content of `file`. `lock` is the file of its pins and the content of that.

    module_exists: says whether a patch module exists.    descriptions: finds the patch.yaml of a patch.
    For the other arguments see `load_matrix`.
    """
    read = Reader(str(file))
    document = compose(file, content)
    top = read.mapping(document, "the matrix", TOP_KEYS)
    supported = {
        distribution: tuple(read.version(item, "a supported release") for item in read.sequence(node, distribution))
        for distribution, node in read.mapping(
            top["supported"], "supported", dict.fromkeys(DISTRIBUTIONS, False)
        ).items()
    }
    nodes = read.mapping(top["patches"], "patches")
    patches = {id: _patch(read, id, node, module_exists, descriptions) for id, node in nodes.items()}
    commits = read_commits(read, top["commits"], supported) if "commits" in top else {}
    for id, entry in patches.items():
        unused = next((name for name in entry.variants if name not in _given(entry)), None)
        if unused is not None:
            place = read.mapping(nodes[id], f"patch {id}").get("variants", nodes[id])
            what = f"no rule of {id} leads to the variant {unused!r}, and no known tree has it"
            raise read.fail(place, what)
    if check_ranges:
        for id, entry in patches.items():
            check_coverage(read, nodes[id], entry, supported)
    matrix = Matrix(str(file), patches, supported, {}, commits=commits)
    names = {distribution: matrix.names(distribution) for distribution in DISTRIBUTIONS}
    pinned: dict[str, dict[str, Pinned]] = {}
    if lock is not None:
        pinned = read_pins(*lock, patches, names)
    matrix = replace(matrix, pinned=pinned)
    for id, entry in patches.items():
        _check_targets(read, nodes[id], entry, matrix)
    return matrix
