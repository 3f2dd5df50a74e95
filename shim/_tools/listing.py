"""All patches, whatever is installed: for `shim list` and the pages."""

from __future__ import annotations

from shim._matrix.model import Matrix
from shim._printing.overview import patches as number_of
from shim._printing.printable import one_line

__all__ = ["list_text", "listed"]


def listed(matrix: Matrix) -> dict[str, dict[str, str]]:
    """`kind`, `summary`, `changes` and `distribution` of each patch by id, and the supported `releases` that get it."""
    found = {}
    for id, entry in matrix.patches.items():
        pins = matrix.pins.get(entry.distribution, {})
        getting = [r for r in matrix.supported.get(entry.distribution, ()) if _gets(pins.get(r, {}).get(id))]
        found[id] = {
            "kind": entry.kind,
            "summary": entry.summary,
            "changes": entry.changes,
            "distribution": entry.distribution,
            "releases": f"{getting[0]} to {getting[-1]}" if len(getting) > 1 else "".join(getting),
        }
    return found


def _gets(pin: object) -> bool:
    return getattr(pin, "variant", None) is not None


def list_text(matrix: Matrix) -> str:
    """The text of `shim list`: all patches with their summaries, by kind."""
    patches = listed(matrix)
    width = max(map(len, patches), default=0)
    lines = [f"{number_of(len(patches))}; shim explain ID says more of one, shim plan which are needed here."]
    for kind in dict.fromkeys(patch["kind"] for patch in patches.values()):
        lines += ["", f"{kind}:"]
        for id, patch in patches.items():
            if patch["kind"] == kind:
                where = f" ({patch['distribution']} {patch['releases']})" if patch["releases"] else ""
                lines.append(f"  {id:<{width}}  {one_line(patch['summary'])}{where}")
    return "\n".join(lines)
