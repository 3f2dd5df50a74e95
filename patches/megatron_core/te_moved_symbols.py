"""Names that Transformer Engine has moved, given back to the megatron-core that looks for them at the old place.

What is wrong: megatron-core guards what it imports from Transformer Engine, so where a name has moved a feature goes
off without a word.
- _SplitAlongDim (now utils.SplitAlongDim, from 2.3 on): every release splits QKV with torch.split, whose backward makes
  a copy more.
- FusedRoPEFunc and apply_rotary_pos_emb (2.2 and 2.3): 0.12 has no fused RoPE, and refuses apply_rope_fusion. With 2.2,
  0.12.1 to 0.12.3 pass it an argument that came with 2.3: TypeError.
- get_workspace, and the argument `workspace` of general_gemm (gone with 2.10): 0.13 to 0.16 have no te_general_gemm,
  and the router's product is torch's.

What the patch does: where megatron-core holds None or nothing under such a name, it gets a function that calls the name
at its new place, with that place's arguments. What works is left alone. Modules imported before apply() are mended
as well.

Upstream: 0.13 (RoPE), 0.17 (workspace), main (SplitAlongDim). Delete with the releases before.

docs/transformer-engine.md has the names that cannot be had, because the installed Transformer Engine has not got what
they stand for.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, dtype

EXTENSIONS = "megatron.core.extensions.transformer_engine:"
ROPE = "megatron.core.models.common.embeddings.rope_utils:"
ATTENTION = "megatron.core.transformer.attention:"
MOE = "megatron.core.transformer.moe.moe_utils:"

log = logging.getLogger("shim")


def _moved(name: str, *modules: str) -> Any:
    """The object where it is now; None, with a warning, where it has moved on."""
    # Importing is not for a factory; where Transformer Engine could not be imported there is nothing to give.
    if "transformer_engine.pytorch" not in sys.modules:
        return None
    for module in modules:
        found = getattr(sys.modules.get(f"transformer_engine.pytorch.{module}"), name, None)
        if found is not None:
            return found
    log.warning("te-moved-symbols: no %s in %s of Transformer Engine: a feature stays off", name, ", ".join(modules))
    return None


def _split_along_dim(original: Any) -> Any:
    split = None if callable(original) else _moved("SplitAlongDim", "utils")
    if split is None:
        return original

    def split_along_dim(*args: Any) -> tuple[Tensor, ...]:
        return split.apply(*args)

    return split_along_dim


def _rope(original: Any) -> Any:
    apply = _moved("apply_rotary_pos_emb", "attention.rope", "attention")
    if apply is None:
        return original
    interleaves = "interleaved" in inspect.signature(apply).parameters
    if callable(original) and (interleaves or original.__module__ + ":" != EXTENSIONS):
        return original

    # transpose_output_memory is about memory alone, and Transformer Engine has nothing like it.
    def fused_apply_rotary_pos_emb(
        t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
    ) -> Tensor:
        if interleaves:
            return apply(t, freqs, tensor_format="sbhd", interleaved=interleaved, fused=True)
        if interleaved:
            raise ValueError(
                "Transformer Engine has interleaved fused RoPE from 2.3 on: set apply_rope_fusion to False"
            )
        return apply(t, freqs, tensor_format="sbhd", fused=True)

    return fused_apply_rotary_pos_emb


def _packed_rope(original: Any) -> Any:
    apply = None if callable(original) else _moved("apply_rotary_pos_emb", "attention.rope", "attention")
    if apply is None:
        return original

    def fused_apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0
    ) -> Tensor:
        where = {"cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank}
        return apply(t, freqs, tensor_format="thd", fused=True, **where)

    return fused_apply_rotary_pos_emb_thd


def _general_gemm(original: Any) -> Any:
    gemm = None if callable(original) else _moved("general_gemm", "cpp_extensions")
    if gemm is None:
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
        return gemm(A, B, out_dtype=out_dtype, layout=layout, out=out, bias=bias, grad=grad)

    return te_general_gemm


_SPLIT = {EXTENSIONS + "SplitAlongDim": _split_along_dim, ATTENTION + "SplitAlongDim": _split_along_dim}
_FUSED_ROPE = {
    place + name: factory
    for place in (EXTENSIONS, ROPE)
    for name, factory in (("fused_apply_rotary_pos_emb", _rope), ("fused_apply_rotary_pos_emb_thd", _packed_rope))
}
_GEMM = {EXTENSIONS + "te_general_gemm": _general_gemm, MOE + "te_general_gemm": _general_gemm}
_VARIANTS = {"rope": {**_SPLIT, **_FUSED_ROPE}, "gemm": {**_SPLIT, **_GEMM}, "split": _SPLIT}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """The factories of a variant: target -> function from what upstream found to what takes its place."""
    return _VARIANTS[variant]
