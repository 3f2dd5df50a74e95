"""A GRPO-style loss with an entropy bonus on a packed row at tensor parallelism 2: one call replaces a trainer's
function.

Two gloo ranks on CPU hold half of the vocabulary each. Every update is computed three times from the same weights: with
a trainer's code on gathered logits, with shim.ops.packed_logprobs, and with its linear form, which never
has the logits. Ends with 0 only if they agree. Then one step with a larger vocabulary: the most bytes that each of
the three holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shim import testing
from shim.ops import linear_packed_logprobs, packed_logprobs

PROMPTS, GROUP, PROMPT, RESPONSE = 2, 16, 4, 8  # prompts, responses to each; tokens of a prompt, of a response
TEMPERATURE, CLIP, BONUS, IGNORED = 0.7, 0.2, 0.01, -100
UPDATES = 8
BOUND = 1e-6  # a few times the rounding of float32
VOCABULARY = 8192  # of the step whose memory is shown
SCRATCH = 1 << 20  # bytes for a tile of the linear form


class Batch(NamedTuple):
    """A packed row of B sequences of S tokens, T = B S. Results are at the position that predicts a token."""

    tokens: Tensor  # [1, T], prompts and sampled responses
    labels: Tensor  # [1, T], the same with IGNORED for a prompt
    cu_seqlens: Tensor  # [B + 1]
    advantage: Tensor  # [1, T], of the sequence
    old: Tensor  # [1, T], log-probabilities at the time of sampling


Found = tuple[Tensor, Tensor, Tensor]  # log-probability, entropy, and the mask of predicted tokens; each [1, T]


def one_call(logits: Tensor, batch: Batch) -> Found:
    """[1, T, V / 2] -> [1, T]; targets, mask and padding included. The ranks exchange four numbers per token."""
    return packed_logprobs(
        logits,
        batch.labels,
        batch.cu_seqlens,
        tp_group=tensor_parallel_group(),  # without it, half of the vocabulary passes for all of it
        temperature=TEMPERATURE,
        entropy=True,
        ignore_index=IGNORED,
    )


def linear_call(hidden: Tensor, weight: Tensor, batch: Batch) -> Found:
    """The same from hidden states [T, 1, H] and this rank's half of the output weight [V / 2, H]."""
    return linear_packed_logprobs(
        hidden,
        weight,
        batch.labels,
        batch.cu_seqlens,
        tp_group=tensor_parallel_group(),
        temperature=TEMPERATURE,
        entropy=True,
        ignore_index=IGNORED,
        scratch_bytes=SCRATCH,
    )


def own_function(logits: Tensor, batch: Batch, dtype: torch.dtype = torch.float64) -> Found:
    """The code that those calls replace: every rank holds the logits of the whole vocabulary, several times over."""
    target = batch.labels.roll(-1)  # the logits of a token are about the next one
    target[:, batch.cu_seqlens[1:].long() - 1] = IGNORED
    every = (gathered(logits).to(dtype) / TEMPERATURE).log_softmax(-1)
    logprob = every.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return logprob, -(every.exp() * every).sum(-1), target != IGNORED


def own_function_in_float32(logits: Tensor, batch: Batch) -> Found:
    return own_function(logits, batch, torch.float32)


def tensor_parallel_group() -> Any:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()


def gathered(logits: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)


def policy_loss(found: Found, batch: Batch) -> Tensor:
    logprob, entropy, mask = found
    ratio = (logprob - batch.old).exp()
    surrogate = torch.minimum(ratio * batch.advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantage)
    # Where nothing is predicted the log-probability is 0, so there is a ratio and a surrogate: the mean leaves it out.
    return -(surrogate + BONUS * entropy)[mask].mean()


