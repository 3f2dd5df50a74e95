"""What the tests of mtp-recompute on one rank share: models, steps, calls of layers, and subclasses of trainers."""

import contextlib
import copy
from functools import partial

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import recompute_cases
import torch
from megatron.core import tensor_parallel
from recompute_cases import METHODS, RECOMPUTED

import shim
from shim import testing
from shim.testing import Layout

ID, PACKED = "mtp-recompute", "mtp-packed-sequences"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
# Lengths and alignment, even for sequence parallelism; None is one sequence without packed_seq_params.
ROWS = {"unpacked": ((16,), None), "plain": ((6, 8, 4), 1), "padded": ((5, 7, 4), 4)}
of_each_method = pytest.mark.parametrize("method", METHODS)
row_of = partial(recompute_cases.row_of, ROWS)


def build(method=None, layers=2, dropout=0.0, lora=False, embedded=True, **model):
    """A model with full recompute by `method`, or with none.

    embedded: with adapters, embeddings require a gradient, as trainers make them: otherwise upstream's recompute of
    the decoder trains none of its adapters, which is no matter of MTP.
    """
    gpt = testing.build_gpt(mtp_num_layers=layers, hidden_dropout=dropout, **METHODS.get(method, {}), **model)
    if lora:
        testing.add_lora(gpt)
        if embedded:
            gpt.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    if dropout and gpt.config.sequence_parallel:
        # There the decoder's layers run inside a fork of the tracker, which is not there when they are recomputed, so
        # that its attention draws other numbers: upstream's, and no matter of MTP, whose fork is inside.
        gpt.decoder.config = copy.copy(gpt.config)
        gpt.decoder.config.recompute_granularity = None
    for name, module in gpt.named_modules():
        if name.endswith("core_attention") and dropout:  # CPUCoreAttention has none of its own
            module.register_forward_hook(partial(_drop_attention, dropout))
    return gpt


def _drop_attention(dropout, module, inputs, output):
    """As the release's attention does it: in the tracker's own random state, another on every rank."""
    if not module.training:
        return output
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return torch.nn.functional.dropout(output, dropout)


@contextlib.contextmanager
def applied_on_one_rank():
    """The patches on one rank: for all tests of a module at once, because a rank takes longer than the tests do."""
    with testing.megatron_on_cpu(), shim.patched(only=[PACKED, ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        with testing.layout_initialised(Layout()):
            yield report


def seed(value=5):
    """The random states of torch and of the tracker: equal before each of two runs that are compared."""
    torch.manual_seed(value)
    tensor_parallel.model_parallel_cuda_manual_seed(value)


def random_states():
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {"torch": torch.get_rng_state(), **{name: state.clone() for name, state in tracked.items()}}


def train(model, row, **options):
    seed()
    return testing.run_packed(model, row, **options)


def inner_of(layer):
    return getattr(layer, "mtp_model_layer", None) or layer.transformer_layer


def calls_of(model):
    """Per MTP layer a list that grows by whether gradients are enabled, whenever its transformer layer runs."""
    calls = []
    for layer in model.mtp.layers:
        seen = []
        inner_of(layer).register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
        calls.append(seen)
    return calls


def expected_calls(method):
    return [[False, True] if recomputed else [True] for recomputed in RECOMPUTED[method]]


def layer_inputs(model, total=16, **extra):
    """What a layer can be called with by itself: no input has a gradient unless it is given one."""
    generator = torch.Generator().manual_seed(3)
    states, ids = torch.randn(total, 1, 32, generator=generator), torch.arange(1, total + 1).view(1, -1)
    inputs = {"hidden_states": states, "attention_mask": None, **extra}
    if VERSION < (0, 14):
        return {**inputs, "decoder_input": states.flip(0)}
    return {**inputs, "input_ids": ids, "position_ids": ids - 1, "embedding": model.embedding}


def output_of(layer, inputs):
    seed()
    output = layer(**inputs)
    return output if isinstance(output, torch.Tensor) else output[0]


PARTS = {  # which weights are trained
    "mtp": lambda name: ".lora." in name and name.startswith("mtp."),
    "second mtp layer": lambda name: ".lora." in name and name.startswith("mtp.layers.1."),
    "decoder": lambda name: ".lora." in name and name.startswith("decoder."),
    "head": lambda name: name == "output_layer.weight",
    "embedding": lambda name: name == "embedding.word_embeddings.weight",
}


def trained_parts(part, method, embedded=False, **options):
    """A model with adapters of which one part is trained."""
    model = build(method, lora=True, embedded=embedded, share_embeddings_and_output_weights=False, **options)
    for name, weight in model.named_parameters():
        weight.requires_grad_(PARTS[part](name))
    return model


class ByKeyword(mtp.MultiTokenPredictionLayer):
    """As mcore-bridge: written for 0.14 to 0.17, a function in front and the tensors by name."""

    def forward(self, input_ids, position_ids, hidden_states, attention_mask, embedding, **rest):
        row, names = rest.get("packed_seq_params"), ("packed_seq_params",) * (VERSION >= (0, 16))
        input_ids, position_ids, *masks, given, hidden_states = self._get_embeddings(
            input_ids=input_ids,
            position_ids=position_ids,
            embedding=embedding,
            hidden_states=hidden_states,
            **dict.fromkeys(names, row),
        )
        step = partial(self._proj_and_transformer_layer, packed_seq_params=row)
        rest = {"attention_mask": attention_mask, "rotary_pos_emb": rest.get("rotary_pos_emb")}
        if self.config.recompute_granularity == "full" and self.training:
            hidden_states = self.recompute(super()._checkpointed_forward, step, hidden_states, given, rest)
        else:
            hidden_states = step(hidden_states=hidden_states, decoder_input=given, **rest)
        return (hidden_states, input_ids, position_ids, *masks)

    @staticmethod
    def recompute(checkpointed, step, hidden_states, given, rest):
        return checkpointed(step, hidden_states=hidden_states, decoder_input=given, **rest)


class ByPosition(ByKeyword):
    """The tensors by position."""

    @staticmethod
    def recompute(checkpointed, step, hidden_states, given, rest):
        return checkpointed(step, hidden_states, given, **rest)


class ByName(ByKeyword):
    """All by name, the function too."""

    @staticmethod
    def recompute(checkpointed, step, hidden_states, given, rest):
        return checkpointed(forward_func=step, hidden_states=hidden_states, decoder_input=given, **rest)


def subclassed(layer_class, method, **options):
    model = build(method, **options)
    for layer in model.mtp.layers:
        layer.__class__ = layer_class
    return model
