"""Patch mtp-recompute on a real release: MTP layers are recomputed, and no bit of losses or gradients changes."""

import contextlib
import copy
import itertools
import types
from functools import partial

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import recompute_cases
import torch
from megatron.core import tensor_parallel
from recompute_cases import METHODS, RECOMPUTED, all_pairs

import shim
from shim import testing
from shim.testing import Layout

ID, PACKED = "mtp-recompute", "mtp-packed-sequences"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
# Lengths and alignment, even for sequence parallelism; None is one sequence without packed_seq_params.
ROWS = {"unpacked": ((16,), None), "plain": ((6, 8, 4), 1), "padded": ((5, 7, 4), 4)}

of_each_method = pytest.mark.parametrize("method", METHODS)
has_checkpointed_forward = pytest.mark.skipif(VERSION < (0, 14), reason="no _checkpointed_forward before 0.14")
stock_packs = pytest.mark.skipif(VERSION < (0, 16), reason="stock refuses packed rows before 0.16")
has_hybrid_mtp = pytest.mark.skipif(VERSION < (0, 17), reason="the hybrid model has MTP from 0.17")
repeats_layers = pytest.mark.skipif(VERSION < (0, 17), reason="mtp_use_repeated_layer came with 0.17")


@pytest.fixture(scope="module")
def applied():
    """The patches on one rank, once for all tests of this module that want them: setting up a rank for each would take
    longer than the tests. All others, and those that fork ranks, come first."""
    with testing.megatron_on_cpu(), shim.patched(only=[PACKED, ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        with testing.layout_initialised(Layout()):
            yield report


@pytest.fixture
def one_rank():
    with testing.layout_initialised(Layout()):
        yield


row_of = partial(recompute_cases.row_of, ROWS)
CASES = all_pairs(method=METHODS, row=ROWS, layers=(1, 2), dropout=(0.0, 0.1), lora=(False, True))


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


def equal_bits(a, b):
    """Whether two results are the same to the last bit."""
    same = torch.equal(a.main, b.main) and torch.equal(a.logged, b.logged) and a.grads.keys() == b.grads.keys()
    return same and all(map(torch.equal, a.mtp, b.mtp)) and all(torch.equal(a.grads[n], b.grads[n]) for n in a.grads)


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


def same_in_all(cases, **model):
    """Cases in which a run with recompute and one without are not the same to the bit, or nothing was compared."""
    wrong = []
    for case in cases:
        options = {name: value for name, value in case.items() if name not in ("method", "row")} | model
        row = row_of(case["row"])
        plain = train(build(**options), row)
        again = train(build(case["method"], **options), row)
        if not (plain.grads and plain.mtp and equal_bits(plain, again)):
            wrong.append((case, testing.differences(again, plain)))
    return wrong


# Stock is wrong


def stock_failure(method, packed):
    """What stock raises with two MTP layers, or None."""
    if VERSION < (0, 14):
        return None
    if VERSION == (0, 18):
        return TypeError, "unexpected keyword argument 'padding_mask'"
    if method.startswith("block"):
        return (NameError, "'warnings' is not defined") if VERSION < (0, 16) else None
    if method == "uniform 2":
        return AssertionError, "must be 1 for MTP recompute"
    return (TypeError, "PackedSeqParams") if packed and VERSION < (0, 19) else None


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@of_each_method
def test_stock_raises_or_does_not_recompute(one_rank, method, packed):
    """What the patch is for, case by case; only uniform 1 is right, on unpacked rows and on 0.19."""
    if packed and VERSION < (0, 16):
        pytest.skip("stock refuses packed rows before 0.16")
    model, row, failure = build(method), row_of("plain" if packed else "unpacked"), stock_failure(method, packed)
    calls = calls_of(model)
    if failure:
        with pytest.raises(failure[0], match=failure[1]):
            train(model, row)
        return
    train(model, row)
    right = method == "uniform 1" and VERSION >= (0, 14)
    assert calls == (expected_calls(method) if right else [[True], [True]])


@pytest.mark.skipif(VERSION < (0, 14) or VERSION >= (0, 18), reason="before 0.14 nothing is recomputed, 0.18 raises")
def test_stock_does_not_train_adapters_behind_frozen_weights(one_rank):
    """No input of the checkpoint requires a gradient, so its output has none: the adapters stay as they are."""
    with contextlib.ExitStack() as failing:
        plain, again = (trained_parts("mtp", method) for method in (None, "uniform 1"))
        assert train(plain, row_of("unpacked")).grads
        failing.enter_context(pytest.raises((AssertionError, RuntimeError)))
        assert train(again, row_of("unpacked")).grads


@pytest.mark.skipif(VERSION < (0, 18), reason="up to 0.17 a subclass may pass a function")
def test_stock_does_not_take_the_function_of_an_older_subclass(one_rank):
    for layer_class in (ByKeyword, ByPosition):
        with pytest.raises(TypeError):
            train(subclassed(layer_class, "uniform 1"), row_of("unpacked"))


def test_dropout_makes_a_difference(one_rank):
    """Otherwise the tests of it would say nothing: another result without it, and with another seed."""
    model, row = build(dropout=0.1), row_of("unpacked")
    results = [train(model, row), train(build(), row)]
    seed(6)
    results.append(testing.run_packed(model, row))
    assert not any(equal_bits(a, b) for a, b in itertools.combinations(results, 2))
    assert equal_bits(results[0], train(model, row))
    # The inner layer draws from both random states.
    for hook_of in ("torch", "model-parallel-rng"):
        seed()
        before = random_states()[hook_of]
        testing.run_packed(model, row)
        assert not torch.equal(before, random_states()[hook_of])


# Nothing else changes


def test_the_class_is_given_back(one_rank):
    before = dict(vars(mtp.MultiTokenPredictionLayer))
    with shim.patched(only=[ID], require=[ID]) as report:
        during = dict(vars(mtp.MultiTokenPredictionLayer))
        names = {target.rpartition(".")[2] for target in report[ID].targets}
        assert {name for name in before if during[name] is not before[name]} == names
        assert all(isinstance(during[name], types.FunctionType) for name in names)
    after = dict(vars(mtp.MultiTokenPredictionLayer))
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)


def test_checkpoints_have_the_keys_they_always_had(one_rank):
    def keys(model):
        return model.state_dict().keys(), model.sharded_state_dict().keys()

    stock = keys(build("uniform 1"))
    with shim.patched(only=[ID]):
        assert keys(build("uniform 1")) == stock


# By itself, on two ranks, together with all patches


def test_by_itself_the_patch_recomputes_what_the_release_can_train(one_rank):
    """Without mtp-packed-sequences: unpacked rows, and plain packed ones from 0.16."""
    rows = ["unpacked"] + ["plain"] * (VERSION >= (0, 16))
    with shim.patched(only=[ID], require=[ID]):
        assert not same_in_all(all_pairs(method=METHODS, row=rows, dropout=(0.0, 0.1), lora=(False, True)))
        for method in METHODS:
            model = build(method)
            calls = calls_of(model)
            train(model, row_of(rows[-1]))
            assert calls == expected_calls(method)


def test_together_with_all_patches(one_rank):
    with shim.patched(require=[ID]):
        assert not same_in_all(all_pairs(method=METHODS, row=ROWS, dropout=(0.0, 0.1)))


def on_rank(layout, cases):
    with testing.megatron_on_cpu(), shim.patched(only=[PACKED, ID], require=[ID]), testing.layout_initialised(layout):
        return same_in_all(cases, sequence_parallel=layout.sequence_parallel)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_recompute_changes_no_bit_under_tensor_parallelism(ranks2, layout):
    assert ranks2.run(on_rank, layout, CASES) == [[], []]


# Trainers that replace the checkpoint's backward


@contextlib.contextmanager
def layers_found(monkeypatch):
    """A backward of CheckpointFunction as a trainer has it, that frees the inputs of what it has recomputed, but not
    those of MTP layers, which it knows by a layer among the cells of the function. This one only counts, because what
    is freed by mistake ends the process. Yields how many checkpoints were an MTP layer's, and how many were not."""
    upstream, counts = tensor_parallel.random.CheckpointFunction.backward, {"mtp": 0, "other": 0}

    def backward(ctx, *grads):
        cells = [cell.cell_contents for cell in ctx.run_function.__closure__ or ()]
        found = any(isinstance(value, mtp.MultiTokenPredictionLayer) for value in cells)
        counts["mtp" if found else "other"] += 1
        return upstream(ctx, *grads)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_parallel.random.CheckpointFunction, "backward", staticmethod(backward))
        yield counts


