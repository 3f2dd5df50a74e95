"""Pins inside a matrix, under the key ``releases``: shim 0.1 wrote them there, and a small matrix may have them."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping

import yaml

from shim._matrix.model import DISTRIBUTIONS, UPSTREAM, PatchEntry, Pin, Pinned
from shim._matrix.pins import FINGERPRINT, by_body
from shim._matrix.reader import Reader

__all__ = ["inline_pins"]

PIN_KEYS = {"variant": True, "fingerprints": True}


def _pin(read: Reader, node: yaml.Node, entry: PatchEntry) -> Pin:
    entries = read.mapping(node, f"pin of {entry.id}", PIN_KEYS)
    name = read.text(entries["variant"], "variant")
    if name != UPSTREAM and name not in entry.variants:
        raise read.fail(entries["variant"], f"there is no variant {name!r} of {entry.id}")
    prints = read.mapping(entries["fingerprints"], "fingerprints")
    for value in prints.values():
        if not re.fullmatch(FINGERPRINT, read.text(value, "a fingerprint")):
            raise read.fail(value, f"{value.value!r} is not a fingerprint; run shim pin")
    if name == UPSTREAM and not set(prints) <= set(entry.bodies):
        odd = sorted(set(prints) - set(entry.bodies))[0]
        raise read.fail(node, f"{odd} is pinned, but is no body of {entry.id}; run shim pin")
    if name != UPSTREAM and set(prints) != set(entry.variants[name].bodies):
        odd = sorted(set(prints) ^ set(entry.variants[name].bodies))[0]
        raise read.fail(node, f"{odd} is pinned or a body of variant {name} of {entry.id}, but not both; run shim pin")
    return Pin(
        None if name == UPSTREAM else name,
        {target: value.value for target, value in prints.items()},
    )


def inline_pins(
    read: Reader, node: yaml.Node, patches: Mapping[str, PatchEntry], names: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Pinned]]:
    """The pins in `node`, by patch and variant as in the lock file of a matrix. MatrixError names file and line.

    names: the supported releases and the commits of each distribution.
    """
    pins: dict[str, dict[str, dict[str, Pin]]] = {}
    done: dict[tuple[str, int], Pin] = {}  # by id() of the node: an alias (*name) composes to the same node
    for distribution, releases in read.mapping(node, "releases", dict.fromkeys(DISTRIBUTIONS, False)).items():
        pins[distribution] = {}
        for release, ids in read.mapping(releases, f"releases of {distribution}").items():
            if release not in names.get(distribution, ()):
                raise read.fail(ids, f"{distribution} {release} is pinned but not in the supported list, nor a commit")
            found = pins[distribution][release] = {}
            for id, pin in read.mapping(ids, f"pins of {distribution} {release}").items():
                if id not in patches:
                    raise read.fail(pin, f"there is no patch {id!r}")
                key = (id, builtins.id(pin))
                if key not in done:
                    done[key] = _pin(read, pin, patches[id])
                found[id] = done[key]
    return by_body(pins)
