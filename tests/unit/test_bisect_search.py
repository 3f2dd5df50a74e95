"""The search of `shim bisect` on planted causes: it names them, and takes no more runs than it says."""

import itertools
import random

import pytest

from shim._tools.bisect_search import most_runs, search

IDS = [f"patch-{number:02}" for number in range(43)]


def solve(patches, differs):
    """What `search` finds, and its steps. `differs` says whether a run with these patches differs from one without."""
    assert differs(frozenset(patches)) and not differs(frozenset())
    searching, steps = search(patches), []
    try:
        step = next(searching)
        while True:
            steps.append(step)
            step = searching.send(differs(step.kept))
    except StopIteration as end:
        return end.value, steps


@pytest.mark.parametrize("number", [1, 2, 3, 7, 43])
def test_one_patch_is_found_wherever_it_stands(number):
    """In as many runs as were announced at most: 12 and one more for 43 patches, where one by one takes 43."""
    patches = IDS[:number]
    for cause in patches:
        found, steps = solve(patches, lambda kept, cause=cause: cause in kept)
        assert found == ((cause,), False)
        assert len(steps) <= most_runs(number) + 1
        assert not any(step.together for step in steps)
    assert most_runs(43) == 12


@pytest.mark.parametrize("number", [2, 3, 9, 43])
def test_two_patches_that_only_together_change_the_result_are_found(number):
    for pair in itertools.combinations(IDS[:number], 2):
        found, steps = solve(IDS[:number], lambda kept, pair=pair: kept.issuperset(pair))
        assert set(found.patches) == set(pair) and not found.rest_changes
        assert len(steps) <= 3 * most_runs(number) + 3


def test_three_that_only_work_together_are_found():
    for causes in itertools.islice(itertools.combinations(IDS, 3), 0, None, 97):
        assert set(solve(IDS, lambda kept, causes=causes: kept.issuperset(causes))[0].patches) == set(causes)


@pytest.mark.parametrize("size", [1, 2])
def test_no_more_runs_follow_than_each_step_says(size):
    """If one patch is the cause from the start, and of two as soon as it is seen that no half is enough."""
    for causes in itertools.combinations(IDS, size):
        _, steps = solve(IDS, lambda kept, causes=causes: kept.issuperset(causes))
        said = [step.left for step in steps if step.together or size == 1]
        follow = list(range(len(said), 0, -1))
        assert all(left >= runs for left, runs in zip(said, follow, strict=True))
        assert said == sorted(said, reverse=True)


def test_of_two_patches_that_each_change_the_result_one_is_named_and_the_other_told():
    found, _ = solve(IDS, lambda kept: not kept.isdisjoint({"patch-03", "patch-30"}))
    assert found.patches in (("patch-03",), ("patch-30",)) and found.rest_changes


def test_what_another_patch_undoes_is_found():
    """A run with 3 differs, with 3 and 5 it does not, with 20 it does: more patches are not always more."""
    found, _ = solve(IDS, lambda kept: ("patch-03" in kept and "patch-05" not in kept) or "patch-20" in kept)
    assert found.patches in (("patch-03",), ("patch-20",))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_answers_are_the_found_set_was_seen_to_differ_and_has_nothing_to_spare(seed):
    chance = random.Random(seed)
    patches = IDS[: chance.randint(1, 9)]
    table = {frozenset(patches): True, frozenset(): False}
    (causes, rest), steps = solve(patches, lambda kept: table.setdefault(kept, chance.random() < 0.4))
    assert table[frozenset(causes)]
    assert not any(table[frozenset(causes) - {one}] for one in causes)
    assert rest == table[frozenset(patches) - frozenset(causes)]
    assert len({step.kept for step in steps}) == len(steps)
