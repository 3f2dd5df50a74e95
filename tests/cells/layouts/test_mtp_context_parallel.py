"""Patch mtp-packed-sequences under context parallelism: every rank's share of a packed row trains as alone."""

import itertools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import (
    ACROSS_LAYOUTS,
    CP2,
    CP4,
    ID,
    LOSS,
    VERSION,
    WITHIN_LAYOUT,
    Messages,
    against_alone,
    apply_in_rank,
    build,
    cp_group,
    in_layout,
    places_of,
    rank_of,
    rolls_in_rank,
    row_of,
    unpacked,
    zeros_but,
)
from recompute_cases import equal_bits
from thorough import in_full

from shim import testing
from shim.testing import Layout
from shim.testing.patience import patience

CELLS = {"0.16.1": "all", "0.13.1": ["test_stock_rolls_unpacked_rows_inside_a_rank", "test_stock_refuses_packed_rows"]}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

OPTIONS = [{"per_token_loss": p, "loss_mask": m} for p, m in itertools.product((False, True), repeat=2)]
stock_packs = pytest.mark.skipif(VERSION < (0, 16), reason="stock refuses packed rows before 0.16")
stock_cannot_pack = pytest.mark.skipif(VERSION >= (0, 16), reason="stock packs from 0.16")


@pytest.fixture(scope="module", autouse=True)
def stock_again(ranks2, ranks4):
    """Other modules use the same ranks."""
    yield
    for ranks in (ranks2, ranks4):
        ranks.run(apply_in_rank, [], {})


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
        (0, {"mtp_num_layers": 2, "position_embedding_type": "learned_absolute"}),
        pytest.param(1, {"mtp_num_layers": 1}, marks=in_full),
        pytest.param(2, {"mtp_num_layers": 2, "lora": True}, marks=in_full),
    ],
    ids=["2-learned_absolute", "1-rope", "2-rope-lora"],
)
def test_packed_equals_alone_on_two_ranks(ranks2, turn, model):
    """Per-token losses, logged losses and gradients are those of each sequence alone, normalised over the row."""
    check_packed_equals_alone(ranks2, CP2, model, turn)


def masked_in_rank():
    with in_layout(CP2):
        gpt, found = build(CP2, mtp_num_layers=2), []
        for first, second in [(zeros_but(8, 6), torch.zeros(5)), (torch.zeros(8), torch.zeros(5))]:
            row = row_of((8, 5), 4, [first, second])
            packed = testing.run_packed(gpt, row)
            finite = packed.logged.isfinite().all() and all(g.isfinite().all() for g in packed.grads.values())
            found.append((bool(finite), testing.worst(testing.differences(packed, testing.run_alone(gpt, row)))))
        return found


def test_a_rank_without_targets_gives_no_nan(ranks2):
    """One target in all, which is on rank 0 and after a roll on rank 1; and no target at all."""
    for found in ranks2.run(masked_in_rank):
        assert all(finite and value <= WITHIN_LAYOUT for finite, value in found), found


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
        with in_layout(CP2, shimmed=shimmed, ids=[ID]):
            gpt = build(CP2, mtp_num_layers=2)
            results[shimmed] = [testing.run_packed(gpt, row, **options) for row in rows for options in OPTIONS]
    return [equal_bits(*pair) for pair in zip(*results.values())]


@pytest.mark.skipif(VERSION < (0, 14), reason="stock rolls unpacked rows inside a rank before 0.14")
def test_where_stock_is_right_no_bit_changes(ranks2):
    """Unpacked rows from 0.14, and packed rows without padding from 0.16: mtp-loss-cp alone sees to the counts."""
    for same in ranks2.run(bits_in_rank, VERSION >= (0, 16)):
        assert all(same), same


# Stock is wrong


def stock_in_rank(lengths, align):
    """The difference to the truth, whose losses of tokens need the patch on no release that packs."""
    with in_layout(CP2, ids=[LOSS]):
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
        ranks.run(rolls_in_rank, CP2, [(valid, None)], [torch.int64], [((), ())], False)


# Messages


def counted_in_rank(layout, rows, shimmed=True):
    """Per row of these lengths: (messages sent, rolls) of a training step with two MTP layers."""
    from shim.patches.megatron_core.mtp_packed_sequences import step

    with in_layout(layout, shimmed=shimmed):
        gpt, found = build(layout, mtp_num_layers=2), []
        for lengths in rows:
            with mock.patch.object(step, "roll_on_rank", wraps=step.roll_on_rank) as rolls:
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


# Failures


def fails_on_one_rank():
    with in_layout(CP2):
        gpt = build(CP2)
        if dist.get_rank() == 1:
            gpt.mtp.layers[0].register_forward_hook(lambda *_: 1 / 0)
        testing.run_packed(gpt, row_of((5, 13, 3), 4))


def nothing_left_in_rank():
    from shim.patches.megatron_core.mtp_packed_sequences.step import THREAD

    return THREAD.step is None


@pytest.mark.once
def test_a_rank_that_fails_does_not_leave_the_others_waiting(ranks2):
    """The rank that failed is named, well before any timeout, and the pool works afterwards."""
    started = time.monotonic()
    with pytest.raises(testing.RankError) as error:
        ranks2.run(fails_on_one_rank)
    assert error.value.exception_type == "ZeroDivisionError" and error.value.rank == 1
    assert time.monotonic() - started < patience()
    assert ranks2.run(nothing_left_in_rank) == [True, True]
    assert ranks2.run(worst_in_rank, CP2, {}, [((5, 13, 3), 4, {})])[0][0] <= WITHIN_LAYOUT
