"""Names of settings that are perhaps misspelt: a known name but for one or two letters of one of its words."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["perhaps_misspelt"]

SHORTEST = 6  # letters of a word that may be misspelt: shorter ones are too near to other words


def perhaps_misspelt(names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """The names, each with the known one that it is nearly. Words of other names, and plurals, are no mistakes."""
    right = list(known)
    words = {word for name in right for word in name.split("_")}
    found: dict[str, str] = {}
    for name in names:
        near = next((one for one in right if one != name and _is_near(name, one, words)), None)
        if near is not None:
            found[name] = near
    return found


def _is_near(name: str, right: str, words: set[str]) -> bool:
    parts, rights = name.split("_"), right.split("_")
    if len(right) < 2 * SHORTEST or abs(len(name) - len(right)) > 2:
        return False
    if name.replace("_", "") == right.replace("_", ""):
        return True
    if len(parts) != len(rights):
        return False
    odd = [(part, one) for part, one in zip(parts, rights, strict=True) if part != one]
    return len(odd) == 1 and odd[0][0] not in words and _is_slip(*odd[0])


def _is_slip(word: str, right: str) -> bool:
    """Whether `word` is `right` with a letter too many, too few, wrong, or two swapped; no plural or past tense."""
    if len(right) < SHORTEST or word.rstrip("sd") == right.rstrip("sd"):
        return False
    if len(word) == len(right):
        wrong = [at for at in range(len(word)) if word[at] != right[at]]
        swapped = len(wrong) == 2 and wrong[1] == wrong[0] + 1
        return len(wrong) == 1 or (swapped and word[wrong[0]] == right[wrong[1]] and word[wrong[1]] == right[wrong[0]])
    short, long = sorted((word, right), key=len)
    return len(long) - len(short) == 1 and any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