def run_model(model: Any, batch: Batch, hidden: bool = False) -> tuple[Tensor, ...]:
    """(logits [1, T, V / 2],) of this rank's columns, or (hidden states [T, 1, H], output weight [V / 2, H])."""
    from megatron.core.packed_seq_params import PackedSeqParams

    length = PROMPT + RESPONSE
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=length,
        max_seqlen_kv=length,
    )
    positions = torch.arange(length).repeat(batch.tokens.size(1) // length)[None]
    model.post_process = not hidden  # without, a GPTModel returns the input of its output layer
    try:
        output = model(input_ids=batch.tokens, position_ids=positions, attention_mask=None, packed_seq_params=params)
    finally:
        model.post_process = True
    return (output, model.shared_embedding_or_output_weight()) if hidden else (output,)


def update(model: Any, batch: Batch, logprobs: Any) -> dict[str, Any]:
    """One forward and backward; the gradients stay in the weights."""
    model.zero_grad(set_to_none=True)
    with testing.Footprint() as footprint:
        outputs = run_model(model, batch, hidden=logprobs is linear_call)
        # A trainer calls loss.backward(). In two parts, so that the collectives of the model's backward do not count.
        heads = [output.detach().requires_grad_() for output in outputs]
        start = footprint.collectives.total()
        found = logprobs(*heads, batch)
        forward = footprint.collectives.total() - start
        loss = policy_loss(found, batch)
        grads = torch.autograd.grad(loss, heads)
        backward = footprint.collectives.total() - start - forward
        _, entropy, mask = (part.detach() for part in found)
        del found
        torch.autograd.backward(outputs, grads)
    weights = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return {
        "loss": loss.item(),
        "entropy": entropy[mask].mean().item(),
        "counts": (forward, backward),
        "outputs": grads,
        "weights": weights,
        "bytes": footprint.peak_bytes,
    }


@torch.no_grad()
def roll_out(model: Any, generator: torch.Generator) -> tuple[Batch, float]:
    """Samples a group of responses to each prompt, the same on both ranks; also returns their mean reward."""
    tokens = torch.randint(64, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
    for _ in range(RESPONSE):
        logits = model(
            input_ids=tokens, position_ids=torch.arange(tokens.size(1)).expand_as(tokens), attention_mask=None
        )
        p = (gathered(logits[:, -1]) / TEMPERATURE).softmax(-1)
        tokens = torch.cat([tokens, p.multinomial(1, generator=generator)], 1)
    reward = (tokens[:, PROMPT:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)  # the policy learns even tokens
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
    labels = tokens.clone()
    labels[:, :PROMPT] = IGNORED
    cu_seqlens = torch.arange(0, tokens.numel() + 1, tokens.size(1), dtype=torch.int32)
    row = tokens.view(1, -1)
    batch = Batch(row, labels.view(1, -1), cu_seqlens, advantage.view(-1, 1).expand_as(tokens).reshape(1, -1), row)
    return batch._replace(old=one_call(*run_model(model, batch), batch)[0]), reward.mean().item()


def train() -> list[tuple[Any, ...]]:
    """The work of each rank; returns the lines of main for every update."""
    steps = []
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        model = testing.build_gpt(mtp_num_layers=None, vocab_size=64)  # your model provider
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        for step in range(UPDATES):
            if step % 2 == 0:  # two updates with each batch: the second one's ratios are not 1
                batch, reward = roll_out(model, generator)
            own, linear, one = (update(model, batch, way) for way in (own_function, linear_call, one_call))
            optimizer.step()  # with the gradients of the one call, which came last
            loss_off = max(abs(mine["loss"] - own["loss"]) for mine in (linear, one))
            norm = own["weights"].norm()
            grad_off = max(((mine["weights"] - own["weights"]).norm() / norm).item() for mine in (linear, one))
            steps.append((step, reward, one["loss"], one["entropy"], *one["counts"], loss_off, grad_off))
    return steps


def memory() -> dict[str, int]:
    """The most bytes that one step holds on this rank, weights and optimizer left out."""
    ways = {
        "on gathered logits": own_function_in_float32,
        "packed_logprobs": one_call,
        "linear_packed_logprobs": linear_call,
    }
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        model = testing.build_gpt(mtp_num_layers=None, vocab_size=VOCABULARY)
        batch, _ = roll_out(model, torch.Generator().manual_seed(0))
        return {name: update(model, batch, way)["bytes"] for name, way in ways.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", choices=testing.RELEASES, metavar="RELEASE", help="megatron-core to fetch and use")
    parser.add_argument("--release-dir", metavar="DIR", help="an unpacked one; by default that on PYTHONPATH")
    options = parser.parse_args(arguments)
    if options.release or options.release_dir:  # has to be on the path before Python starts
        directory = options.release_dir or testing.fetch(options.release)
        return subprocess.run([sys.executable, __file__], env=testing.environment(directory)).returncode
    if importlib.util.find_spec("megatron") is None:
        parser.error("no megatron-core on the path: --release 0.16.1 fetches one")
    # Upstream warns of all the optional kernels that a CPU has no use for.
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    print(f"megatron-core {testing.release()}; off: from the trainer's own function, in float64 on gathered logits")
    with testing.Ranks(2) as ranks:
        first, second = ranks.run(train)
        held = ranks.run(memory)[0]
    print("update  reward  loss      entropy  collectives   loss off  gradient off")
    for row in first:
        print("{:<6}  {:.3f}   {:8.5f}  {:.4f}   {} fwd, {} bwd  {:.1e}   {:.1e}".format(*row))
    # The loss is a sum of terms near 1 that cancel: its difference is absolute. Python's maximum may lose a NaN.
    worst = torch.tensor([row[-2:] for row in first + second]).max().item()
    same = [row[:4] for row in first] == [row[:4] for row in second]
    print(f"Largest difference {worst:.1e}, allowed {BOUND:.0e}; losses the same on both ranks: {same}")
    unit = PROMPTS * GROUP * (PROMPT + RESPONSE) * VOCABULARY // 2 * 4
    print(f"Bytes of a step, vocabulary {VOCABULARY}; 1 is a copy of this rank's logits, {unit / 2**20:.0f} MiB:")
    print("\n".join(f"  {name:<24}{size / unit:6.2f}" for name, size in held.items()))
    return 0 if worst <= BOUND and same and all(row[4:6] == (1, 0) for row in first + second) else 1


if __name__ == "__main__":
    sys.exit(main())
