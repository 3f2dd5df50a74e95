"""What `shim plan` and `shim doctor` say of this environment: the notes of patches, and which attention is on."""

from __future__ import annotations

import importlib

from shim._planning.plan import Plan
from shim._releases.sources import Sources
from shim._te.attention import attention_notes

__all__ = ["notes_of"]


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
