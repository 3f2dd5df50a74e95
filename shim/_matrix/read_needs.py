"""Reading the contracts of a patch, and the signs that a release has mended its defect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shim._matrix.model import Mended, Needs, Variant
from shim._matrix.reader import Reader
from shim._record import replace
from shim._releases.phrases import parsed

if TYPE_CHECKING:
    import yaml

__all__ = ["read_mended", "with_contracts"]

LISTS = ("parameters", "first", "also", "decorators", "has", "lacks", "returns")
CONTRACT_KEYS = {**dict.fromkeys(("target",), True), **dict.fromkeys(("variants", *LISTS, "exact"), False)}
MENDED_KEYS = {"target": True, "has": True, "note": True}
PHRASES = ("has", "lacks", "returns")


def with_contracts(read: Reader, node: yaml.Node, variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """The variants with the contracts in `node`. A contract concerns the variants it names, or all with its body."""
    found: dict[str, dict[str, Needs]] = {name: {} for name in variants}
    for item in read.sequence(node, "contracts"):
        given = read.mapping(item, "a contract", CONTRACT_KEYS)
        body = read.target(given["target"], "target")
        having = [name for name, variant in variants.items() if body in variant.bodies]
        chosen = read.texts(given["variants"], "variants") if "variants" in given else having
        odd = next((name for name in chosen if name not in having), None)
        if odd is not None or not chosen:
            raise read.fail(item, f"{body} is no body of {f'variant {odd}' if odd else 'a variant'}")
        needs = _needs(read, item, given, body)
        for name in chosen:
            if body in found[name]:
                raise read.fail(item, f"{body} has two contracts in variant {name}")
            found[name][body] = needs
    return {name: replace(variant, needs=found[name]) for name, variant in variants.items()}


def _needs(read: Reader, node: yaml.Node, given: Mapping[str, yaml.Node], body: str) -> Needs:
    if not given.keys() - {"target", "variants"}:
        raise read.fail(node, f"the contract of {body} is empty; a body without a contract must be known")
    lists = {name: _texts(read, given[name], name) for name in LISTS if name in given}
    return Needs(**lists, exact="exact" in given and read.flag(given["exact"], "exact"))


def read_mended(read: Reader, node: yaml.Node) -> Iterator[Mended]:
    for item in read.sequence(node, "mended"):
        given = read.mapping(item, "an entry of mended", MENDED_KEYS)
        target = read.target(given["target"], "target")
        yield Mended(target, _texts(read, given["has"], "has"), read.text(given["note"], "note"))


def _texts(read: Reader, node: yaml.Node, what: str) -> tuple[str, ...]:
    texts = read.texts(node, what)
    if not texts:
        raise read.fail(node, f"{what} is empty")
    for text in texts if what in PHRASES else ():
        try:
            parsed(text)
        except ValueError as error:
            raise read.fail(node, f"{what}: {error}") from None
    return texts
