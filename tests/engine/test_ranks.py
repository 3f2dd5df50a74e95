"""What ranks gather, what they say about each other, and on which device; torch.distributed is a fake."""

import sys
import types

import pytest

import shim
from shim._engine import ranks as _ranks


class FakeTensor(list):
    def __init__(self, values, device):
        super().__init__(values)
        self.device = device

    tolist = list.copy


class FakeGroup:
    def __init__(self, kinds=("cpu",), bound=None):
        self._device_types = [types.SimpleNamespace(type=kind) for kind in kinds]
        if bound is not None:
            self.bound_device_id = bound


class FakeDistributed(types.ModuleType):
    """torch.distributed as one rank sees it: `others` are the rows of the other ranks, or what makes them of mine."""

    def __init__(self, rank, others, *, initialised=True, world=None, ranks=None, backend="gloo"):
        super().__init__("torch.distributed")
        self.rank, self.others, self.gathered, self.ranks = rank, others, [], ranks
        self.is_available = lambda: True
        self.is_initialized = lambda: initialised
        self.get_rank = lambda group=None: rank
        self.get_world_size = lambda group=None: len(others) + 1 if world is None else world
        self.get_backend = lambda group=None: backend
        self.get_process_group_ranks = lambda group: self.ranks
        self.group = types.SimpleNamespace(WORLD=FakeGroup())

    def all_gather(self, rows, mine, group=None):
        assert all(len(row) == len(mine) and row.device == mine.device for row in rows)
        self.gathered.append((list(mine), mine.device, group))
        others = [other(list(mine)) if callable(other) else other for other in self.others]
        for row, values in zip(rows, [*others[: self.rank], mine, *others[self.rank :]], strict=True):
            row[:] = values


class FakeAccelerator:
    """torch.cuda, or torch.npu."""

    def __init__(self, *, current=0, initialised=False, count=8):
        self.current_device = lambda: current
        self.is_initialized = lambda: initialised
        self.device_count = lambda: count


@pytest.fixture
def distributed(monkeypatch):
    def install(*args, **kwargs):
        torch = types.ModuleType("torch")
        torch.int64 = "int64"
        torch.device = lambda kind, index=None: kind if index is None else f"{kind}:{index}"
        torch.tensor = lambda values, dtype, device: FakeTensor(values, device)
        torch.empty_like = lambda tensor: FakeTensor([0] * len(tensor), tensor.device)
        torch.distributed = FakeDistributed(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch.distributed

    return install


@pytest.fixture
def row_of(distributed, monkeypatch):
    """The row that a rank with these arguments sends."""

    def row(digest, patches, releases=None, effects=None):
        with monkeypatch.context():
            fake = distributed(0, [lambda mine: mine])
            assert _ranks.ranks_that_differ(digest, patches, releases or {}, None, effects or {}) == ""
        return fake.gathered[0][0]

    return row


def test_ranks_that_agree_say_nothing(distributed):
    fake = distributed(1, [list, list])
    assert _ranks.ranks_that_differ("a", {"p": "x", "q": ""}, {}) == ""
    assert len(fake.gathered) == 1
    assert not _ranks.is_rank_zero()
    distributed(0, [])
    assert _ranks.is_rank_zero()


def test_the_size_is_the_same_whatever_ranks_have(row_of):
    """Ranks that send different sizes hang; every value fits an int64."""
    rows = [row_of("a", {str(n): "x" * n for n in range(count)}) for count in (0, 1, 5, 126, 127, 1000)]
    rows.append(row_of(_ranks.NOTHING, {}))
    assert {len(row) for row in rows} == {_ranks.SLOTS}
    assert all(-(2**63) <= value < 2**63 for row in rows for value in row)


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
    """Also where all patches are the same, and where one rank has no such release; long ones are cut, not confused."""
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
        ({**here, "torch": "2.9.0+" + "x" * 41}, "torch (2.9.0+xxxxxxxxxxxxxxxxxx, not 2.9.0+"),
    ):
        distributed(0, [row_of("b", patches, there)])
        assert _ranks.ranks_that_differ("a", patches, here).startswith(f"rank 1 differs in {said}")
    distributed(0, [row_of("a", patches, here)])
    assert _ranks.ranks_that_differ("a", patches, here) == ""


def test_what_else_ranks_can_differ_in(distributed, row_of):
    """Nothing applied, on either side; another shim, that knows of other patches; too many patches to name."""
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
    many = {f"{n:03}": "x" for n in range(200)}
    row = row_of("b", {**many, "199": ""})
    distributed(0, [row])
    assert _ranks.ranks_that_differ("a", many, {}) == "rank 1 differs in its digest (against rank 0)"


