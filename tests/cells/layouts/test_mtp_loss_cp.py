"""Patch mtp-loss-cp: the loss of multi-token prediction, its gradient and its log are those of one rank."""

import contextlib
import itertools
from collections import Counter

import pytest
import torch
from context_parallel_cases import ACROSS_LAYOUTS, Unpacked, row_of, unpacked, zeros_but
from thorough import times
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shim
from shim import testing
from shim.patches.megatron_core.mtp_loss_cp.proof import logged_losses, off_by, step, wrapped_model
from shim.testing import Layout

CELLS = {"0.13.1": "all", "0.19.2": ["test_packed_rows_without_padding_need_no_other_patch"]}

ID, PACKED, OPTIONS, FUSED = "mtp-loss-cp", "mtp-packed-sequences", "mtp-loss-options", "fused-linear-logprob"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
PER_TOKEN = {"calculate_per_token_loss": True}
CP2, CP4, SP_CP2 = Layout(cp=2), Layout(cp=4), Layout(tp=2, cp=2, sequence_parallel=True)


def random_mask(length, seed=5):
    return (torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.4).float()


def last(length, count):
    return zeros_but(length, *range(length - count, length))


# Rows by name; lengths fit four ranks with sequence parallelism over two. Ranks of two hold 0 to 7 and 24 to 31, and 8
# to 23; of four, 0 to 3 and 28 to 31, 4 to 7 and 24 to 27, and so on.
ROWS = {
    "all": unpacked(32),
    "last 10": unpacked(32, last(32, 10)),
    "last 6, all on one rank": unpacked(32, last(32, 6)),
    "one, which a roll brings to another rank": unpacked(32, zeros_but(32, 8)),
    "one, which a roll drops": unpacked(32, zeros_but(32, 0)),
    "none": unpacked(32, torch.zeros(32)),
    "random": unpacked(32, random_mask(32)),
}
WEIGHTED = {"less than one in all": unpacked(32, 0.25 * zeros_but(32, 20))}
PACKED_ROWS = {
    "without padding": row_of((16, 32, 16), 1),
    "last ones": row_of((16, 32, 16), 1, [last(16, 3), last(32, 9), last(16, 2)]),
    "random": row_of((16, 32), 1, [random_mask(16), random_mask(32, 1)]),
    "one in all": row_of((16, 32), 1, [torch.zeros(16), zeros_but(32, 8)]),
    "none": row_of((16, 16), 1, [torch.zeros(16)] * 2),
    "padding": row_of((11, 16, 3), 16),
    "padding, last ones": row_of((11, 16, 5), 16, [last(11, 2), last(16, 3), last(5, 4)]),
}
assert all(isinstance(row, Unpacked) for row in ROWS.values())
FEW = {
    name: row
    for name, row in {**ROWS, **PACKED_ROWS}.items()
    if name in ("last 6, all on one rank", "none", "random", "padding, last ones")
}


@contextlib.contextmanager
def in_layout(layout, ids, options=None):
    """A rank's surroundings: CPU substitutions, these patches alone where the release needs them, and the layout."""
    wanted = [id for id in ids if shim.plan()[id].wanted]
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        if not wanted:
            yield
            return
        with shim.patched(only=wanted, require=wanted, options=options or {}):
            yield


def trained(layout, ids, options, model, rows, with_mask=True):
    """(gradients by name, logged losses) of each row."""
    found = []
    with in_layout(layout, ids, options):
        wrapped = wrapped_model(sequence_parallel=layout.sequence_parallel, **model)
        for row in rows:
            step(wrapped, row, packed=not isinstance(row, Unpacked), with_mask=with_mask)
            grads = {name: weight.main_grad.double().clone() for name, weight in wrapped.module.named_parameters()}
            found.append((grads, logged_losses()))
    return found


def whole(grads, truth, only_mtp=False):
    return torch.cat([grads[name].flatten() for name in truth if name.startswith("mtp.") or not only_mtp])


