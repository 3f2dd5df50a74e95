"""What `shim plan` and `shim doctor` say of this environment: the notes of patches, and which attention is on."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

from shim._planning.decision import Decision
from shim._planning.plan import Plan
from shim._releases.detect import Environment
from shim._releases.sources import SourceError, Sources
from shim._te.tables import TE

__all__ = ["attention_notes", "notes_of"]

FLASH = "flash-attn"
NEWER = {3: "flash-attn-3", 4: "flash-attn-4"}  # wheels of later FlashAttentions
LEAST = Version("2.1.1")
LABELS = "te-flash-local-version"  # the patch that lets a version with a local label count as the release itself
# The modules that hold the newest FlashAttention 2 that is taken, from the newest Transformer Engine to the oldest.
MODULES = (
    "transformer_engine.pytorch.attention.dot_product_attention.utils",
    "transformer_engine.pytorch.dot_product_attention.utils",
    "transformer_engine.pytorch.attention",
)
NAMES = ("max_version", "_flash_attn_max_version")
FLASH_ON, FUSED_ON, UNFUSED_ON = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"  # variables


def attention_notes(environment: Environment, decisions: Mapping[str, Decision], sources: Sources) -> Iterator[str]:
    """Sentences on FlashAttention and fused attention, with a remedy if one is off. None without Transformer Engine.

    Imports nothing. Which of those that are on a layer gets depends on its shapes, its mask and the GPU as well.
    """
    te = environment.installed.get(TE)
    if te is None or te.version is None:
        return
    if _is_off(FLASH_ON):
        yield f"FlashAttention is off by {FLASH_ON}=0"
    else:
        yield _flash(te.version, _newest(sources), decisions.get(LABELS))
        for generation, wheel in NEWER.items():
            if found := _installed(wheel):
                yield f"FlashAttention {generation}: {wheel} {found} is installed; only some GPUs run it"
    fused = f"off by {FUSED_ON}=0" if _is_off(FUSED_ON) else "on, if cuDNN takes the shapes"
    unfused = f"off by {UNFUSED_ON}=0" if _is_off(UNFUSED_ON) else "on"
    yield (
        f"fused attention (cuDNN) is {fused}; unfused attention is {unfused}. Which one a layer gets depends on its "
        "shapes, its mask and the GPU: NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints it"
    )


def _is_off(variable: str) -> bool:
    return os.environ.get(variable) == "0"


def _flash(te: Version, newest: Version | None, labels: Decision | None) -> str:
    """The sentence on FlashAttention 2."""
    given = _installed(FLASH)
    if newest is None:
        return (
            f"FlashAttention 2: {FLASH} {given or 'is not installed'}; which of its releases Transformer Engine {te} "
            "takes cannot be read in its source"
        )
    remedy = f"Remedy, if it is needed: {FLASH}=={newest}"
    if given is None:
        return f"FlashAttention 2 is off: {FLASH} is not installed. {remedy}"
    try:
        found = Version(given)
    except InvalidVersion:
        return f"FlashAttention 2: {FLASH} has the version {given}, which cannot be compared"
    if not LEAST <= Version(found.public) <= newest:
        takes = f"Transformer Engine {te} takes {FLASH} {LEAST} to {newest}"
        return f"FlashAttention 2 is off: {takes}, and {found} is installed. {remedy}"
    if found > newest and labels is not None and labels.action != "upstream":
        if not labels.wanted:
            return (
                f"FlashAttention 2 is off: Transformer Engine {te} takes {FLASH} to {newest}, and {found} for newer. "
                f"Remedy: {LABELS}, which is {labels.action}"
            )
        return f"FlashAttention 2 is on: {FLASH} {found}, whose label {LABELS} leaves out of the comparison"
    return f"FlashAttention 2 is on: {FLASH} {found}"


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _newest(sources: Sources) -> Version | None:
    """The newest FlashAttention 2 that the installed Transformer Engine takes, read in its source."""
    for module in MODULES:  # ast.walk is breadth-first: the constant comes before what functions assign
        if sources.path(module) is None:
            continue
        try:
            tree = sources.tree(module)
        except SourceError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in NAMES:
                match node.value:
                    case ast.Call(args=[ast.Constant(value=str(text))]):
                        return Version(text)
    return None


def notes_of(made: Plan) -> list[str]:
    """Sentences, each behind the id of its patch or "attention". Imports neither torch nor upstream.

    A patch has notes if it has a file notes.py.
    """
    sources = Sources()
    found = []
    for decision in made.decisions.values():
        place = f"{made.matrix.patches[decision.id].module}.notes"
        if decision.wanted and sources.path(place) is not None:
            said = importlib.import_module(place).notes(made.environment.versions)
            found += [f"{decision.id}: {note}" for note in said]
    return found + [f"attention: {note}" for note in attention_notes(made.environment, made.decisions, sources)]
