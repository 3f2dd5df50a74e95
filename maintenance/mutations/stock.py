"""What a release does right by itself: a mutant that fails here breaks the release, whatever a patch makes of it.

Each function runs stock without the feature that a patch is about, and gives what came of it.
"""

import contextlib
import hashlib
import sys
import warnings

import torch

import shim
from shim import testing
from shim.testing import Layout

__all__ = ["PROBES", "digest_of"]

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.1}


def _flat(value):
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().double().contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for key in sorted(value):
            yield str(key).encode()
            yield from _flat(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield repr(value).encode()


def digest_of(names):
    """16 hexadecimal digits over what these probes give. What they raise passes through."""
    assert not shim.status().applied
    found = hashlib.sha256()
    engine = testing.te_cuda_stand_ins() if "transformer_engine" in sys.modules else contextlib.nullcontext()
    with engine, testing.megatron_on_cpu(), testing.layout_initialised(Layout()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            torch.manual_seed(3)
            for part in _flat(PROBES[name]()):
                found.update(part)
    return found.hexdigest()[:16]


def _step(model, row, **options):
    from megatron.core import tensor_parallel

    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    result = testing.run_packed(model, row, **options)
    return [result.main, result.mtp, result.logged, result.grads]


def _unpacked():
    from shim.patches.megatron_core.mtp_recompute.proof import OneSequence

    return OneSequence(**vars(testing.pack(testing.random_sequences((9,)))))


def _packed():
    return testing.pack(testing.random_sequences((5, 7, 4)))


def mtp():
    """Multi-token prediction without packing or recompute."""
    return _step(testing.build_gpt(mtp_num_layers=2, **DROPOUT), _unpacked())


def packed():
    """Packed rows without multi-token prediction; rotary embeddings are not fused."""
    return _step(testing.build_gpt(mtp_num_layers=None), _packed())


def recompute():
    """Decoder layers under both methods, with dropout."""
    methods = UNIFORM, {**UNIFORM, "recompute_method": "block"}
    return [_step(testing.build_gpt(mtp_num_layers=None, **DROPOUT, **method), _unpacked()) for method in methods]


def checkpoints():
    """One checkpoint by itself."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(5)
    x = torch.randn(3, 4, requires_grad=True)
    y = tensor_parallel.checkpoint(lambda given: torch.nn.functional.dropout(given.sin(), 0.5), False, x)
    torch.rand(7)
    y.sum().backward()
    return [y, x.grad]


def loss():
    """Both cross entropies on one rank, the plain one smoothed too."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    target = torch.randint(0, 64, (12, 2))
    found = []
    with torch.compiler.set_stance("force_eager"):
        for function, arguments in (
            (tensor_parallel.vocab_parallel_cross_entropy, (target, 0.0)),
            (tensor_parallel.vocab_parallel_cross_entropy, (target, 0.1)),
            (fused_vocab_parallel_cross_entropy, (target, group)),
        ):
            logits = torch.randn(12, 2, 64, requires_grad=True)
            losses = function(logits * 1, *arguments)
            losses.mean().backward()
            found += [losses, logits.grad]
    return found


def half():
    """A model in bf16, whose output is fp32."""
    from megatron.core.transformer.module import Float16Module

    half = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
    model = testing.build_gpt(mtp_num_layers=None, **half)
    ids = torch.randint(0, 64, (1, 9))
    output = Float16Module(model.config, model)(ids, torch.arange(9)[None], None)
    output.float().sum().backward()
    return [output, {n: w.grad for n, w in model.named_parameters() if w.grad is not None}]


def rope():
    """Rotations of one rank, not fused."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import TransformerConfig

    from shim.patches.megatron_core._proof_rotations import Group

    config = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=2, apply_rope_fusion=False)
    freqs = torch.randn(25, 1, 1, 8)
    group = {} if testing.release().startswith("0.12") else {"cp_group": Group()}
    rows = torch.tensor([0, 4, 12, 24], dtype=torch.int32)
    unpacked = rope_utils.apply_rotary_pos_emb(torch.randn(24, 1, 2, 12), freqs[:24], config, **group)
    return [unpacked, rope_utils.apply_rotary_pos_emb(torch.randn(24, 2, 12), freqs, config, cu_seqlens=rows, **group)]


def yarn():
    """The tables of MLA, fused and not, on one rank."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from shim.patches.megatron_core._proof_rotations import Group

    made = YarnRotaryEmbedding(8, original_max_position_embeddings=32)
    made.cp_group = Group()
    return [[*made.get_cached_cos_sin(length, dtype=torch.float32), *made(length)] for length in (48, 16)]


def moe():
    """Experts with and without room to spare, and without a stash."""
    import moe_cases

    steps = [moe_cases.train(moe_cases.build(**more)) for more in ({}, moe_cases.DROPLESS)]
    return [[step.losses, step.grads] for step in steps]


def bias():
    """Experts with a bias, on rows without padding."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # looked up, and without Transformer Engine not there
    model = testing.build_gpt(
        num_layers=1,
        mtp_num_layers=None,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
    )
    row = torch.arange(6)[None]
    losses = model(row, row, None, labels=row)
    losses.mean().backward()
    return [losses, model.decoder.layers[0].mlp.router.local_tokens_per_expert]


def stash():
    """Upstream's own stash in the orders that it can do."""
    import paged_stash_cases as cases

    with cases.interpreted_kernels(), cases.unwritten_memory_is_nan():
        model = cases.build(1, 2)
        plain = cases.train(model, [3, 5], in_flight=1, stash=False)
        cases.train(model, [3, 5], in_flight=1)
        return [plain, cases.train(model, [3, 5], in_flight=1)]


def fp8():
    """Regions of FP8 without recompute, and Transformer Engine's checkpoint without regions."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import distributed

    enter = te.autocast if hasattr(te, "autocast") else te.fp8_autocast
    states = [testing.fp8_state()]
    with enter(enabled=True):
        states.append(testing.fp8_state())
        with enter(enabled=False):
            states.append(testing.fp8_state())
    states.append(testing.fp8_state())
    x = torch.randn(3, 4, requires_grad=True)
    y = distributed.checkpoint(lambda given: given.sin(), x)
    y.sum().backward()
    named = [(state.enabled, state.calibrating) for state in states]
    return [named, y, x.grad, _without_output()]


def _without_output():
    """A checkpoint that discards its output, which stock has with Transformer Engine only."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random

    model_parallel_cuda_manual_seed(5)
    x, checkpoint = torch.randn(3, 4, requires_grad=True), random.CheckpointWithoutOutput()
    y = checkpoint.checkpoint(lambda given: torch.nn.functional.dropout(given.sin(), 0.5), x)
    z = y.sin()
    checkpoint.discard_output_and_register_recompute(z)
    z.sum().backward()
    return [z, x.grad]


PROBES = {f.__name__: f for f in (mtp, packed, recompute, checkpoints, loss, half, rope, yarn, moe, bias, stash, fp8)}
