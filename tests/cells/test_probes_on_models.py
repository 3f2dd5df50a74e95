"""What probes say of overrides in a real model: right ones, ones that lose one thing, ones that cannot be judged.

tests/cells/test_effect.py trains with the usual ones. Here each override differs from a right one in a single thing.
"""

import inspect
import itertools
from types import SimpleNamespace

import megatron.core.models.gpt.gpt_model as gpt_model
import megatron.core.transformer.multi_token_prediction as mtp
import moe_cases
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock

from shim import testing
from shim._engine.probes import run
from shim.patches.megatron_core import frozen_recompute, mtp_loss_cp, mtp_packed_sequences, mtp_recompute, paged_stash
from shim.testing import Layout

ABOUT = ["mtp-packed-sequences", "mtp-recompute", "frozen-recompute"]  # the patches, see chosen.py

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**UNIFORM, "recompute_method": "block"}
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
Layer = mtp.MultiTokenPredictionLayer
LAYER = f"{Layer.__module__}:MultiTokenPredictionLayer."
POSTPROCESS = f"{gpt_model.__name__}:GPTModel._postprocess"

from_014 = pytest.mark.skipif(VERSION < (0, 14), reason="up to 0.13 the block rolls and computes the loss")
from_016 = pytest.mark.skipif(VERSION < (0, 16), reason="up to 0.15 a layer does not get the packed row")


@pytest.fixture(autouse=True)
def layout():
    with testing.layout_initialised(Layout()):
        yield


def said(patch, module, method, models=()):
    """True, False, or why a probe cannot tell."""
    found, why = run(patch.probe, module, method, list(models))
    return why if found is None else found


def assert_said(expected, found):
    """expected: a part of the reason if nothing is known."""
    assert found is expected if isinstance(expected, bool) else isinstance(found, str) and expected in found, found


# Recompute of an MTP layer


class Recomputes(Layer):
    """Right, also for a row that is packed. Each of the classes below changes one of these."""

    times = 1

    def before(self, given):
        return given

    def inside(self, given):
        return given

    def _checkpointed_forward(self, *args, **kwargs):
        is_passed = bool(args) and callable(args[0])  # up to 0.17
        function = args[0] if is_passed else self._proj_and_transformer_layer
        given = self.before({"attention_mask": None, **kwargs})
        names = [name for name, value in given.items() if torch.is_tensor(value)]
        rest = {name: value for name, value in given.items() if name not in names}

        def once(*values):
            return function(**self.inside({**rest, **dict(zip(names, values, strict=True))}))

        for _ in range(self.times - 1):
            once(*(given[name] for name in names))
        if not self.times:
            return once(*(given[name] for name in names))
        return tensor_parallel.checkpoint(once, False, *(given[name] for name in names))


class Skips(Recomputes):
    times = 0


class RunsThrice(Recomputes):
    times = 2


class LosesDecoderInput(Recomputes):
    def before(self, given):
        return {**given, "decoder_input": given["decoder_input"].detach()}


class LosesStates(Recomputes):
    def before(self, given):
        return {**given, "hidden_states": given["hidden_states"].detach().requires_grad_()}


class TrainsAnotherValue(Recomputes):
    def inside(self, given):
        return {**given, "hidden_states": given["hidden_states"] * (1 + given["hidden_states"].requires_grad)}


class FreesStates(Recomputes):
    """As a backward does that frees the inputs of a checkpoint."""

    def before(self, given):
        states = given["hidden_states"]
        states.register_hook(lambda grad: (states.untyped_storage().resize_(0), None)[1])
        return given


class MakesStatesDifferentiable(Recomputes):
    def before(self, given):
        states = given["hidden_states"]
        return given if states.requires_grad else {**given, "hidden_states": states.detach().requires_grad_()}


class LosesTheRow(Recomputes):
    def inside(self, given):
        return {**given, "packed_seq_params": None}


class LosesTheRowInRecompute(Recomputes):
    def inside(self, given):
        return {**given, "packed_seq_params": None} if given["hidden_states"].requires_grad else given


class AsksTheTrainer(Recomputes):
    def before(self, given):
        return self.of_this_trainer


def with_layer(cls, **options):
    model = testing.build_gpt(**{key: options[key] for key in options.keys() & {*UNIFORM, *NORMS}})
    layer = model.mtp.layers[0]
    layer.__class__ = cls
    for name, value in options.items():
        object.__setattr__(layer.config, name, value)
    return model, layer


