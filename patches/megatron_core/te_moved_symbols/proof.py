"""Proofs of te-moved-symbols."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from shim import testing
from shim._torch_names import required
from shim.testing.proof import CannotRunError, Here, proof

CORE = "megatron.core."


def _ends_in_a_kernel(call: Callable[[], Any]) -> bool:
    """Whether a call comes to a compiled function, which refuses tensors of a CPU. Loops of Python work with them."""
    try:
        call()
    except (AttributeError, TypeError):  # nothing there, or something with other arguments
        return False
    except RuntimeError:
        return True
    return False


def splits_query_key_and_value() -> bool:
    split = import_module(CORE + "transformer.attention").SplitAlongDim
    if split is None:
        return False
    node = split(torch.ones(2, requires_grad=True), 0, [1, 1])[0].grad_fn
    return "SplitAlongDim" in type(node).__name__  # on torch 2.9 node.name() is refused


def rotates() -> bool:
    rope = import_module(CORE + "models.common.embeddings.rope_utils")
    values, angles = torch.ones(4, 1, 2, 8), torch.ones(4, 1, 1, 8)
    return _ends_in_a_kernel(lambda: rope.fused_apply_rotary_pos_emb(values, angles))


def rotates_packed_rows() -> bool:
    rope = import_module(CORE + "models.common.embeddings.rope_utils")
    values, angles, offsets = torch.ones(4, 2, 8), torch.ones(4, 1, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    return _ends_in_a_kernel(lambda: rope.fused_apply_rotary_pos_emb_thd(values, offsets, angles))


def multiplies_in_the_router() -> bool:
    moe = import_module(CORE + "transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):  # before 0.13
        return True
    return _ends_in_a_kernel(lambda: moe.te_general_gemm(torch.ones(4, 8), torch.ones(3, 8), torch.float32))


def shares_placeholders_of_gradients() -> bool:
    layers = import_module(CORE + "tensor_parallel.layers")
    if not hasattr(layers, "get_dummy_wgrad"):  # it is imported from 0.14 on; if it is not there, HAVE_TE is False
        return bool(getattr(layers, "HAVE_TE", True))
    first, second = (layers.get_dummy_wgrad([2, 3], torch.float32) for _ in range(2))
    return bool(layers.HAVE_TE and first.data_ptr() == second.data_ptr())


def takes_the_norm_of_gradients() -> bool:
    clip = import_module(CORE + "optimizer.clip_grads")
    flag, gradients = torch.zeros(1, dtype=torch.int), [[torch.ones(3)]]
    return _ends_in_a_kernel(lambda: clip.multi_tensor_applier(clip.l2_norm_impl, flag, gradients, False))


FEATURES = (
    splits_query_key_and_value,
    rotates,
    rotates_packed_rows,
    multiplies_in_the_router,
    shares_placeholders_of_gradients,
    takes_the_norm_of_gradients,
)


def lost() -> list[str]:
    return [feature.__name__ for feature in FEATURES if not feature()]


@proof("{:.0f} of 6 functions of Transformer Engine not used", right="all of them used", defect="missing", te=True)
def functions_that_moved_are_used(here: Here) -> float:
    """Functions of Transformer Engine that have moved are silently not used.

    To reproduce: `from megatron.core.transformer.attention import SplitAlongDim` with Transformer Engine 2.3 or later:
    it is None. megatron-core guards its imports. Where Transformer Engine has moved a name, a feature goes off or
    something slower takes its place, and nothing says so:

    - the split of QKV, from 2.3 on, in all releases;
    - fused rotary embeddings, in 0.12 from 2.2 or 2.3 on (apply_rope_fusion raises, also for packed rows);
    - the router's general_gemm, in 0.13 to 0.16 from 2.10 on;
    - the shared placeholder of fused weight gradients, from 0.14 on before 2.3 (HAVE_TE of the layers is False);
    - the kernels for the norm of gradients, from 0.17 on before 2.14.

    Right: each call ends in Transformer Engine, whose function is there under another name.
    """
    return float(len(here.run(lost)[0]))


_Mode: Any = required("torch.utils._python_dispatch:TorchDispatchMode")


class Copies(_Mode):  # type: ignore[misc]
    """Counts how often tensors are put together into a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.cat
        return func(*args, **(kwargs or {}))


HEADS, WIDTH, TOKENS = 4, 32, 6


def copies_of_the_gradient() -> int:
    """In the backward of the split into query, key and value, whose gradients lie in one buffer."""
    options: dict[str, Any] = {"num_attention_heads": HEADS, "num_query_groups": HEADS, "hidden_size": WIDTH}
    try:
        model: Any = testing.build_gpt(mtp_num_layers=None, **options)
    except TypeError as error:
        raise CannotRunError(f"this pair builds no model without te-cpu-offload: {error}") from error
    hidden = torch.randn(TOKENS, 1, WIDTH, requires_grad=True)
    parts = model.decoder.layers[0].self_attention.get_query_key_value_tensors(hidden)[:3]
    gradients = torch.randn(TOKENS, 1, HEADS, 3 * WIDTH // HEADS).chunk(3, -1)
    with Copies() as copies:
        torch.autograd.backward(parts, gradients)
    return copies.count


@proof("{:.0f} copy of the gradient of QKV per layer", right="no copy", defect="time", te=True)
def the_gradient_of_qkv_is_not_copied(here: Here) -> float:
    """The gradients of query, key and value are copied into one tensor in every layer, although they lie in one.

    To reproduce, with Transformer Engine 2.3 or later: take query, key and value from
    `SelfAttention.get_query_key_value_tensors(hidden)`, and give backward gradients that are views of one buffer, as
    those of Transformer Engine's fused attention are. Count `aten.cat`.

    megatron-core looks for `_SplitAlongDim` in transformer_engine.pytorch.attention, from where it has moved to
    transformer_engine.pytorch.utils.SplitAlongDim. The import is guarded, and torch.split takes its place, whose
    backward copies [s, b, 3 h]. Right: no copy, because SplitAlongDim returns the buffer. From 0.12 on.
    """
    attention = import_module("transformer_engine.pytorch.attention")
    if hasattr(attention, "_SplitAlongDim"):
        raise CannotRunError("this Transformer Engine has _SplitAlongDim where megatron-core looks for it")
    return float(here.run(copies_of_the_gradient)[0])
