"""Patch mtp-packed-sequences under context parallelism: every rank's share of a packed row trains as alone.

A rank holds the chunks of a row that zigzag gives it. Functions named `..._in_rank` run in every rank of a pool at
once; what they return is judged in the test.
"""

import contextlib
import itertools
import time
from unittest import mock

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shim
from shim import testing
from shim.ops import packed_roll, rank_roll_index, roll_on_rank
from shim.testing import Layout, oracle

ID = "mtp-packed-sequences"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
WITHIN_LAYOUT, ACROSS_LAYOUTS = 1e-6, 5e-6
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OPTIONS = [{"per_token_loss": p, "loss_mask": m} for p, m in itertools.product((False, True), repeat=2)]
GLOBAL = {"global_normalizer": True}
CP2, CP4 = Layout(cp=2), Layout(cp=4)

stock_packs = pytest.mark.skipif(VERSION < (0, 16), reason="stock refuses packed rows before 0.16")
stock_cannot_pack = pytest.mark.skipif(VERSION >= (0, 16), reason="stock packs from 0.16")


# In a rank: what undoes the patch that is applied, and its options. Planning and reverting for each test would take
# longer than the tests.
APPLIED = []


def apply_in_rank(shimmed, options):
    """The patch with these options, or stock, for as long as nothing else is asked for."""
    wanted = [options] if shimmed else []
    if APPLIED[1:] != wanted:
        if APPLIED:
            APPLIED[0].close()
        APPLIED.clear()
        if shimmed:
            undo = contextlib.ExitStack()
            undo.enter_context(shim.patched(only=[ID], require=[ID], options={ID: options}))
            APPLIED.extend([undo, options])


@contextlib.contextmanager
def in_layout(layout, shimmed=True, **options):
    """A rank's surroundings: CPU substitutions, the patch or stock, and the layout."""
    with testing.megatron_on_cpu():
        apply_in_rank(shimmed, options)
        with testing.layout_initialised(layout):
            yield


@pytest.fixture(scope="module", autouse=True)
def stock_again(ranks2, ranks4):
    """Other modules use the same ranks."""
    yield
    for ranks in (ranks2, ranks4):
        ranks.run(apply_in_rank, False, {})


def build(layout, lora=False, **model):
    gpt = testing.build_gpt(sequence_parallel=layout.sequence_parallel, **model)
    if lora:
        testing.add_lora(gpt)
    return gpt


def row_of(lengths, align, masks=None):
    return testing.pack(testing.random_sequences(lengths), align=align, loss_masks=masks)


class Unpacked(testing.PackedRow):
    """A row of one sequence that the model gets without packed_seq_params."""

    def packed_seq_params(self):
        return None


def unpacked(length, mask=None):
    return Unpacked(**vars(row_of((length,), 1, None if mask is None else [mask])))


def against_alone(gpt, row, **options):
    return testing.differences(testing.run_packed(gpt, row, **options), testing.run_alone(gpt, row, **options))


def equal_bits(a, b):
    same = torch.equal(a.main, b.main) and torch.equal(a.logged, b.logged) and a.grads.keys() == b.grads.keys()
    return same and all(map(torch.equal, a.mtp, b.mtp)) and all(torch.equal(a.grads[n], b.grads[n]) for n in a.grads)


def places_of(slots, rank, ranks):
    """Where the tokens of a rank lie in the row: of every slot the front chunk, then the tail chunk.

    slots: where slots end. A share that is odd has the longer front.
    """
    places = []
    for start, end in itertools.pairwise([0, *slots]):
        share = (end - start) // ranks
        front, tail = (share + 1) // 2, share // 2
        places += range(start + rank * front, start + (rank + 1) * front)
        back = start + ranks * front + (ranks - 1 - rank) * tail
        places += range(back, back + tail)
    return torch.tensor(places, dtype=torch.int64)


def rank_of(group):
    return dist.get_rank(group)


def cp_group():
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


# Packed equals alone


