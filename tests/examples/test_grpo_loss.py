"""The GRPO example at tensor parallelism 2 against a formula of its own, written from the tokens and all logits."""

import importlib.util
import re
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None or find_spec("torch") is None:
    pytest.skip("needs torch and a release of megatron-core on PYTHONPATH", allow_module_level=True)

import megatron.core.models.gpt.gpt_model  # noqa: F401  # before ranks are forked: they inherit it
import torch
import torch.distributed as dist

from shim import testing

CELLS = {"0.15.3": "all"}

# Under its name, because what ranks run is found by its module's.
_spec = importlib.util.spec_from_file_location("grpo_loss", Path(__file__).parents[2] / "examples" / "grpo_loss.py")
grpo_loss = sys.modules["grpo_loss"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(grpo_loss)

BOUND = 1e-6
PROMPT = 4
PROMPT_LOGITS = PROMPT - 1  # those of the last prompt token are about the first token of the response


def formula(logits, tokens, advantage, old):
    """The loss and the log-probabilities, from logits [B, S, V] in float64; neither targets nor masks are read."""
    x = logits[:, PROMPT_LOGITS:-1] / 0.7
    p = x.exp() / x.exp().sum(-1, keepdim=True)
    logprob = p.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1).log()
    entropy = -(p * p.log()).sum(-1)
    ratio = logprob.exp() / old.exp()
    gain = torch.where(advantage > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8)) * advantage
    return -gain.mean() - 0.01 * entropy.mean(), logprob, ratio


def group_normalised(tokens):
    rewards = [statistics.mean(float(token % 2 == 0) for token in row[PROMPT:]) for row in tokens.tolist()]
    groups = [rewards[:16], rewards[16:]]
    return torch.tensor(
        [[(r - statistics.mean(group)) / statistics.stdev(group)] for group in groups for r in group],
        dtype=torch.float64,
    )


def off(a, b):
    """Relative to the norm; NaN where there is any."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def whole(logits):
    """The logits [B, S, V] of all ranks, in float64, without megatron and without a gradient to this rank's."""
    shards = [torch.empty_like(logits) for _ in range(2)]
    dist.all_gather(shards, logits.detach().contiguous())
    return torch.cat(shards, -1).double().requires_grad_()


def weights(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def sequences(packed):
    """A packed row [1, T, ...] as [B, S, ...]."""
    return packed.view(-1, PROMPT + 8, *packed.shape[2:])


def against_the_formula():
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        model = testing.build_gpt(mtp_num_layers=None, vocab_size=64)
        batch, _ = grpo_loss.roll_out(model, torch.Generator().manual_seed(3))
        response = slice(PROMPT_LOGITS, -1)
        sampled_with = sequences(batch.old)
        # As if the policy had moved since: some ratios are clipped, some are not. Prompts get garbage.
        moved = batch.old + 0.3 * torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(4))
        batch = batch._replace(old=moved)
        tokens, advantage = sequences(batch.tokens), sequences(batch.advantage)[:, :1]

        mine = grpo_loss.update(model, batch, grpo_loss.one_call)
        mine_weights = weights(model)
        linear = grpo_loss.update(model, batch, grpo_loss.linear_call)
        linear_weights = weights(model)

        model.zero_grad()
        # Each sequence unpacked.
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=None)
        every = whole(logits)
        loss, logprob, ratio = formula(every, tokens, advantage.double(), sequences(moved)[:, response].double())
        loss.backward()
        gradient = every.grad.chunk(2, -1)[dist.get_rank()]
        logits.backward(gradient.float())

        # Without a loss that masks: -100 alone keeps the prompts' logits out of it.
        leaf = logits.detach().view(1, -1, logits.size(-1)).requires_grad_()
        found = grpo_loss.one_call(leaf, batch)
        (found[0].sum() + found[1].sum()).backward()
        gradients = sequences(mine["outputs"][0]), sequences(leaf.grad)

        return {
            "tokens": batch.tokens,
            "loss": mine["loss"],
            "entropy": mine["entropy"],
            "counts": (mine["counts"], linear["counts"]),
            "loss off": max(abs(way["loss"] - loss.item()) for way in (mine, linear)),
            "old off": off(sampled_with[:, response], logprob.detach()),
            "advantage off": off(advantage, group_normalised(tokens)),
            "logits off": off(gradients[0], gradient),
            "weights off": {
                name: max(off(mine_weights[name], grad), off(linear_weights[name], grad))
                for name, grad in weights(model).items()
            },
            "clipped": ((ratio - 1).abs() > 0.2).double().mean().item(),
            "prompt": [g[:, :PROMPT_LOGITS].count_nonzero().item() for g in gradients],
            "last": [g[:, -1].count_nonzero().item() for g in gradients],
            "response": [g[:, response].count_nonzero().item() for g in gradients],
            "counter": counter_counts(),
        }


