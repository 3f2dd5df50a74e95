"""What ranks gather, what they say about each other, and on which device; torch.distributed is a fake."""

import sys
import types

import pytest

import shim
from shim._engine import log
from shim._engine import ranks as _ranks


class FakeDistributed(types.ModuleType):
    """torch.distributed as one rank sees it: `others` are what the other ranks send, or what makes that of mine."""

    def __init__(self, rank, others, *, initialised=True, world=None, ranks=None):
        super().__init__("torch.distributed")
        self.rank, self.others, self.gathered, self.ranks = rank, others, [], ranks
        self.is_available = lambda: True
        self.is_initialized = lambda: initialised
        self.get_rank = lambda group=None: rank
        self.get_world_size = lambda group=None: len(others) + 1 if world is None else world
        self.get_process_group_ranks = lambda group: self.ranks

    def all_gather_object(self, found, mine, group=None):
        self.gathered.append((mine, group))
        others = [other(mine) if callable(other) else other[isinstance(mine, dict)] for other in self.others]
        found[:] = [*others[: self.rank], mine, *others[self.rank :]]


def same(mine):
    return mine


@pytest.fixture
def distributed(monkeypatch):
    def install(*args, **kwargs):
        torch = types.ModuleType("torch")
        torch.distributed = FakeDistributed(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch.distributed

    return install


@pytest.fixture
def row_of(distributed, monkeypatch):
    """What a rank with these arguments sends: its digest, and all of it."""

    def row(digest, patches, releases=None, effects=None):
        with monkeypatch.context():
            fake = distributed(0, [("another", {"digest": _ranks.NOTHING, "releases": {}, "patches": {}})])
            _ranks.ranks_that_differ(digest, patches, releases or {}, None, effects or {})
        return fake.gathered[0][0], fake.gathered[1][0]

    return row


def test_ranks_that_agree_say_nothing(distributed):
    fake = distributed(1, [same, same])
    assert _ranks.ranks_that_differ("a", {"p": "x", "q": ""}, {}) == ""
    assert len(fake.gathered) == 1
    assert not log.is_rank_zero()
    distributed(0, [])
    assert log.is_rank_zero()


def test_ranks_and_patches_that_differ_are_named(distributed, row_of):
    mine, patches = row_of("a", {"p": "x", "q": "y", "r": ""}), {"p": "x", "q": "y", "r": ""}
    second, third = row_of("b", {"p": "x", "q": "z", "r": ""}), row_of("c", {"p": "", "q": "z", "r": "w"})
    distributed(0, [second, mine, third])
    assert _ranks.ranks_that_differ("a", patches, {}) == (
        "rank 1 differs in q (variant); rank 3 differs in p (not applied), q (variant), r (applied) (against rank 0)"
    )
    distributed(1, [mine])
    assert _ranks.ranks_that_differ("b", {"p": "x", "q": "z", "r": ""}, {}) == (
        "rank 1 differs in q (variant) (against rank 0)"
    )


def test_it_is_said_what_of_a_patch_differs(distributed, row_of):
    """Its options are the caller's to fix, upstream's bodies and the patch's code whoever installed them."""
    mine = ("old", "bodies", "options", "code")
    rows = [row_of("b", {"p": (*mine[:n], "other", *mine[n + 1 :])}) for n in range(4)]
    distributed(0, [*rows, row_of("b", {"p": ("new", "others", "options", "other")})])
    assert _ranks.ranks_that_differ("a", {"p": mine}, {}) == (
        "rank 1 differs in p (variant); rank 2 differs in p (upstream's bodies); rank 3 differs in p (options); rank 4 "
        "differs in p (its code); rank 5 differs in p (variant, upstream's bodies, its code) "
        "(against rank 0)"
    )


def test_other_peoples_patches_that_differ_are_named(distributed, row_of):
    """The digest is that of what was asked for, so ranks are told apart by what somebody else's objects leave of it."""
    patches = {f"p{n}": "x" for n in range(10)}
    rows = [row_of("a", patches, None, effects) for effects in ({"p9": "conflict"}, {"p0": "in part", "p9": "failed"})]
    distributed(0, rows)
    assert _ranks.ranks_that_differ("a", patches, {}) == (
        "rank 1 differs in p9 (in conflict, not in force); rank 2 differs in p0 (in force in part, not in force), "
        "p9 (failed, not in force) (against rank 0)"
    )


def test_releases_that_differ_are_named_with_both_versions(distributed, row_of):
    """Also where all patches are the same, and where one rank has no such release."""
    here = {"megatron-shim": "0.1.0", "megatron-core": "0.19.0", "torch": "2.9.0+" + "x" * 40, "the matrix": "shipped"}
    patches = {"p": "x"}
    for there, said in (
        ({**here, "megatron-core": "0.19.2"}, "megatron-core (0.19.2, not 0.19.0)"),
        (
            {**here, "megatron-shim": "0.2.0", "the matrix": "0" * 16},
            "megatron-shim (0.2.0, not 0.1.0), the matrix (0000",
        ),
        ({**here, _ranks.OWN_CODE: "0.1.0 0123456789ab"}, "shim's own code (0.1.0 0123456789ab, not none)"),
        ({**here, _ranks.PACKAGES: "0123456789ab"}, "files of packages (0123456789ab, not none)"),
        ({**here, "transformer-engine": "2.9.0"}, "transformer-engine (2.9.0, not none)"),
        ({**here, "torch": "2.9.0+" + "x" * 41}, f"torch (2.9.0+{'x' * 41}, not 2.9.0+"),
    ):
        distributed(0, [row_of("b", patches, there)])
        assert _ranks.ranks_that_differ("a", patches, here).startswith(f"rank 1 differs in {said}")
    distributed(0, [row_of("a", patches, here)])
    assert _ranks.ranks_that_differ("a", patches, here) == ""


def test_what_else_ranks_can_differ_in(distributed, row_of):
    """Nothing applied, on either side; another shim, that knows of other patches."""
    patches = {"p": "x"}
    for mine, other, words in (
        (("a", patches), (_ranks.NOTHING, {}), "whether anything was applied at all"),
        ((_ranks.NOTHING, {}), ("a", patches), "whether anything was applied at all"),
        (("a", patches), ("a", {"p": "x", "q": ""}), "another release of shim"),
        (("a", patches), ("b", patches), "its digest"),
    ):
        row = row_of(*other)
        distributed(0, [row])
        found = _ranks.ranks_that_differ(*mine, {})
        assert found.startswith("rank 1 differs in ") and words in found


def test_in_a_group_the_ranks_of_the_world_are_named(distributed, row_of):
    row, group = row_of("b", {"p": "y"}), object()
    fake = distributed(0, [row], ranks=[4, 6])
    assert _ranks.ranks_that_differ("a", {"p": "x"}, {}, group) == "rank 6 differs in p (variant) (against rank 4)"
    assert [of for _, of in fake.gathered] == [group, group]


def test_who_is_alone_or_not_a_member_gathers_nothing(distributed):
    for world in (-1, 1):
        fake = distributed(1, [], world=world)
        assert _ranks.ranks_that_differ("a", {}, {}, object()) == ""
        assert fake.gathered == []


def test_without_initialised_ranks_nothing_is_gathered(distributed, monkeypatch):
    """Where torch.distributed is not initialised, RANK says who speaks."""
    fake = distributed(1, [same], initialised=False)
    assert _ranks.ranks_that_differ("a", {}, {}) == ""
    assert fake.gathered == []
    monkeypatch.setenv("RANK", "1")
    assert not log.is_rank_zero()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # as while it is being imported
    assert _ranks.ranks_that_differ("a", {}, {}) == ""


# check()


def test_check_compares_before_it_raises(patched_world, distributed):
    """A rank on which check() raises takes part in the collective all the same, so that no other rank waits for it."""
    fake = distributed(0, [same])
    with pytest.raises(shim.OptionError):
        shim.check()
    assert len(fake.gathered) == 1
    shim.apply(require=["count"])
    with pytest.raises(shim.NotMetError, match="pending"):
        shim.check()
    assert len(fake.gathered) == 2


def test_check_names_rank_and_patch(patched_world, distributed):
    """Ranks with other excludes are a NotMetError; what is imported, and which objects are bound, is no difference."""
    fake = distributed(0, [same])
    patched_world.patch("more", ["megatron.core.other:other"])
    shim.apply()
    shim.check()
    patched_world.snapshot()
    shim.check()
    first, later = (digest for digest, _ in fake.gathered)
    assert first == later
    fake = distributed(0, [("another", {"digest": "", "releases": {}, "patches": {}})])
    with pytest.raises(shim.NotMetError, match="another release of shim"):
        shim.check()
    everything = tuple(row for row, _ in fake.gathered)
    shim.apply(exclude=["more"])
    distributed(0, [everything])
    with pytest.raises(shim.NotMetError, match=r"rank 1 differs in more \(applied\) \(against rank 0\).*Remedy"):
        shim.check()
    shim.revert()
    distributed(1, [everything])
    with pytest.raises(shim.OptionError):
        shim.check()