def worst_in_rank(layout, model, cases):
    """The largest difference between packed and alone over (lengths, align, options), and the case that has it."""
    with in_layout(layout):
        gpt, found = build(layout, **model), (0.0, None)
        for lengths, align, options in cases:
            difference = against_alone(gpt, row_of(lengths, align), **options)
            if not testing.worst(difference) <= found[0]:  # NaN is not smaller than anything
                found = (testing.worst(difference), (lengths, align, options, difference))
        return found


# Without padding, with padding, and with sequences of one token and of none.
ROWS = [(8, 16, 8), (5, 13, 3), (1, 6, 2, 0, 8)]


def check_packed_equals_alone(ranks, layout, model, turn, options=OPTIONS):
    """Each of the options on one of the rows: three turns are every pair."""
    align = 2 * layout.cp * (layout.tp if layout.sequence_parallel else 1)
    cases = [(ROWS[(turn + number) % len(ROWS)], align, option) for number, option in enumerate(options)]
    for rank, (value, case) in enumerate(ranks.run(worst_in_rank, layout, model, cases)):
        assert value <= WITHIN_LAYOUT, (rank, case)


@pytest.mark.parametrize(
    ("turn", "model"),
    [
        (0, {"mtp_num_layers": 1}),
        (1, {"mtp_num_layers": 2, "position_embedding_type": "learned_absolute"}),
        (2, {"mtp_num_layers": 2, "lora": True}),
    ],
    ids=["1-rope", "2-learned_absolute", "2-rope-lora"],
)
def test_packed_equals_alone_on_two_ranks(ranks2, turn, model):
    """Per-token losses, logged losses and gradients are those of each sequence alone, normalised by the rank."""
    check_packed_equals_alone(ranks2, CP2, model, turn)


@pytest.mark.parametrize(("layers", "lora"), [(2, False), (1, True)], ids=["2", "1-lora"])
def test_packed_equals_alone_on_four_ranks(ranks4, layers, lora):
    """As on two ranks; the ranks in the middle have two neighbours."""
    model = {"mtp_num_layers": layers, "lora": lora}
    check_packed_equals_alone(ranks4, CP4, model, 0 if lora else 1, OPTIONS[1:2] if lora else OPTIONS[::3])


@pytest.mark.parametrize(
    ("layout", "lora", "options"),
    [
        (Layout(tp=2, cp=2), False, OPTIONS[::3]),
        (Layout(tp=2, cp=2, sequence_parallel=True), False, OPTIONS[1:3]),
        (Layout(tp=2, cp=2, sequence_parallel=True), True, OPTIONS[:1]),
    ],
    ids=["tp2+cp2", "tp2+sp+cp2", "tp2+sp+cp2-lora"],
)
def test_packed_equals_alone_under_tensor_parallelism(ranks4, layout, lora, options):
    """The neighbour in the context-parallel group is not the next rank of the world."""
    check_packed_equals_alone(ranks4, layout, {"mtp_num_layers": 2, "lora": lora}, 1, options)


def masked_in_rank():
    with in_layout(CP2):
        gpt, found = build(CP2, mtp_num_layers=2), []
        for first, second in [(zeros_but(8, 6), torch.zeros(5)), (torch.zeros(8), torch.zeros(5))]:
            row = row_of((8, 5), 4, [first, second])
            packed = testing.run_packed(gpt, row)
            finite = packed.logged.isfinite().all() and all(g.isfinite().all() for g in packed.grads.values())
            found.append((bool(finite), testing.worst(testing.differences(packed, testing.run_alone(gpt, row)))))
        return found


def zeros_but(length, *places):
    mask = torch.zeros(length)
    mask[list(places)] = 1
    return mask


def test_a_rank_without_targets_gives_no_nan(ranks2):
    """One target in all, which is on rank 0 and after a roll on rank 1; and no target at all."""
    for found in ranks2.run(masked_in_rank):
        assert all(finite and value <= WITHIN_LAYOUT for finite, value in found), found


