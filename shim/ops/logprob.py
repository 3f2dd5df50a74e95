"""Log-probability, entropy and log-sum-exp of each token, from logits whose vocabulary is split over ranks.

Let x be the logits divided by the temperature, V the global vocabulary, and p = softmax(x) over V:

    logsumexp = log(sum_j exp(x_j))
    logprob   = x_target - logsumexp
    entropy   = logsumexp - sum_j p_j x_j
    d logprob / d x_j = [j = target] - p_j;   d entropy / d x_j = -p_j (log p_j + entropy);   d logsumexp / d x_j = p_j

Label smoothing e gives the target the weight 1 - e and every other entry e / (V - 1), as in megatron-core. With a = e V
/ (V - 1), logprob becomes (1 - a) logprob + a mean_j(x_j - logsumexp).

In forward each rank reduces its columns to 3 to 5 numbers per token, and the ranks exchange the numbers once. Backward
needs only the logits and a few numbers per row, so ranks exchange nothing. Neither pass makes a temporary as large as
the logits. The single gradient has the dtype of the logits.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shim._torch_names import find, outside_graph
from shim.ops._logprob_chunks import LOG2E
from shim.ops._logprob_linear import LinearTokenLogprobs
from shim.ops._logprob_products import Largest, LowRank
from shim.ops._logprob_rows import (
    Learned,
    Options,
    checked_options,
    differentiable_once,
    exchanged,
    ignored_rows,
    passes_for,
    places,
    results,
    row_gradient,
)
from shim.ops._saved_tensors import foreign_hooks_active

__all__ = ["Largest", "LowRank", "TokenLogprobs", "linear_token_logprobs", "token_logprobs"]


_IGNORED = -2  # saved as the target's place for an ignored token; -1 means a target on another rank


class TokenLogprobs(NamedTuple):
    """Results per token in fp32 (fp64 for fp64 logits); 0 for ignored tokens. `entropy` is None unless asked for."""

    logprob: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


def token_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    tp_group: Any = None,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["no_grad"] = False,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    scratch_bytes: int | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool | Literal["unread"] = False,
) -> TokenLogprobs:
    """The log-probability of each target, with its log-sum-exp and, if asked for, its entropy. All are differentiable.

    logits: [..., V / ranks] in fp32, bf16, fp16 or fp64, any strides: this rank's share of the vocabulary, which is
    split evenly and in order of the ranks. Saved for backward by reference.
    target: int64 or int32 [...], indices into the global vocabulary. Every rank passes the same.
    tp_group: the ranks that share the vocabulary; None if one rank has all of it. Without the group a share counts as
    the whole vocabulary. A group of one rank may be any object with rank() and size().
    temperature: divides the logits; a positive number, or a tensor that broadcasts to [...]. It gets no gradient.
    entropy: "no_grad" computes the entropy without a gradient.
    label_smoothing: see the module. It changes only `logprob`.
    ignore_index: tokens with this target have results of 0 and a gradient of exactly 0, whatever their logits. None
    ignores no token. A loss made of ratios or means must still mask these tokens: 0 stands for a probability of 1.
    scratch_bytes: the memory a pass may use for temporaries; it uses at least the memory for one token. Default: 1 MiB
    per thread and at most 4 MiB on CPU, which stays in the cache; 128 MiB elsewhere. chunk_size: the number of tokens
    per chunk, instead of scratch_bytes. Neither changes the results. Kernels (see below) need no scratch.
    inplace_backward: write the gradient over the logits. After backward the memory then no longer holds logits. If
    another operation needs the logits in its own backward, or this backward runs twice, autograd raises RuntimeError
    instead of a wrong gradient. Logits get a separate gradient if another tensor shares their memory (views, results of
    detach(), results that autograd keeps; sharing through NumPy or DLPack is not detected), if hooks keep them, if they
    overlap themselves, or if no single stride reaches their rows. ValueError for logits that are a leaf, or a view of
    one. "unread" writes only over logits that nobody can read any more, and so ends in no error: they get a separate
    gradient also if a variable, a container or another operation's node holds them when backward comes here, if they
    are a leaf or a view, and if the graph is retained. A read on another CUDA stream that only record_stream() knows of
    is not detected.

    Ranks exchange 3 to 5 numbers per token in forward, by one all-gather, and nothing in backward.

    A row that is -inf throughout gives NaN, as in torch.log_softmax. ValueError if arguments do not fit together, for a
    target outside the vocabulary, and for a temperature tensor that is not positive. The last two are device-side
    assertions on CUDA, so that the host does not wait. Differentiable once. On CUDA each pass is one Triton kernel if
    Triton can be imported; TRITON_INTERPRET=1 runs the same kernels on CPU. torch.compile breaks the caller's graph
    here.
    """
    given = (logits, target, tp_group, temperature, entropy, label_smoothing, ignore_index)
    how = (scratch_bytes, chunk_size, inplace_backward)
    if torch.compiler.is_compiling():
        return _outside_graph(*given, *how)
    return _token_logprobs(*given, *how)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    tp_group: Any = None,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["no_grad"] = False,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    scratch_bytes: int | None = None,
    chunk_size: int | None = None,
    sum_hidden_grad: bool = True,
    weight_grad: Tensor | None = None,
    low_rank: LowRank | None = None,
    largest: Largest | None = None,
) -> TokenLogprobs:
    """token_logprobs of ``hidden @ weight.T + bias``, whose logits exist one tile at a time, never as a whole.

    hidden: [..., H], the same on every rank. weight: [V / ranks, H] and bias: [V / ranks], this rank's share, in the
    dtype of hidden. The logits are rounded to that dtype, as by the product alone. A CPU without fast products in bf16
    or fp16 multiplies in fp32 instead, and rounds no logits. All three get a gradient if they require one.
    scratch_bytes: memory for a tile of tokens times up to 4096 columns. Default: 16 MiB on CPU, 256 MiB elsewhere.
    chunk_size: the number of tokens per tile, instead of scratch_bytes. For bf16 and fp16, sums over tiles are in fp32:
    [T, H], and as many rows of the weight as a tile has columns; so are these rows themselves if products are.
    sum_hidden_grad: each rank computes its part of the gradient of hidden. One all-reduce in backward, the only one,
    sums the parts. False returns the part, for callers who sum themselves (behind megatron-core's
    copy_to_tensor_model_parallel_region, or a gather of sequence-parallel shards).
    weight_grad: [V / ranks, H] in any dtype, such as a main_grad. Backward adds the gradient of the weight to it,
    without a rounding to the weight's dtype before. The weight itself then gets None. bf16 and fp16 tiles are
    multiplied into fp32: on CUDA directly from torch 2.8 on, else as copies in fp32.
    low_rank: a second product that is added to the logits, as that of an adapter (LoRA). No weight [V / ranks, H + r]
    is made. Its gradients are as those above.
    largest: gets the largest logit of each token in this rank's share, and its column, as for a count of right
    predictions. The logits are not computed once more for it.

    Other arguments, the result, the kernels and the errors are those of token_logprobs. Backward computes the logits
    again.
    """
    given = (hidden, weight, bias, target, sum_hidden_grad, weight_grad, low_rank, largest, tp_group, temperature)
    how = (entropy, label_smoothing, ignore_index, scratch_bytes, chunk_size)
    if torch.compiler.is_compiling():
        return _linear_outside_graph(*given, *how)
    return _linear_token_logprobs(*given, *how)


def _token_logprobs(
    logits: Tensor, target: Tensor, group: Any, temperature: float | Tensor, *options: Any
) -> TokenLogprobs:
    if logits.dim() == 0:
        raise ValueError("logits must have a vocabulary dimension")
    checked, per_token = checked_options(logits.shape[-1], logits, target, group, temperature, *options)
    memory = logits._base if logits._is_view() else logits
    if checked.inplace is True and memory is not None and memory.is_leaf and memory.requires_grad:
        raise ValueError("inplace_backward would write a leaf's gradient over the leaf: use it on computed logits")
    logprob, entropy, logsumexp = _TokenLogprobs.apply(logits, target, per_token, checked)
    return TokenLogprobs(logprob, entropy, logsumexp)


def _linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    sum_hidden_grad: bool,
    weight_grad: Tensor | None,
    low_rank: LowRank | None,
    largest: Largest | None,
    group: Any,
    temperature: float | Tensor,
    *options: Any,
) -> TokenLogprobs:
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [..., H] and [V, H]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has the shape {list(bias.shape)}, not {list(weight.shape[:1])}")
    other_hidden, other_weight, other_grad, sum_other_grad = low_rank or (None, None, None, False)
    if other_hidden is not None and other_weight is not None:
        fits = other_hidden.shape[:-1] == hidden.shape[:-1] and other_weight.shape[:1] == weight.shape[:1]
        if not fits or other_weight.shape[1:] != other_hidden.shape[-1:]:
            shapes = f"{list(other_hidden.shape)} and {list(other_weight.shape)}"
            raise ValueError(f"low_rank has the shapes {shapes}, not [..., r] and [V, r] of the first product")
    others = (("low_rank.hidden", other_hidden), ("low_rank.weight", other_weight))
    for name, tensor in (("weight", weight), ("bias", bias), *others):
        if tensor is not None and (tensor.dtype, tensor.device) != (hidden.dtype, hidden.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, hidden {hidden.dtype} on {hidden.device}")
    for of_weight, to in ((weight, weight_grad), (other_weight, other_grad)):
        if of_weight is not None and to is not None and (to.shape, to.device) != (of_weight.shape, of_weight.device):
            there = f"{list(to.shape)} on {to.device}"
            raise ValueError(f"weight_grad is {there}, not {list(of_weight.shape)} on {of_weight.device}")
    wanted = (target.shape, target.device, torch.int64)
    if largest is not None and wanted != (largest.column.shape, largest.column.device, largest.column.dtype):
        raise ValueError(f"largest.column is not {list(target.shape)} in torch.int64 on {target.device}")
    if largest is not None and wanted[:2] != (largest.value.shape, largest.value.device):
        raise ValueError(f"largest.value is not {list(target.shape)} on {target.device}")
    checked, per_token = checked_options(weight.shape[0], hidden, target, group, temperature, *options)
    found = LinearTokenLogprobs.apply(
        hidden,
        weight,
        bias,
        target,
        per_token,
        sum_hidden_grad,
        checked,
        weight_grad,
        other_hidden,
        other_weight,
        other_grad,
        sum_other_grad,
        largest,
    )
    return TokenLogprobs(*found)


# torch.compile cannot trace value reads (the checks on CPU) or writes over an input. The first call imports dynamo.
_outside_graph = outside_graph(_token_logprobs)
_linear_outside_graph = outside_graph(_linear_token_logprobs)


class Rows:
    """Views a tensor [..., V] as [T, V] without a copy: leading dimensions in the order of their strides."""

    def __init__(self, tensor: Tensor) -> None:
        leading = range(tensor.dim() - 1)
        self.order = sorted(leading, key=lambda dim: tensor.stride(dim), reverse=True)
        self.sizes = [tensor.size(dim) for dim in self.order]
        self.back = sorted(leading, key=lambda place: self.order[place])

    def of(self, tensor: Tensor) -> Tensor:
        """[..., V] as [T, V]: a view if one stride reaches all rows, else a copy."""
        return tensor.permute(*self.order, -1).reshape(math.prod(self.sizes), tensor.size(-1))

    def flat(self, tensor: Tensor) -> Tensor:
        """[...] as [T], contiguous."""
        return tensor.permute(self.order).reshape(-1).contiguous()

    def restored(self, flat: Tensor) -> Tensor:
        """[T] or [T, V] in the shape of the tensor."""
        behind = range(len(self.sizes), len(self.sizes) + flat.dim() - 1)
        return flat.view([*self.sizes, *flat.shape[1:]]).permute([*self.back, *behind])


def _is_shared(tensor: Tensor) -> bool:
    """Whether a tensor other than its base shares the memory of `tensor`.

    Autograd tracks views. It does not track the result of detach() in a custom function, which may share the memory of
    a leaf, a cache or a CUDA graph, nor the results that nodes keep.
    """
    count = find("torch:_C._storage_Use_Count")
    memory = tensor.untyped_storage()
    return count is None or count(memory._cdata) > 2 + tensor._is_view()  # 2: `tensor` and `memory`


def _is_unread(logits: Tensor, witness: Tensor | None) -> bool:
    """Whether nobody but the backward that runs can read `logits` any more.

    witness: a tensor that is saved and taken out like the logits, and that nobody else knows. So what holds the logits
    is counted on any torch and Python, which differ in the counts of a tensor that nobody else has.
    """
    is_retained = find("torch:_C._autograd._get_current_graph_task_keep_graph")
    if witness is None or logits.is_leaf or logits._is_view() or is_retained is None or is_retained():
        return False
    return _holders(logits) is not None and _holders(logits) == _holders(witness)


def _holders(tensor: Tensor) -> tuple[int, int, int] | None:
    """How many hold the tensor in C++ and in Python, and how many its memory in Python; None if torch does not say."""
    count = getattr(tensor, "_use_count", None)
    return None if count is None else (count(), sys.getrefcount(tensor), sys.getrefcount(tensor.untyped_storage()))


def _can_be_overwritten(rows: Tensor, original: Tensor) -> bool:
    """Whether `rows` [T, V] is the memory of `original`, with every entry at its own address."""
    if rows.numel() == 0 or rows.data_ptr() != original.data_ptr():
        return False
    sizes = sorted((stride, size) for stride, size in zip(rows.stride(), rows.shape) if size > 1)
    reach = 0
    for stride, size in sizes:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


class _TokenLogprobs(torch.autograd.Function):
    """apply(logits, target, temperature [...] or None, options) -> logprob, entropy or None, logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, per_token: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        rows = Rows(logits)
        x, aim = rows.of(logits), rows.flat(target)
        columns = x.size(1)
        ignored = ignored_rows(aim, options.ignore_index)
        temperature = options.temperature if per_token is None else rows.flat(per_token)
        scale = LOG2E / temperature
        place = places(aim, ignored, options.rank * columns, columns)
        stats = passes_for(x).statistics(
            x,
            place,
            scale,
            entropy=bool(options.entropy),
            total=options.smoothing > 0,
            ignored=ignored,
            scratch_bytes=options.scratch_bytes,
            chunk_size=options.chunk_size,
        )
        stats = exchanged(stats, scale, options)
        (logprob, entropy, logsumexp), learned = results(stats, ignored, temperature, columns, options)
        ctx.options = options
        if ignored is not None:
            place = place.masked_fill(ignored, _IGNORED)
        ctx.hooked, ctx.overwrote = foreign_hooks_active(), False
        witness = logits.new_empty(0) if options.inplace == "unread" and not ctx.hooked else None
        ctx.save_for_backward(logits, witness, place, per_token, *learned)
        ctx.version = (logits.data_ptr(), logits._version) if ctx.needs_input_grad[0] else None
        ctx.set_materialize_grads(False)
        if entropy is not None:
            entropy = rows.restored(entropy)
            if options.entropy == "no_grad":
                ctx.mark_non_differentiable(entropy)
        return rows.restored(logprob), entropy, rows.restored(logsumexp)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        options: Options = ctx.options
        if ctx.overwrote:
            raise RuntimeError(
                "a second backward through token_logprobs(inplace_backward=True): its logits now hold the gradient"
            )
        logits, witness, place, per_token, *learned = ctx.saved_tensors
        if (logits.data_ptr(), logits._version) != ctx.version and logits.data_ptr() == ctx.version[0]:
            # Autograd also looks, but not at tensors that hooks for saved tensors keep.
            raise RuntimeError("the logits of token_logprobs were modified by an inplace operation before its backward")
        # Hooks may have kept this same tensor for other users, whom autograd would not warn.
        same = ctx.hooked and logits.data_ptr() == ctx.version[0]
        inplace = bool(options.inplace) and not same and not _is_shared(logits)
        if options.inplace == "unread":
            inplace = inplace and _is_unread(logits, witness)
        rows = Rows(logits)
        x = rows.of(logits.detach())
        columns = x.size(1)
        ignored = ignored_rows(place, _IGNORED)
        if ignored is not None:
            place = place.clamp(min=-1)
        temperature = options.temperature if per_token is None else rows.flat(per_token)
        grads = [None if value is None else rows.flat(value) for value in of_results]
        row = row_gradient(Learned(*learned), grads, ignored, temperature, columns, options)
        ctx.overwrote = inplace and _can_be_overwritten(x, logits)
        if ctx.overwrote:
            # Before the first write, so that every other saved reference sees the change.
            torch.autograd.graph.increment_version(logits)
        out = x if ctx.overwrote else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        passes_for(x).gradient(
            x,
            out,
            place,
            LOG2E / temperature,
            row,
            ignored=ignored,
            scratch_bytes=options.scratch_bytes,
            chunk_size=options.chunk_size,
        )
        return (rows.restored(out), None, None, None), (logits,)
