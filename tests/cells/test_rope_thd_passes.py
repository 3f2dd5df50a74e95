"""rope-thd: what the layers of a pass share. Whole steps have the bits of stock, and no operation more than stock's."""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from trainings import FULL

import shim
from shim import testing
from shim.testing import Footprint, Layout
from shim.testing.layout import layout_initialised
from shim.testing.model import build_chunks
from shim.testing.packing import PackedRow
from shim.testing.proof import on_device

CELLS = {"0.16.1": "all"}
ABOUT = []  # a pass is what v0_15 alone knows; test_rope_thd.py has every variant

ID = "rope-thd"
VARIANT = shim.plan()[ID].variant
pytestmark = pytest.mark.skipif(VARIANT != "v0_15", reason="no layers share anything here")


class Case(NamedTuple):
    """A step of a model on packed rows. The rows are microbatches of a schedule if there are several."""

    lengths: tuple[tuple[int, ...], ...] = ((24, 40),)
    layout: Layout = Layout()
    options: dict = {}


ROWS = ((24, 40), (8, 16, 40), (64,))
CASES = {
    "one layer": Case(options={"num_layers": 1}),
    "one sequence": Case(((64,),)),
    "four layers": Case(),
    "recompute": Case(options=FULL),
    "recompute of two layers at a time": Case(options={**FULL, "recompute_num_layers": 2}),
    "microbatches": Case(ROWS),
    "CP 2": Case(layout=Layout(cp=2)),
    "PP 2": Case(ROWS, Layout(pp=2)),
    "PP 2, recompute": Case(ROWS, Layout(pp=2), FULL),
    "PP 2, virtual stages": Case(((24, 40), (32, 32)), Layout(pp=2, vp=2)),
}


def offsets_in_one_tensor(row, **extra):
    """As trainers give them: queries and keys have the same."""
    packed = made(row, **extra)
    packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    return packed


made = PackedRow.packed_seq_params


@contextlib.contextmanager
def step_of(case):
    """A function that runs the step and returns losses and gradients."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(on_device("cpu", te=False))
        undo.enter_context(layout_initialised(case.layout))
        undo.enter_context(mock.patch.object(PackedRow, "packed_seq_params", offsets_in_one_tensor))
        torch.manual_seed(0)
        build = functools.partial(testing.build_gpt, **{"num_layers": 4, "mtp_num_layers": None, **case.options})
        model = build_chunks(build) if case.layout.vp > 1 else build()
        rows = [
            testing.pack(testing.random_sequences(lengths, seed=i), align=8) for i, lengths in enumerate(case.lengths)
        ]
        if len(rows) > 1:
            yield lambda: testing.run_schedule(model, rows)
        else:
            yield lambda: testing.run_packed(model, rows[0])


def both_sides(case):
    """(the same bits, operations of stock, of the patch, bytes at the peak of stock, of the patch) on this rank."""
    with step_of(case) as step:
        stock = step()
        counts = [counted(step)]
        with shim.patched(only=[ID], require=[ID]):
            mine = step()
            counts.append(counted(step))
    same = torch.equal(mine.main, stock.main) and mine.grads.keys() == stock.grads.keys()
    same &= all(torch.equal(mine.grads[name], stock.grads[name]) for name in stock.grads)
    (operations, peak), (my_operations, my_peak) = counts
    return same and bool(stock.grads), operations, my_operations, peak, my_peak


def counted(step):
    with Footprint() as footprint:
        step()
    return footprint.operations, footprint.peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_bits_of_stock_and_no_operation_more(name, ranks):
    case = CASES[name]
    sequences = max(map(len, case.lengths))
    for same, stock, mine, peak, my_peak in ranks[case.layout.world].run(both_sides, case):
        assert same
        assert mine <= stock
        if case.layout.world == 1:  # messages under way hold memory for as long as they please
            assert my_peak <= peak + 16 * sequences  # of four bytes: a number for each sequence, or four


def losses_of_a_buffer(recompute, write):
    """Of three microbatches, whose offsets lie in one buffer that is filled anew by `write`, on stock and patched."""

    def run():
        torch.manual_seed(0)
        model = testing.build_gpt(**{"num_layers": 4, "mtp_num_layers": None, **(FULL if recompute else {})})
        row = testing.pack(testing.random_sequences(ROWS[0]), align=8)
        packed, found = offsets_in_one_tensor(row), []
        for end in (24, 40, 32):
            write(packed.cu_seqlens_q, torch.tensor([0, end, 64], dtype=torch.int32))
            losses = model(row.input_ids, row.position_ids, None, labels=row.labels, packed_seq_params=packed)
            losses.mean().backward()
            found.append(losses.detach())
        return [*found, *(weight.grad for weight in model.parameters())]

    with on_device("cpu", te=False), layout_initialised(Layout()):
        stock = run()
        with shim.patched(only=[ID], require=[ID]):
            return all(map(torch.equal, stock, run())) and not torch.equal(*stock[:2])


def uncounted(buffer, values):
    buffer.data.copy_(values)


def counted_by_torch(buffer, values):
    buffer.copy_(values)


@pytest.mark.parametrize("write", [uncounted, counted_by_torch])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_a_buffer_that_is_filled_for_each_microbatch_is_never_stale(recompute, write, ranks):
    assert ranks[1].run(losses_of_a_buffer, recompute, write)[0]


def state_with_an_own_block():
    from megatron.core.transformer.transformer_block import TransformerBlock

    class Own(TransformerBlock):
        def forward(self, hidden_states, attention_mask, packed_seq_params=None, **others):
            return hidden_states

    with on_device("cpu", te=False), layout_initialised(Layout()):
        model = testing.build_gpt(mtp_num_layers=None)
        model.decoder.__class__ = Own
        with shim.patched(only=[ID], require=[ID]):
            return shim.check(model)[ID].state


def test_a_block_with_a_forward_of_its_own_hides_no_more_than_what_layers_share(ranks):
    assert ranks[1].run(state_with_an_own_block) == ["applied"]
