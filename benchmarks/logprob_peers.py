"""Other packages' functions for the log-probabilities of tokens, in the shape that benchmarks/logprob.py compares.

Their public functions are called as their trainers call them, by default with 128 tokens a chunk. A package that
cannot be imported is left out, with the reason. Source checkouts can be named with `--peers DIR`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CHUNK", "Peers", "find"]

CHUNK = 128  # tokens


class Peers(NamedTuple):
    """Functions by name. "chunked" in a name: works on some tokens at a time. Nothing else is read from names.

    logits: (logits [T, 1, V / ranks], target [T, 1]) -> logprob [T, 1] in nats, plus the entropy if the name ends
    with "with entropy". linear: (hidden [T, 1, H], weight [V, H], target [T, 1]) -> logprob [T, 1].
    missing: package -> why it is not here.
    """

    logits: dict[str, Callable[[Any, Any], Any]]
    linear: dict[str, Callable[[Any, Any, Any], Any]]
    missing: dict[str, str]


def find(ranks: int, device: str = "cpu", chunk: int = CHUNK) -> Peers:
    """Those that can be imported and do `ranks` ranks, which are all that torch.distributed has when they are called.

    device: "meta" for tensors without memory, with stand-ins for kernels. chunk: the tokens of one.
    SkyRL and verl take megatron-core's tensor-parallel group, which must be initialised by then.
    """
    found = Peers({}, {}, {})
    for package, add in _PACKAGES.items():
        try:
            add(found, ranks, device, chunk)
        except (ImportError, AttributeError, RuntimeError, OSError) as error:  # also of the package's imports
            found.missing[package] = str(error).splitlines()[0] if str(error) else type(error).__name__
    return found


def _columns(columns: int) -> tuple[int, int]:
    """The first of this rank's columns of the vocabulary, and the one behind the last."""
    import torch.distributed as dist

    return dist.get_rank() * columns, (dist.get_rank() + 1) * columns


def _torch(found: Peers, ranks: int, device: str, chunk: int) -> None:
    from torch.nn import LinearCrossEntropyOptions  # torch 2.13
    from torch.nn.functional import linear_cross_entropy

    if ranks == 1 and device != "meta":  # what its operator does is not seen there
        how: Any = {"reduction": "none", "options": LinearCrossEntropyOptions()}
        found.linear["torch, chunked, linear"] = lambda h, w, t: (
            -linear_cross_entropy(h.squeeze(1), w, t.squeeze(1), **how).unsqueeze(1)
        )


def _nemo_rl(found: Peers, ranks: int, device: str, chunk: int) -> None:
    import torch.distributed as dist
    from nemo_rl.distributed import model_utils

    whole = model_utils.DistributedLogprob
    chunked = model_utils.ChunkedDistributedLogprob
    negated_entropy = model_utils.ChunkedDistributedEntropy
    linear = model_utils.ChunkedDistributedHiddenStatesToLogprobs

    # [1, T, V]: it cuts the second dimension.
    def logprob(x: Any, t: Any) -> Any:
        return whole.apply(x.transpose(0, 1), t.t(), *_columns(x.shape[-1]), dist.group.WORLD, False).t()

    def in_chunks(x: Any, t: Any) -> Any:
        return chunked.apply(x.transpose(0, 1), t.t(), *_columns(x.shape[-1]), chunk, dist.group.WORLD, False).t()

    def with_entropy(x: Any, t: Any) -> Any:
        return in_chunks(x, t) - negated_entropy.apply(x.transpose(0, 1), chunk, dist.group.WORLD, False).t()

    def from_hidden(h: Any, w: Any, t: Any) -> Any:
        return linear.apply(h, t.t(), w, *_columns(w.shape[0]), chunk, dist.group.WORLD, False).t()

    found.logits["NeMo-RL"] = logprob
    found.logits["NeMo-RL, chunked"] = in_chunks
    found.logits["NeMo-RL, chunked, with entropy"] = with_entropy
    found.linear["NeMo-RL, chunked, linear"] = from_hidden


