"""The fp32 residual stream.

What is wrong (0.12 to 0.16): with fp32_residual_connection the embedding gives its output in fp32, and residuals are to
stay so. But the function that adds the output of attention or MLP to the residual first casts the residual to the dtype
of that output. So the first layer rounds the stream to bf16, and every layer after it adds in bf16. The flag has no
effect behind the first addition.

The patch: under the flag, a layer (TransformerLayer, MambaLayer) gets residual and output in fp32 for its addition, so
that nothing is left to cast. Messages between pipeline stages are then also fp32. That is the meaning of the flag: the
stream needs the memory of fp32, and the messages twice the bytes, as from 0.17 on. Nothing happens without the flag.

Upstream: fixed in 0.17 by pull request 3504.

Not covered: the schedule that overlaps the messages of experts (overlap_moe_expert_parallel_comm) adds outside of the
layer. CUDA graphs take inputs in the dtype of the weights.

Delete when: 0.16 is not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument

LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer."
MAMBA = "megatron.core.ssm.mamba_layer:MambaLayer."
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
PIPELINED = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")

MLP = {"v0_12": "_forward_mlp", "v0_16": "_forward_post_mlp"}  # what adds the output of the MLP

ADDITIONS = ("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda")  # what a layer adds with, by attribute


def _adds_in_fp32(original: Function) -> Function:
    """For a method that adds to the residual."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        layer = args[0]
        if not layer.config.fp32_residual_connection:
            return original(*args, **kwargs)
        held = vars(layer)
        # An addition that does nothing is a submodule, and no attribute of the layer itself.
        additions = {name: held[name] for name in ADDITIONS if name in held}
        held.update({name: _in_fp32(addition) for name, addition in additions.items()})
        try:
            return original(*args, **kwargs)
        finally:
            held.update(additions)

    return method


def _in_fp32(addition: Function) -> Function:
    """As get_bias_dropout_add, for a function that adds fp32 to fp32."""

    def choose(*args: Any, **kwargs: Any) -> Function:
        add = addition(*args, **kwargs)

        def in_fp32(output: Any, residual: Any, *others: Any, **named: Any) -> Any:
            if isinstance(output, tuple):
                output = tuple(None if part is None else part.float() for part in output)
            return add(output, residual.float(), *others, **named)

        return in_fp32

    return choose


def _sends_fp32(original: Function) -> Function:
    """For a schedule of pipeline stages, whose messages have the dtype of the stream."""
    model_of = argument(original, "model")

    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        model = model_of(args, kwargs)
        config = sys.modules[SCHEDULES].get_model_config(model[0] if isinstance(model, list) else model)
        before = config.pipeline_dtype
        # Schedules take any ModelParallelConfig, and only a TransformerConfig has the flag.
        if not getattr(config, "fp32_residual_connection", False) or before is None:
            return original(*args, **kwargs)
        config.pipeline_dtype = torch.float32
        try:
            return original(*args, **kwargs)
        finally:
            config.pipeline_dtype = before

    return schedule


def probe(function: Function, target: str, models: list[Any]) -> bool | str:
    """Of a schedule: may any model send other than fp32 where it should? See docs/patch-modules.md."""
    configs = [model.config for model in models if hasattr(model, "config")]
    if not configs:
        return "only a model says whether fp32_residual_connection is set"
    for config in configs:
        sends = config.pipeline_model_parallel_size > 1 and config.pipeline_dtype not in (None, torch.float32)
        if sends and config.fp32_residual_connection:
            return "shim cannot try a schedule, which sends messages to other ranks"
    return True


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    methods = [f"{LAYER}_forward_attention", LAYER + MLP[variant], f"{MAMBA}forward"]
    return {
        **dict.fromkeys(methods, _adds_in_fp32),
        **{f"{SCHEDULES}:{name}": _sends_fp32 for name in PIPELINED},
    }
