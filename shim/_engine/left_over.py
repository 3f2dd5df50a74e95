"""What shim had bound and cannot make inert after it has taken it off: other code may put it on its name again."""

from __future__ import annotations

from collections.abc import Container, Iterator

from shim._engine.aliases import unwrap
from shim._engine.chain import MISSING, Chain, Key, Slot, read_name

__all__ = ["LeftOver"]

# Equal ones may be the same object, so it is unknown whose it is.
_WITHOUT_IDENTITY = (type(None), bool, int, float, str, bytes)


class LeftOver:
    """Classes, callable objects and constants of chains that have ended, by the name that they stood on.

    A function passes its calls on from then on (see Retired), and is not kept here.
    """

    def __init__(self) -> None:
        self._ended: dict[Key, Chain] = {}

    def draft(self) -> LeftOver:
        """A copy to try a transaction on."""
        copy = LeftOver()
        copy._ended = dict(self._ended)
        return copy

    def note(self, chain: Chain) -> None:
        """A chain has ended whose object does not pass its calls on to what was there before."""
        inner = unwrap(chain.top)
        others = chain.borrowed and chain.base is not MISSING
        if type(inner) not in _WITHOUT_IDENTITY and inner is not unwrap(chain.base) and not others:
            self._ended[chain.key] = chain

    def back(self, governed: Container[Key]) -> Iterator[Slot]:
        """The names that hold such an object again, and that shim does not govern."""
        for key, chain in list(self._ended.items()):
            current = read_name(chain.owner, chain.name)
            if key not in governed and current is not MISSING and unwrap(current) is unwrap(chain.top):
                yield Slot(chain.owner, chain.name, chain.base, current, chain.target)
