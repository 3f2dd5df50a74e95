"""What a seed adds to its step: other attention, adapters of experts, uneven stages, and ways to sum and to step.

Drawn on its own, after all else, so that a seed keeps the step that it had before.
"""

from dataclasses import replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from shim import testing

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
KNOWN = TransformerConfig.__dataclass_fields__
PLAIN_GPT = ("dense", "moe")


def with_more(choose, step):
    """The step with more options. choose: a random.Random of its own."""
    step = replace(step, options=dict(step.options))
    if step.kind in PLAIN_GPT:
        _attention(choose, step)
    if step.kind in (*PLAIN_GPT, "mla", "mla moe"):
        _layers(choose, step)
    if "moe" in step.kind:
        step = _experts(choose, step)
    if step.optimizer:
        # At the bound of a clamp fp32 and fp64 have other gradients.
        step.options.pop("activation_func_clamp_value", None)
        step = replace(step, clip=choose.choice([0.0, 0.0, 0.01, 1.0]))
        if step.optimizer == "plain" and choose.random() < 0.2:
            step = replace(step, descent="sgd")
    return replace(step, ddp=_sums(choose, step))


def _attention(choose, step):
    """megatron-core's own attention, which takes no packed rows and no context parallelism."""
    if step.packed or step.layout.cp > 1 or choose.random() < 0.5:
        return
    step.options["own_attention"] = True
    if "window_attn_skip_freq" in KNOWN and choose.random() < 0.5:  # before, windows need Transformer Engine
        step.options["window_size"] = (choose.choice([2, 5]), 0)
        skipped = choose.choice([None, 2])
        step.options["window_attn_skip_freq"] = None if _counts_by_stage(step) else skipped
    if "softmax_type" in KNOWN and choose.random() < 0.5:
        step.options["softmax_type"] = choose.choice(["off-by-one", "learnable"])


def _counts_by_stage(step):
    """Whether the number of a layer of multi-token prediction depends on the layout (docs/left.md)."""
    return VERSION < (0, 16) and step.layout.pp > 1 and step.options.get("mtp_num_layers")


def _layers(choose, step):
    options, layout = step.options, step.layout
    depths = options.get("mtp_num_layers") or 0
    has_positions = step.kind in PLAIN_GPT and "no_rope_freq" in KNOWN and not _counts_by_stage(step)
    has_layout = "pipeline_model_parallel_layout" in KNOWN and (VERSION >= (0, 14) or not depths)
    way = choose.choice(["", "", "first", "layout", "positions"])
    if way == "first" and layout.pp == 2 and layout.vp == 1:
        options |= {"num_layers": 3, "num_layers_in_first_pipeline_stage": choose.choice([1, 2])}
    elif way == "layout" and layout.pp > 1 and layout.vp == 1 and has_layout:
        last = ["mtp"] * depths + ["loss"]
        stages = [["embedding", "decoder"], ["decoder", "decoder"]]
        if layout.pp == 4:
            stages = [["embedding"], ["decoder"], ["decoder", "decoder"], []]
        stages[-1] = stages[-1] + last
        options |= {"num_layers": 3, "pipeline_model_parallel_layout": stages}
    # Layers of multi-token prediction are counted from the first, too.
    elif way == "positions" and has_positions and depths <= options["num_layers"]:
        options["no_rope_freq"] = [number % 2 for number in range(options["num_layers"])]
    if "moe" in step.kind and options["num_layers"] > 1 and not depths and choose.random() < 0.3:
        options["moe_layer_freq"] = [(number + 1) % 2 for number in range(options["num_layers"])]


def _experts(choose, step):
    options, layout = step.options, step.layout
    if choose.random() < 0.2:
        options["moe_router_dtype"] = "fp64"
    if step.frozen:
        return step
    way = choose.choice(["", "", "", "lora", "experts", "router"])
    # An adapter of an expert is whole on each rank that has the expert.
    if way == "lora" and (step.kind != "moe" or (layout.tp if layout.etp is None else layout.etp) > 1):
        way = "experts"
    return replace(step, frozen=way)


def _sums(choose, step):
    """How DDP sums gradients over replicas: options of its config."""
    sums = {}
    if choose.random() < 0.5:
        sums["overlap_grad_reduce"] = True
    if choose.random() < 0.5:
        sums["bucket_size"] = choose.choice([1, 2000, 10_000])
    if not step.options["calculate_per_token_loss"] and choose.random() < 0.3:
        sums["average_in_collective"] = True
    if step.options["params_dtype"] == torch.float32 and choose.random() < 0.3:
        sums["grad_reduce_in_fp32"] = True
    replicas = step.world // (step.layout.tp * step.layout.pp)
    if step.optimizer == "distributed" and replicas % (2 * step.layout.ep) == 0 and choose.random() < 0.4:
        sums["num_distributed_optimizer_instances"] = 2
    if step.optimizer == "distributed" and sums.get("overlap_grad_reduce") and choose.random() < 0.5:
        sums["overlap_param_gather"] = True
    return sums
