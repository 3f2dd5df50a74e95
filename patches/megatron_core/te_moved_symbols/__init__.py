"""Names that Transformer Engine has moved, for a megatron-core that looks for them at the old place.

What is wrong: megatron-core guards its imports from Transformer Engine. If a name has moved, a feature goes off in
silence.
- _SplitAlongDim (from 2.3 on utils.SplitAlongDim): every release splits QKV by torch.split, whose backward makes an
  extra copy.
- FusedRoPEFunc and apply_rotary_pos_emb (2.2 and 2.3): 0.12 has no fused RoPE and refuses apply_rope_fusion. With 2.2,
  0.12.1 to 0.12.3 pass it an argument that came with 2.3, which raises a TypeError.
- get_workspace, and the argument `workspace` of general_gemm (gone with 2.10): 0.13 to 0.16 have no te_general_gemm,
  and torch computes the router's product. Transformer Engine computes what is all in fp32 in TF32, as every other pair
  of releases does. Its kernel reads a bias as if it had the type of the output (cuBLASLt is told none), so the function
  that comes back converts the bias of 0.16's router.
- multi_tensor_scale_tensor (from 2.14 on): without this name, 0.17 to 0.20 use none of its neighbours. Without Apex,
  the norm of the gradients and their clipping are then loops with a host read for every parameter.
- get_dummy_wgrad (from 2.3 on): the linear layers of 0.14 to 0.20 take Transformer Engine for absent. They allocate a
  placeholder for every fused gradient and refuse CPU offloading.

The patch: if megatron-core holds None or nothing under such a name, the name gets a function that calls the new place
with the arguments of the new place. Neighbours that exist are given back, and the placeholder is made once. Working
names do not change. The patch also fixes modules that were imported before apply().

Upstream: 0.13 (RoPE), 0.17 (workspace).

docs/transformer-engine.md lists the names that no patch can give back, because the installed Transformer Engine lacks
what they stand for.

Delete when: megatron-core imports SplitAlongDim from transformer_engine.pytorch.utils, and the releases before are not
supported.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, dtype

EXTENSIONS = "megatron.core.extensions.transformer_engine:"
ROPE = "megatron.core.models.common.embeddings.rope_utils:"
ATTENTION = "megatron.core.transformer.attention:"
MOE = "megatron.core.transformer.moe.moe_utils:"
LAYERS = "megatron.core.tensor_parallel.layers:"
CLIP = "megatron.core.optimizer.clip_grads:"

log = logging.getLogger("shim")


def _home(name: str, *modules: str) -> Any:
    """The module that has `name` now; None, with a warning, if no module has.

    Bound functions read the name from the module at each call, because others replace it, such as the batch-invariant
    mode of 0.16.
    """
    # A factory must not import. If Transformer Engine could not be imported, there is nothing to give back.
    if "transformer_engine.pytorch" not in sys.modules:
        return None
    for module in modules:
        home = sys.modules.get(f"transformer_engine.pytorch.{module}")
        # Not by an attribute read, which would import a lazy module.
        if home is not None and object.__getattribute__(home, "__dict__").get(name) is not None:
            return home
    log.warning("te-moved-symbols: no %s in %s of Transformer Engine: a feature stays off", name, ", ".join(modules))
    return None


def _split_along_dim(original: Any) -> Any:
    home = None if callable(original) else _home("SplitAlongDim", "utils")
    if home is None:
        return original

    def split_along_dim(*args: Any) -> tuple[Tensor, ...]:
        return home.SplitAlongDim.apply(*args)

    return split_along_dim


def _rope(original: Any) -> Any:
    home = _home("apply_rotary_pos_emb", "attention.rope", "attention")
    if home is None:
        return original
    interleaves = "interleaved" in inspect.signature(home.apply_rotary_pos_emb).parameters
    if not callable(original):
        return _fused_rope(home, interleaves)
    fixed = getattr(original, "__globals__", None) is globals()
    if interleaves or fixed or original.__module__ + ":" != EXTENSIONS:
        return original
    return _fused_rope_like(original, home)


@functools.cache
def _fused_rope_like(original: Any, home: Any) -> Any:
    # Cached, so that the two modules that hold one function hold one after apply() too. It is pickled by its name.
    return functools.wraps(original)(_fused_rope(home, interleaves=False))


def _fused_rope(home: Any, interleaves: bool) -> Any:
    # transpose_output_memory concerns the memory layout only, and Transformer Engine has no such option.
    def fused_apply_rotary_pos_emb(
        t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
    ) -> Tensor:
        if interleaves:
            return home.apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=interleaved, fused=True)
        if interleaved:
            raise ValueError(
                "Transformer Engine has interleaved fused RoPE from 2.3 on: set apply_rope_fusion to False"
            )
        return home.apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", fused=True)

    return fused_apply_rotary_pos_emb


def _packed_rope(original: Any) -> Any:
    home = None if callable(original) else _home("apply_rotary_pos_emb", "attention.rope", "attention")
    if home is None:
        return original

    def fused_apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0
    ) -> Tensor:
        where = {"cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank}
        return home.apply_rotary_pos_emb(t, freqs, tensor_format="thd", fused=True, **where)

    return fused_apply_rotary_pos_emb_thd


def _general_gemm(original: Any) -> Any:
    home = None if callable(original) else _home("general_gemm", "cpp_extensions")
    if home is None:
        return original

    def te_general_gemm(
        A: Tensor,
        B: Tensor,
        out_dtype: dtype | None = None,
        layout: str = "TN",
        out: Tensor | None = None,
        bias: Tensor | None = None,
        grad: bool = False,
    ) -> Any:
        if bias is not None and out_dtype is not None and not grad:
            # The kernel reads a bias as if it had the type of the output. The router's has that of the weights.
            bias = bias.to(out_dtype)
        return home.general_gemm(A, B, out_dtype=out_dtype, layout=layout, out=out, bias=bias, grad=grad)

    return te_general_gemm


def _neighbour(original: Any, name: str) -> Any:
    """Transformer Engine's module with the function, if megatron-core uses its own loop; else None."""
    return _home(name, "optimizers") if original.__module__ == "megatron.core.utils" else None


