"""The signs of the matrix against real releases: what shows that a release is right without a patch.

A wrong sign leaves a defect in place, in silence. So a sign shows on every release that is right and on no other, and
it goes as soon as somebody puts the defect back.
"""

from functools import cache

import pytest
from edited_sources import Edited, found_in, sources_of
from put_back import DEFECTS
from recording import NO_SOURCES
from thorough import in_full

from shim._matrix.load import load_matrix
from shim._matrix.model import NOT_NEEDED, RIGHT, UPSTREAM
from shim._planning.contract import shows
from shim._releases.sources import Sources
from shim.testing.releases import at_hand, fetch

pytestmark = pytest.mark.xdist_group("sources")
MATRIX = load_matrix()

# Patches whose signs say nothing of releases that are right: only the bodies of these releases do. Those that lack
# every target need no sign, see lacks_targets.
SILENT = {
    (
        "te-cp-thd-padding",
        NOT_NEEDED,
    ): "they have the defect, and nothing that takes the argument",
    ("te-flash-3-cp", NOT_NEEDED): "code of a module, in no function, imports another FlashAttention 3 there",
    ("te-flash-local-version", UPSTREAM): "the comparison is code of a module, in no function that a sign could read",
    ("te-grouped-mlp-hybrid", UPSTREAM): "the proof says it: a comparison of formats stands in another function",
    ("hybrid-frozen-norms", NOT_NEEDED): "nothing in them says that no spec of theirs has a separate norm",
    ("hybrid-uneven-stages", UPSTREAM): "one release is right, and no later one has the function",
}
# Patches that another distribution than their own decides about: by pairs of releases, see test_a_pair_...
BY_PAIRS = ("te-moved-symbols", "max-logit-graph")


def signs_of(id, state):
    return MATRIX.patches[id].fixed if state == UPSTREAM else MATRIX.patches[id].lacking


def lacks_targets(id, state):
    """Whether no release in this state has a target of the patch, so that the missing name says it without a sign."""
    entry = MATRIX.patches[id]
    pins = MATRIX.pins[entry.distribution]
    names = [name for name in MATRIX.supported[entry.distribution] if MATRIX.wanted(id, name) == state]
    return not any(set(pins[name][id].fingerprints) & set(entry.targets) for name in names if id in pins[name])


def is_silent(id, state):
    return (id, state) in SILENT or (not signs_of(id, state) and lacks_targets(id, state))


SIGNED = sorted(id for id, entry in MATRIX.patches.items() if entry.fixed or entry.lacking)


@cache
def releases_of(distribution):
    """The releases and commits whose sources are there. Those of commits are not everywhere."""
    released = MATRIX.supported[distribution]
    return [name for name in MATRIX.names(distribution) if name in released or at_hand(name, distribution)]


def shown(id, sources):
    """The states that signs of a patch show, each once."""
    return [state for state in RIGHT if any(shows(sources, sign) for sign in signs_of(id, state))]


def in_order(id, is_it):
    """The releases and commits of a patch, oldest first, for which `is_it` holds of what the matrix wants there."""
    names = MATRIX.in_order(MATRIX.patches[id].distribution, releases_of(MATRIX.patches[id].distribution))
    return [name for name in names if is_it(MATRIX.wanted(id, name))]


@pytest.mark.parametrize("id", SIGNED)
def test_signs_show_on_the_releases_that_are_right_and_on_no_other(id):
    """A commit of which the matrix says nothing may not show one either: somebody has to look at it first."""
    distribution, wrong = MATRIX.patches[id].distribution, []
    for name in releases_of(distribution):
        wanted, found = MATRIX.wanted(id, name), shown(id, sources_of(distribution, name))
        expected = [wanted] if wanted in RIGHT and not is_silent(id, wanted) else []
        wrong += [] if found == expected else [f"{name}: {found}, and not {expected}"]
    assert wrong == []


def test_every_patch_that_some_release_does_not_need_has_a_sign_for_that():
    ruled = {(id, rule.gives) for id, entry in MATRIX.patches.items() for rule in entry.rules if rule.gives in RIGHT}
    without = {(id, state) for id, state in ruled if not signs_of(id, state)}
    assert {(id, state) for id, state in without if not lacks_targets(id, state)} == set(SILENT)


