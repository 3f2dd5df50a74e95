"""What probes say of overrides in a model: right ones, ones that lose one thing, ones that cannot be judged.

The same for blocks with adapters and for experts. See test_probes_on_layers.py.
"""

from types import SimpleNamespace

import megatron.core.models.gpt.gpt_model as gpt_model
import megatron.core.transformer.multi_token_prediction as mtp
import moe_cases
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from probed import assert_said, moved, said

from shim import testing
from shim.patches.megatron_core import frozen_recompute, mtp_loss_cp, mtp_packed_sequences, paged_stash
from shim.testing import Layout

CELLS = {"0.17.0": "all"}

ABOUT = ["mtp-packed-sequences", "mtp-loss-cp", "frozen-recompute", "paged-stash"]  # the patches, see chosen.py

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
POSTPROCESS = f"{gpt_model.__name__}:GPTModel._postprocess"

from_014 = pytest.mark.skipif(VERSION < (0, 14), reason="up to 0.13 the block rolls and computes the loss")


@pytest.fixture(autouse=True)
def layout():
    with testing.layout_initialised(Layout()):
        yield


# The loss of a model


class Loses(gpt_model.GPTModel):
    """Right, and takes any mask. Each of the classes below changes one of these."""

    is_main_first = False

    def labels(self, labels, row):
        return moved(labels, row)

    def mask(self, mask, labels, row):
        mask = torch.ones_like(labels) if mask is None else mask.int()
        is_token = ~torch.isin(torch.arange(labels.size(-1)), torch.tensor([4, 8, 9]))  # as the probe's row has padding
        return moved(mask * is_token, row)

    def weighted(self, loss):
        return loss

    def of_tokens(self, labels, logits):
        return self.compute_language_model_loss(labels, logits)

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, loss_mask=None, **kwargs):
        row = kwargs["packed_seq_params"]
        main, deeper = self.mtp(hidden_states=hidden_states).chunk(2)
        if self.is_main_first:
            losses = self.compute_language_model_loss(labels, self.output_layer(main, weight=None)[0])
        mask = self.mask(loss_mask, labels, row)
        loss = self.of_tokens(self.labels(labels, row), self.output_layer(deeper, weight=None)[0]) * mask
        if self.is_main_first:
            return losses + (self.weighted(loss) - loss.detach()).sum()
        main = mtp.MTPLossAutoScaler.apply(main, self.weighted(loss))
        return self.compute_language_model_loss(labels, self.output_layer(main, weight=None)[0])


class LosesTheMainFirst(Loses):
    is_main_first = True


class LosesTheMainFirstAndOtherLabels(LosesTheMainFirst):
    def labels(self, labels, row):
        return labels


class LosesOtherLabels(Loses):
    def labels(self, labels, row):
        return labels


class LosesLabelsOfTheNext(Loses):
    """The padded offsets are right for it, and one sequence is moved by two."""

    def labels(self, labels, row):
        found = moved(labels, row)
        return torch.cat((found[:, :5], found[:, 6:], found[:, :1]), -1)


class LosesCountsPadding(Loses):
    def mask(self, mask, labels, row):
        return moved(torch.ones_like(labels), row)


class LosesTheLastTarget(Loses):
    def mask(self, mask, labels, row):
        found = super().mask(mask, labels, row)
        found[0, 6] = 0
        return found


class LosesTheSecondSequence(Loses):
    """To a half."""

    def weighted(self, loss):
        return loss * torch.tensor([1.0] * 5 + [0.5] * 5)


class LosesNothing(Loses):
    def weighted(self, loss):
        return loss.detach()


class LosesByItself(Loses):
    def of_tokens(self, labels, logits):
        return logits.sum(-1).t()


class LosesWithoutMasks(Loses):
    """Takes none, and no float."""

    def mask(self, mask, labels, row):
        if mask is None or mask.is_floating_point():
            raise TypeError("a mask of truth values, please")
        return super().mask(mask, labels, row)


class LosesWithFloats(Loses):
    def mask(self, mask, labels, row):
        if mask is None or not mask.is_floating_point():
            raise RuntimeError("a mask of numbers, please")
        return super().mask(mask, labels, row)


class LosesAsTheTrainerSays(Loses):
    def mask(self, mask, labels, row):
        raise RuntimeError("of this trainer")


@from_014
@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Loses, True),
        (LosesWithoutMasks, True),
        (LosesWithFloats, True),
        (LosesTheMainFirst, True),
        (LosesTheMainFirstAndOtherLabels, False),
        (LosesOtherLabels, False),
        (LosesLabelsOfTheNext, False),
        (LosesCountsPadding, False),
        (LosesTheLastTarget, False),
        (LosesTheSecondSequence, False),
        (LosesNothing, "no gradient"),
        (LosesByItself, "in its own way"),
        (LosesAsTheTrainerSays, "of this trainer"),
    ],
)
def test_the_loss_of_a_model(cls, expected):
    model = testing.build_gpt()
    model.__class__ = cls
    assert_said(expected, said(mtp_packed_sequences, model, POSTPROCESS))


