"""Reading the contracts of a patch, the signs that a release is right without it, and what people decided of bodies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shim._matrix.model import RIGHT, Decided, Needs, Place, Sign, Variant
from shim._matrix.pins import FINGERPRINT
from shim._matrix.reader import Reader
from shim._releases.phrases import parsed

if TYPE_CHECKING:
    import yaml

__all__ = ["read_decided", "read_signs", "with_contracts"]

LISTS = ("parameters", "first", "also", "decorators", "has", "lacks", "keeps", "confined", "may", "returns")
CONTRACT_KEYS = {**dict.fromkeys(("target",), True), **dict.fromkeys(("variants", *LISTS, "exact"), False)}
PLACE = {"target": True, "has": False, "lacks": False, "once": False}
SIGN_KEYS = {**PLACE, "target": False, "places": False, "note": True}
DECIDED_KEYS = dict.fromkeys(("target", "body", "as", "note"), True)
PHRASES = ("has", "lacks", "keeps", "confined", "may", "returns")


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


def read_signs(read: Reader, node: yaml.Node, key: str) -> Iterator[Sign]:
    """The signs under `key`. A sign of one place is written without `places`."""
    for item in read.sequence(node, key):
        given = read.mapping(item, f"an entry of {key}", SIGN_KEYS)
        note = read.text(given.pop("note"), "note")
        if "places" in given:
            if len(given) > 1:
                raise read.fail(item, "a sign has either places, or a target with phrases")
            places = [_place(read, p, read.mapping(p, "a place", PLACE)) for p in _items(read, given["places"])]
        else:
            places = [_place(read, item, given)]
        yield Sign(tuple(places), note)


def _items(read: Reader, node: yaml.Node) -> list[yaml.Node]:
    items = list(read.sequence(node, "places"))
    if not items:
        raise read.fail(node, "places is empty")
    return items


def _place(read: Reader, node: yaml.Node, given: Mapping[str, yaml.Node]) -> Place:
    if "target" not in given:
        raise read.fail(node, "a sign needs a target, or places")
    phrases = {name: _texts(read, given[name], name) for name in ("has", "lacks") if name in given}
    once = "once" in given and read.flag(given["once"], "once")
    return Place(read.target(given["target"], "target"), **phrases, once=once)


def read_decided(read: Reader, node: yaml.Node, variants: Mapping[str, Variant]) -> Iterator[Decided]:
    """The entries of `decided`. Each is about a body of a variant, or of any variant if a release is right."""
    for item in read.sequence(node, "decided"):
        given = read.mapping(item, "an entry of decided", DECIDED_KEYS)
        gives = read.text(given["as"], "as", (*variants, *RIGHT))
        target, body = read.target(given["target"], "target"), read.text(given["body"], "body")
        having = [variants[gives]] if gives in variants else variants.values()
        if not any(target in variant.bodies for variant in having):
            raise read.fail(item, f"{target} is no body of {f'variant {gives}' if gives in variants else 'a variant'}")
        if not re.fullmatch(FINGERPRINT, body):
            raise read.fail(given["body"], f"{body!r} is not a fingerprint, as shim audit and shim pin print it")
        yield Decided(target, body, gives, read.text(given["note"], "note"))


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
