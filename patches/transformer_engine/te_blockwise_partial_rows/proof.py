"""Proofs of te-blockwise-partial-rows.

Layers and gathers are Transformer Engine's, between two ranks over gloo. Torch stands in for compiled kernels, with
scales that are powers of two, as by default. Values are small whole numbers and those times four: E4M3 holds both
exactly by the scale of a block, so that right results are exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shim import testing
from shim.testing.fp8_layer import LARGEST, OnGpu, fp8_region, fresh_fp8_state
from shim.testing.layout import Layout
from shim.testing.proof import Here, LacksFeatureError, proof
from shim.testing.transformer_engine import compiled_ops

RANKS, INPUTS, OUTPUTS, BLOCK = 2, 128, 256, 128
HOPPER = (9, 0)  # with a kernel for blockwise FP8 in each release
TENSORS = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"


def in_blocks(rows: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """[m, k] to bytes of E4M3, [m, k], and inverse scales of blocks, [m / height, k / width] rounded up, in fp32."""
    m, k = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -k % width, 0, -m % height))
    blocks = padded.view(padded.shape[0] // height, height, -1, width)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    inverse = torch.where(largest > 0, torch.exp2((largest / LARGEST).log2().ceil()), 1.0)
    small = (blocks / inverse).view(padded.shape)[:m, :k]
    return small.to(torch.float8_e4m3fn).view(torch.uint8), inverse[:, 0, :, 0]


def put(target: Tensor, values: Tensor) -> None:
    """Write [m, k] into the corner of a target, which may be padded or of more dimensions."""
    target.view(-1, target.shape[-1])[: values.shape[0], : values.shape[1]] = values


def make_empty(quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, *more: Any) -> Any:
    """A tensor that the compiled part makes from 2.16 on."""
    data: dict[str, Tensor | None] = {}
    for side, wanted in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        lies = quantizer.get_columnwise_shape(shape) if side == "columnwise" else shape
        scales = quantizer.get_scale_shape(shape, columnwise=side == "columnwise")
        data[f"{side}_data"] = torch.empty(lies, dtype=torch.uint8) if wanted else None
        data[f"{side}_scale_inv"] = torch.empty(scales) if wanted else None
    tensors: Any = import_module(TENSORS)
    how = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": quantizer.block_scaling_dim == 2}
    return tensors.Float8BlockwiseQTensor(shape=shape, dtype=dtype, **data, **how)


def quantize(source: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """[..., k] in blocks of 1 x 128 along rows and of 128 x 1 along columns, or of 128 x 128 along both."""
    made = output is None
    if made:
        output = quantizer.make_empty(source.shape, dtype=source.dtype, device=source.device)
    rows = source.detach().float().reshape(-1, source.shape[-1])
    square, compact = quantizer.block_scaling_dim == 2, getattr(quantizer, "all_gather_usage", False)  # up to 2.11
    if output._rowwise_data is not None:
        data, scales = in_blocks(rows, BLOCK if square else 1, BLOCK)
        put(output._rowwise_data, data)
        put(output._rowwise_scale_inv, scales if square or compact else scales.t())
    if output._columnwise_data is not None:
        data, scales = in_blocks(rows, BLOCK, BLOCK if square else 1)
        put(output._columnwise_data, data if compact else data.t())
        put(output._columnwise_scale_inv, scales.t() if square else scales)
    return storage(**output.get_metadata()) if made and quantizer.internal else output


def storage(**metadata: Any) -> Any:
    """The values of a quantized tensor in an object that is no torch tensor, as modules keep them."""
    tensors: Any = import_module(TENSORS)
    return tensors.Float8BlockwiseQTensor.__bases__[0](**metadata)


def values(operand: Any, along: str) -> Tensor:
    """An operand of a product, [m, k] in fp32, of its blocks along rows or along columns."""
    if type(operand) is not Tensor:
        other = "columnwise" if along == "rowwise" else "rowwise"
        operand = storage(**operand.get_metadata() | {f"{other}_data": None, f"{other}_scale_inv": None}).dequantize()
    given: Tensor = operand.float()
    return given.view(-1, given.shape[-1])


def generic_gemm(
    left: Any, transpose_left: bool, right: Any, transpose_right: bool, output: Any, *more: Any, **named: Any
) -> Any:
    """right @ left of cuBLAS's columns: it reads both operands along the dimension that it sums over."""
    a = values(left, "rowwise" if transpose_left else "columnwise")
    b = values(right, "columnwise" if transpose_right else "rowwise")
    product = (b.t() if transpose_right else b) @ (a.t() if transpose_left else a)
    return (product if output is None else output.copy_(product)), None, None, None


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    return data.view(-1, data.shape[-1]).t().contiguous()


def swap_first_dims(data: Tensor, *, out: Tensor | None = None) -> Tensor:
    swapped = data.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


KERNELS: dict[str, Any] = {
    "create_empty_quantized_tensor": make_empty,
    "quantize": quantize,
    "generic_gemm": generic_gemm,
    "fp8_transpose": fp8_transpose,
    "swap_first_dims": swap_first_dims,
}