def test_a_backward_that_looks_for_the_layer_finds_it(monkeypatch):
    """With all patches on, also through what carries an override."""
    with testing.megatron_on_cpu(), shim.patched(), testing.layout_initialised(Layout()):
        for kind in ("unpacked", "padded"):
            plain = train(build(), row_of(kind))
            for fields in ({}, {"rotary_interleaved": False}):
                model = build("uniform 1")
                with layers_found(monkeypatch) as counts, shim.config_override(model.config, **fields):
                    again = train(model, row_of(kind))
                assert counts == {"mtp": 2, "other": 2}
                assert equal_bits(plain, again)


# No bit changes


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_recompute_changes_no_bit(applied, case):
    """Losses, logged losses and all gradients, with dropout, too: what is run again draws the same numbers."""
    assert not same_in_all([case])


@of_each_method
def test_random_states_go_on_as_without_recompute(applied, method):
    """The step after the next draws the same numbers, because backward leaves the random states alone."""
    states = []
    for chosen in (None, method):
        train(build(chosen, dropout=0.1), row_of("padded"))
        states.append(random_states())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("options", [{"per_token_loss": True}, {"loss_mask": False}], ids=str)
def test_recompute_changes_no_bit_of_other_losses(applied, options):
    row = row_of("padded")
    assert equal_bits(train(build(), row, **options), train(build("uniform 1"), row, **options))


