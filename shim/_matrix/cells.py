"""The cells a trainer should test: one release for every set of bodies that differ."""

from __future__ import annotations

from packaging.version import Version

from shim._errors import OptionError
from shim._matrix.model import Matrix
from shim._releases.versions import in_range, parse_range

__all__ = ["cells"]


def cells(matrix: Matrix, spec: str | None = None, pairs: bool = False) -> list[dict[str, str]]:
    """Cells as ``{"megatron-core": release}``: of releases that patches cannot tell apart, the newest.

    spec: a PEP 440 range of megatron-core.    pairs: each cell with every release of Transformer Engine that differs,
    under "transformer-engine". Raises OptionError where `spec` is no range, or leaves nothing.
    """
    try:
        parse_range(spec or "")
    except ValueError as error:
        raise OptionError(f"--range {spec!r} is not a range of versions: {error}") from None
    cores = _distinct(matrix, "megatron-core", spec)
    if not cores:
        raise OptionError(f"no supported release of megatron-core lies in {spec!r}")
    if not pairs:
        return [{"megatron-core": core} for core in cores]
    te_releases = _distinct(matrix, "transformer-engine", None)
    return [{"megatron-core": core, "transformer-engine": te} for core in cores for te in te_releases]


def _distinct(matrix: Matrix, distribution: str, spec: str | None) -> list[str]:
    newest: dict[str, str] = {}  # by all that is pinned; dictionaries keep the place of the first of a group
    for release in sorted(matrix.supported.get(distribution, ()), key=Version):
        if in_range(Version(release), spec or ""):
            pins = matrix.pins.get(distribution, {}).get(release, {})
            key = repr([(id, pin.variant, sorted(pin.fingerprints.items())) for id, pin in pins.items() if pin.variant])
            newest[key] = release
    return list(newest.values())
