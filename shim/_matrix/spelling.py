"""The right spelling of a wrong name: names that contain it or lie within it, else the nearest by edits."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["all_of", "did_you_mean", "nearest", "one_of"]

SHORTEST = 3  # letters. A shorter name is part of too many others.
MOST = 3
NAMED = 20  # names that a message lists. It says of more only how many there are.


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known`, nearest first: the same but for case and hyphens, one within the other, similar."""
    import difflib  # here, because most names are right

    by_plain = {_plain(one): one for one in known}
    wanted = _plain(name.strip())
    if wanted in by_plain:
        return [by_plain[wanted]]
    similar = difflib.get_close_matches(wanted, by_plain, MOST, 0.6)
    held = [one for one in by_plain if min(len(one), len(wanted)) >= SHORTEST and (wanted in one or one in wanted)]
    # Prefer the names that contain little more than `name`.
    held.sort(key=lambda one: (one not in similar, abs(len(one) - len(wanted))))
    return [by_plain[one] for one in dict.fromkeys([*held, *similar])][:MOST]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A half sentence for an error message: the nearest of `known`, or a few of them. "" if `known` is empty."""
    names = list(known)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return _asked(name, names) or (f"known are {', '.join(names[:NAMED])}{more}" if names else "")


def one_of(name: object, known: Iterable[str]) -> str:
    """The same for a few choices. It names all of them: "one of a, b; did you mean 'a'?"."""
    return f"one of {all_of(name, known)}"


def all_of(name: object, known: Iterable[str]) -> str:
    """The same without the first words: "a, b; did you mean 'a'?"."""
    names = list(known)
    return "; ".join(filter(None, (", ".join(names), _asked(name, names))))


def _asked(name: object, known: list[str]) -> str:
    found = [repr(one) for one in nearest(name, known)] if isinstance(name, str) else []
    if not found:
        return ""
    return f"did you mean {' or '.join(filter(None, (', '.join(found[:-1]), found[-1])))}?"
