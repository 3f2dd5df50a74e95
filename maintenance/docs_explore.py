"""docs/explore.html: choose two releases and what you train, and see the defects that hit you. One file, no network.

The page is put together from explore/page.html, page.css and page.js. Its data are the matrix and the results of the
proofs, and everything that the script shows is one of their texts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._matrix.concerns import WORDS
from shim._matrix.model import RIGHT, SYMPTOMS, UPSTREAM, Matrix, PatchEntry, in_range
from shim._proving.pictures import both_schemes
from shim._te.features import losses_of

from .docs_defects import ProofText, proof_texts
from .docs_links import segments
from .docs_picture import tones

__all__ = ["GROUPS", "PRESETS", "VERDICTS", "explore_data", "explore_page"]

CORE, TE = "megatron-core", "transformer-engine"
PARTS = Path(__file__).parent / "explore"
VERDICTS = ("fixed", "upstream", "cannot run")  # the data have their places in this list
# Words that the choice of Transformer Engine answers, and the one that holds for every run.
ANSWERED = ("any", "te", "no-te")
# What a user ticks, in the order of the page. A word that no group has comes last.
GROUPS = {
    "Model": "mtp moe mla gated-attention mamba gdn dsa mrope fused-rope fp32-residual max-logit",
    "Batches": "packed padding-mask label-smoothing fused-loss datasets",
    "Training": "lora recompute fp8 cuda-graph router-replay",
    "Parallelism": "tp sp cp pp layout ep",
    "Optimizer": "distributed-optimizer offloaded-optimizer muon fsdp param-groups checkpoint",
    "Your code": "own-code config-override",
}
PRESETS = {
    "Dense model, one GPU": "",
    "LoRA on packed rows": "lora packed recompute tp sp",
    "Experts with MTP and MLA": "mtp moe mla recompute tp sp pp ep distributed-optimizer checkpoint",
    "Long rows": "packed recompute tp sp cp",
    "FP8": "fp8 recompute cuda-graph tp sp distributed-optimizer",
}


def explore_page(matrix: Matrix, proved: Mapping[str, Any]) -> str:
    """The text of docs/explore.html."""
    # A "<" in the data would end its element, were it that of "</script>".
    data = json.dumps(explore_data(matrix, proved), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    script = (PARTS / "page.js").read_text("utf-8")
    style = f"{both_schemes(':root')}\n{tones(':root')}\n" + (PARTS / "page.css").read_text("utf-8")
    filled = {"SCRIPT_HASH": _hash(script), "STYLE_HASH": _hash(style), "STYLE": style, "SCRIPT": script, "DATA": data}
    page = (PARTS / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], page)


def _hash(text: str) -> str:
    """For the page's policy: the browser runs this script, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def explore_data(matrix: Matrix, proved: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows, as plain data.

    Releases and texts are given by their places in a list. A patch has one letter for each release of the distributions
    that decide about it (`by`): a capital for a variant, "u" if the release has fixed the defect, "n" if it never had
    it. A run of a proof is [first release, number of releases, verdict, stock, with shim].

    `lost` has what megatron-core loses beside a Transformer Engine, see _lost.
    """
    releases = {CORE: [core for core in matrix.supported[CORE] if core in proved], TE: list(matrix.supported[TE])}
    texts: dict[str, int] = {}
    return {
        "core": releases[CORE],
        "te": releases[TE],
        "beside": [releases[TE].index(proved[release][TE]) for release in releases[CORE]],
        "symptoms": SYMPTOMS,
        "words": [[group, [[word, WORDS[word]] for word in words]] for group, words in _grouped().items()],
        "presets": [[name, words.split()] for name, words in PRESETS.items()],
        "patches": [_patch(entry, releases, proved, texts) for entry in matrix.patches.values()],
        "lost": [[lost, patch, spans] for (lost, patch), spans in _lost(releases).items()],
        "texts": list(texts),
    }


def _lost(releases: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], list[list[int]]]:
    """(what is lost, the patch that restores it or "") -> [first megatron-core, number, bits of Transformer Engine]."""
    masks: dict[tuple[str, str], list[int]] = {}
    for place, core in enumerate(releases[CORE]):
        for bit, te in enumerate(releases[TE]):
            for feature in losses_of(Version(core), Version(te)):
                mask = masks.setdefault((feature.lost, feature.patch), [0] * len(releases[CORE]))
                mask[place] |= 1 << bit
    return {what: list(_spans(mask)) for what, mask in masks.items()}


def _spans(mask: Sequence[int]) -> Iterator[list[int]]:
    for bits, places in groupby(range(len(mask)), key=lambda place: mask[place]):
        span = list(places)
        if bits:
            yield [span[0], len(span), bits]


def _grouped() -> dict[str, list[str]]:
    groups = {group: words.split() for group, words in GROUPS.items()}
    named = {*ANSWERED, *(word for words in groups.values() for word in words)}
    groups["Your code"] += [word for word in WORDS if word not in named]
    return groups


def _patch(
    entry: PatchEntry, releases: Mapping[str, Sequence[str]], proved: Mapping[str, Any], texts: dict[str, int]
) -> dict[str, Any]:
    by = [name for name in (CORE, TE) if any(name in rule.ranges for rule in entry.rules)]
    return {
        "id": entry.id,
        "without": _sentence(entry.without),
        "symptom": entry.symptom,
        "summary": entry.summary,
        "changes": entry.changes,
        "concerns": entry.concerns,
        "links": [list(segments(reference)) for reference in entry.references],
        "met": [list(segments(who)) for who in entry.met_by],
        "by": [(CORE, TE).index(name) for name in by],
        "states": _states(entry, by, releases),
        "pairs": [
            [rule.note, *(_span(rule.ranges.get(name, ""), releases[name]) for name in (CORE, TE))]
            for rule in entry.pairs
        ],
        "proofs": [_proof(text, releases[CORE], proved, texts) for text in proof_texts(entry)],
    }


def _sentence(text: str) -> str:
    """The text with a capital, unless it begins with a name of the code."""
    return text[:1].upper() + text[1:] if re.match(r"[A-Za-z-]+\s", text) else text


def _span(ranges: str, releases: Sequence[str]) -> list[int]:
    """[first, number] of the releases in a range, which is one without gaps."""
    places = [place for place, release in enumerate(releases) if not ranges or in_range(Version(release), ranges)]
    return [places[0], len(places)] if places else [0, 0]


def _states(entry: PatchEntry, by: Sequence[str], releases: Mapping[str, Sequence[str]]) -> list[str]:
    """A letter for each release that decides; if both distributions do, a text for each megatron-core."""
    letters = {variant: chr(ord("A") + place) for place, variant in enumerate(entry.variants)}

    def letter(**versions: str) -> str:
        rule = entry.rule_for({name.replace("_", "-"): Version(version) for name, version in versions.items()})
        if rule is None or rule.gives in RIGHT:
            return "u" if rule is not None and rule.gives == UPSTREAM else "n"
        return letters[rule.gives]

    if by == [CORE]:
        return ["".join(letter(megatron_core=core) for core in releases[CORE])]
    if by == [TE]:
        return ["".join(letter(transformer_engine=te) for te in releases[TE])]
    return [
        "".join(letter(megatron_core=core, transformer_engine=te) for te in releases[TE]) for core in releases[CORE]
    ]


def _proof(
    text: ProofText, releases: Sequence[str], proved: Mapping[str, Any], texts: dict[str, int]
) -> dict[str, Any]:
    return {
        "label": text.label,
        "what": text.reproduction.splitlines()[0],
        "defect": text.keywords.get("defect", "silent"),
        "te": int(bool(text.keywords.get("te"))),
        "gpu": int("cpu" not in text.keywords.get("devices", ["cpu"])),
        "runs": list(_runs(text.label, releases, proved, texts)),
    }


def _runs(label: str, releases: Iterable[str], proved: Mapping[str, Any], texts: dict[str, int]) -> Iterator[list[int]]:
    found = [proved[release]["proofs"].get(label) for release in releases]
    for said, places in groupby(range(len(found)), key=lambda place: found[place]):
        span = list(places)
        if said is not None:
            sides = [texts.setdefault(said[side], len(texts)) for side in ("stock", "with_shim")]
            yield [span[0], len(span), VERDICTS.index(said["verdict"]), *sides]
