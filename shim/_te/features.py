"""The lost features of the installed pair of releases, and the patches that restore them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from shim._planning.decision import Decision, LostFeature
from shim._releases.detect import Environment
from shim._releases.sources import Sources
from shim._releases.versions import parse_range
from shim._te.names import Names, imported_below, wanted_names
from shim._te.tables import MEGATRON, TE, expanded, remedies, table

__all__ = ["LostFeature", "lost_features", "losses_of", "missing_names", "pair_is_known", "places", "remedy_for"]


def remedy_for(name: str, megatron: Version) -> Mapping[str, str] | None:
    """The remedy for a name that this megatron-core wants: the first case whose range holds. None: not judged."""
    cases = remedies()["names"].get(name, [])
    return next((case for case in cases if _holds(case.get(MEGATRON, ""), megatron)), None)


def _holds(ranges: str, version: Version) -> bool:
    return not ranges or parse_range(ranges).contains(version, prereleases=True)


def _known(version: Version | None, releases: Sequence[str]) -> str | None:
    """The measured release with the public part of `version`, if there is one."""
    if version is None:
        return None
    public = Version(version.public)
    return next((release for release in releases if Version(release) == public), None)


def pair_is_known(environment: Environment) -> bool | None:
    """Whether both installed releases were measured. None if one of them is not installed."""
    installed = environment.installed
    if MEGATRON not in installed or TE not in installed:
        return None
    return all(_known(installed[name].version, table()[name]) is not None for name in (MEGATRON, TE))


def places(megatron: Version | None, te: Version | None) -> dict[str, list[str]] | None:
    """For each name that this pair loses, the modules and their losses. None: the pair was not measured."""
    measured = table()
    mine, other = _known(megatron, measured[MEGATRON]), _known(te, measured[TE])
    if mine is None or other is None:
        return None
    found: dict[str, list[str]] = {}
    for loss in measured["losses"]:
        if any(
            mine in expanded(wanting, measured[MEGATRON]) and other in expanded(lacking, measured[TE])
            for wanting, lacking in loss["on"].items()
        ):
            found.setdefault(loss["name"], []).extend(f"{loss['module']}: {what}" for what in loss["what"])
    return found


def lost_features(
    environment: Environment, decisions: Mapping[str, Decision], *, read_sources: bool = False
) -> tuple[LostFeature, ...] | None:
    """The lost features of the installed pair. () if one is not installed, None if the pair was not measured.

    With `read_sources` shim reads the sources of such a pair, see `missing_names`. That takes a second or two.
    """
    installed = environment.installed
    if MEGATRON not in installed or TE not in installed:
        return ()
    megatron, te = installed[MEGATRON].version, installed[TE].version
    found = places(megatron, te)
    if found is None and read_sources:
        found = missing_names(environment.sources, Path(installed[MEGATRON].location), megatron)
    if found is None or megatron is None or te is None:
        return None
    return (*_of_names(found, megatron, te, decisions), *_of_drifts(megatron, te, decisions))


def losses_of(megatron: Version, te: Version) -> tuple[LostFeature, ...]:
    """The lost features of two measured releases, whatever is installed, without a decision about their patches."""
    return (*_of_names(places(megatron, te) or {}, megatron, te, {}), *_of_drifts(megatron, te, {}))


def missing_names(sources: Sources, package: Path, megatron: Version | None) -> dict[str, list[str]]:
    """The names that the modules of megatron-core below `package` import, and Transformer Engine lacks: the places.

    Both are read in `sources`. The effect of a missing name is not known. A name is left out if the last measured
    release of megatron-core up to this one imports it, and loses nothing without it beside any measured TE release.
    """
    measured = table()[MEGATRON]
    like = next((r for r in reversed(measured) if megatron is None or Version(r) <= megatron), measured[0])
    lost = {
        loss["name"] for loss in table()["losses"] if any(like in expanded(wanting, measured) for wanting in loss["on"])
    }
    harmless = {name for name, found in wanted_names().items() if like in found["wanted_by"]} - lost
    names = Names(sources)
    gone = {
        name: modules
        for name, modules in imported_below(package, sources).items()
        if name not in harmless and not names.has(name)
    }
    return {
        name: [f"{module} imports it" for module in modules]
        for name, modules in gone.items()
        if name.rpartition(".")[0] not in gone  # a member is lost with its class
    }


def _of_names(
    found: Mapping[str, Sequence[str]], megatron: Version, te: Version, decisions: Mapping[str, Decision]
) -> Iterator[LostFeature]:
    for name, where in found.items():
        judged = remedy_for(name, megatron) or {"remedy": "", "lost": "; ".join(where)}
        if judged["remedy"] != "unneeded":
            yield _feature(name, judged, decisions, _comes_with(name, te), tuple(where))


def _of_drifts(megatron: Version, te: Version, decisions: Mapping[str, Decision]) -> Iterator[LostFeature]:
    for drift in remedies()["drifts"]:
        if _holds(drift[MEGATRON], megatron) and _holds(drift[TE], te):
            yield _feature(drift["name"], drift, decisions, "", tuple(drift["places"]))


def _feature(
    name: str, judged: Mapping[str, Any], decisions: Mapping[str, Decision], comes_with: str, where: tuple[str, ...]
) -> LostFeature:
    patch = judged.get("patch", "")
    decision = decisions.get(patch)
    fixed = decision is not None and decision.wanted
    why_not = "" if fixed or not patch else "the matrix does not have it"
    if decision is not None and not fixed:
        why_not = f"it is {decision.action}: {decision.reason}"
    return LostFeature(name, judged["lost"], judged["remedy"], patch, fixed, why_not, comes_with, where)


def _comes_with(name: str, te: Version) -> str:
    found = wanted_names().get(name, {"in": []})["in"]
    return next((release for release in found if Version(release) > te), "")