def recomputed_in_rank():
    with in_layout(CP2):
        row = row_of((5, 13, 3), 4)
        plain = testing.run_packed(build(CP2, mtp_num_layers=2), row)
        again = testing.run_packed(build(CP2, mtp_num_layers=2, **UNIFORM), row)
        return equal_bits(plain, again)


def test_full_recompute_gives_the_same_bits(ranks2):
    """What a recompute runs again finds the row, its group and its index as the forward pass did."""
    assert ranks2.run(recomputed_in_rank) == [True, True]


# Across layouts, and unpacked rows


def across_layouts_in_rank(lengths, shimmed, packed):
    """The MTP losses of this rank's tokens against those of the same sequences on one rank, relative."""
    row = row_of(lengths, 4) if packed else unpacked(*lengths)
    with in_layout(Layout(), shimmed=shimmed):
        whole = testing.run_alone(build(Layout(), mtp_num_layers=2), row)
    with in_layout(CP2, shimmed=shimmed):
        local = testing.run_packed(build(CP2, mtp_num_layers=2), row)
        places = places_of(row.ends, rank_of(cp_group()), 2)
    expected = torch.stack([loss[places] for loss in whole.mtp])
    main = (local.main - whole.main[places]).abs().max() / whole.main.abs().max()
    return float(main), float((torch.stack(local.mtp) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_losses_are_those_of_one_rank(ranks2, packed):
    """Cutting a row over ranks changes no loss: the truth of the other tests is not wrong in the same way."""
    for main, found in ranks2.run(across_layouts_in_rank, (5, 13, 3) if packed else (16,), True, packed):
        assert main <= ACROSS_LAYOUTS and found <= ACROSS_LAYOUTS


@pytest.mark.skipif(VERSION >= (0, 14), reason="0.14 and later roll unpacked rows over ranks")
def test_stock_rolls_unpacked_rows_inside_a_rank(ranks2):
    """0.12 and 0.13: chunks run into one another, and the MTP loss is that of other tokens."""
    for main, found in ranks2.run(across_layouts_in_rank, (16,), False, False):
        assert main <= ACROSS_LAYOUTS and found > 0.1


def unpacked_against_packed_in_rank():
    with in_layout(CP2):
        gpt = build(CP2, mtp_num_layers=2)
        results = [
            [testing.run_packed(gpt, row, **options) for row in (unpacked(16), row_of((16,), 1))] for options in OPTIONS
        ]
        return max(testing.worst(testing.differences(*pair)) for pair in results)


def test_an_unpacked_row_is_a_packed_row_of_one_sequence(ranks2):
    """On 0.12 and 0.13 the patch gives unpacked rows the group too, and later releases have it."""
    assert max(ranks2.run(unpacked_against_packed_in_rank)) <= WITHIN_LAYOUT


def bits_in_rank(with_packed):
    rows = [unpacked(16), *([row_of((8, 16, 8), 1), row_of((4, 12), 1)] if with_packed else [])]
    results = {}
    for shimmed in (True, False):
        with in_layout(CP2, shimmed=shimmed):
            gpt = build(CP2, mtp_num_layers=2)
            results[shimmed] = [testing.run_packed(gpt, row, **options) for row in rows for options in OPTIONS]
    return [equal_bits(*pair) for pair in zip(*results.values())]


@pytest.mark.skipif(VERSION < (0, 14), reason="stock rolls unpacked rows inside a rank before 0.14")
def test_where_stock_is_right_no_bit_changes(ranks2):
    """Unpacked rows from 0.14, and packed rows without padding from 0.16."""
    for same in ranks2.run(bits_in_rank, VERSION >= (0, 16)):
        assert all(same), same


# Stock is wrong


def stock_in_rank(lengths, align):
    """The difference to the truth, which needs the patch on no release that packs."""
    with in_layout(CP2, shimmed=False):
        return against_alone(build(CP2), row_of(lengths, align))


@stock_packs
def test_stock_ignores_padding(ranks2):
    """The roll reads cu_seqlens_q, attention the padded offsets: the gradient is off by more than 1e-2."""
    for found in ranks2.run(stock_in_rank, (8, 16, 8), 4):
        assert testing.worst(found) <= WITHIN_LAYOUT, found
    for found in ranks2.run(stock_in_rank, (6, 14, 6), 4):
        assert found["main"] <= WITHIN_LAYOUT and found["grad"] > 1e-2, found


@stock_cannot_pack
def test_stock_refuses_packed_rows():
    with testing.Ranks(2) as ranks:
        with pytest.raises(testing.RankError, match="sequence packing is not yet supported"):
            ranks.run(stock_in_rank, (8, 16, 8), 1)


@stock_packs
@pytest.mark.parametrize("valid", [(0, 0, 16), (0, 2, 16)], ids=["empty", "one-token-a-rank"])
def test_stock_fails_on_short_sequences(valid):
    """A pool of its own: a rank that fails between two messages leaves one behind."""
    if VERSION > (0, 16) and valid == (0, 0, 16):
        pytest.skip("0.17 and later step over empty sequences")
    with testing.Ranks(2) as ranks, pytest.raises(testing.RankError, match="IndexError"):
        ranks.run(rolls_in_rank, CP2, [(valid, None)], [torch.int64], [((), ())], False, timeout=30)


# roll_tensor itself


def params(valid, padded=None, group=None):
    from megatron.core.packed_seq_params import PackedSeqParams

    valid, padded = (None if cu is None else torch.tensor(cu, dtype=torch.int32) for cu in (valid, padded))
    slots = {} if padded is None else {"cu_seqlens_q_padded": padded}
    row = PackedSeqParams(qkv_format="thd", cu_seqlens_q=valid, **slots)
    if group is not None:
        row.cp_group = group  # a field from 0.16; releases before that have no such name, and take it all the same
    return row


def whole_and_rolled(valid, padded, dtype, before=(), after=()):
    """A row of shape [*before, T, *after] with no zero in it, and what it is after a roll."""
    length = (padded or valid)[-1]
    shape = [*before, length, *after]
    whole = (torch.arange(1, 1 + torch.Size(shape).numel()) % 100 + 1).view(shape).float().to(dtype)
    cu = [None if x is None else torch.tensor(x) for x in (valid, padded)]
    return whole, packed_roll(whole, *cu, dim=len(before))


def rolls_in_rank(layout, rows, dtypes, shapes, shimmed=True, partition="sequence"):
    """Cases in which the roll of this rank's share is not the share of the rolled row."""
    options = {"partition": partition} if shimmed else {}
    with in_layout(layout, shimmed=shimmed, **options):
        wrong, group = [], cp_group()
        for (valid, padded), dtype, (before, after) in itertools.product(rows, dtypes, shapes):
            whole, expected = whole_and_rolled(valid, padded, dtype, before, after)
            slots = list(padded or valid)[1:] if partition == "sequence" else [whole.size(len(before))]
            places, dim = places_of(slots, rank_of(group), group.size()), len(before)
            row = params(valid, padded)
            # Every other way to name a dimension.
            dims = dim if len(after) % 2 else dim - whole.dim()
            share = whole.index_select(dim, places)
            rolled, total = mtp.roll_tensor(share, shifts=-1, dims=dims, cp_group=group, packed_seq_params=row)
            right = expected.index_select(dim, places)
            if rolled.dtype != dtype or not torch.equal(rolled, right) or not torch.equal(total, right.sum()):
                wrong.append((valid, padded, dtype, before, after, rolled.tolist()))
        return wrong


# In slots that two and four ranks share out evenly: empty sequences (first, in the middle, last), of one token, of
# one and of no token a rank, shares of odd length, padding, and rows of nothing.
SHORT_ROWS = [
    ((0, 8), None),
    ((0, 0, 16), None),
    ((0, 8, 8, 8, 24, 24), None),
    ((0, 4, 8), None),
    ((0, 4, 16, 28), None),
    ((0, 12, 24), None),
    ((0, 1, 2), (0, 4, 8)),
    ((0, 1, 1, 8), (0, 8, 16, 24)),
    ((0, 5, 18, 21), (0, 8, 24, 32)),
    ((0, 3, 7), (0, 8, 12)),
    ((0, 0), (0, 8)),
    ((0, 0), None),
    ((0,), None),
]
SHAPES = [((), ()), ((1,), ()), ((), (1, 3)), ((2,), (3,))]


@pytest.mark.parametrize("world", [2, 4])
def test_a_share_of_the_rolled_row_is_the_roll_of_the_share(ranks2, ranks4, world):
    """Whatever the sequences, dtype, rank and dimension; cu_seqlens (0, 2, 16) is one token a rank on two ranks."""
    ranks, layout = (ranks2, CP2) if world == 2 else (ranks4, CP4)
    rows = [*SHORT_ROWS, ((0, 2, 16), None), ((0, 2, 4, 10), None)] if world == 2 else SHORT_ROWS
    for wrong in ranks.run(rolls_in_rank, layout, rows, [torch.int64, torch.float32], SHAPES):
        assert not wrong, wrong
    dtypes = [torch.bool, torch.int32, torch.uint8, torch.float64, torch.bfloat16, torch.float16]
    for wrong in ranks.run(rolls_in_rank, layout, [((0, 5, 18, 21), (0, 8, 24, 32))], dtypes, SHAPES[:2]):
        assert not wrong, wrong


def eight_bit_in_rank():
    """The eight-bit floats have no sum, which roll_tensor returns: the roll itself, on the bytes of a row."""
    with in_layout(CP2):
        whole, expected = whole_and_rolled((0, 5, 13), (0, 8, 16), torch.uint8)
        group, cu = cp_group(), torch.tensor([[0, 5, 13], [0, 8, 16]])
        places = places_of([8, 16], rank_of(group), 2)
        index = rank_roll_index(*cu, 8, "cpu", rank_of(group), 2)
        rolled = roll_on_rank(whole[places].view(torch.float8_e4m3fn), index, 0, group)
        return torch.equal(rolled.view(torch.uint8), expected[places])


def test_eight_bit_floats_travel_as_bytes(ranks2):
    assert ranks2.run(eight_bit_in_rank) == [True, True]


def behind_the_last_slot_in_rank():
    with in_layout(CP2):
        here = places_of([8], rank_of(cp_group()), 2) + 1
        rolled, _ = mtp.roll_tensor(torch.cat([here, torch.tensor([77, 78])]), -1, -1, cp_group(), params((0, 8)))
        return rolled.tolist()


def test_what_lies_behind_the_last_slot_becomes_zero(ranks2):
    """Rows that are filled up to a fixed length; neither a token nor a message comes from there."""
    assert ranks2.run(behind_the_last_slot_in_rank) == [[2, 3, 8, 0, 0, 0], [4, 5, 6, 7, 0, 0]]


def gradient_in_rank():
    """The gradient of a roll against that of the roll of the whole row, and the messages of both passes."""
    with in_layout(CP2):
        group, (valid, padded) = cp_group(), ((0, 5, 18, 21), (0, 8, 24, 32))
        torch.manual_seed(1)
        whole, weight = torch.randn(32, 1, 3, requires_grad=True), torch.randn(32, 1, 3)
        (packed_roll(whole, torch.tensor(valid), torch.tensor(padded), dim=0) * weight).sum().backward()
        places = places_of(padded[1:], rank_of(group), 2)
        local = whole.detach()[places].requires_grad_()
        with Messages() as forward:
            rolled, _ = mtp.roll_tensor(local, dims=0, cp_group=group, packed_seq_params=params(valid, padded))
        with Messages() as backward:
            (rolled * weight[places]).sum().backward()
        return float((local.grad - whole.grad[places]).abs().max()), forward.sent, backward.sent


def test_the_roll_is_differentiable_over_ranks(ranks2):
    """Gradients go back the way the tokens came, in one message per neighbour."""
    assert ranks2.run(gradient_in_rank) == [(0.0, 1, 1)] * 2


# The group of the row


def own_group_in_rank(world_layout, size):
    """A roll of a row whose cp_group has `size` ranks, in a layout of another size; True where it is right."""
    with in_layout(world_layout):
        me, world = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
        own = groups[me // size]
        whole, expected = whole_and_rolled((0, 5, 13), (0, 8, 16), torch.int64)
        places = places_of([8, 16], rank_of(own), size)
        row = params((0, 5, 13), (0, 8, 16), own)
        rolled, _ = mtp.roll_tensor(whole[places], shifts=-1, dims=-1, cp_group=cp_group(), packed_seq_params=row)
        dist.barrier()
        dist.destroy_process_group(own)
        return torch.equal(rolled, expected[places])


@pytest.mark.parametrize(("layout", "size"), [(CP2, 1), (Layout(), 2)], ids=["local-in-cp2", "two-in-cp1"])
def test_the_group_of_a_row_wins_over_that_of_the_model(ranks2, layout, size):
    """Dynamic context parallelism: cp_group of the row says over how many ranks this row is cut, this one or more."""
    assert ranks2.run(own_group_in_rank, layout, size) == [True, True]


def test_a_row_can_be_cut_over_some_of_the_ranks(ranks4):
    """Four ranks in the model's group, two in the row's: neighbours are those of the row."""
    assert ranks4.run(own_group_in_rank, CP4, 2) == [True] * 4


# How a row is cut


def uneven_in_rank(valid, padded):
    with in_layout(CP2), pytest.raises(ValueError, match="multiple of the 2 ranks"):
        length = (padded or valid)[-1] // 2
        mtp.roll_tensor(torch.arange(length), cp_group=cp_group(), packed_seq_params=params(valid, padded))


def test_slots_that_ranks_cannot_share_out_evenly_are_refused(ranks2):
    """No rank can hold half of a token: an error beats training on other tokens."""
    ranks2.run(uneven_in_rank, (0, 3, 8), None)
    ranks2.run(uneven_in_rank, (0, 2, 7), (0, 5, 8))


@pytest.mark.parametrize("world", [2, 4])
def test_a_row_can_be_cut_as_a_whole(ranks2, ranks4, world):
    """Option partition="row": zigzag over the row, wherever sequences begin, so slots need not be divisible."""
    rows = [((0, 16), None), ((0, 5, 9, 16), None), ((0, 3, 3, 4, 16, 32), None), ((0, 5, 12), (0, 7, 16))]
    arguments = (Layout(cp=world), rows, [torch.int64, torch.float32], SHAPES, True, "row")
    for wrong in (ranks2 if world == 2 else ranks4).run(rolls_in_rank, *arguments):
        assert not wrong, wrong


def test_another_partition_is_refused():
    with pytest.raises((ValueError, shim.ShimError), match=r"partition.*'blocks'.*sequence.*row"):
        with shim.patched(only=[ID], options={ID: {"partition": "blocks"}}):
            pass


# Messages


class Messages(TorchDispatchMode):
    """Counts what goes out from this rank, and sums over each group."""

    def __init__(self):
        super().__init__()
        self.sent = self.reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        self.sent += name == "c10d.send"
        self.reductions += name == "c10d.allreduce_"
        return func(*args, **(kwargs or {}))


def counted_in_rank(layout, rows, shimmed=True):
    """Per row of these lengths: (messages sent, rolls) of a training step with two MTP layers."""
    from shim.patches.megatron_core import _packed_step

    with in_layout(layout, shimmed=shimmed):
        gpt, found = build(layout, mtp_num_layers=2), []
        for lengths in rows:
            with mock.patch.object(_packed_step, "roll_on_rank", wraps=_packed_step.roll_on_rank) as rolls:
                with Messages() as messages:
                    testing.run_packed(gpt, row_of(lengths, 2 * layout.cp))
            found.append((messages.sent, rolls.call_count))
        return found


def test_messages_do_not_depend_on_the_number_of_sequences(ranks2, ranks4):
    """A roll sends at most one message to each neighbour, for all sequences together; stock one for each sequence."""
    rolls = 2 * (3 if VERSION == (0, 12) else 4)  # ids, positions (not on 0.12), labels and mask of two layers
    rows = [(32,), (4,) * 8]
    stock = ranks2.run(counted_in_rank, CP2, rows, False) if VERSION >= (0, 16) else None
    assert ranks2.run(counted_in_rank, CP2, rows) == [[(rolls, rolls)] * 2] * 2, f"stock: {stock}"
    if stock:
        assert stock == [[(rolls, 0), (8 * rolls, 0)]] * 2
    # The first and the last rank have one neighbour, those between them two.
    expected = [[(rolls * neighbours, rolls)] for neighbours in (1, 2, 2, 1)]
    assert ranks4.run(counted_in_rank, CP4, [(8, 3, 0, 16)]) == expected


# Option global_normalizer


def share(mask):
    """Targets of all context-parallel ranks, over the number of ranks."""
    total = mask.sum()
    dist.all_reduce(total, group=cp_group())
    return total / cp_group().size()


def global_factors(config, view, per_token_loss, depth):
    """As shim.testing.oracle, with the counts of all ranks."""
    weight = torch.tensor(config.mtp_loss_scaling_factor / depth)
    masks = [view.rolled_mask(k) if VERSION < (0, 17) else view.mask for k in range(1, depth + 1)]
    return [weight * share(mask) if per_token_loss else weight for mask in masks]


def global_truth(gpt, row, **options):
    """Each sequence alone, and the MTP loss such that its average over ranks is the mean over all targets."""
    with mock.patch.multiple(
        oracle,
        _mean=lambda loss, mask: (loss * mask).sum() / share(mask).clamp(min=1e-9),
        _mtp_factors=global_factors,
    ):
        return testing.run_alone(gpt, row, **options)


def global_in_rank(layout, cases):
    """Per case: whether all is finite, and the difference to the truth; of the first case also without the option."""
    with in_layout(layout, **GLOBAL):
        gpt, found = build(layout, mtp_num_layers=2), []
        for row, options in cases:
            result = testing.run_packed(gpt, row, **options)
            finite = result.logged.isfinite().all() and all(g.isfinite().all() for g in result.grads.values())
            found.append((bool(finite), testing.differences(result, global_truth(gpt, row, **options))))
            if len(found) == 1:
                unlike = testing.differences(result, testing.run_alone(gpt, row, **options))
        return found, unlike


def global_cases(align):
    few = [zeros_but(8, 6), torch.zeros(8)]  # on rank 0 of 2, after a roll on rank 1: fewer targets than ranks
    rows = [row_of((8, 8), align), row_of((8, 8), align, few), row_of((5, 13, 3), align)]
    rows.append(row_of((8, 8), align, [torch.zeros(8)] * 2))
    rows += [unpacked(16, mask) for mask in (None, zeros_but(16, 1, 9, 13))]
    return [(row, {"per_token_loss": per_token}) for row in rows for per_token in (False, True)]


@pytest.mark.parametrize("world", [2, 4])
def test_with_the_global_normaliser_the_average_over_ranks_is_the_mean_over_all_targets(ranks2, ranks4, world):
    """Logged losses and gradients of mean and per-token losses, where ranks have different numbers of targets,
    where one has none, fewer targets than ranks (from 0.17 upstream raises counts to 1), no target, and unpacked."""
    ranks, layout, cases = (ranks2, CP2, global_cases(4)) if world == 2 else (ranks4, CP4, global_cases(8)[:4])
    for rank, (found, unlike) in enumerate(ranks.run(global_in_rank, layout, cases)):
        for (row, options), (finite, difference) in zip(cases, found):
            assert finite and testing.worst(difference) <= WITHIN_LAYOUT, (rank, row.loss_mask, options, difference)
        assert unlike["grad"] > 1e-3, (rank, unlike)


def without_labels_in_rank(layout, per_token_loss):
    """0.19: (logged, gradients summed over ranks) of the MTP loss whose labels come from the input."""
    with in_layout(layout, **GLOBAL):
        gpt, row = build(layout, mtp_num_layers=2), row_of((5, 13, 3), 4)
        gpt.config.calculate_per_token_loss = per_token_loss
        places = places_of(row.ends, rank_of(cp_group()), layout.cp) if layout.cp > 1 else torch.arange(row.total)
        logits = gpt(
            input_ids=row.input_ids[:, places],
            position_ids=row.position_ids[:, places],
            attention_mask=None,
            loss_mask=row.loss_mask[:, places],
            packed_seq_params=row.packed_seq_params(),
        )
        (logits.sum() * 0).backward()
        grads = torch.cat([weight.grad.flatten() for weight in gpt.parameters() if weight.grad is not None])
        logged = mtp.MTPLossLoggingHelper.tracker["loss_values"].clone()
        mtp.MTPLossLoggingHelper.tracker.clear()
        if layout.cp > 1:
            dist.all_reduce(grads, group=cp_group())
        return logged, grads


@pytest.mark.skipif(VERSION < (0, 19), reason="labels are derived from the input from 0.19")
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_the_global_normaliser_knows_derived_labels(ranks2, per_token_loss):
    """They take one roll of the mask more; the mean over all targets is what one rank logs."""
    (logged, grads), _ = ranks2.run(without_labels_in_rank, Layout(), per_token_loss)
    (first, summed), (second, _) = ranks2.run(without_labels_in_rank, CP2, per_token_loss)
    torch.testing.assert_close((first + second) / 2, logged, rtol=ACROSS_LAYOUTS, atol=0)
    wrong = (summed if per_token_loss else summed / 2) - grads
    assert wrong.norm() / grads.norm() <= ACROSS_LAYOUTS


def steps_in_rank(layout, options):
    """Per row: (sums over ranks in a step, logged)."""
    with in_layout(layout, **options):
        gpt, found = build(layout, mtp_num_layers=2), []
        for row in (row_of((8, 8), 4), unpacked(16)):
            with Messages() as messages:
                logged = testing.run_packed(gpt, row).logged
            found.append((messages.reductions, logged))
        return found


def test_the_global_normaliser_costs_one_reduction_and_logs_what_one_rank_logs(ranks2):
    """One more sum over ranks in a step, for all MTP layers together, packed or not; and two sequences of 8 on two
    ranks, with 6 and 8 targets: the average of the ranks' own means is another number."""
    with_it, one, without = (
        ranks2.run(steps_in_rank, layout, options) for layout, options in ((CP2, GLOBAL), (Layout(), GLOBAL), (CP2, {}))
    )
    for row in range(2):
        assert all(a[row][0] == b[row][0] + 1 for a, b in zip(with_it, without))
        together, own = (torch.stack([rank[row][1] for rank in result]).mean(0) for result in (with_it, without))
        torch.testing.assert_close(together, one[0][row][1], rtol=ACROSS_LAYOUTS, atol=0)
        assert float((own - together).abs().max()) > 1e-3, (own, together)


# Failures


def fails_on_one_rank():
    with in_layout(CP2):
        gpt = build(CP2)
        if dist.get_rank() == 1:
            gpt.mtp.layers[0].register_forward_hook(lambda *_: 1 / 0)
        testing.run_packed(gpt, row_of((5, 13, 3), 4))


def nothing_left_in_rank():
    from shim.patches.megatron_core._packed_step import STEP

    return (STEP.row, STEP.indices, STEP.group, STEP.normaliser) == (None, None, None, None)


def test_a_rank_that_fails_does_not_leave_the_others_waiting(ranks2):
    """The rank that failed is named, well before any timeout, and the pool works afterwards."""
    started = time.monotonic()
    with pytest.raises(testing.RankError) as error:
        ranks2.run(fails_on_one_rank)
    assert error.value.exception_type == "ZeroDivisionError" and error.value.rank == 1
    assert time.monotonic() - started < 30
    assert ranks2.run(nothing_left_in_rank) == [True, True]
    assert ranks2.run(worst_in_rank, CP2, {}, [((5, 13, 3), 4, {})])[0][0] <= WITHIN_LAYOUT
