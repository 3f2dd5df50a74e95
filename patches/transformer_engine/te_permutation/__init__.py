"""Transformer Engine's fused permutation of tokens compiles with Triton 3.5 and later.

What is wrong (2.6 to 2.9): a kernel of the permutation calls triton.language.core.get_int_dtype while it is compiled.
Since Triton 3.5 such a call is an error unless the function is marked for it: moe_permute_fusion=True of megatron-core
ends with "Unsupported function referenced" in the first forward pass. torch 2.9 brings Triton 3.5.

The patch: Transformer Engine's module of kernels sees a copy of triton.language.core in which that one function is
marked. Triton's own module stays as it is. With an older Triton the copy is the same.

NeMo-RL edits the installed file for this. Beside shim it need not.

Upstream: 2.10 (pull request 2286).

Delete when: Transformer Engine 2.9 is not supported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

CORE = "transformer_engine.pytorch.triton.permutation:core"


def _core(original: Any) -> Any:
    copied = ModuleType(original.__name__, original.__doc__)  # Triton takes nothing but this very class for a module
    vars(copied).update(vars(original))
    # The module of the kernels has imported it.
    mark = getattr(sys.modules["triton"], "constexpr_function", None)
    if mark is not None and type(original.get_int_dtype) is FunctionType:
        vars(copied)["get_int_dtype"] = mark(original.get_int_dtype)
    return copied


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant. A factory takes upstream's object, here a module, and returns another."""
    return {CORE: _core}
