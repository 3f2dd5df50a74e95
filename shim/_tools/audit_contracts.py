"""The words of an audit about the contract of an unknown body: kept or broken, with its terms."""

from __future__ import annotations

from collections.abc import Iterator

from shim._matrix.model import Needs

__all__ = ["NONE", "judged"]

NONE = "none, so the body must be known"
PHRASE_LIMIT = 100  # characters


def judged(needs: Needs | None, breach: str) -> str:
    """``kept: ...`` with the terms of the contract, ``broken: ...`` with the breach, NONE if there is none."""
    if needs is None:
        return NONE
    return f"broken: {breach}" if breach else f"kept: it {'; it '.join(_asked(needs))}"


def _asked(needs: Needs) -> Iterator[str]:
    """The terms of the contract, as properties of a body that keeps it. Other decorators are never allowed."""
    taken = list(dict.fromkeys((*needs.first, *needs.parameters)))
    if needs.exact:
        also = f", at most {', '.join(needs.also)} more" if needs.also else ""
        yield f"takes {', '.join(taken)} and nothing else{also}" if taken else f"takes nothing{also}"
    elif taken:
        yield f"takes {', '.join(taken)}"
    if needs.decorators:
        yield f"has {_listed(needs.decorators, '@')}"
    if needs.has:
        yield f"has {_listed(needs.has)}"
    if needs.lacks:
        yield f"lacks {_listed(needs.lacks)}"
    if needs.keeps:
        yield f"binds nothing else to {_listed(needs.keeps)}"
    if needs.confined:
        yield f"uses {_listed(needs.confined)} there alone"
    if needs.returns:
        yield f"returns only {_listed(needs.returns)}"


def _listed(phrases: tuple[str, ...], before: str = "") -> str:
    shown = (" ".join(phrase.split()) for phrase in phrases)
    return ", ".join(f"`{before}{p if len(p) <= PHRASE_LIMIT else p[:PHRASE_LIMIT] + '...'}`" for p in shown)
