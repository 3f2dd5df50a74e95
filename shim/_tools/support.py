"""The variants of all patches on all supported releases, as data and as a table."""

from __future__ import annotations

from packaging.version import Version

from shim._matrix.model import Matrix, PatchEntry

__all__ = ["support", "support_table"]


def support(matrix: Matrix) -> dict[str, dict[str, dict[str, str]]]:
    """``{distribution: {release: {patch id: variant, or "upstream"}}}``."""
    table: dict[str, dict[str, dict[str, str]]] = {}
    for distribution, releases in matrix.supported.items():
        for release in releases:
            row = table.setdefault(distribution, {}).setdefault(release, {})
            for id, entry in matrix.patches.items():
                if entry.distribution == distribution:
                    row[id] = _cell(entry, release)
    return table


def _cell(entry: PatchEntry, release: str) -> str:
    rule = entry.pinned_rule(Version(release))
    return "-" if rule is None else rule.variant or "upstream"


def support_table(matrix: Matrix) -> str:
    """A Markdown table for each distribution: patches down, releases across. Releases with equal columns share one."""
    tables: list[str] = []
    for distribution, releases in support(matrix).items():
        columns: list[tuple[str, str, dict[str, str]]] = []
        for release, row in releases.items():
            if columns and columns[-1][2] == row:
                columns[-1] = (columns[-1][0], release, row)
            else:
                columns.append((release, release, row))
        ids = [id for id, entry in matrix.patches.items() if entry.distribution == distribution]
        heads = [first if first == last else f"{first} - {last}" for first, last, _ in columns]
        lines = [f"| {distribution} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        lines += [f"| {id} | " + " | ".join(row[id] for _, _, row in columns) + " |" for id in ids]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
