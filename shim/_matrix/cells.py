"""The cells that a trainer should test: the everyday releases, one for each set of bodies."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from shim._errors import OptionError
from shim._matrix.model import Matrix
from shim._releases.versions import in_range, parse_range

__all__ = ["cells", "with_bodies_of"]


def cells(matrix: Matrix, spec: str | None = None, pairs: bool = False) -> list[dict[str, str]]:
    """Cells as ``{"megatron-core": release}``: the newest of the releases that no patch can tell apart.

    spec: a PEP 440 range of megatron-core.
    pairs: combine each cell with every everyday TE release, under "transformer-engine".

    Raises OptionError if `spec` is no range, or leaves no release.
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
    newest: dict[str, str] = {}  # keyed by the bodies. A group keeps the place of its first release.
    for release in sorted(matrix.supported.get(distribution, ()), key=Version):
        if in_range(Version(release), spec or ""):
            newest[_bodies(matrix, distribution, release)] = release
    return list(newest.values())


def _bodies(matrix: Matrix, distribution: str, release: str) -> str:
    """The same text for all releases that no patch can tell apart."""
    pins = matrix.pins.get(distribution, {}).get(release, {})
    return repr([(id, pin.variant, sorted(pin.fingerprints.items())) for id, pin in pins.items() if pin.variant])


def with_bodies_of(matrix: Matrix, distribution: str, release: str, among: Iterable[str]) -> str:
    """The one of `among` that no patch can tell from `release`. The release itself if there is none."""
    wanted = _bodies(matrix, distribution, release)
    return next((other for other in among if _bodies(matrix, distribution, other) == wanted), release)
