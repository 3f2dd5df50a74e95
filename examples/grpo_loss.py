"""A GRPO-style loss with an entropy bonus at tensor parallelism 2, where one call replaces a trainer's own function.

Two gloo ranks on CPU hold half of the vocabulary each. Every update is computed twice from the same weights: with
shim.ops.token_logprobs, and with what a trainer writes itself on gathered logits. Ends with 0 only where they agree.
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
from shim.ops import token_logprobs

PROMPTS, GROUP, PROMPT, RESPONSE = 2, 16, 4, 8  # prompts, responses to each; tokens of a prompt, of a response
TEMPERATURE, CLIP, BONUS, IGNORED = 0.7, 0.2, 0.01, -100
BOUND = 1e-6  # a few times the rounding of float32


class Batch(NamedTuple):
    tokens: Tensor  # [B, S], prompt and sampled response
    target: Tensor  # [B, S], the token after each; IGNORED where that is none of a response
    advantage: Tensor  # [B, 1]
    old: Tensor  # [B, S], log-probabilities at the time of sampling


def one_call(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, V / 2] and [B, S] -> log-probability and entropy [B, S]; the ranks exchange four numbers per token."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()  # without it, half of the vocabulary passes for all of it
    found = token_logprobs(logits, target, tp_group=group, temperature=TEMPERATURE, entropy=True, ignore_index=IGNORED)
    return found.logprob, found.entropy


def own_function(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What that call replaces: every rank holds the logits of the whole vocabulary, several times over. In float64."""
    every = (gathered(logits).double() / TEMPERATURE).log_softmax(-1)
    logprob = every.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return logprob, -(every.exp() * every).sum(-1)


def gathered(logits: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)


def policy_loss(logprob: Tensor, entropy: Tensor, batch: Batch) -> Tensor:
    ratio = (logprob - batch.old).exp()
    surrogate = torch.minimum(ratio * batch.advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantage)
    # An ignored token has log-probability 0, so a ratio of 1 and a surrogate: the mean has to leave it out.
    return -(surrogate + BONUS * entropy)[batch.target != IGNORED].mean()


def run_model(model: Any, tokens: Tensor) -> Tensor:
    """Without labels, a GPTModel with parallel_output returns this rank's columns of the logits, [B, S, V / 2]."""
    return model(input_ids=tokens, position_ids=torch.arange(tokens.size(1)).expand_as(tokens), attention_mask=None)


def update(model: Any, batch: Batch, logprobs: Any) -> dict[str, Any]:
    """One forward and backward; the gradients stay in the weights."""
    model.zero_grad(set_to_none=True)
    logits = run_model(model, batch.tokens)
    with testing.Footprint() as forward:
        logprob, entropy = logprobs(logits, batch.target)
    loss = policy_loss(logprob, entropy, batch)
    # A trainer calls loss.backward(). In two parts, so that the collectives of the model's backward do not count.
    with testing.Footprint() as backward:
        (grad,) = torch.autograd.grad(loss, logits)
    logits.backward(grad)
    entropy = entropy.detach()[batch.target != IGNORED].mean()
    weights = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    counts = (forward.collectives.total(), backward.collectives.total())
    return {"loss": loss.item(), "entropy": entropy.item(), "counts": counts, "logits": grad, "weights": weights}


@torch.no_grad()
def roll_out(model: Any, generator: torch.Generator) -> tuple[Batch, float]:
    """Samples a group of responses to each prompt, the same on both ranks; also returns their mean reward."""
    tokens = torch.randint(64, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
    for _ in range(RESPONSE):
        p = (gathered(run_model(model, tokens)[:, -1]) / TEMPERATURE).softmax(-1)
        tokens = torch.cat([tokens, p.multinomial(1, generator=generator)], 1)
    reward = (tokens[:, PROMPT:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)  # the policy learns even tokens
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
    target = tokens.roll(-1, 1)  # the logits of a token are about the next one
    target[:, : PROMPT - 1] = target[:, -1] = IGNORED
    old, _ = one_call(run_model(model, tokens), target)
    return Batch(tokens, target, advantage.view(-1, 1), old), reward.mean().item()


def train() -> list[tuple[Any, ...]]:
    """What each rank does; returns of every update what main prints."""
    steps = []
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        model = testing.build_gpt(mtp_num_layers=None, vocab_size=64)  # your model provider
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        for step in range(8):
            if step % 2 == 0:  # two updates with each batch: the second one's ratios are not 1
                batch, reward = roll_out(model, generator)
            own, one = update(model, batch, own_function), update(model, batch, one_call)
            optimizer.step()  # with the gradients of the one call, which came last
            loss_off = abs(one["loss"] - own["loss"])
            grad_off = ((one["weights"] - own["weights"]).norm() / own["weights"].norm()).item()
            steps.append((step, reward, one["loss"], one["entropy"], *one["counts"], loss_off, grad_off))
    return steps


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
    print("update  reward  loss      entropy  collectives   loss off  gradient off")
    for row in first:
        print("{:<6}  {:.3f}   {:8.5f}  {:.4f}   {} fwd, {} bwd  {:.1e}   {:.1e}".format(*row))
    # The loss is a sum of terms near 1 that cancel: its difference is absolute. Python's maximum may lose a NaN.
    worst = torch.tensor([row[-2:] for row in first + second]).max().item()
    same = [row[:4] for row in first] == [row[:4] for row in second]
    print(f"Largest difference {worst:.1e}, allowed {BOUND:.0e}; losses the same on both ranks: {same}")
    return 0 if worst <= BOUND and same and all(row[4:6] == (1, 0) for row in first + second) else 1


if __name__ == "__main__":
    sys.exit(main())