def test_in_a_group_the_ranks_of_the_world_are_named(distributed, row_of):
    row, group = row_of("b", {"p": "y"}), FakeGroup()
    fake = distributed(0, [row], ranks=[4, 6])
    assert _ranks.ranks_that_differ("a", {"p": "x"}, {}, group) == "rank 6 differs in p (variant) (against rank 4)"
    assert fake.gathered[0][2] is group


def test_who_is_alone_or_not_a_member_gathers_nothing(distributed):
    for world in (-1, 1):
        fake = distributed(1, [], world=world)
        assert _ranks.ranks_that_differ("a", {}, {}, FakeGroup()) == ""
        assert fake.gathered == []


def test_without_initialised_ranks_nothing_is_gathered(distributed, monkeypatch):
    """Where torch.distributed is not initialised, RANK says who speaks."""
    fake = distributed(1, [list], initialised=False)
    assert _ranks.ranks_that_differ("a", {}, {}) == ""
    assert fake.gathered == []
    monkeypatch.setenv("RANK", "1")
    assert not _ranks.is_rank_zero()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # as while it is being imported
    assert _ranks.ranks_that_differ("a", {}, {}) == ""


@pytest.mark.parametrize(
    ("kinds", "accelerator", "local_rank", "device"),
    [
        (["cpu"], None, "3", "cpu"),
        (["cpu", "cuda"], FakeAccelerator(), "3", "cpu"),  # cpu:gloo,cuda:nccl: no device is set up for this
        (["cuda", "cpu"], FakeAccelerator(current=1, initialised=True), None, "cpu"),
        (["cuda"], FakeAccelerator(), "3", "cuda:3"),  # before the trainer has chosen its device
        (["cuda"], FakeAccelerator(current=2, initialised=True), "3", "cuda:2"),  # after
        (["cuda"], FakeAccelerator(current=2), None, "cuda:2"),
        (["cuda"], FakeAccelerator(count=1), "3", "cuda:0"),  # each process sees one device
        (["cuda"], FakeAccelerator(count=0), "0", "cuda:0"),
        (["npu"], FakeAccelerator(), "5", "npu:5"),
        (["npu"], types.SimpleNamespace(current_device=lambda: 4), "5", "npu:4"),  # cannot say whether it is set up
    ],
)
def test_the_device_is_one_that_the_group_can_gather_on(
    distributed, monkeypatch, kinds, accelerator, local_rank, device
):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for group in (None, FakeGroup(kinds)):
        fake = distributed(0, [list], ranks=[0, 1])
        fake.group.WORLD = FakeGroup(kinds)
        for kind in kinds:
            setattr(sys.modules["torch"], kind, accelerator)
        assert _ranks.ranks_that_differ("a", {"p": "x"}, {}, group) == ""
        assert fake.gathered[0][1] == device


def test_the_device_a_group_is_bound_to(distributed, monkeypatch):
    """init_process_group(device_id=...) says it, whatever the current device is."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    fake = distributed(0, [list])
    fake.group.WORLD = FakeGroup(["cuda"], bound="cuda:7")
    sys.modules["torch"].cuda = FakeAccelerator(initialised=True)
    assert _ranks.ranks_that_differ("a", {}, {}) == ""
    assert fake.gathered[0][1] == "cuda:7"


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda:1"), ("gloo", "cpu"), ("mpi", "cpu")])
def test_a_group_that_names_no_devices(distributed, monkeypatch, backend, device):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    fake = distributed(0, [list], backend=backend)
    fake.group.WORLD = object()
    sys.modules["torch"].cuda = FakeAccelerator(current=1, initialised=True)
    assert _ranks.ranks_that_differ("a", {}, {}) == ""
    assert fake.gathered[0][1] == device


# check()


def test_check_compares_before_it_raises(patched_world, distributed):
    """A rank on which check() raises takes part in the collective all the same, so that no other rank waits for it."""
    fake = distributed(0, [list])
    with pytest.raises(shim.OptionError):
        shim.check()
    assert len(fake.gathered) == 1
    shim.apply(require=["count"])
    with pytest.raises(shim.NotMetError, match="pending"):
        shim.check()
    assert len(fake.gathered) == 2


def test_check_names_rank_and_patch(patched_world, distributed):
    """Ranks with other excludes are a NotMetError; what is imported, and which objects are bound, is no difference."""
    fake = distributed(0, [list])
    patched_world.patch("more", ["megatron.core.other:other"])
    shim.apply()
    shim.check()
    patched_world.snapshot()
    shim.check()
    everything, everything_later = (row for row, _, _ in fake.gathered)
    assert everything == everything_later
    shim.apply(exclude=["more"])
    distributed(0, [everything])
    with pytest.raises(shim.NotMetError, match=r"rank 1 differs in more \(applied\) \(against rank 0\).*Remedy"):
        shim.check()
    shim.revert()
    distributed(1, [everything])
    with pytest.raises(shim.OptionError):
        shim.check()