@has_hybrid_mtp
@pytest.mark.parametrize("method", ["uniform 1", "uniform 2", "block 1"])
@pytest.mark.parametrize("pattern", ["*-*-/*-/*-", "**/*"])
def test_recompute_changes_no_bit_of_the_hybrid_model(applied, pattern, method):
    for kind in ROWS:
        results = [
            train(testing.build_hybrid(pattern, hidden_dropout=0.1, **options), row_of(kind))
            for options in ({}, METHODS[method])
        ]
        assert results[0].grads and equal_bits(*results)


@repeats_layers
@pytest.mark.parametrize("depths", [1, 2])
@of_each_method
def test_recompute_changes_no_bit_with_one_layer_for_all_depths(applied, depths, method):
    """The layer is number 0 at every depth: block recomputes it each time."""
    again = build(method, depths, dropout=0.1, mtp_use_repeated_layer=True)
    calls = calls_of(again)
    plain = build(None, depths, dropout=0.1, mtp_use_repeated_layer=True)
    assert equal_bits(train(plain, row_of("padded")), train(again, row_of("padded")))
    assert calls == [[False] * depths + [True] * depths]


# It is really recomputed


@pytest.mark.parametrize("kind", ROWS)
@of_each_method
def test_layers_are_recomputed(applied, method, kind):
    """Forward without gradients, once more with them in backward; in training only."""
    model = build(method)
    calls = calls_of(model)
    train(model, row_of(kind))
    assert calls == expected_calls(method)
    evaluated = build(method).eval()
    calls = calls_of(evaluated)
    train(evaluated, row_of(kind))
    assert calls == [[True], [True]]


def test_nothing_is_recomputed_unless_asked_for(applied):
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    for options in ({}, selective):
        model = build(**options)
        calls = calls_of(model)
        train(model, row_of("padded"))
        assert calls == [[True], [True]]


@contextlib.contextmanager
def saved_bytes(model):
    """Per MTP layer the bytes that its own forward saves for backward, weights left out, each storage once."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found = [{} for _ in model.mtp.layers]
    with contextlib.ExitStack() as undo:
        for layer, storages in zip(model.mtp.layers, found):

            def keep(tensor, storages=storages):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so that no address is used twice
                return tensor

            hooks = []

            def enter(*_, hooks=hooks, keep=keep):
                hooks.append(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
                hooks[-1].__enter__()

            def leave(*_, hooks=hooks):
                hooks.pop().__exit__(None, None, None)

            undo.callback(layer.register_forward_pre_hook(enter).remove)
            undo.callback(layer.register_forward_hook(leave).remove)
        yield lambda: [sum(size for size, _ in storages.values()) for storages in found]


def bytes_saved(method, kind):
    model = build(method)
    with saved_bytes(model) as count:
        train(model, row_of(kind))
        return count()


@pytest.mark.parametrize("kind", ["unpacked", "padded"])
def test_less_is_saved_for_backward(applied, kind):
    """Within the MTP layers alone, so that what the decoder saves plays no part: their two inputs and token ids."""
    none, uniform, block1, block2 = (bytes_saved(m, kind) for m in (None, "uniform 1", "block 1", "block 2"))
    assert uniform == block2 and block1 == [uniform[0], none[1]]
    inputs = 2 * row_of(kind).total * 32 * 4
    assert all(inputs <= size <= 1.25 * inputs for size in uniform), (uniform, inputs)
    assert all(4 * size < full for size, full in zip(uniform, none)), (uniform, none)


@contextlib.contextmanager
def checkpoint_inputs(layer, monkeypatch):
    """The tensors that tensor_parallel.checkpoint is given while this layer runs, and the layer's own arguments."""
    inside, found, given, original = [], [], {}, tensor_parallel.checkpoint

    def spy(function, distribute, *values):
        if inside:
            found.append(values)
        return original(function, distribute, *values)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_parallel, "checkpoint", spy)

        def begin(module, args, kwargs):
            inside.append(module)
            given.update(kwargs)

        enter = layer.register_forward_pre_hook(begin, with_kwargs=True)
        leave = layer.register_forward_hook(lambda *_: inside.clear())
        yield found, given
        enter.remove()
        leave.remove()


