"""version_matrix.yaml: read, checked, with file and line in every complaint."""

from __future__ import annotations

import builtins
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from shim._errors import MatrixError
from shim._matrix.coverage import check_coverage
from shim._matrix.declared import read_declared
from shim._matrix.model import CHANGES, DISTRIBUTIONS, KINDS, Matrix, PatchEntry, Pin, Rule, StandIn, Variable, Variant
from shim._matrix.reader import Reader, compose, read_yaml
from shim._releases.fingerprint import ABSENT
from shim._releases.sources import find_spec

__all__ = ["check_modules", "load_matrix", "matrix_path"]

FINGERPRINT = re.compile(r"[0-9a-f]{16}\.([0-9a-f]{8}|-)|" + ABSENT)
# Environment variables list them, with commas and spaces between, and say "none" for an empty list.
PATCH_ID = re.compile(r"(?!none$)[A-Za-z0-9_-]+")
# Variables that a matrix can have shim set: what a library reads as a switch. Others name code to load (LD_PRELOAD).
SETTABLE = ("NVTE_CPU_OFFLOAD_V1",)
TRUSTED = ("shim.patches",)  # packages whose modules any matrix can name
PACKAGE = Path(__file__).resolve().parents[1]


def matrix_path() -> Path:
    """The matrix that ships with shim: inside the wheel, or at the top of the source tree."""
    inside = PACKAGE / "version_matrix.yaml"
    return inside if inside.exists() else PACKAGE.parent / "version_matrix.yaml"


def patches_path() -> Path:
    inside = PACKAGE / "patches"
    return inside if inside.is_dir() else PACKAGE.parent / "patches"


TOP_KEYS = {"supported": True, "patches": True, "releases": False}
PATCH_KEYS = {
    "summary": True,
    "without": False,
    "kind": True,
    "changes": True,
    "distribution": True,
    "module": True,
    "variants": True,
    "applies": True,
    "upstream": False,
    "references": False,
    "delete_when": True,
    "options": False,
    "variables": False,
    "stand_ins": False,
}
VARIABLE_KEYS = {**dict.fromkeys(("value", "before", "option", "without"), True), **dict.fromkeys(DISTRIBUTIONS, False)}
VARIANT_KEYS = {"targets": True, "reads": False}
TARGET_KEYS = {"target": True, "inherits": False, "optional": False, "added": False, "alone": False}
RULE_KEYS = {**dict.fromkeys(DISTRIBUTIONS, False), "note": False}
PIN_KEYS = {"variant": True, "fingerprints": True}


def _variant(read: Reader, name: str, node: yaml.Node) -> Variant:
    entries = read.mapping(node, f"variant {name}", VARIANT_KEYS)
    targets: list[str] = []
    inherited: dict[str, str] = {}
    flags: dict[str, set[str]] = {"optional": set(), "added": set(), "alone": set()}
    for item in read.sequence(entries["targets"], f"targets of {name}"):
        if isinstance(item, yaml.MappingNode):
            given = read.mapping(item, "a target", TARGET_KEYS)
            target = read.target(given["target"], "target")
            if "inherits" in given:
                inherited[target] = read.target(given["inherits"], "inherits")
            for flag in flags.keys() & given.keys():
                if read.flag(given[flag], flag):
                    flags[flag].add(target)
            if target in inherited and target in flags["added"]:
                raise read.fail(item, f"target {target} cannot be both inherited and added")
        else:
            target = read.target(item, "a target")
        if target in targets:
            raise read.fail(item, f"target {target} stands twice in variant {name}")
        targets.append(target)
    if set(targets) <= flags["optional"]:
        raise read.fail(node, f"variant {name} has no target" + (" that is not optional" if targets else ""))
    reads = entries.get("reads")
    items = [] if reads is None else read.sequence(reads, f"reads of {name}")
    relied = tuple(read.target(i, "a read") for i in items)
    return Variant(name, tuple(targets), relied, inherited, *map(frozenset, flags.values()))


def _variables(read: Reader, node: yaml.Node, options: Iterable[str]) -> Iterator[Variable]:
    for name, item in read.mapping(node, "variables").items():
        if name not in SETTABLE:
            raise read.fail(item, f"a matrix cannot set the variable {name}; it can set {', '.join(SETTABLE)}")
        given = read.mapping(item, f"variable {name}", VARIABLE_KEYS)
        option = read.text(given["option"], "option", tuple(options))
        value, before, without = (read.text(given[key], key) for key in ("value", "before", "without"))
        ranges = {d: read.range(given[d], d) for d in DISTRIBUTIONS if d in given}
        yield Variable(name, value, before, option, without, ranges)