# The arguments below have the names that megatron-core's loops use.


def _applier(original: Any) -> Any:
    home = _neighbour(original, "multi_tensor_applier")

    def multi_tensor_applier(op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        return home.multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args)

    return original if home is None else multi_tensor_applier


def _l2_norm(original: Any) -> Any:
    home = _neighbour(original, "multi_tensor_l2norm")

    def multi_tensor_l2norm(chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool, *args: Any) -> Any:
        return home.multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args)

    return original if home is None else multi_tensor_l2norm


def _scale(original: Any) -> Any:
    home = _neighbour(original, "multi_tensor_scale")

    def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: Any, scale: float) -> Any:
        return home.multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)

    return original if home is None else multi_tensor_scale


def _have_te(original: Any) -> Any:
    # In this module the flag decides about the placeholder below and about branches in the layers.
    return original or "transformer_engine.pytorch" in sys.modules


def _dummy_wgrad(original: Any) -> Any:
    if callable(original) or "transformer_engine.pytorch" not in sys.modules:
        return original
    made: dict[tuple[tuple[int, ...], dtype], Tensor] = {}

    def get_dummy_wgrad(shape: list[int], dtype: dtype, zero: bool = False) -> Tensor:
        key = (tuple(shape), dtype)
        if key not in made:
            made[key] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=False)
        if zero:
            made[key].zero_()
        return made[key].detach()

    return get_dummy_wgrad


_SPLIT = {EXTENSIONS + "SplitAlongDim": _split_along_dim, ATTENTION + "SplitAlongDim": _split_along_dim}
_FUSED_ROPE = {
    place + name: factory
    for place in (EXTENSIONS, ROPE)
    for name, factory in (("fused_apply_rotary_pos_emb", _rope), ("fused_apply_rotary_pos_emb_thd", _packed_rope))
}
_GEMM = {EXTENSIONS + "te_general_gemm": _general_gemm, MOE + "te_general_gemm": _general_gemm}
_WGRAD = {LAYERS + "HAVE_TE": _have_te, LAYERS + "get_dummy_wgrad": _dummy_wgrad}
_NORM = {
    CLIP + "multi_tensor_applier": _applier,
    CLIP + "l2_norm_impl": _l2_norm,
    CLIP + "multi_tensor_scale_impl": _scale,
}
_VARIANTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "v0_12": {**_SPLIT, **_FUSED_ROPE},
    "v0_13": {**_SPLIT, **_GEMM},
    "v0_14": {**_SPLIT, **_GEMM, **_WGRAD},
    "v0_17": {**_SPLIT, **_WGRAD, **_NORM},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes the object that upstream found and returns the replacement."""
    return _VARIANTS[variant]