@pytest.mark.parametrize(
    ("depths", "ranks", "expected"),
    [(1, 1, True), (2, 2, "by which count"), (None, 2, True), (0, 2, True), (None, 1, True)],
)
def test_the_loss_over_ranks(depths, ranks, expected):
    model = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=depths, context_parallel_size=ranks))
    assert_said(expected, said(mtp_loss_cp, model, POSTPROCESS))


# Adapters behind frozen embeddings


class Block(TransformerBlock):
    """Right under full recompute and under that of norms. Each of the classes below changes one of these."""

    checkpoints = True

    def enters(self, states):
        return states if states.requires_grad else states.detach().requires_grad_()

    def leaves(self, states):
        return states

    def forward(self, hidden_states, attention_mask, **rest):
        def layers(states):
            for layer in self.layers:
                states = layer(hidden_states=states, attention_mask=attention_mask, **rest)[0]
            return states

        states = self.enters(hidden_states)
        full = self.config.recompute_granularity == "full" and self.checkpoints
        return self.leaves(tensor_parallel.checkpoint(layers, False, states) if full else layers(states))


class EntersAsItComes(Block):
    def enters(self, states):
        return states


class EntersAsItComesUnchecked(EntersAsItComes):
    checkpoints = False


class LeavesNothingToTrain(Block):
    """The layers get states that require a gradient, and what comes out has none."""

    def leaves(self, states):
        return states.detach()


class AsksTheTrainersBlock(Block):
    def enters(self, states):
        return self.of_this_trainer


class EmbedsTrained(gpt_model.GPTModel):
    def _preprocess(self, *args, **kwargs):
        return (torch.ones(3, 1, 4, requires_grad=True), None)


class EmbedsFrozen(gpt_model.GPTModel):
    def _preprocess(self, *args, **kwargs):
        return (torch.ones(3, 1, 4), None)


class EmbedsNoTuple(gpt_model.GPTModel):
    def _preprocess(self, *args, **kwargs):
        return torch.ones(3, 1, 4, requires_grad=True)


class EmbedsLater(gpt_model.GPTModel):
    def _preprocess(self, *args, **kwargs):
        raise KeyError("of this trainer")


def adapted(cls, model_cls=gpt_model.GPTModel, change=testing.add_lora, **options):
    model = testing.build_gpt(mtp_num_layers=None, **options)
    change(model)
    model.decoder.__class__, model.__class__ = cls, model_cls
    return model


HOOK = "as by a hook"


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (Block, UNIFORM, True),
        (Block, NORMS, True),
        (EntersAsItComes, UNIFORM, HOOK),
        (EntersAsItComes, NORMS, HOOK),
        (EntersAsItComes, {}, True),
        (EntersAsItComes, {**NORMS, "recompute_modules": ["core_attn"]}, True),
        (EntersAsItComesUnchecked, UNIFORM, True),  # a layer's own weight trains behind states without a gradient
        (LeavesNothingToTrain, UNIFORM, HOOK),
        (AsksTheTrainersBlock, UNIFORM, "of_this_trainer"),
        (AsksTheTrainersBlock, {}, True),
    ],
)
def test_adapters_behind_frozen_embeddings(cls, options, expected):
    model = adapted(cls, EmbedsFrozen, **options)
    assert_said(expected, said(frozen_recompute, model.decoder, f"{TransformerBlock.__module__}:x", [model]))


@pytest.mark.parametrize("change", [lambda model: model, lambda model: model.requires_grad_(False)])
def test_a_block_with_nothing_frozen_or_nothing_trained_loses_nothing(change):
    model = adapted(EntersAsItComes, EmbedsFrozen, change, **UNIFORM)
    assert said(frozen_recompute, model.decoder, "", [model]) is True


@pytest.mark.parametrize(
    ("cls", "expected"), [(EmbedsTrained, True), (EmbedsFrozen, HOOK), (EmbedsNoTuple, HOOK), (EmbedsLater, HOOK)]
)
def test_a_model_may_make_its_embeddings_require_a_gradient(cls, expected):
    for options in (UNIFORM, NORMS):
        model = adapted(EntersAsItComes, cls, **options)
        assert_said(expected, said(frozen_recompute, model.decoder, "", [model]))
    assert_said(HOOK, said(frozen_recompute, model.decoder, "", []))


# Experts


@pytest.mark.skipif(moe_cases.NOT_TOLD, reason="experts of 0.12.0 are not told which rows are padding")
def test_experts_and_what_is_no_expert():
    model = moe_cases.build(moe_shared_expert_intermediate_size=20)
    layer, mlp = model.decoder.layers[0].mlp, f"{paged_stash.MLP}"
    grouped = paged_stash.TE_GROUPED
    expert = moe_cases.experts_of(model)[0]
    with moe_cases.patched():
        for module, method in ((expert, mlp), (layer.shared_experts, mlp), (layer.experts, grouped)):
            assert said(paged_stash, module, method, [model]) is True, "nothing asks for a stash"
        with moe_cases.stashing(model):
            assert_said("no way to try experts", said(paged_stash, expert, mlp, [model]))
            assert said(paged_stash, layer.shared_experts, mlp, [model]) is True
            assert_said("no way to try experts", said(paged_stash, layer.experts, grouped, [model]))
            assert_said("no way to try experts", said(paged_stash, layer.shared_experts, grouped, [model]))
