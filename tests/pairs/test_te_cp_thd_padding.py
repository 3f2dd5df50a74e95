"""te-cp-thd-padding: rows with and without padding on two ranks, what is left to stock, and what it costs."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import shim
from shim import testing
from shim.patches.transformer_engine.te_cp_thd_padding import NO_BACKEND, PaddedAttentionError, bindings
from shim.patches.transformer_engine.te_cp_thd_padding.proof import RANKS, attended, error_of, offsets_of, stand_ins

CELLS = {"0.12.0+2.3.0": "all"}

ID = "te-cp-thd-padding"
PLAN = shim.plan()[ID]
pytestmark = pytest.mark.skipif(not PLAN.wanted, reason="this release needs no patch")
CP = testing.Layout(cp=RANKS)
ROWS = {
    "behind the last": ([8, 16], [8, 13]),
    "behind all": ([8, 16, 4], [6, 13, 3]),
    "most of the last": ([8, 16], [8, 2]),
    "nowhere": ([8, 16], [8, 16]),
}


@pytest.fixture(scope="module")
def ranks():
    with testing.Ranks(RANKS) as pool:
        yield pool


def errors(patched):
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), testing.layout_initialised(CP):
        with shim.patched(only=[ID] if patched else [], require=[ID] if patched else []):
            return {name: error_of(*row) for name, row in ROWS.items()}


def bits():
    """Without padding, and with what the caller says of it: the outputs are those of stock."""
    row, padded = ROWS["nowhere"], ROWS["behind all"]
    cases = [(row, {}), (row, {"pad_between_seqs": True}), (padded, {}), (padded, {"pad_between_seqs": False})]
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), testing.layout_initialised(CP):
        stock = [attended(*lengths, **arguments)[0] for lengths, arguments in cases]
        with shim.patched(only=[ID], require=[ID]):
            found = [attended(*lengths, **arguments)[0] for lengths, arguments in cases]
    return [torch.equal(a, b) for a, b in zip(found, stock, strict=True)]


def test_rows_are_attended_as_their_sequences_alone(ranks):
    """In bf16, whose rounding is below 4e-3."""
    stock, found = ([*zip(*(rank.values() for rank in ranks.run(errors, side)), strict=True)] for side in (False, True))
    wrong = {name for name, of_ranks in zip(ROWS, stock, strict=True) if max(of_ranks) > 0.1}
    assert wrong == {"behind the last", "most of the last"}  # padding between sequences is seen
    assert max(map(max, found)) < 4e-3, found


def test_what_stock_does_right_keeps_its_bits(ranks):
    assert ranks.run(bits) == [[True] * 4] * RANKS


def wrapped(result=None):
    """The wrapper around a function that takes what upstream's takes, and returns its arguments, or raises."""
    with stand_ins() as attention:
        signature = inspect.signature(attention.forward)

    def upstream(*args, **kwargs):
        if result is not None:
            raise result
        return signature.bind(*args, **kwargs).arguments

    upstream.__signature__ = signature
    (factory,) = bindings(PLAN.variant, {}).values()
    return factory(upstream)


def layer(world=2, comm="p2p", qkv_format="thd"):
    group = world and SimpleNamespace(size=lambda: world)
    return SimpleNamespace(cp_group=group, cp_comm_type=comm, qkv_format=qkv_format)


def offsets(real=(8, 13), padded=(8, 16)):
    lengths, starts = offsets_of(list(real)), offsets_of(list(padded))
    return {
        **{f"cu_seqlens_{part}": lengths for part in ("q", "kv")},
        **{f"cu_seqlens_{part}_padded": starts for part in ("q", "kv")},
    }


def test_what_upstream_is_asked():
    forward, qkv = wrapped(), [torch.empty(0)] * 3
    assert forward(layer(), *qkv, **offsets())["pad_between_seqs"] is True
    assert forward(layer(), *qkv, **offsets(padded=(8, 13)))["pad_between_seqs"] is False
    assert forward(layer(qkv_format="sbhd"), *qkv, qkv_format="thd", **offsets())["pad_between_seqs"] is True
    for asked in (True, False):
        assert forward(layer(), *qkv, pad_between_seqs=asked, **offsets())["pad_between_seqs"] is asked


@pytest.mark.parametrize(
    ("attention", "arguments"),
    [
        (layer(world=None), {}),
        (layer(world=1), {}),
        (layer(comm="a2a"), {}),
        (layer(comm="a2a+p2p"), {}),
        (layer(qkv_format="sbhd"), {}),
        (layer(), {"qkv_format": "bshd"}),
        (layer(), {"inference_params": "a cache"}),
    ],
)
def test_all_else_is_left_to_stock(attention, arguments):
    with mock.patch.object(torch, "equal", side_effect=AssertionError("a wait for the device")):
        found = wrapped()(attention, *[torch.empty(0)] * 3, **arguments, **offsets())
    assert "pad_between_seqs" not in found


@pytest.mark.parametrize(
    ("given", "comparisons"),
    [
        (offsets(), 1),
        (offsets(padded=(8, 13)), 2),
        ({name: offsets_of([8, 13]) for name in offsets()}, 2),
        (dict.fromkeys(offsets(), offsets_of([8, 13])), 0),
    ],
)
def test_it_waits_for_the_device_no_more_often_than_stock(given, comparisons):
    """Stock compares queries' offsets, and those of keys where the first are equal."""
    with mock.patch.object(torch, "equal", wraps=torch.equal) as equal:
        wrapped()(layer(), *[torch.empty(0)] * 3, **given)
    assert equal.call_count == comparisons


def test_where_nothing_takes_padding_the_error_has_a_remedy():
    error = ValueError(f"{NO_BACKEND} for the provided inputs.")
    with pytest.raises(PaddedAttentionError, match="NVTE_FUSED_ATTN=1") as raised:
        wrapped(error)(layer(), *[torch.empty(0)] * 3, **offsets())
    assert raised.value.__cause__ is error
    for given, arguments in ((offsets(), {"pad_between_seqs": True}), (offsets(padded=(8, 13)), {})):
        with pytest.raises(ValueError, match=NO_BACKEND) as raised:
            wrapped(error)(layer(), *[torch.empty(0)] * 3, **arguments, **given)
        assert raised.value is error