def off_in_rank(layout, ids, options, model, rows, with_mask=True):
    """How far each row is off from what it is without context parallelism: gradients, those of MTP, logged losses."""
    alone = Layout(tp=layout.tp, sequence_parallel=layout.sequence_parallel)
    # A row without any target gives NaN on one rank up to 0.16, unless mtp-packed-sequences is there.
    truths = trained(alone, [*ids, *({PACKED} - {*ids})], options, model, rows, with_mask)
    found = trained(layout, ids, options, model, rows, with_mask)
    return [
        {
            "gradient": difference(whole(a, b), whole(b, b)),
            "gradient of MTP": difference(whole(a, b, True), whole(b, b, True)),
            "logged": difference(logged, right),
        }
        for (a, logged), (b, right) in zip(found, truths, strict=True)
    ]


def difference(found, truth):
    """Relative; of a truth that is zero, absolute."""
    if not truth.any():
        return float(found.double().norm())
    return off_by(found.double(), truth.double())


def assert_like_one_rank(ranks, layout, ids, options, model, rows, with_mask=True):
    """Every number is that of one rank: NaN is not smaller than anything."""
    for rank, found in enumerate(ranks.run(off_in_rank, layout, ids, options, model, list(rows.values()), with_mask)):
        for name, off in zip(rows, found, strict=True):
            assert all(value <= ACROSS_LAYOUTS for value in off.values()), (rank, name, off)


# ---- stock is wrong


@pytest.mark.parametrize("ids", [[], [PACKED]], ids=["stock", "mtp-packed-sequences"])
def test_without_the_patch_a_rank_divides_by_its_own_count(ranks2, ids):
    """The more unlike the counts of the ranks, the further off."""
    names = ["last 10", "last 6, all on one rank", "random"]
    [found, _] = ranks2.run(off_in_rank, CP2, ids, {}, {}, [ROWS[name] for name in names])
    for name, off in zip(names, found, strict=True):
        assert not off["gradient of MTP"] <= 1e-2 and not off["logged"] <= 1e-4, (name, off)


# ---- unpacked rows, by this patch alone


# Each with the other number of layers is below, beside other patches.
BOTH = pytest.mark.parametrize(("depths", "per_token"), times([(2, True)], [(2, True), (1, False)]), ids=str)


@BOTH
def test_unpacked_rows_train_like_on_one_rank(ranks2, depths, per_token):
    """Wherever the targets are, and if there is none."""
    model = {"mtp_num_layers": depths, "calculate_per_token_loss": per_token}
    # A number of tokens is whole, so weights below one are for a mean.
    assert_like_one_rank(ranks2, CP2, [ID], {}, model, ROWS if per_token else {**ROWS, **WEIGHTED})
    assert_like_one_rank(ranks2, CP2, [ID], {}, model, {"all": ROWS["all"]}, with_mask=False)


# ---- packed rows, and beside other patches


@pytest.mark.skipif(VERSION < (0, 16), reason="stock refuses packed rows before 0.16")
def test_packed_rows_without_padding_need_no_other_patch(ranks2):
    rows = {name: row for name, row in PACKED_ROWS.items() if not row.is_padded}
    assert_like_one_rank(ranks2, CP2, [ID], {}, {"mtp_num_layers": 2}, rows)
    assert_like_one_rank(ranks2, CP2, [ID], {}, PER_TOKEN, rows)


@BOTH
def test_packed_rows_beside_mtp_packed_sequences(ranks2, depths, per_token):
    """With padding and without; a row without a loss mask counts no padding."""
    model = {"mtp_num_layers": depths, "calculate_per_token_loss": per_token}
    assert_like_one_rank(ranks2, CP2, [ID, PACKED], {}, model, {**PACKED_ROWS, **FEW})
    rows = {name: PACKED_ROWS[name] for name in ("without padding", "padding")}
    assert_like_one_rank(ranks2, CP2, [ID, PACKED], {}, model, rows, with_mask=False)


