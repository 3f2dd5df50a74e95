"""check() on real gloo ranks: every rank learns which rank differs, and in which patch."""

import re
import shutil

import pytest

pytest.importorskip("torch")

import rank_world
from fake_world import World

import shim
from shim.testing import Ranks

CORE = "megatron.core."


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Three ranks with a fake megatron-core, and two patches for it."""
    world = World(tmp_path_factory.mktemp("world"))
    world.patch("count", [CORE + "ops:double"])
    world.patch("more", [CORE + "other:other"], options={"size": 3})
    with Ranks(3) as pool:
        pool.run(rank_world.start, str(world.root))
        pool.root = world.root
        yield pool


def test_other_excludes_are_an_error_on_every_rank_that_names_rank_and_patch(ranks):
    found = ranks.run(rank_world.with_excludes, [], ["more"], [])
    assert len(found) == 3
    for text in found:
        assert text.startswith("NotMetError: ranks disagree")
        assert (
            "rank 1 differs in more (not applied) (against rank 0)" in text
            and "rank 2" not in text
            and "count" not in text
        )


def test_several_ranks_are_named(ranks):
    for text in ranks.run(rank_world.with_excludes, ["count"], ["more"], []):
        assert (
            "rank 1 differs in count (applied), more (not applied); rank 2 differs in count (applied) (against rank 0)"
            in text
        )


def test_another_release_with_the_same_bodies_is_named(ranks, tmp_path):
    """All patches are bound alike there, and other code beside them is not the same."""
    shutil.copytree(ranks.root, tmp_path / "tree")
    info = tmp_path / "tree" / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text().replace("PATCH = 0", "PATCH = 2"))
    for text in ranks.run(rank_world.with_release, 1, str(tmp_path / "tree")):
        assert (
            "NotMetError: ranks disagree about what is applied: rank 1 differs in megatron-core (9.9.2, not 9.9.0) "
            in text
        )


def test_other_options_other_patches_and_another_engine_are_told_apart(ranks, tmp_path):
    for text in ranks.run(rank_world.with_options, {"size": 4}, {"size": 5}, {"size": 4}):
        assert "rank 1 differs in more (options) (against rank 0)" in text
    shutil.copytree(ranks.root, tmp_path / "tree")
    code = tmp_path / "tree" / "fake_patches" / "count.py"
    code.write_text(code.read_text() + "# changed\n")
    for text in ranks.run(rank_world.with_release, 1, str(tmp_path / "tree")):
        assert re.search(
            r"rank 1 differs in files of packages \(\w{12}, not \w{12}\), count \(its code\) \(against rank 0", text
        )
    for text in ranks.run(rank_world.with_engine, 1):
        version = re.escape(shim.__version__)
        both = rf"\({version} \w{{12}}, not {version} \w{{12}}\)"
        assert re.search(rf"rank 1 differs in shim's own code {both} \(against rank 0\)", text)


def test_ranks_with_the_same_plan_agree_whatever_they_have_imported(ranks):
    """One has imported the target, one another module, one nothing."""
    found = ranks.run(rank_world.with_modules, [CORE + "ops"], [CORE + "layers"], [])
    assert len({digest for digest, _ in found}) == 1 and "Error" not in found[0][0]
    assert [state for _, state in found] == ["applied", "pending", "pending"]


def test_a_rank_that_has_applied_nothing(ranks):
    """It says so itself; the others learn which it is."""
    found = ranks.run(rank_world.without_apply, 2)
    assert found[2].startswith("OptionError")
    for text in found[:2]:
        assert "rank 2 differs in whether anything was applied at all" in text


def test_in_a_subgroup_only_its_members_are_compared(ranks):
    """Ranks are named as the world counts them; who is not a member is asked nothing."""
    found = ranks.run(rank_world.in_subgroup, [1, 2], 2)
    assert "NotMetError" not in found[0]
    for text in found[1:]:
        assert "rank 2 differs in count (not applied) (against rank 1)" in text
    assert not [text for text in ranks.run(rank_world.in_subgroup, [0, 1], 2) if "Error" in text]
