"""The result of a proof: both sides, and one verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shim._matrix.declared import RIGHT

__all__ = ["FAILURES", "Outcome", "Result", "outcome_of", "past", "summary", "verdict_of"]

# In the order in which a summary counts them.
VERDICTS = {
    "fixed": "fixed",
    "upstream": "upstream already right",
    "right": "right with and without shim",
    "cannot run": "cannot run here",
    "not fixed": "not fixed",
    "not reproduced": "not reproduced, though the matrix says that stock is wrong",
    "made worse": "right on stock and wrong with shim",
    "broken": "without a result",
}
FAILURES = ("not fixed", "not reproduced", "made worse", "broken")
ALWAYS_COUNTED = ("fixed", "not fixed")


@dataclass(frozen=True)
class Outcome:
    """One side: "right", "wrong", "cannot run", or "broken", and the measurement in words (`text`).

    reached: of the bodies that were watched, those that ran.
    lacks: whether it cannot run because the tree lacks the feature.
    """

    state: str
    text: str
    seconds: float = 0.0
    value: float | None = None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    details: str = ""
    reached: tuple[str, ...] = ()
    lacks: bool = False

    @property
    def ended_early(self) -> bool:
        """Whether it is wrong by an error, a hang or a signal, as the proof expects, and has measured nothing."""
        return self.state == "wrong" and (self.value is None or math.isinf(self.value))

    def to_dict(self) -> dict[str, Any]:
        number = self.value if self.value is not None and math.isfinite(self.value) else None
        curves = {name: list(values) for name, values in self.curves.items()}
        said = {"state": self.state, "text": self.text, "value": number, "seconds": round(self.seconds, 3)}
        return {**said, "curves": curves, "details": self.details}


def outcome_of(answer: Mapping[str, Any], defect: str, crashes: str) -> Outcome:
    """The outcome in a worker's answer. A hang or a death is wrong only if that is the defect."""
    state, text = answer["state"], answer["text"]
    expected = {"hung": defect == "hang", "died": defect == "crash" and "signal" in crashes}
    if state not in ("right", "wrong", "cannot run"):
        state = "wrong" if expected.get(state) else "broken"
    return Outcome(
        state,
        text,
        answer.get("seconds", 0.0),
        answer.get("value"),
        answer.get("curves", {}),
        answer.get("details", ""),
        tuple(answer.get("reached", ())),
        answer.get("lacks", False),
    )


@dataclass(frozen=True)
class Result:
    """One proof on the installed releases.

    patch: its id; "" for a generic proof. label: the id, with the proof's name if the patch has several.
    action: of shim.plan() for the patch. reproduction: the docstring of the proof. audit: the verdict of
    `shim audit`, if the proof ran against a tree. curve: the quantity in the curves of both sides.
    left: targets without which the patch applies here, because their bodies are not known.
    """

    patch: str
    proof: str
    label: str
    kind: str
    defect: str
    device: str
    verdict: str
    reason: str
    action: str = ""
    variant: str | None = None
    stock: Outcome | None = None
    patched: Outcome | None = None
    bound: float = 0.0
    reproduction: str = ""
    source: str = ""
    audit: str = ""
    curve: str = "loss"
    left: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """What the patch does without here, in words; "" if it applies whole."""
        names = ", ".join(target.partition(":")[2] for target in self.left)
        return f"in part: without {names}, of which the body is not known" if names else ""

    @property
    def failed(self) -> bool:
        return self.verdict in FAILURES

    @property
    def sides(self) -> tuple[Outcome, ...]:
        """The sides that ran, stock first."""
        return tuple(side for side in (self.stock, self.patched) if side is not None)

    @property
    def gets_further(self) -> bool:
        """Whether the patched side gets past what ends stock, and then breaks in another way. So it shows nothing."""
        return self.patched is not None and _gets_further(self.stock, self.patched)

    @property
    def reached(self) -> set[str]:
        """The watched bodies that ran on either side."""
        return {target for side in self.sides for target in side.reached}

    @property
    def seconds(self) -> float:
        return sum(side.seconds for side in self.sides)

    def to_dict(self) -> dict[str, Any]:
        names = ("patch", "proof", "kind", "defect", "device", "verdict", "reason", "action", "variant", "bound")
        found = {name: getattr(self, name) for name in (*names, "reproduction", "audit")}
        sides = {"stock": self.stock, "with_shim": self.patched}
        return {**found, **{name: None if side is None else side.to_dict() for name, side in sides.items()}}


def verdict_of(action: str, stock: Outcome, patched: Outcome | None) -> tuple[str, str]:
    """(verdict, reason) of a proof. `action` is that of the plan; `patched` is None if the patch is not applied."""
    for side, name in ((stock, "stock"), (patched, "with shim")):
        if side is not None and side.state == "cannot run":
            return "cannot run", side.text
        if side is not None and side.state == "broken" and (name == "stock" or stock.state == "right"):
            return "broken", f"{name}: {side.text}"
    if action in RIGHT:
        if stock.state == "right":
            return "upstream", "this release is right"
        return "not fixed", "the matrix says that this release is right, and it is not"
    if action != "apply":
        return ("not fixed" if stock.state == "wrong" else "right"), f"the patch is {action} here"
    if stock.state == "right":
        return "not reproduced", "stock is right here, and the matrix says that it is wrong"
    assert patched is not None
    if patched.state == "right":
        return "fixed", ""
    if _gets_further(stock, patched):
        return "broken", past(stock, patched)
    return "not fixed", f"with shim: {patched.text}"


def _gets_further(stock: Outcome | None, patched: Outcome) -> bool:
    return stock is not None and stock.ended_early and patched.state == "broken"


def past(stock: Outcome, patched: Outcome) -> str:
    """What is said if the patched side breaks behind what ends stock."""
    return f"with the patch the run gets past {stock.text}, and ends in: {patched.text}"


def generic_verdict(stock: Outcome, patched: Outcome) -> tuple[str, str]:
    """(verdict, reason) of a generic proof on a user's model."""
    for side, name in ((stock, "without shim"), (patched, "with shim")):
        if side.state in ("cannot run", "broken"):
            return side.state, f"{name}: {side.text}"
    return {
        ("right", "right"): ("right", ""),
        ("wrong", "right"): ("fixed", ""),
        ("wrong", "wrong"): ("not fixed", f"with shim: {patched.text}"),
        ("right", "wrong"): ("made worse", f"with shim: {patched.text}"),
    }[stock.state, patched.state]


def summary(results: Iterable[Result]) -> str:
    """ "31 fixed, 4 upstream already right, 3 cannot run here, 0 not fixed"."""
    counts = Counter(result.verdict for result in results)
    shown = [verdict for verdict in VERDICTS if counts[verdict] or verdict in ALWAYS_COUNTED]
    return ", ".join(f"{counts[verdict]} {VERDICTS[verdict]}" for verdict in shown)