@pytest.mark.parametrize("kind", ROWS)
def test_a_checkpoint_is_given_two_tensors(applied, monkeypatch, kind):
    """hidden_states and decoder_input; rows, masks and rotary tables have no gradient and are in the function."""
    model, embedded = build("uniform 1", layers=1), []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output.detach()))
    with checkpoint_inputs(model.mtp.layers[0], monkeypatch) as (found, given):
        train(model, row_of(kind))
    [(hidden, decoder_input)] = found
    assert torch.equal(hidden, given["hidden_states"]) and torch.equal(decoder_input, embedded[-1])


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


def test_other_tensors_are_given_for_their_gradient(applied, monkeypatch):
    """A rotary table that is trained gets the gradient it has without recompute; a mask beside it stays outside."""
    gradients = []
    for method in (None, "uniform 1"):
        model = build(method, layers=1)
        layer, table = model.mtp.layers[0], model.rotary_pos_emb(16).detach().clone().requires_grad_()
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        with checkpoint_inputs(layer, monkeypatch) as (found, _):
            inputs = layer_inputs(model, rotary_pos_emb=table)
            inputs["hidden_states"].requires_grad_()
            output = output_of(layer, {**inputs, "attention_mask": mask})
        output.square().sum().backward()
        gradients.append([table.grad, inputs["hidden_states"].grad])
        assert table.grad.any()
        if method:
            [values] = found
            assert len(values) == 3 and sum(value is table for value in values) == 1
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_without_gradients_nothing_is_saved(applied, method):
    """A layer in training mode under no_grad, as when a reference is computed: the same output."""
    model, plain = build(method, layers=1), build(layers=1)
    with torch.no_grad():
        output = output_of(model.mtp.layers[0], layer_inputs(model))
        assert not output.requires_grad
        assert torch.equal(output, output_of(plain.mtp.layers[0], layer_inputs(plain)))


def test_an_unknown_method_is_refused(applied):
    model = build("uniform 1", layers=1)
    layer = model.mtp.layers[0]
    layer.config = copy.copy(layer.config)
    layer.config.recompute_method = "every other"
    with pytest.raises(ValueError, match="recompute"):
        output_of(layer, layer_inputs(model))


# Frozen weights


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


FROZEN = [
    case
    for case in all_pairs(part=PARTS, method=METHODS, embedded=(False, True), row=("unpacked", "padded"))
    if case["embedded"] or case["part"] != "decoder"  # see build()
]


@pytest.mark.parametrize("case", FROZEN, ids=lambda case: "-".join(map(str, case.values())))
def test_frozen_weights_change_nothing(applied, case):
    """Also where no input of a layer requires a gradient, where nothing in a layer does, and where neither does."""
    part, method, embedded, row = case["part"], case["method"], case["embedded"], row_of(case["row"])
    plain = train(trained_parts(part, None, embedded, dropout=0.1), row)
    again = train(trained_parts(part, method, embedded, dropout=0.1), row)
    names = {name for name, weight in trained_parts(part, None).named_parameters() if weight.requires_grad}
    assert plain.grads.keys() == names and all(grad.any() for grad in plain.grads.values())
    assert equal_bits(plain, again)