@pytest.mark.parametrize(("packed", "skip"), times([(True, True)], list(itertools.product((True, False), repeat=2))))
def test_beside_losses_without_logits(ranks2, packed, skip):
    options = {FUSED: {"fuse": True, "skip_masked": skip}}
    rows = FEW if packed else {name: ROWS[name] for name in FEW if name in ROWS}
    ids = [ID, FUSED, *([PACKED] if packed else [])]
    assert_like_one_rank(ranks2, CP2, ids, options, {"mtp_num_layers": 2} if packed == skip else PER_TOKEN, rows)


@pytest.mark.parametrize("packed", times([True], [True, False]), ids=str)
def test_beside_mtp_loss_options(ranks2, packed):
    """Detached heads have the loss of one rank, too."""
    options = {OPTIONS: {"detach": True}}
    rows = FEW if packed else {name: ROWS[name] for name in FEW if name in ROWS}
    ids = [ID, OPTIONS, *([PACKED] if packed else [])]
    assert_like_one_rank(ranks2, CP2, ids, options, {"mtp_num_layers": 2}, rows)


# ---- what it costs


class Traffic(TorchDispatchMode):
    """Counts what goes out from this rank: (what, of how many numbers)."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        if name.startswith("c10d."):
            self.seen[name, sum(leaf.numel() for leaf in tree_leaves(args[0]))] += 1
        return func(*args, **(kwargs or {}))


def traffic_in_rank(layout, ids, model, row):
    with in_layout(layout, ids):
        wrapped = wrapped_model(**model)
        with Traffic() as traffic:
            step(wrapped, row, packed=not isinstance(row, Unpacked))
        logged_losses()
        return traffic.seen


@pytest.mark.parametrize(("depths", "row"), times([(2, "padding")], [(2, "padding"), (1, "random")]))
def test_a_step_costs_one_small_collective(ranks2, depths, row):
    """A number for the loss mask and one for each depth; none on one rank; and no roll more than without the patch."""
    # 0.12 and 0.13 send nothing for unpacked rows without it.
    beside = [PACKED] if VERSION < (0, 14) or row in PACKED_ROWS else []
    row, model = {**ROWS, **PACKED_ROWS}[row], {"mtp_num_layers": depths}
    for layout, more in ((CP2, {("c10d.allreduce_", 1 + depths): 1}), (Layout(), {})):
        before = ranks2.run(traffic_in_rank, layout, beside, model, row)
        after = ranks2.run(traffic_in_rank, layout, [ID, *beside], model, row)
        assert after == [seen + Counter(more) for seen in before]
        assert bool(before[0]) and (layout == Layout() or ("c10d.send" in {name for name, _ in before[0]}))


def bits_in_rank(rows):
    results = {}
    for ids in ([], [ID]):
        results[bool(ids)] = trained(Layout(), ids, {}, {"mtp_num_layers": 2}, rows)
    same = itertools.starmap(
        lambda a, b: all(torch.equal(a[0][name], b[0][name]) for name in a[0]) and torch.equal(a[1], b[1]),
        zip(results[True], results[False], strict=True),
    )
    return list(same)


@pytest.mark.once
def test_on_one_rank_no_bit_changes(ranks2):
    for same in ranks2.run(bits_in_rank, [ROWS["random"], ROWS["last 10"]]):
        assert all(same)


def left_after_an_error_in_rank():
    """What the thread keeps where the loss of the first depth fails: masks that were rolled, or not."""
    from shim.patches.megatron_core._rolled_masks import THREAD

    with in_layout(CP2, [ID]):
        wrapped, during = wrapped_model(), []

        def fail(*args):
            during.append(THREAD.masks is not None)
            raise ZeroDivisionError

        wrapped.module.output_layer.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            step(wrapped, ROWS["random"])
        return during, THREAD.masks


@pytest.mark.once
def test_an_error_leaves_nothing_behind(ranks2):
    assert ranks2.run(left_after_an_error_in_rank) == [([True], None)] * 2
