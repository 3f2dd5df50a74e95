"""sp-unscattered-embeddings: tokens train as with an embedding that scatters, bit for bit."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils
from needed import needed
from unscattered_cases import CASES, FULL, LENGTHS, MODELS, equal, outcome

import shim
from shim import testing
from shim.patches.megatron_core._proof_features import takes_padding_mask
from shim.patches.megatron_core.recompute_padding_mask.proof import MODEL as EXPERTS
from shim.patches.megatron_core.sp_unscattered_embeddings.proof import build, build_hybrid
from shim.testing import Layout

CELLS = {"0.17.1": "all"}

ID = "sp-unscattered-embeddings"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
pytestmark = needed(ID)
SP2 = Layout(tp=2, sequence_parallel=True)


@contextlib.contextmanager
def inside(layout, patched=True):
    """patched: "all" for all patches, True for this one, False for none. Packed rows need another in any case."""
    chosen = {} if patched == "all" else {"only": ["rope-thd", ID] if patched else ["rope-thd"]}
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        with shim.patched(**chosen, require=[ID] if patched else []):
            yield


def results(layout, scatters, kind, options, patched=True):
    """What a rank gets of a row of tokens. scatters: whether the model's embedding does."""
    with inside(layout, patched):
        model = build(layout.sequence_parallel, scatters, **options)
        return outcome(testing.run_packed(model, testing.pack(testing.random_sequences(LENGTHS[kind]), align=8)))


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_the_bits_of_an_embedding_that_scatters(ranks2, kind, model):
    """Which is right on stock."""
    options = MODELS[model]
    right = ranks2.run(results, SP2, True, kind, options, False)
    assert all(map(equal, ranks2.run(results, SP2, False, kind, options), right))


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sequence_parallel=True, cp=2), Layout(tp=2, sequence_parallel=True, pp=2)], ids=str
)
def test_on_four_ranks(ranks4, layout):
    right = ranks4.run(results, layout, True, "packed", {}, False)
    assert all(map(equal, ranks4.run(results, layout, False, "packed", {}), right))


@pytest.mark.parametrize(
    ("layout", "scatters"),
    [(SP2, True), (Layout(tp=2), True), (Layout(tp=2), False)],
    ids=["with sp", "tp alone", "tp alone, whole"],
)
def test_what_stock_does_right_stays(ranks2, layout, scatters):
    right = ranks2.run(results, layout, scatters, "one", {}, False)
    assert all(map(equal, ranks2.run(results, layout, scatters, "one", {}), right))


def test_with_all_patches(ranks2):
    """With layers of multi-token prediction, which call the embedding themselves."""
    options = {"mtp_num_layers": 2, **FULL}
    right = ranks2.run(results, SP2, True, "packed", options, "all")
    assert all(map(equal, ranks2.run(results, SP2, False, "packed", options, "all"), right))


def routed(scatters, patched):
    """The gradients of a mixture of experts on a row that ends in padding."""
    with inside(SP2, patched):
        # Upstream wants a dispatcher by all-to-all or all-gather under tensor parallelism.
        model = build(True, scatters, **{**EXPERTS, "moe_token_dispatcher_type": "allgather"})
        row = torch.arange(16)[None]
        # 0.16 looks it up in every step, and has it with Transformer Engine only. A part is compiled on first use.
        with (
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
            torch.compiler.set_stance("force_eager"),
        ):
            losses = model(row, row, None, labels=row.roll(-1), padding_mask=row >= 10)
            losses[row < 10].mean().backward()
        return [losses.detach(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}]


@pytest.mark.skipif(not takes_padding_mask(), reason="models of this release take no padding mask")
def test_a_padding_mask_is_cut_like_the_embeddings(ranks2):
    right = ranks2.run(routed, True, False)
    assert all(map(equal, ranks2.run(routed, False, True), right))


def with_hook_that_scatters(patched):
    """As of a wrapper that scatters what the model's embedding returns."""
    with inside(SP2, patched):
        model = build(True)
        model.embedding.register_forward_hook(lambda _, __, made: mappings.scatter_to_sequence_parallel_region(made))
        return outcome(testing.run_packed(model, testing.pack(testing.random_sequences((16,)), align=8)))


def test_nobody_scatters_twice(ranks2):
    right = ranks2.run(with_hook_that_scatters, False)
    assert all(map(equal, ranks2.run(with_hook_that_scatters, True), right))


def hybrid(scatters, patched):
    with inside(SP2, patched):
        model = build_hybrid(True, scatters)
        row = torch.arange(8)[None]
        losses = model(row, row, None, labels=row.roll(-1))
        losses.mean().backward()
        return [losses.detach(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}]


@pytest.mark.skipif(VERSION < (0, 17), reason="older specs of hybrid models need their kernels")
def test_a_hybrid_model(ranks2):
    right = ranks2.run(hybrid, True, False)
    assert all(map(equal, ranks2.run(hybrid, False, True), right))


def checked(layout, scatters, replaces):
    """What check() says of a model on this rank. replaces: whether its class has a method of a trainer."""

    def own(self, *args, **kwargs):
        raise NotImplementedError  # it is not called

    with inside(layout):
        model = build(layout.sequence_parallel, scatters)
        if replaces:
            name = "_preprocess" if hasattr(model, "_preprocess") else "forward"
            model.__class__ = type("Own", (type(model),), {name: own})
        return shim.check(model)[ID]


@pytest.mark.parametrize(
    ("layout", "scatters", "replaces", "state"),
    [(SP2, False, False, "applied"), (SP2, False, True, "unknown"), (SP2, True, True, "applied")],
    ids=str,
)
def test_what_check_says(ranks2, layout, scatters, replaces, state):
    """A method of a trainer is a matter of this patch only if the embedding of its model does not scatter."""
    for found in ranks2.run(checked, layout, scatters, replaces):
        assert found.state == state
        assert ("shim does not try whether it scatters" in found.reason) is (state == "unknown")