@from_014
@pytest.mark.parametrize(
    ("cls", "options", "of_recompute", "of_rows"),
    [
        (Recomputes, UNIFORM, True, True),
        (Recomputes, BLOCK, True, True),
        (Recomputes, {**BLOCK, "recompute_num_layers": 0}, False, True),
        (Skips, UNIFORM, False, True),
        (Skips, BLOCK, False, True),
        (Skips, {**BLOCK, "recompute_num_layers": 0}, True, True),
        (RunsThrice, UNIFORM, False, True),
        (LosesDecoderInput, UNIFORM, False, False),
        (LosesStates, UNIFORM, False, False),
        (TrainsAnotherValue, UNIFORM, False, False),
        (FreesStates, UNIFORM, False, True),
        (LosesTheRow, UNIFORM, True, False),
        (LosesTheRowInRecompute, UNIFORM, True, False),
        (AsksTheTrainer, UNIFORM, "of_this_trainer", "of_this_trainer"),
        (AsksTheTrainer, {}, True, True),
        (AsksTheTrainer, NORMS, True, True),
        (Recomputes, {**UNIFORM, "fp8": "hybrid"}, "cannot run FP8", "cannot run FP8"),
        (Recomputes, {**UNIFORM, "fp4": "e2m1"}, "cannot run FP8", "cannot run FP8"),
        (Skips, {"fp8": "hybrid"}, True, True),
    ],
)
def test_recompute_of_a_layer(cls, options, of_recompute, of_rows):
    model, layer = with_layer(cls, **options)
    assert_said(of_recompute, said(mtp_recompute, layer, LAYER + "_checkpointed_forward", [model]))
    assert_said(of_rows, said(mtp_packed_sequences, layer, LAYER + "_checkpointed_forward", [model]))
    model.config.mtp_num_layers = None
    assert said(mtp_packed_sequences, layer, LAYER + "_checkpointed_forward", [model]) is True


def frozen(*parts):
    """Changes a model so that these parts of it train nothing but their adapters, and the others nothing."""

    def change(model):
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.partition(".")[0] in parts and name.endswith("layernorm.weight"))

    return change


def all_of(*parts):
    def change(model):
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.partition(".")[0] in parts)

    return change


UNTOLD = "the layer is trained only if"


@from_014
@pytest.mark.parametrize(
    ("cls", "change", "expected"),
    [
        (Recomputes, frozen("mtp"), UNTOLD),
        (Recomputes, all_of("mtp"), UNTOLD),  # nothing of the layer is frozen, and nothing in front of it trains
        (MakesStatesDifferentiable, frozen("mtp"), True),
        (MakesStatesDifferentiable, all_of("mtp"), True),
        (Recomputes, frozen("mtp", "decoder"), True),
        (Recomputes, all_of("mtp", "embedding"), True),
        (Recomputes, all_of("decoder"), True),
        (Recomputes, all_of(), True),
        (Skips, frozen("mtp"), False),
    ],
)
def test_recompute_of_a_layer_behind_frozen_weights(cls, change, expected):
    """Up to 0.18 no input of the layer requires a gradient there."""
    model, layer = with_layer(cls, **UNIFORM)
    change(model)
    assert_said(expected, said(mtp_recompute, layer, LAYER + "_checkpointed_forward", [model]))


@from_014
@pytest.mark.parametrize(
    ("fp8", "fp4", "expected"),
    [(None, None, True), (None, "e2m1", "cannot run FP4"), ("hybrid", None, True), ("hybrid", "e2m1", True)],
)
def test_the_fp4_region_of_a_layer(fp8, fp4, expected):
    _, layer = with_layer(Recomputes, fp8=fp8, fp4=fp4)
    assert_said(expected, said(mtp_recompute, layer, LAYER + "_proj_and_transformer_layer"))
    assert_said("no way to try this method", said(mtp_recompute, layer, LAYER + "forward"))
    assert_said("no way to try this method", said(mtp_packed_sequences, layer, LAYER + "other"))


# Embeddings of an MTP layer


def moved(tensor, row):
    """Each sequence of a row [1, s] moved left by one, without a function of megatron-core or shim."""
    found, offsets = torch.zeros_like(tensor), row.cu_seqlens_q_padded.tolist()
    for start, end in itertools.pairwise(offsets):
        found[..., start : end - 1] = tensor[..., start + 1 : end]
    return found


class Embeds(Layer):
    """Right. Each of the classes below changes one of these."""

    def ids(self, ids, row):
        return moved(ids, row)

    def embedded(self, ids, row):
        return moved(ids, row)

    def mask(self, mask, row):
        """As in shim: the last token of a sequence predicts nothing, and padding stays padding."""
        return mask | torch.isin(torch.arange(mask.size(-1)), torch.tensor([3, 7]))

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        inputs = embedding(input_ids=self.embedded(input_ids, packed_seq_params), position_ids=position_ids)
        mask = None if padding_mask is None else self.mask(padding_mask, packed_seq_params)
        between = (mask,) if "padding_mask" in inspect.signature(Layer._get_embeddings).parameters else ()
        return self.ids(input_ids, packed_seq_params), position_ids, *between, inputs, hidden_states


