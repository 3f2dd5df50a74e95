"""fp32-router-counts: the bias of experts moves by exact counts, on one rank and on several, also under recompute."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from thorough import times
from uncompiled import inside

import shim
from shim import testing
from shim.patches.megatron_core.fp32_router_counts.proof import GLOBAL, MODEL, forward, in_16_bits, noted
from shim.testing import Layout

CELLS = {"0.16.0": "all"}

ID = "fp32-router-counts"
pytestmark = [
    pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch"),
    pytest.mark.usefixtures("uncompiled"),
]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BF16, FP32, FP16 = {}, {"bf16": False}, {"bf16": False, "fp16": True, "params_dtype": torch.float16}
TOKENS = 512
RATE = 1e-3  # of moe_router_bias_update_rate


def applied():
    return shim.patched(only=[ID], require=[ID])


def router_of(model):
    return model.decoder.layers[0].mlp.router


def built(**options):
    model = testing.build_gpt(**{**MODEL, **options})
    return model, in_16_bits(model) if model.config.bf16 or model.config.fp16 else model


def counted(**options):
    """The counts of the model's router after twelve microbatches, and the sum of its maps."""
    model, wrapped = built(**options)
    with noted(model) as maps:
        for number in range(12):
            forward(wrapped, number, TOKENS).backward()
    return router_of(model).local_tokens_per_expert, torch.stack(maps[:: len(maps) // 12]).sum(dim=(0, 1))


@pytest.mark.parametrize("options", [BF16, FP16, {**BF16, **FULL}], ids=["bf16", "fp16", "recompute"])
def test_counts_are_exact(options):
    """Under full recompute a router runs twice, and counts once."""
    stock, truth = counted(**options)
    assert stock.dtype != torch.float32
    if not options.get("fp16"):  # which rounds from 2048 on
        assert not torch.equal(stock.long(), truth)
    with applied():
        found, truth = counted(**options)
    assert found.dtype == torch.float32 and torch.equal(found.long(), truth)
    assert truth.sum() == 12 * TOKENS * MODEL["moe_router_topk"]


def test_fp16_counts_beyond_its_largest_number():
    """Stock has inf there, and moves every bias by nan."""

    def added():
        model, wrapped = built(**FP16)
        router = router_of(model)
        with noted(model):
            forward(wrapped, 0, 8)
            router.local_tokens_per_expert.fill_(65504)
            for number in range(8):
                forward(wrapped, number, TOKENS)
        return router.local_tokens_per_expert

    assert added().isinf().any()
    with applied():
        assert not added().isinf().any()


def test_a_model_of_fp32_does_not_change():
    stock, _ = counted(**FP32)
    with applied():
        model, _ = built(**FP32)
        counts = router_of(model).local_tokens_per_expert
        storage = counts.data_ptr()
        with noted(model):
            forward(model, 0, 8)
        assert router_of(model).local_tokens_per_expert is counts and counts.data_ptr() == storage
        found, _ = counted(**FP32)
    assert torch.equal(found, stock)


def test_the_buffer_stays_where_a_graph_has_seen_it():
    """Only the first forward moves it: what a CUDA graph captures in later ones keeps its address."""
    with applied():
        model, wrapped = built()
        seen = set()
        with noted(model):
            for number in range(3):
                forward(wrapped, number, 8)
                seen.add(router_of(model).local_tokens_per_expert.data_ptr())
    assert len(seen) == 1


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_loads_both_ways(assign):
    """Counts are in none, a bias may be there in bf16."""
    model, wrapped = built()
    with noted(model):
        forward(wrapped, 0, 8)
    stock = {
        name: value.clone()
        for name, value in torch.nn.Module.state_dict(wrapped).items()
        if isinstance(value, torch.Tensor)
    }
    with applied():
        model, wrapped = built()
        with noted(model):
            forward(wrapped, 0, 8)
            written = {
                name: value
                for name, value in torch.nn.Module.state_dict(wrapped).items()
                if isinstance(value, torch.Tensor)
            }
            assert {name: (value.dtype, value.shape) for name, value in written.items()} == {
                name: (value.dtype, value.shape) for name, value in stock.items()
            }
            bf16 = {name: value.bfloat16() for name, value in stock.items()}
            torch.nn.Module.load_state_dict(wrapped, bf16, strict=False, assign=assign)
            forward(wrapped, 0, 8)
        router = router_of(model)
        assert router.local_tokens_per_expert.dtype == router.expert_bias.dtype == torch.float32
        assert router.local_tokens_per_expert.sum() == 2 * 8 * MODEL["moe_router_topk"]


def test_the_global_loss_has_the_gradient_of_fp32_counts():
    """After many microbatches, whose counts stock rounds. Its counts begin anew with each step, as on stock."""
    if not hasattr(router_of(built()[0]), "reset_global_aux_loss_tracker"):
        pytest.skip("this release has no global auxiliary loss")

    def gradient():
        model, wrapped = built(**GLOBAL)
        router = router_of(model)
        with noted(model):
            forward(wrapped, 0, 8)
            one = router.global_tokens_per_expert.clone()
            for _ in range(700):
                router.global_tokens_per_expert += one + 1
                router.ga_steps += 1
            wrapped.zero_grad()
            forward(wrapped, 0, 8).backward()
        steps = router.ga_steps.item()
        router.reset_global_aux_loss_tracker()
        assert not router.global_tokens_per_expert.any() and not router.ga_steps
        return router.weight.grad.float(), steps

    stock, steps = gradient()
    assert steps == 256
    with applied():
        found, steps = gradient()
    assert steps == 702 and not torch.allclose(found, stock, rtol=1e-2)


def on_ranks(layout, patched):
    """The expert bias after a step of six microbatches on this rank's rows, the tokens of each expert on all ranks."""
    with inside(layout), shim.patched(only=[ID] if patched else []):
        model = testing.build_gpt(
            **MODEL, moe_token_dispatcher_type="allgather", sequence_parallel=layout.sequence_parallel
        )
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), in_16_bits(model))
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        with noted(model) as maps:
            for number in range(rank, 12, ranks):
                forward(wrapped, number, TOKENS).backward()
        counts = torch.stack(maps).sum(dim=(0, 1))
        router = router_of(model)
        exact = int((router.local_tokens_per_expert.long() - counts).abs().sum())
        finalize_model_grads([wrapped])
        torch.distributed.all_reduce(counts)
        return router.expert_bias.clone(), torch.sign(counts.float().mean() - counts) * RATE, exact


@pytest.mark.parametrize(
    "layout",
    times([Layout(cp=2)], [Layout(cp=2), Layout(), Layout(tp=2, sequence_parallel=True), Layout(ep=2)]),
    ids=str,
)
def test_on_two_ranks_the_bias_moves_by_all_tokens(ranks2, layout):
    """Each data-parallel rank has rows of its own, each context- or tensor-parallel rank a part of each sequence."""
    assert any(off for _, _, off in ranks2.run(on_ranks, layout, False))
    for bias, truth, off in ranks2.run(on_ranks, layout, True):
        assert not off and torch.allclose(bias, truth)