@contextlib.contextmanager
def kernels() -> Iterator[Any]:
    """transformer_engine.pytorch, whose linear layers compute here by torch."""
    recipes: Any = import_module("transformer_engine.common.recipe")
    if not hasattr(recipes, "Float8BlockScaling"):
        raise LacksFeatureError("this Transformer Engine has no blockwise FP8")
    with (
        testing.te_cuda_stand_ins(HOPPER),
        compiled_ops(KERNELS),
        fresh_fp8_state(),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
        mock.patch.object(torch.cuda, "device", lambda *args: contextlib.nullcontext()),
        mock.patch.object(Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        # gloo gathers at once, and bundles nothing
        mock.patch.object(dist, "_coalescing_manager", lambda *args, **kwargs: contextlib.nullcontext(mock.Mock())),
    ):
        yield import_module("transformer_engine.pytorch")


def sample(rows: int) -> Tensor:
    """Rows of all ranks, [RANKS * rows, INPUTS] in bf16, those of each rank four times as large as those before."""
    size = 4.0 ** torch.arange(RANKS).repeat_interleave(rows)
    return ((torch.arange(RANKS * rows * INPUTS).view(-1, INPUTS) % 5 - 2) * size[:, None]).bfloat16()


def layer_of(te: Any, kind: str = "Linear") -> Any:
    """A column-parallel layer of this rank, whose weights are -1, 0 and 1."""
    how = {"tp_group": dist.group.WORLD, "tp_size": RANKS, "sequence_parallel": True, "parallel_mode": "column"}
    layer = getattr(te, kind)(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device="cpu", **how)
    with torch.no_grad():
        layer.weight.copy_((torch.arange(layer.weight.numel()) % 3 - 1).view_as(layer.weight))
    return layer


def output_of(layer: Any, rows: Tensor) -> Tensor:
    output: Tensor = layer(rows)
    return output


def off_by(rows: int, kind: str = "Linear", forward: Callable[[Any, Tensor], Tensor] = output_of) -> float:
    """How far an output, or a gradient, of a column-parallel layer is from that of all rows in high precision."""
    with kernels() as te:
        layer, everything = layer_of(te, kind), sample(rows)
        own = everything.chunk(RANKS)[dist.get_rank()].clone().requires_grad_()
        recipes: Any = import_module("transformer_engine.common.recipe")
        with fp8_region(recipes.Float8BlockScaling()):
            output = forward(layer, own.as_subclass(OnGpu)).as_subclass(Tensor)
        output.float().sum().backward()
        weight = layer.weight.detach().float()
        of_weight = torch.ones(len(output), len(weight)).t() @ everything.float()
        of_rows = RANKS * weight.sum(0).expand(rows, -1)  # ranks have equal weights
        pairs: Any = ((output, everything.float() @ weight.t()), (layer.weight.grad, of_weight), (own.grad, of_rows))
        return max(float((found - right.to(found.dtype)).abs().max()) for found, right in pairs)


def measured(here: Here, rows: int) -> float:
    return max(here.run(off_by, rows, layout=Layout(tp=RANKS, sequence_parallel=True)))


@proof(
    "outputs or gradients off by {:.1e}",
    right="outputs and gradients of all rows",
    defect="crash",
    crashes=r"All-gather requires quantizable tensor for quantizer Float8BlockQuantizer|invalid output tensor list",
    ranks=2,
    te=True,
)
def a_rank_has_64_rows(here: Here) -> float:
    """Blockwise FP8 cannot train under sequence parallelism if the rows of a rank do not fill blocks of 128.

    To reproduce: two ranks, and with 64 rows on each of them, inside `te.fp8_autocast` with the recipe
    Float8BlockScaling, `te.Linear(128, 256, parallel_mode="column", sequence_parallel=True, tp_group=..., tp_size=2)`.
    From 2.8 on it asserts "All-gather requires quantizable tensor for quantizer Float8BlockQuantizer". From 2.5 to 2.7
    backward gathers a row of scales from each rank, for rows that have one block, which raises.

    Right is the result of all rows. Fixed in 2.14 (pull request 2637). Here torch stands in for the kernels.
    """
    return measured(here, 64)


@proof(
    "outputs or gradients off by {:.1e}",
    right="outputs and gradients of all rows",
    ranks=2,
    te=True,
    variants=("v2_5",),
)
def a_rank_has_120_rows(here: Here) -> float:
    """The gradient of a weight in blockwise FP8 is silently wrong under sequence parallelism if rows fill no blocks.

    To reproduce: as with 64 rows, with 120 rows on each rank, from 2.5 to 2.7. A rank has one block of rows and so have
    two ranks two, 240 rows as well. So backward gathers two scales for two blocks. But the second block begins at row
    128, and the scale of the second rank was made for its rows, from 120 on: rows 120 to 127 get the scale of the first
    rank. If their values need another, as here, they are wrong by the quotient of the two.

    Right is the gradient of all rows. Fixed in 2.14 (pull request 2637). Here torch stands in for the kernels.
    """
    return measured(here, 120)