def _stand_ins(read: Reader, node: yaml.Node) -> Iterator[StandIn]:
    for package, items in read.mapping(node, "stand_ins").items():
        if not package.isidentifier():
            raise read.fail(items, f"{package!r} is not the name of a top-level package")
        modules: list[str] = []
        for item in read.sequence(items, f"modules that may run without {package}"):
            module = read.text(item, "a module")
            if not all(name.isidentifier() for name in module.split(".")):
                raise read.fail(item, f"{module!r} is not the name of a module")
            if module.partition(".")[0] == package:
                raise read.fail(item, f"{module} is missing itself where {package} is")
            if module in modules:
                raise read.fail(item, f"module {module} stands twice for {package}")
            modules.append(module)
        if not modules:
            raise read.fail(items, f"no module is named that may run without {package}")
        yield StandIn(package, tuple(modules))


def _rules(read: Reader, node: yaml.Node, variants: Mapping[str, Variant] | None) -> list[Rule]:
    keys = dict(RULE_KEYS) if variants is None else {**RULE_KEYS, "variant": True}
    rules = []
    for item in read.sequence(node, "applies" if variants else "upstream"):
        entries = read.mapping(item, "a rule", keys)
        name = None
        if variants is not None:
            name = read.text(entries["variant"], "variant")
            if name not in variants:
                known = ", ".join(variants)
                raise read.fail(entries["variant"], f"there is no variant {name!r}; known are {known}")
        ranges = {d: read.range(entries[d], d) for d in DISTRIBUTIONS if d in entries}
        if not ranges:
            raise read.fail(item, f"a rule needs a range over one of {', '.join(DISTRIBUTIONS)}")
        note = read.text(entries["note"], "note") if "note" in entries else ""
        rules.append(Rule(ranges, name, note, item.start_mark.line + 1))
    return rules


def _check_targets(read: Reader, node: yaml.Node, entry: PatchEntry, matrix: Matrix) -> None:
    """Every body of every variant must have been seen in a release, and none of them all in a release that is right.

    Says nothing before the first `shim pin`.
    """
    pinned = [pin for _, pin in matrix.known(entry.id)]
    for release, right in matrix.known(entry.id):
        for release_too, pin in matrix.known(entry.id) if right.variant is None else ():
            if pin.variant and pin.fingerprints.items() <= right.fingerprints.items():
                what = f"{release} has {entry.id} already, but the same bodies as {release_too}, which needs it"
                raise read.fail(node, f"{what}; name what upstream changed among the reads of variant {pin.variant}")
    for variant in entry.variants.values() if pinned else ():
        if all(pin.variant != variant.name for pin in pinned):
            gone = ", ".join(variant.targets)
            raise read.fail(node, f"no release of the supported list has the targets of variant {variant.name}: {gone}")


def _module_exists(module: str, shipped: bool) -> bool:
    """Whether there is such a patch module; only a matrix that is not the shipped one may name modules elsewhere."""
    prefix = "shim.patches."
    names = module.removeprefix(prefix).split(".")
    if not all(name.isidentifier() for name in names):
        return False
    if module.startswith(prefix):
        return patches_path().joinpath(*names).with_suffix(".py").is_file()
    return not shipped and find_spec(module) is not None


def _patch(read: Reader, id: str, node: yaml.Node, module_exists: Callable[[str], bool]) -> PatchEntry:
    if not PATCH_ID.fullmatch(id):
        raise read.fail(node, f"{id!r} is not a patch id: letters, digits and hyphens")
    entries = read.mapping(node, f"patch {id}", PATCH_KEYS)
    variants = {
        name: _variant(read, name, item)
        for name, item in read.mapping(entries["variants"], f"variants of {id}").items()
    }
    if not variants:
        raise read.fail(entries["variants"], f"patch {id} has no variant")
    rules = _rules(read, entries["applies"], variants)
    if "upstream" in entries:
        rules += _rules(read, entries["upstream"], None)
    unused = [name for name in variants if all(rule.variant != name for rule in rules)]
    if unused:
        raise read.fail(entries["variants"], f"no rule of {id} leads to the variant {unused[0]!r}")
    module = read.text(entries["module"], "module")
    if not module_exists(module):
        raise read.fail(entries["module"], f"there is no module {module} among the patches of shim, nor to import")
    options = read.mapping(entries["options"], f"options of {id}") if "options" in entries else {}
    declared = {name: read_declared(read, name, value) for name, value in options.items()}
    return PatchEntry(
        id=id,
        summary=read.text(entries["summary"], "summary"),
        without=read.text(entries["without"], "without") if "without" in entries else "",
        kind=read.text(entries["kind"], "kind", KINDS),
        changes=read.text(entries["changes"], "changes", CHANGES),
        distribution=read.text(entries["distribution"], "distribution", DISTRIBUTIONS),
        module=module,
        variants=variants,
        rules=tuple(rules),
        references=read.texts(entries["references"], "references") if "references" in entries else (),
        delete_when=read.text(entries["delete_when"], "delete_when"),
        options={name: option.default for name, option in declared.items()},
        declared=declared,
        variables=tuple(_variables(read, entries["variables"], options)) if "variables" in entries else (),
        stand_ins=tuple(_stand_ins(read, entries["stand_ins"])) if "stand_ins" in entries else (),
        line=node.start_mark.line,
    )