def counter_counts():
    """What the example's counter says of one collective in backward, which megatron's copy has, and none forward."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    x = torch.ones(2, requires_grad=True)
    with testing.Footprint() as forward:
        y = copy_to_tensor_model_parallel_region(x)
    with testing.Footprint() as backward:
        torch.autograd.grad(y.sum(), x)
    return forward.collectives.total(), backward.collectives.total()


@pytest.fixture(scope="module")
def found():
    with testing.Ranks(2) as ranks:
        yield ranks.run(against_the_formula)


def test_the_loss_and_every_gradient_are_those_of_the_formula(found):
    for rank in found:
        assert 0.1 < rank["clipped"] < 0.9
        assert rank["loss off"] <= BOUND and rank["old off"] <= BOUND and rank["advantage off"] <= 1e-5
        assert rank["logits off"] <= BOUND
        assert len(rank["weights off"]) > 10
        assert {name: value for name, value in rank["weights off"].items() if not value <= BOUND} == {}


def test_the_logits_of_masked_tokens_get_a_gradient_of_exactly_zero(found):
    for rank in found:
        assert rank["prompt"] == rank["last"] == [0, 0]
        assert min(rank["response"]) > 0


def test_one_collective_forward_and_none_backward(found):
    # The linear form sums the gradient of the hidden states, which else the output layer does.
    assert [rank["counts"] for rank in found] == [((1, 0), (1, 1))] * 2
    assert [rank["counter"] for rank in found] == [(0, 1), (0, 1)]


def test_both_ranks_have_the_same_responses_and_the_same_loss(found):
    first, second = found
    assert torch.equal(first["tokens"], second["tokens"])
    assert (first["loss"], first["entropy"]) == (second["loss"], second["entropy"])


def test_the_example_learns_and_ends_with_0(capsys):
    assert grpo_loss.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    rows = [line.split() for line in lines if re.match(r"\d", line)]
    assert [row[4:8] for row in rows] == [["1", "fwd,", "0", "bwd"]] * 8
    assert float(rows[-1][1]) > float(rows[0][1]) + 0.1  # reward
    assert any(line.endswith("losses the same on both ranks: True") for line in lines)
    held = [float(line.split()[-1]) for line in lines[-3:]]
    page = (Path(__file__).parents[2] / "docs" / "log-probabilities.md").read_text(encoding="utf-8")
    rows = page.partition("| bytes of the step |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert held == [float(row.split("|")[2]) for row in rows]


def test_the_example_fails_where_its_two_functions_differ(monkeypatch):
    own_function = grpo_loss.own_function

    def other_sign(*given):
        logprob, entropy, mask = own_function(*given)
        return logprob, -entropy, mask

    monkeypatch.setattr(grpo_loss, "own_function", other_sign)
    monkeypatch.setattr(grpo_loss, "UPDATES", 1)
    monkeypatch.setattr(grpo_loss, "VOCABULARY", 64)
    assert grpo_loss.main([]) == 1