@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_inputs_without_gradient_train_the_layer(applied, method):
    """The layer by itself: adapters inside get the very same gradients, and the caller's tensor stays a constant."""
    gradients = []
    for chosen in (None, method):
        model = trained_parts("mtp", chosen, layers=1)
        layer, inputs = model.mtp.layers[0], layer_inputs(model)
        output_of(layer, inputs).square().sum().backward()
        if VERSION < (0, 19):  # which makes this very tensor require one, with recompute and without
            assert not inputs["hidden_states"].requires_grad and inputs["hidden_states"].grad is None
        gradients.append([weight.grad for weight in layer.parameters() if weight.requires_grad])
    assert gradients[0] and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_a_layer_in_which_nothing_is_trained_gives_its_output(applied, method):
    outputs = []
    for chosen in (None, method):
        model = trained_parts("head", chosen, layers=1)
        outputs.append(output_of(model.mtp.layers[0], layer_inputs(model)))
    assert torch.equal(*outputs)


# Subclasses


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


@has_checkpointed_forward
@pytest.mark.parametrize("layer_class", [ByKeyword, ByPosition, ByName])
@of_each_method
def test_a_subclass_may_pass_its_own_function(applied, method, layer_class):
    """On every release, also where upstream's method no longer has a parameter for it."""
    for kind in ROWS if VERSION >= (0, 16) else ["unpacked"]:
        model = subclassed(layer_class, method, dropout=0.1)
        calls = calls_of(model)
        again = train(model, row_of(kind))
        assert equal_bits(train(subclassed(layer_class, None, dropout=0.1), row_of(kind)), again)
        assert calls == expected_calls(method)


@has_checkpointed_forward
@pytest.mark.parametrize("by_position", [False, True])
def test_a_subclass_of_a_later_release_passes_no_function(applied, by_position):
    """From 0.18 the tensors come first."""
    if VERSION < (0, 18):
        pytest.skip("up to 0.17 the function comes first")

    class Later(ByKeyword):
        @staticmethod
        def recompute(checkpointed, step, hidden_states, given, rest):
            rest = {**rest, **step.keywords}
            if by_position:
                return checkpointed(hidden_states, given, **rest)
            return checkpointed(hidden_states=hidden_states, decoder_input=given, **rest)

    plain, again = (train(subclassed(Later, method, dropout=0.1), row_of("padded")) for method in (None, "uniform 1"))
    assert equal_bits(plain, again)


# Failures


class Broken(Exception):
    pass


def failing_at(model, call):
    """The transformer layer of the first MTP layer raises when it runs for the `call`-th time, from 1, and is then
    whole again."""
    left = [call]

    def fail(*_):
        left[0] -= 1
        if left[0] == 0:
            handle.remove()
            raise Broken(call)

    handle = inner_of(model.mtp.layers[0]).register_forward_pre_hook(fail)


@pytest.mark.parametrize("call", [1, 2], ids=["forward", "recompute"])
@pytest.mark.parametrize("method", ["uniform 1", "block 1"])
def test_an_exception_comes_through_and_leaves_nothing_behind(applied, method, call):
    """The next step draws the numbers, and gives the bits, that it has without recompute: not seeded again, so that
    a random state left forked would show."""
    row, results = row_of("padded"), []
    for chosen in (None, method):
        model = build(chosen, dropout=0.1)
        if chosen or call == 1:  # without recompute there is no second run
            failing_at(model, call)
            with pytest.raises(Broken) as error:
                train(model, row)
            assert error.value.args == (call,)
        else:
            train(model, row)
        results.append(testing.run_packed(model, row))
    assert equal_bits(*results)


# torch.compile


@pytest.mark.parametrize(("part", "backend"), [("mlp", "eager"), ("projection", "eager"), ("projection", "aot_eager")])
def test_compiled_parts_are_recomputed(applied, part, backend):
    """The projection, or a part of the transformer layer (the whole takes ten seconds to compile), in place: to the
    bit what they give without recompute."""
    row, results, calls = row_of("padded"), [], []
    torch._dynamo.reset()
    for method in (None, "uniform 1"):
        model = build(method, layers=1)
        layer = model.mtp.layers[0]
        layer.hnorm.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        (layer.eh_proj if part == "projection" else inner_of(layer).mlp).compile(backend=backend)
        results.append(train(model, row))
    assert calls == [True, False, True]
    assert equal_bits(*results)
    assert testing.worst(testing.differences(results[1], train(build("uniform 1", layers=1), row))) <= 1e-6