def _pin(read: Reader, node: yaml.Node, entry: PatchEntry) -> Pin:
    entries = read.mapping(node, f"pin of {entry.id}", PIN_KEYS)
    name = read.text(entries["variant"], "variant")
    if name != "upstream" and name not in entry.variants:
        raise read.fail(entries["variant"], f"there is no variant {name!r} of {entry.id}")
    prints = read.mapping(entries["fingerprints"], "fingerprints")
    for value in prints.values():
        if not FINGERPRINT.fullmatch(read.text(value, "a fingerprint")):
            raise read.fail(value, f"{value.value!r} is not a fingerprint; run shim pin")
    if name == "upstream" and not set(prints) <= set(entry.bodies):
        odd = sorted(set(prints) - set(entry.bodies))[0]
        raise read.fail(node, f"{odd} is pinned, but is no body of {entry.id}; run shim pin")
    if name != "upstream" and set(prints) != set(entry.variants[name].bodies):
        odd = sorted(set(prints) ^ set(entry.variants[name].bodies))[0]
        raise read.fail(node, f"{odd} is pinned or a body of variant {name} of {entry.id}, but not both; run shim pin")
    return Pin(
        None if name == "upstream" else name,
        {target: value.value for target, value in prints.items()},
    )


def _pins(
    read: Reader, node: yaml.Node, patches: Mapping[str, PatchEntry], supported: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, dict[str, Pin]]]:
    pins: dict[str, dict[str, dict[str, Pin]]] = {}
    done: dict[tuple[str, int], Pin] = {}  # an alias (*name) composes to the very same node
    for distribution, releases in read.mapping(node, "releases", dict.fromkeys(DISTRIBUTIONS, False)).items():
        pins[distribution] = {}
        for release, ids in read.mapping(releases, f"releases of {distribution}").items():
            if release not in supported.get(distribution, ()):
                raise read.fail(ids, f"{distribution} {release} is pinned but not in the supported list")
            found = pins[distribution][release] = {}
            for id, pin in read.mapping(ids, f"pins of {distribution} {release}").items():
                if id not in patches:
                    raise read.fail(pin, f"there is no patch {id!r}")
                key = (id, builtins.id(pin))
                if key not in done:
                    done[key] = _pin(read, pin, patches[id])
                found[id] = done[key]
    return pins


def load_matrix(
    path: str | os.PathLike[str] | None = None, *, check_ranges: bool | None = None, pins: bool = True
) -> Matrix:
    """Read and check a matrix (default: the one that ships with shim). MatrixError names file and line.

    `check_ranges` searches for gaps and overlaps; by default in any matrix but the one that ships, where a test does
    it and plan time need not pay for it. `pins=False` leaves the pins out, for whoever is about to write them anew. A
    matrix of one's own may name patch modules outside shim, see `check_modules`, and must not be writable by others.
    """
    file = Path(path) if path is not None else matrix_path()
    read = Reader(str(file))
    # Whoever may write the matrix that ships may write the code beside it, too.
    shipped = _is_shipped(file)
    content = read_yaml(file, guarded=not shipped)
    document = compose(file, content)
    top = read.mapping(document, "the matrix", TOP_KEYS)
    supported = {
        distribution: tuple(read.version(item, "a supported release") for item in read.sequence(node, distribution))
        for distribution, node in read.mapping(
            top["supported"], "supported", dict.fromkeys(DISTRIBUTIONS, False)
        ).items()
    }
    nodes = read.mapping(top["patches"], "patches")
    patches = {id: _patch(read, id, node, lambda m: _module_exists(m, shipped)) for id, node in nodes.items()}
    if check_ranges or (check_ranges is None and not shipped):
        for id, entry in patches.items():
            check_coverage(read, nodes[id], entry, supported)
    known = _pins(read, top["releases"], patches, supported) if pins and "releases" in top else {}
    matrix = Matrix(str(file), patches, supported, known, "" if shipped else hashlib.sha256(content).hexdigest()[:16])
    for id, entry in patches.items():
        _check_targets(read, nodes[id], entry, matrix)
    return matrix


def _is_shipped(file: Path) -> bool:
    try:
        return file.resolve() == matrix_path().resolve()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return False


def check_modules(matrix: Matrix, packages: Iterable[str]) -> None:
    """MatrixError where a patch module lies neither in shim.patches nor in one of `packages`.

    A matrix names code that is imported, so it must not be enough to write one, or to set MEGATRON_SHIM_MATRIX.
    """
    allowed = (*TRUSTED, *packages)
    for entry in matrix.patches.values():
        if not any(f"{entry.module}.".startswith(f"{package}.") for package in allowed):
            top, inside = entry.module.partition(".")[0], " and ".join(allowed)
            raise MatrixError(
                f"{matrix.path}:{entry.line}: {entry.id}: the module {entry.module} lies outside {inside}."
                f" Remedy: if you trust its code, name its package: shim.apply(packages=[{top!r}]), or --package {top}."
            )