PAIRS = [
    # patch, megatron-core, Transformer Engine, what the signs show
    *(("te-moved-symbols", core, "2.1.0", [NOT_NEEDED]) for core in ("0.12.0", "0.12.3", "0.13.0", "0.13.1")),
    *(("te-moved-symbols", core, "2.2.0", [NOT_NEEDED]) for core in ("0.13.0", "0.13.1")),
    *(("te-moved-symbols", core, "2.2.0", []) for core in ("0.12.0", "0.12.3", "0.14.0")),
    *(("te-moved-symbols", core, "2.3.0", []) for core in ("0.12.3", "0.13.1", "0.14.0")),
    *(("te-moved-symbols", core, "2.8.0", []) for core in ("0.12.3", "0.13.1", "0.16.1", "0.17.0")),
    *(("te-moved-symbols", core, "2.1.0", []) for core in ("0.14.0", "0.16.1", "0.17.0", "0.19.2")),
    *(
        ("max-logit-graph", core, te, [NOT_NEEDED])
        for core in ("0.16.1", "0.18.2")
        for te in ("2.1.0", "2.2.0", "2.3.0")
    ),
    *(("max-logit-graph", core, "2.8.0", [NOT_NEEDED]) for core in ("0.16.0", "0.16.1", "0.17.1", "0.18.2")),
    *(("max-logit-graph", core, "2.9.0", []) for core in ("0.16.0", "0.17.1", "0.18.2")),
    *(("max-logit-graph", core, "2.20.2", []) for core in ("0.16.1", "0.18.2")),
    ("max-logit-graph", "0.15.3", "2.9.0", [NOT_NEEDED]),
    *(("te-cpu-offload", core, te, [NOT_NEEDED]) for core in ("0.12.0", "0.15.3") for te in ("2.1.0", "2.10.0")),
    *(("te-cpu-offload", core, te, []) for core in ("0.16.0", "0.17.0", "0.19.2") for te in ("2.1.0", "2.10.0")),
]


@pytest.mark.parametrize(("id", "core", "engine", "expected"), PAIRS)
def test_a_pair_of_releases_shows_whether_it_needs_the_patch(id, core, engine, expected):
    sources = Sources([fetch(core, "megatron-core"), fetch(engine, "transformer-engine")])
    assert shown(id, sources) == expected


def test_every_pair_that_the_rules_speak_of_is_asked():
    asked = {(id, tuple(expected)) for id, _, _, expected in PAIRS}
    assert {(id, state) for id in BY_PAIRS for state in ((), (NOT_NEEDED,))} <= asked


def right_ones(id):
    """The releases and commits that have fixed it, whether their sources are there or not."""
    return [name for name in MATRIX.names(MATRIX.patches[id].distribution) if MATRIX.wanted(id, name) == UPSTREAM]


FIXED = [id for id in SIGNED if right_ones(id)]


def tried_on(id):
    """(number, sign, release) of every sign of a fix, with the newest release or commit that shows it.

    None of the releases shows a sign that was written for one to come.
    """
    right = in_order(id, lambda wanted: wanted == UPSTREAM)
    for number, sign in enumerate(signs_of(id, UPSTREAM)):
        showing = [name for name in right if shows(sources_of(MATRIX.patches[id].distribution, name), sign)]
        if showing:
            yield number, sign, showing[-1]


def skip_for_commits(id):
    """What only commits show cannot be tried without their sources. A failure if all of these are there."""
    distribution = MATRIX.patches[id].distribution
    absent = [name for name in right_ones(id) if name not in releases_of(distribution)]
    assert absent, f"no release and no commit shows the sign of {id}"
    pytest.skip(f"{NO_SOURCES}{distribution} at commit {' or '.join(absent)}")


@in_full
@pytest.mark.parametrize("id", FIXED)
def test_a_sign_of_a_fix_goes_with_the_fix(id):
    """The newest right release with the bodies of the newest wrong one: nothing says any more that it is right."""
    distribution, tried = MATRIX.patches[id].distribution, list(tried_on(id))
    wrong = in_order(id, lambda wanted: wanted is not None and wanted not in RIGHT)[-1]
    for _, sign, right in tried:
        edited = Edited(sources_of(distribution, right))
        for place in sign.places:
            was = found_in(sources_of(distribution, wrong), place.target)
            if was or len(sign.places) == 1:  # a function that came with the fix stays, unless nothing else is asked
                edited.put(place.target, was)
        assert shown(id, edited) == [], f"{right} with bodies of {wrong}"
    if not tried and (id, UPSTREAM) not in SILENT:
        skip_for_commits(id)


@in_full
@pytest.mark.parametrize(("id", "number", "target", "old", "new"), DEFECTS)
def test_a_sign_of_a_fix_goes_with_each_of_its_parts(id, number, target, old, new):
    """The defect written back into the newest right release, as somebody may who knows nothing of it."""
    right = next((release for tried, _, release in tried_on(id) if tried == number), None)
    if right is None:
        skip_for_commits(id)
    edited = Edited(sources_of(MATRIX.patches[id].distribution, right))
    edited.replace(target, old, new)
    assert shown(id, edited) == []


def test_a_defect_is_written_back_for_every_fix():
    assert {id for id, *_ in DEFECTS} == {id for id in FIXED if (id, UPSTREAM) not in SILENT}


@in_full
@pytest.mark.parametrize("id", FIXED)
def test_a_sign_survives_what_is_beside_the_point(id):
    """One statement more in every function that the patch binds, reads or has a sign in."""
    tried = list(tried_on(id))
    if not tried and (id, UPSTREAM) not in SILENT:
        skip_for_commits(id)
    for _, sign, right in tried:
        edited = Edited(sources_of(MATRIX.patches[id].distribution, right))
        for target in {*MATRIX.patches[id].bodies, *(place.target for place in sign.places)}:
            edited.begin(target, "_unused = None")
        assert shown(id, edited) == [UPSTREAM], right
