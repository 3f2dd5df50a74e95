"""mtp-packed-sequences where older hidden states are rolled too (mtp_hsm, from 0.20): packed equals alone."""

import contextlib

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from context_parallel_cases import apply_in_rank

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.17.1": "all"}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

ID = "mtp-packed-sequences"
ROWS = [((5, 7, 4), 1), ((5, 7, 4), 4), ((1, 6, 2), 4), ((8,), 1)]
EVEN_ROWS = [((8, 16, 8), 4), ((5, 13, 3), 4), ((1, 6, 2), 4)]
WITHIN_LAYOUT = 1e-6
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

pytestmark = pytest.mark.skipif(
    not hasattr(mtp, "_mix_hidden_state_history"), reason="mixing of hidden states came with 0.20"
)


@contextlib.contextmanager
def drawn(state):
    """Every token draws this state of those it can draw; else a row and its sequences alone draw different ones."""
    randint = torch.randint

    def same(high, size, **options):
        return torch.full(size, min(state, high - 1), **options)

    torch.randint = same
    try:
        yield
    finally:
        torch.randint = randint


def build(**options):
    return testing.build_gpt(mtp_num_layers=3, mtp_hsm=True, **options)


def packed_and_alone(gpt, rows, state, **options):
    """The largest difference over these rows, and the row that has it."""
    found = (0.0, None)
    for lengths, align in rows:
        row = testing.pack(testing.random_sequences(lengths), align=align)
        with drawn(state):
            packed, alone = testing.run_packed(gpt, row, **options), testing.run_alone(gpt, row, **options)
        value = testing.worst(testing.differences(packed, alone))
        if not value <= found[0]:
            found = (value, (lengths, align))
    return found


@pytest.mark.parametrize("state", [0, 1])
@pytest.mark.parametrize("recompute", [{}, UNIFORM], ids=["", "recompute"])
def test_packed_equals_alone(state, recompute):
    with testing.layout_initialised(Layout()):
        assert packed_and_alone(build(), ROWS[1:2], state)[0] > 1e-2  # stock
        with shim.patched(only=[ID], require=[ID]):
            value, row = packed_and_alone(build(**recompute), ROWS, state)
    assert value <= WITHIN_LAYOUT, row


def in_rank(layout, rows, shimmed, state):
    with testing.megatron_on_cpu():
        apply_in_rank([ID] if shimmed else [], {})
        with testing.layout_initialised(layout):
            found = packed_and_alone(build(sequence_parallel=layout.sequence_parallel), rows, state)
        apply_in_rank([], {})
    return found


@pytest.mark.parametrize("state", [0, 1])
def test_packed_equals_alone_under_tensor_parallelism(ranks2, state):
    for value, row in ranks2.run(in_rank, Layout(tp=2), EVEN_ROWS, True, state):
        assert value <= WITHIN_LAYOUT, row


def older_states_in_rank(layout, lengths, align, own_group):
    """For every roll of older states in a step: whether it is what stock's roll gives for the same arguments.

    own_group: whether the row brings its group along, as under dynamic context parallelism.
    """
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        stock = mtp._roll_tensor_packed_seq
        with shim.patched(only=[ID], require=[ID]):
            gpt = build(sequence_parallel=layout.sequence_parallel)
            row = testing.pack(testing.random_sequences(lengths), align=align)
            params = row.packed_seq_params()
            params.cp_group = gpt.mtp.cp_group if own_group else None
            object.__setattr__(row, "packed_seq_params", lambda: params)
            roll, same = mtp.roll_tensor, []

            def compared(tensor, *args, **kwargs):
                rolled, total = roll(tensor, *args, **kwargs)
                if kwargs.get("return_sum") is False:
                    right, nothing = stock(tensor.detach(), **kwargs)
                    same.append(torch.equal(rolled, right) and total is nothing is None)
                return rolled, total

            mtp.roll_tensor = compared
            try:
                testing.run_packed(gpt, row)
            finally:
                mtp.roll_tensor = roll
    return same


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("align", [4, 8])
@pytest.mark.parametrize("layout", [Layout(tp=2, sequence_parallel=True), Layout(cp=2)], ids=str)
def test_older_states_are_rolled_as_upstream_means_it(ranks2, layout, align, own_group):
    """What a rank rolls by itself depends on the layout, so no sequence alone is the truth here. Stock's roll is right:
    it gets no padding, because the row is cut at the padding before."""
    for same in ranks2.run(older_states_in_rank, layout, (8, 16, 8), align, own_group):
        assert same == [True] * 2
    for same in ranks2.run(older_states_in_rank, layout, (5, 13, 3), align, own_group):
        assert same == [True] * 2