def _skyrl(found: Peers, ranks: int, device: str, chunk: int) -> None:
    import torch.distributed as dist
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    chunked = model_utils.ChunkedDistributedLogprob
    entropy = model_utils.vocab_parallel_entropy
    linear = model_utils.FusedLinearChunkedDistributedLogprob

    def in_chunks(x: Any, t: Any) -> Any:
        return chunked.apply(x.transpose(0, 1), t.t(), *_columns(x.shape[-1]), chunk, dist.group.WORLD, False).t()

    def with_entropy(x: Any, t: Any) -> Any:
        return in_chunks(x, t) + entropy(x.transpose(0, 1), chunk_size=chunk).t()

    def from_hidden(h: Any, w: Any, t: Any) -> Any:
        return linear.apply(h.transpose(0, 1), w, t.t(), *_columns(w.shape[0]), chunk, dist.group.WORLD, False).t()

    found.logits["SkyRL, chunked"] = in_chunks
    found.logits["SkyRL, chunked, with entropy"] = with_entropy
    found.linear["SkyRL, chunked, linear"] = from_hidden


def _slime(found: Peers, ranks: int, device: str, chunk: int) -> None:
    import torch.distributed as dist
    from slime.utils.ppo_utils import calculate_log_probs_and_entropy

    def in_chunks(x: Any, t: Any) -> Any:
        return calculate_log_probs_and_entropy(x.squeeze(1), t.squeeze(1), dist.group.WORLD, chunk_size=chunk)[0]

    def with_entropy(x: Any, t: Any) -> Any:
        logprob, entropy = calculate_log_probs_and_entropy(
            x.squeeze(1), t.squeeze(1), dist.group.WORLD, with_entropy=True, chunk_size=chunk
        )
        return logprob + entropy.view_as(logprob)

    found.logits["slime, chunked"] = in_chunks
    found.logits["slime, chunked, with entropy"] = with_entropy


def _verl(found: Peers, ranks: int, device: str, chunk: int) -> None:
    from verl.utils.megatron import tensor_parallel

    logprob = tensor_parallel.vocab_parallel_log_probs_from_logits
    entropy = tensor_parallel.vocab_parallel_entropy
    found.logits["verl"] = logprob
    # The first overwrites logits in fp32, so the second needs others; its users copy them in any dtype.
    found.logits["verl, with entropy"] = lambda x, t: logprob(x.clone(), t) + entropy(x)


def _verl_linear(found: Peers, ranks: int, device: str, chunk: int) -> None:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    if ranks == 1:  # its other linear form, also for tensor parallelism, is a kernel for CUDA
        fused = FusedLinearForPPO(chunk)
        # It also computes the entropy. Its results are in the dtype of the hidden states.
        found.linear["verl, chunked, linear"] = lambda h, w, t: fused(h.squeeze(1), w, t.squeeze(1))[0].unsqueeze(1)


def _primus(found: Peers, ranks: int, device: str, chunk: int) -> None:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from primus.backends.megatron.patches.fused_linear_ce_patches import _ChunkedLinearCE

    class Model:
        """The part of a GPTModel that it needs: stock's loss of a chunk of logits."""

        @staticmethod
        def _scale_logits(logits: Any) -> Any:
            return logits

        @staticmethod
        def compute_language_model_loss(labels: Any, logits: Any) -> Any:
            return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t().contiguous()

    if ranks == 1:  # it sums no gradient of hidden states over ranks
        found.linear["Primus, chunked, linear"] = lambda h, w, t: -_ChunkedLinearCE.apply(h, w, t.t(), Model, chunk).t()


def _trl(found: Peers, ranks: int, device: str, chunk: int) -> None:
    from trl.trainer.utils import selective_log_softmax

    if ranks == 1:  # one row of a batch, as it loops over those
        found.logits["TRL"] = lambda x, t: selective_log_softmax(x.transpose(0, 1), t.t()).t()


def _liger(found: Peers, ranks: int, device: str, chunk: int) -> None:
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("runs on CUDA only: on CPU its kernels would be interpreted")
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def linear(h: Any, w: Any, t: Any) -> Any:
        # bias, class weights, ignored target, z-loss, smoothing
        fixed = (None, None, -100, 0.0, 0.0, "none")
        return -LigerFusedLinearCrossEntropyFunction.apply(h.squeeze(1), w, t.squeeze(1), *fixed)[0].unsqueeze(1)

    found.linear["Liger, chunked, linear"] = linear


_PACKAGES: dict[str, Callable[[Peers, int, str, int], None]] = {
    "torch's linear form": _torch,
    "NeMo-RL": _nemo_rl,
    "SkyRL": _skyrl,
    "slime": _slime,
    "verl": _verl,
    "verl's linear form": _verl_linear,
    "Primus": _primus,
    "TRL": _trl,
    "Liger": _liger,
}