class ReturnsOthers(Embeds):
    def ids(self, ids, row):
        return ids.roll(-1, -1)


class EmbedsOthers(Embeds):
    def embedded(self, ids, row):
        return ids.roll(-1, -1) * (torch.arange(ids.size(-1)) != 2)  # one token of the first sequence is lost


class ReturnsUnmoved(Embeds):
    def ids(self, ids, row):
        return ids


class ReturnsOneThing(Embeds):
    def _get_embeddings(self, *args, **kwargs):
        return super()._get_embeddings(*args, **kwargs)[-2]


class EmbedsNothing(Embeds):
    def _get_embeddings(self, *args, embedding, **kwargs):
        return super()._get_embeddings(*args, embedding=lambda **_: None, **kwargs)


class KeepsTheMask(Embeds):
    def mask(self, mask, row):
        return mask


class RollsTheMask(Embeds):
    """The last token of a sequence counts as padding, and its padding as a token."""

    def mask(self, mask, row):
        return mask.roll(-1, -1)


class CountsNoPadding(Embeds):
    def mask(self, mask, row):
        return mask & False


class CountsNoTokens(Embeds):
    def mask(self, mask, row):
        return mask | True


class LosesTheMask(Embeds):
    def mask(self, mask, row):
        return None


@from_016
@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Embeds, True),
        (ReturnsOthers, True),  # what comes behind the last token of a sequence trains nothing
        (EmbedsOthers, False),
        (ReturnsUnmoved, False),
        (ReturnsOneThing, "something else than upstream"),
        (EmbedsNothing, "something else than upstream"),
    ],
)
def test_embeddings_of_a_layer(cls, expected):
    _, layer = with_layer(cls)
    assert_said(expected, said(mtp_packed_sequences, layer, LAYER + "_get_embeddings"))


BALANCED = {"num_moe_experts": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ROUTED = {**BALANCED, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, "moe_router_enable_expert_bias": False}
PADDING = "padding counts as tokens"


@pytest.mark.skipif(VERSION < (0, 18), reason="a layer gets no padding mask")
@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (Embeds, BALANCED, True),
        (KeepsTheMask, BALANCED, True),
        (RollsTheMask, BALANCED, PADDING),
        (CountsNoPadding, BALANCED, PADDING),
        (CountsNoTokens, BALANCED, PADDING),
        (LosesTheMask, BALANCED, PADDING),
        (CountsNoPadding, {}, True),
        (CountsNoPadding, ROUTED, True),
        (CountsNoPadding, {**BALANCED, "moe_router_load_balancing_type": "none"}, True),
        (CountsNoPadding, {**ROUTED, "moe_z_loss_coeff": 0.1}, PADDING),
        (CountsNoPadding, {**ROUTED, "moe_router_enable_expert_bias": True}, PADDING),
    ],
)
def test_padding_in_a_layer(cls, options, expected):
    _, layer = with_layer(cls, **options)
    assert_said(expected, said(mtp_packed_sequences, layer, LAYER + "_get_embeddings"))


class Forwards(Layer):
    """Right: it has the row, and rolls by itself. Each of the classes below changes one of these."""

    def inputs(self, ids, row):
        return moved(ids, row)

    def row(self, row):
        return row

    def forward(self, input_ids, position_ids, hidden_states, packed_seq_params, embedding, **rest):
        inputs = embedding(input_ids=self.inputs(input_ids, packed_seq_params), position_ids=position_ids)
        given = {"decoder_input": inputs, "packed_seq_params": self.row(packed_seq_params)}
        return self._proj_and_transformer_layer(hidden_states=hidden_states, attention_mask=None, **given)


class ForwardsUnmoved(Forwards):
    def inputs(self, ids, row):
        return ids


class ForwardsNoRow(Forwards):
    def row(self, row):
        return None


class ForwardsACopy(Forwards):
    """Without padded offsets."""

    def row(self, row):
        return SimpleNamespace(cu_seqlens_q=row.cu_seqlens_q)


class ForwardsNothing(Forwards):
    def forward(self, hidden_states, **rest):
        return hidden_states


@from_014
@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Forwards, True),
        (ForwardsUnmoved, False),
        (ForwardsNoRow, False),
        (ForwardsACopy, False),
        (ForwardsNothing, "does not run the layer as upstream does"),
    ],
)
def test_forward_of_a_layer(cls, expected):
    _, layer = with_layer(cls)
    assert_said(expected, said(mtp_packed_sequences, layer, LAYER + "forward"))


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
