"""Proof of te-permutation."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from unittest import mock

from shim._torch_names import find, required
from shim.testing.proof import CannotRunError, Here, proof

KERNEL = "_row_id_map_pass_3_kernel"
EXPERTS = 8


def failures() -> int:
    """How many of the kernels that sort cannot be compiled: 0 or 1. Compiling for a GPU needs none."""
    if find("triton:constexpr_function") is None:
        raise CannotRunError("this needs Triton 3.5 or later")
    kernel = getattr(import_module("transformer_engine.pytorch.triton.permutation"), KERNEL, None)
    if kernel is None:
        raise CannotRunError("the kernels of this release do not sort")
    target = required("triton.backends.compiler:GPUTarget")("cuda", 90, 32)
    kinds = {
        parameter.name: "constexpr" if parameter.is_constexpr else "*i32" if parameter.name.endswith("ptr") else "i32"
        for parameter in kernel.params
    }
    constants = {"LOAD_SIZE": EXPERTS, "num_experts": EXPERTS}
    # Else a result of another time would be taken, and one would be left behind.
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, TRITON_CACHE_DIR=empty):
        try:
            required("triton:compile")(required("triton.compiler:ASTSource")(kernel, kinds, constants), target=target)
        except (required("triton:CompilationError"), RuntimeError) as error:
            if "Unsupported function referenced: <function get_int_dtype" not in str(error):
                raise
            return 1
    return 0


@proof(
    "{:.0f} kernel cannot be compiled: Unsupported function referenced: get_int_dtype",
    right="the kernel is compiled",
    defect="crash",
    te=True,
    devices=("cpu", "cuda"),
)
def the_fused_permutation_is_compiled(here: Here) -> int:
    """TE's fused permutation of tokens cannot be compiled with Triton 3.5 or later.

    To reproduce, with torch 2.9: train a mixture of experts with `moe_permute_fusion=True`, or call
    `transformer_engine.pytorch.moe_permute_with_probs`. Or, without a GPU, compile
    `transformer_engine.pytorch.triton.permutation._row_id_map_pass_3_kernel` by `triton.compile` for a GPUTarget.

    `_compare_and_swap` calls `core.get_int_dtype(...)`, a plain Python function, which Triton refuses since 3.5:
    "Unsupported function referenced". Right would be to mark it with `triton.constexpr_function`.
    Wrong in 2.6 to 2.9, right from 2.10 (pull request 2286).
    """
    return int(here.run(failures)[0])
