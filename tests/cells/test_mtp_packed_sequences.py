"""Patch mtp-packed-sequences on a real release: packed equals alone, and where stock is right no bit changes."""

import copy
import functools
import inspect
import itertools
import pickle
import sys
import warnings
from pathlib import Path

import fork_server
import megatron.core.models.gpt.gpt_model as gpt_model
import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from chosen import ONCE
from packaging.version import Version
from recompute_cases import equal_bits
from thorough import in_full
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shim
from shim import testing
from shim.patches.megatron_core.mtp_packed_sequences.proof import ALIGN, LENGTHS
from shim.testing import Layout

CELLS = {
    "0.12.3": "all",
    "0.19.2": [
        "test_stock_ignores_padding_between_sequences",
        "test_a_packed_row_is_really_recomputed",
        "test_plain_packing_keeps_every_bit",
        "test_without_labels_later_releases_keep_their_behaviour",
        "test_the_hybrid_model_is_not_waited_for_but_served_when_it_comes",
    ],
    "0.18.2": ["test_stock_cannot_recompute_a_packed_row"],
    "0.16.0": ["test_labels_of_mtp_alone_train_it_in_a_fork"],
}

ID = "mtp-packed-sequences"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
if not shim.plan()[ID].wanted:
    pytest.skip("these sources need no patch: see test_mtp_packed_sequences_upstream", allow_module_level=True)
WITHIN_LAYOUT = 1e-6
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**UNIFORM, "recompute_method": "block"}
PLAIN, PADDED = (LENGTHS, 1), (LENGTHS, ALIGN)
RECOMPUTES_MTP = VERSION >= (0, 14)

stock_cannot_pack = pytest.mark.skipif(VERSION >= (0, 16), reason="stock packs from 0.16")
stock_packs = pytest.mark.skipif(VERSION < (0, 16), reason="stock refuses packed rows before 0.16")


@pytest.fixture
def applied():
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        yield report


def build(lora=False, **model):
    gpt = testing.build_gpt(**model)
    if lora:
        testing.add_lora(gpt)
    return gpt


def row_of(lengths, align=1, **options):
    return testing.pack(testing.random_sequences(lengths), align=align, **options)


def worst_over(cases, **model):
    """The largest difference between packed and alone over (row arguments, options), and the case that has it."""
    gpt = build(**model)
    found = (0.0, None)
    for (lengths, align), options in cases:
        row = row_of(lengths, align)
        difference = testing.differences(
            testing.run_packed(gpt, row, **options), testing.run_alone(gpt, row, **options)
        )
        value = testing.worst(difference)
        if not value <= found[0]:  # NaN is not smaller than anything
            found = (value, (lengths, align, options, difference))
    return found


ROWS = [PLAIN, PADDED, ((1, 6, 2), 4), ((3, 0, 5), 1), ((8,), 1)]
OPTIONS = [{"per_token_loss": p, "loss_mask": m} for p, m in itertools.product((False, True), repeat=2)]
CASES = list(itertools.product(ROWS, OPTIONS))


# Stock is wrong


@stock_cannot_pack
def test_stock_refuses_packed_rows(one_rank):
    with pytest.raises(AssertionError, match="sequence packing is not yet supported"):
        testing.run_packed(build(), row_of(*PLAIN))


@stock_packs
@pytest.mark.parametrize("loss_mask", [True, False])
def test_stock_ignores_padding_between_sequences(one_rank, loss_mask):
    value, _ = worst_over([(PADDED, {"loss_mask": loss_mask})])
    assert value > 1e-2


@pytest.mark.skipif(VERSION > (0, 16), reason="0.17 and later count tokens safely")
def test_stock_gives_nan_where_every_target_is_masked(one_rank):
    row = row_of((6,), loss_masks=[torch.zeros(6)])
    object.__setattr__(row, "packed_seq_params", lambda: None)
    assert testing.run_packed(build(), row).logged.isnan().all()


@pytest.mark.skipif(VERSION < (0, 14) or VERSION >= (0, 19), reason="does not recompute MTP, or does so rightly")
@stock_packs
def test_stock_cannot_recompute_a_packed_row(one_rank):
    with pytest.raises(TypeError, match=r"PackedSeqParams|padding_mask"):
        testing.run_packed(build(**UNIFORM), row_of(*PLAIN))


# With the patch, packed equals alone


@pytest.mark.parametrize("lora", [False, True], ids=["all-weights", "lora"])
@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
@pytest.mark.parametrize("layers", [1, 2])
def test_packed_equals_alone(applied, one_rank, layers, position, lora):
    """The full product in `make matrix`; once per variant each row meets each of the options in two models."""
    first = 2 * layers + 2 * (position == "rope") + lora
    cases = [(row, OPTIONS[(first + i) % len(OPTIONS)]) for i, row in enumerate(ROWS)] if ONCE else CASES
    value, case = worst_over(cases, mtp_num_layers=layers, position_embedding_type=position, lora=lora)
    assert value <= WITHIN_LAYOUT, case


def on_rank(layout, model, cases):
    with testing.megatron_on_cpu(), shim.patched(only=[ID], require=[ID]), testing.layout_initialised(layout):
        return worst_over(cases, sequence_parallel=layout.sequence_parallel, **model)


# Sequence parallelism shares rows out evenly, so their lengths are even. Each model meets each row with one of the
# options and another model with the next, so that all pairs occur.
EVEN_ROWS = [((6, 8, 4), 1), ((5, 7, 4), 4), ((1, 6, 2), 4)]
TP_MODELS = [(1, "rope", False), (2, "learned_absolute", False), (2, "rope", True), (1, "learned_absolute", True)]


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sequence_parallel=True), pytest.param(Layout(tp=2), marks=in_full)], ids=str
)
@pytest.mark.parametrize("number", range(len(TP_MODELS)), ids=map(str, TP_MODELS))
def test_packed_equals_alone_under_tensor_parallelism(ranks2, layout, number):
    layers, position, lora = TP_MODELS[number]
    model = {"mtp_num_layers": layers, "position_embedding_type": position, "lora": lora}
    cases = [(row, OPTIONS[(number + i) % len(OPTIONS)]) for i, row in enumerate(EVEN_ROWS)]
    for rank, (value, case) in enumerate(ranks2.run(on_rank, layout, model, cases)):
        assert value <= WITHIN_LAYOUT, (rank, case)


@pytest.mark.parametrize(("lengths", "align"), [PLAIN, PADDED])
@pytest.mark.parametrize("layers", [1, 2])
# First what 0.14 and 0.15 raise under, for the releases that run one case.
@pytest.mark.parametrize("recompute", [BLOCK, UNIFORM, {**UNIFORM, "recompute_num_layers": 2}], ids=["block", "1", "2"])
def test_packed_rows_train_under_full_recompute_to_the_same_bits(applied, one_rank, recompute, layers, lengths, align):
    if VERSION >= (0, 19) and recompute == {**UNIFORM, "recompute_num_layers": 2}:
        pytest.skip("stock refuses it for unpacked rows as well: mtp-recompute's part")
    row = row_of(lengths, align)
    plain = testing.run_packed(build(mtp_num_layers=layers), row)
    again = testing.run_packed(build(mtp_num_layers=layers, **recompute), row)
    assert equal_bits(plain, again)


@pytest.mark.skipif(not RECOMPUTES_MTP, reason="0.12 and 0.13 never recompute MTP layers")
def test_a_packed_row_is_really_recomputed(applied, one_rank):
    model = build(**UNIFORM)
    layer = model.mtp.layers[0]
    inner = getattr(layer, "mtp_model_layer", None) or layer.transformer_layer
    calls = []
    inner.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    testing.run_packed(model, row_of(*PADDED))
    assert calls == [False, True]


def test_labels_on_the_next_tokens_only(applied, one_rank):
    """A masked last target, masked sequences and all targets masked: finite, and equal to alone."""
    for masks in (
        [torch.ones(5), torch.zeros(7), torch.tensor([1.0, 0, 0, 1])],
        [torch.zeros(5), torch.zeros(7), torch.zeros(4)],
    ):
        row = testing.pack(testing.random_sequences(PADDED[0]), align=4, loss_masks=masks)
        model = build(mtp_num_layers=2)
        packed, alone = testing.run_packed(model, row), testing.run_alone(model, row)
        assert packed.logged.isfinite().all() and all(g.isfinite().all() for g in packed.grads.values())
        assert testing.worst(testing.differences(packed, alone)) <= WITHIN_LAYOUT


def test_an_unpacked_row_without_targets_gives_no_nan(applied, one_rank):
    row = row_of((6,), loss_masks=[torch.zeros(6)])
    object.__setattr__(row, "packed_seq_params", lambda: None)
    result = testing.run_packed(build(), row)
    assert result.logged.isfinite().all() and all(g.isfinite().all() for g in result.grads.values())


# Where stock is right, no bit changes


@pytest.mark.parametrize("recompute", [{}, UNIFORM], ids=["", "recompute"])
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_unpacked_rows_keep_every_bit(one_rank, per_token_loss, recompute):
    if recompute and VERSION == (0, 18):
        pytest.skip("0.18 cannot recompute MTP at all: mtp-recompute's part")
    row = row_of((9,))
    object.__setattr__(row, "packed_seq_params", lambda: None)
    stock = testing.run_packed(build(mtp_num_layers=2, **recompute), row, per_token_loss=per_token_loss)
    with shim.patched(only=[ID]):
        shimmed = testing.run_packed(build(mtp_num_layers=2, **recompute), row, per_token_loss=per_token_loss)
    assert equal_bits(stock, shimmed)


@stock_packs
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_packing_keeps_every_bit(one_rank, options):
    row = row_of(*PLAIN)
    stock = testing.run_packed(build(mtp_num_layers=2), row, **options)
    with shim.patched(only=[ID]):
        assert equal_bits(stock, testing.run_packed(build(mtp_num_layers=2), row, **options))


def test_the_state_dict_is_the_same(one_rank):
    before = {name: value.shape for name, value in build().state_dict().items() if value is not None}
    with shim.patched(only=[ID]):
        assert before == {name: value.shape for name, value in build().state_dict().items() if value is not None}


# Without labels


def logits_of(model, row, packed):
    return model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        attention_mask=None,
        labels=None,
        packed_seq_params=row.packed_seq_params() if packed else None,
    )


@pytest.mark.skipif(VERSION > (0, 16), reason="later releases give logits themselves, and keep their own behaviour")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_without_labels_come_logits_and_no_mtp_loss(one_rank, training, packed):
    row = row_of(*PADDED) if packed else row_of((6,))
    model = build(mtp_num_layers=2).train(training)
    with pytest.raises((AssertionError, AttributeError)):
        logits_of(model, row, packed)
    with shim.patched(only=[ID]):
        logits = logits_of(model, row, packed)
        assert torch.equal(logits, logits_of(build(mtp_num_layers=None).train(training), row, packed))
    assert not mtp.MTPLossLoggingHelper.tracker
    assert model.mtp_process and model.config.mtp_num_layers == 2


@pytest.mark.skipif(not (0, 14) <= VERSION <= (0, 16), reason="here the patch decides whether MTP runs")
def test_labels_of_mtp_alone_train_it_in_a_fork(one_rank, monkeypatch):
    """slime's and miles' models take them as mtp_kwargs, beside labels=None."""
    from shim.patches.megatron_core.mtp_packed_sequences.layer import patch_postprocess

    upstream, row = gpt_model.GPTModel._postprocess, row_of(*PADDED)

    def fork(model, labels=None, mtp_kwargs=None, **arguments):
        return upstream(model, labels=mtp_kwargs["mtp_labels"] if labels is None else labels, **arguments)

    given = inspect.signature(upstream)
    asked = inspect.Parameter("mtp_kwargs", inspect.Parameter.KEYWORD_ONLY, default=None)
    fork.__signature__ = given.replace(parameters=[*given.parameters.values(), asked])
    patched = patch_postprocess(fork, {"partition": "sequence"})
    with shim.patched(only=[ID]):
        right = testing.run_packed(build(), row)
        monkeypatch.setattr(
            gpt_model.GPTModel,
            "_postprocess",
            lambda model, labels, **arguments: patched(
                model, labels=None, mtp_kwargs={"mtp_labels": labels}, **arguments
            ),
        )
        found = testing.run_packed(build(), row)
        monkeypatch.undo()
    assert testing.worst(testing.differences(found, right)) == 0


@pytest.mark.skipif(VERSION < (0, 17), reason="stock raises up to 0.16")
def test_without_labels_later_releases_keep_their_behaviour(one_rank):
    row = row_of(*PLAIN)
    stock = logits_of(build(), row, packed=True)
    logged = {k: v.clone() for k, v in mtp.MTPLossLoggingHelper.tracker.items() if isinstance(v, torch.Tensor)}
    mtp.MTPLossLoggingHelper.tracker.clear()
    with shim.patched(only=[ID]):
        assert torch.equal(stock, logits_of(build(), row, packed=True))
    tracker = mtp.MTPLossLoggingHelper.tracker
    assert all(torch.equal(value, tracker[name]) for name, value in logged.items())


# roll_tensor itself


def params(valid, padded=None, **extra):
    from megatron.core.packed_seq_params import PackedSeqParams

    as_tensor = functools.partial(torch.tensor, dtype=torch.int32)
    slots = {} if padded is None else {"cu_seqlens_q_padded": as_tensor(padded)}
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=as_tensor(valid), **slots, **extra)


@pytest.mark.parametrize(
    ("shape", "dim"), [((10,), 0), ((1, 10), -1), ((10, 1, 3), 0), ((2, 10, 3), 1), ((1, 10, 5), -2)]
)
def test_roll_tensor_takes_any_rank_and_dimension(applied, shape, dim):
    """Sequences of 3 and 2 in slots of 4 and 4, two tokens behind the last slot: 1 2 0 0 | 5 0 0 0 | 0 0. Any dtype and
    empty sequences are in tests/ops/test_packed_roll.py."""

    def along_dim(values):
        return torch.tensor(values).view([10 if i == dim % len(shape) else 1 for i in range(len(shape))]).expand(shape)

    row = params([0, 3, 5], [0, 4, 8])
    rolled, total = mtp.roll_tensor(along_dim(list(range(10))), shifts=-1, dims=dim, packed_seq_params=row)
    assert torch.equal(rolled, along_dim([1, 2, 0, 0, 5, 0, 0, 0, 0, 0]))
    assert torch.equal(total, rolled.sum())


def test_roll_tensor_is_differentiable(applied):
    values = torch.randn(6, 1, 4, dtype=torch.float64, requires_grad=True)
    row = params([0, 2, 5])
    assert torch.autograd.gradcheck(lambda x: mtp.roll_tensor(x, dims=0, packed_seq_params=row)[0], values)


def test_roll_tensor_can_be_called_as_on_the_newest_release(applied):
    assert {"cp_group", "packed_seq_params"} <= set(inspect.signature(mtp.roll_tensor).parameters)
    assert list(inspect.signature(mtp.roll_tensor).parameters)[:3] == ["tensor", "shifts", "dims"]
    rolled, _ = mtp.roll_tensor(torch.arange(4), -1, -1, None, params([0, 2, 4]))
    assert rolled.tolist() == [1, 0, 3, 0]
    assert mtp.roll_tensor(torch.arange(4), shifts=-1, dims=-1, cp_group=None)[0].tolist() == [1, 2, 3, 0]


@pytest.mark.skipif(
    "return_sum" not in inspect.signature(mtp.roll_tensor).parameters, reason="releases before 0.20 always sum"
)
def test_roll_tensor_sums_only_where_asked_to(applied):
    row = params([0, 3, 5], [0, 4, 8])
    rolled, total = mtp.roll_tensor(torch.arange(8), packed_seq_params=row, return_sum=False)
    assert rolled.tolist() == [1, 2, 0, 0, 5, 0, 0, 0] and total is None
    assert mtp.roll_tensor(torch.arange(8), packed_seq_params=row)[1] == 8


def test_a_patched_function_pickles_and_says_who_it_is(applied):
    assert pickle.loads(pickle.dumps(mtp.roll_tensor)) is mtp.roll_tensor
    assert mtp.roll_tensor.__name__ == "roll_tensor" and mtp.roll_tensor.__module__ == mtp.__name__


def test_torch_compile_takes_the_patched_roll_in_one_graph(applied):
    row = params([0, 3, 5], [0, 4, 8])

    def twice(tensor):
        return mtp.roll_tensor(tensor, dims=-1, packed_seq_params=row)[0] * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        values = torch.arange(1.0, 11)
        assert torch.equal(torch.compile(twice, fullgraph=True, backend="eager")(values), twice(values))


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="torch 2.9 traces no copy of attributes")
def test_torch_compile_takes_a_whole_mtp_layer_in_one_graph(applied, one_rank, monkeypatch):
    """With the packed row and all that shim wires in. Stock warns inside its layers, which breaks its own graphs."""
    monkeypatch.setattr(warnings, "warn", lambda *args, **kwargs: None)
    model, row = build(), row_of(*PADDED)
    layer = model.mtp.layers[0]
    states = torch.randn(row.total, 1, model.config.hidden_size, requires_grad=True)
    inputs = {"hidden_states": states, "attention_mask": None, "packed_seq_params": row.packed_seq_params()}
    if VERSION < (0, 14):
        inputs["decoder_input"] = states.flip(0)
    else:
        inputs |= {"input_ids": row.input_ids, "position_ids": row.position_ids, "embedding": model.embedding}

    def output(inputs):
        result = layer(**inputs)
        return result if isinstance(result, torch.Tensor) else result[0]

    torch._dynamo.reset()
    assert torch.allclose(torch.compile(output, fullgraph=True, backend="eager")(inputs), output(inputs))


# Costs


class HostReads(TorchDispatchMode):
    """Counts values read back from tensors, all of them and those asked for by shim's own code."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2", "equal")

    def __init__(self):
        super().__init__()
        self.all = self.ours = self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernels += 1
        if func.overloadpacket.__name__ in self.NAMES:
            self.read()
        return func(*args, **(kwargs or {}))

    def read(self):
        self.all += 1
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        self.ours += "ops" in path.parts or "patches" in path.parts


class Conversions(TorchFunctionMode):
    """Sees tolist(), numpy() and cpu(), which no kernel stands for on CPU."""

    def __init__(self, reads):
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu"):
            self.reads.read()
        return func(*args, **(kwargs or {}))


def counted_step(model, row):
    with HostReads() as reads, Conversions(reads):
        testing.run_packed(model, row)
    return reads


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Of few sequences the host reads a CPU's offsets, which is no wait."""
    monkeypatch.setattr("shim.ops.roll._FEW", 0)


def test_nothing_is_read_back_from_a_device(one_rank, as_on_a_device):
    model, row = build(mtp_num_layers=2), row_of(*PADDED)
    with shim.patched(only=[ID]):
        reads = counted_step(model, row)
    assert reads.ours == 0
    if VERSION >= (0, 16):
        assert reads.all <= counted_step(model, row).all


def test_the_number_of_kernels_does_not_depend_on_the_number_of_sequences(applied, as_on_a_device):
    counts = []
    for sequences in (1, 8, 64):
        with HostReads() as reads:
            mtp.roll_tensor(
                torch.arange(256), packed_seq_params=params([i * 256 // sequences for i in range(sequences + 1)])
            )
        counts.append(reads.kernels)
    assert len(set(counts)) == 1 and counts[0] < 40


def test_the_mask_is_computed_once_for_all_rolls_of_a_step(applied, one_rank, monkeypatch):
    from shim.ops import roll_index
    from shim.patches.megatron_core.mtp_packed_sequences import step as step_module

    calls = []
    monkeypatch.setattr(step_module, "roll_index", lambda *given: calls.append(given) or roll_index(*given))
    for step in (1, 2):
        testing.run_packed(build(mtp_num_layers=2), row_of(*PADDED))
        assert len(calls) == step


def test_a_reused_buffer_is_never_stale(applied, one_rank):
    """The same PackedSeqParams with other lengths written into its buffers, also past autograd's version counter."""
    model = build()
    first, second = row_of((5, 7, 4)), row_of((3, 9, 4))
    shared = first.packed_seq_params()
    for row in (first, second):
        testing.run_packed(model, row)
        fresh = row.packed_seq_params()
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            getattr(shared, name).data.copy_(getattr(fresh, name))
        shared.max_seqlen_q = shared.max_seqlen_kv = fresh.max_seqlen_q
        object.__setattr__(row, "packed_seq_params", lambda: shared)
        reused = testing.run_packed(model, row)
        object.__setattr__(row, "packed_seq_params", functools.partial(copy.deepcopy, shared))
        assert equal_bits(reused, testing.run_packed(model, row))
        assert testing.worst(testing.differences(reused, testing.run_alone(model, row))) <= WITHIN_LAYOUT


def test_an_exception_inside_leaves_nothing_behind(applied, one_rank):
    from shim.patches.megatron_core.mtp_packed_sequences.step import THREAD

    model = build()
    model.mtp.layers[0].final_layernorm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        testing.run_packed(model, row_of(*PLAIN))
    assert THREAD.step is None


# The engine on a real release


def test_check_sees_the_real_model_and_names_what_stands_above(applied, one_rank):
    """tests/cells/test_effect.py has the overrides that trainers have."""
    model = build()
    assert shim.check(model)[ID].state == "applied"

    class Bridge(gpt_model.GPTModel):
        def _postprocess(self, *args, **kwargs):
            return super()._postprocess(*args, **kwargs)

    class Own(gpt_model.GPTModel):
        def _postprocess(self, hidden_states, *args, **kwargs):
            return self.mtp(hidden_states=hidden_states)

    if VERSION >= (0, 14):
        model.__class__ = Bridge  # which calls the fixed method, and so hides nothing
        assert shim.check(model)[ID].state == "applied"
        model.__class__ = Own
        with pytest.raises(shim.NotMetError, match="Own"):
            shim.check(model)
        assert shim.status()[ID].state == "shadowed"


def objects_of(report):
    found = {}
    for target in report[ID].targets:
        module, _, qualname = target.partition(":")
        if module not in sys.modules:
            continue  # an optional one
        owner = sys.modules[module]
        *path, name = qualname.split(".")
        for part in path:
            owner = vars(owner)[part]
        found[target] = vars(owner)[name]
    return found


def test_revert_gives_back_the_same_objects():
    with shim.patched(only=[ID]) as report:
        during = objects_of(report)
    stock = objects_of(report)
    aliases = {name: vars(gpt_model)[name] for name in ("roll_tensor", "process_mtp_loss") if name in vars(gpt_model)}
    with shim.patched(only=[ID]) as report:
        assert all(objects_of(report)[t] is not stock[t] for t in stock)
        assert all(vars(gpt_model)[name] is vars(mtp)[name] for name in aliases)
    assert objects_of(report).keys() == stock.keys() == during.keys()
    assert all(objects_of(report)[t] is stock[t] for t in stock)
    assert all(vars(gpt_model)[name] is value for name, value in aliases.items())


@pytest.mark.skipif(VERSION < (0, 17), reason="no MTP in hybrid models before 0.17")
def test_the_hybrid_model_is_not_waited_for_but_served_when_it_comes():
    """In a process of its own, because no test can be sure to be the first that imports it."""
    code = """
import importlib, shim
import megatron.core.models.gpt.gpt_model
report = shim.apply()["mtp-packed-sequences"]
late = [target for target, state in report.targets.items() if state == "idle"]
assert report.state == "applied" and len(late) == 1, report
module, _, qualname = late[0].partition(":")
importlib.import_module(module)
assert shim.status()["mtp-packed-sequences"].targets[late[0]] == "bound"
"""
    done = fork_server.run(code, share_loaded=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_pins_are_those_of_this_release():
    """Stale pins fail here: what the plan reads from the installed sources is what `shim pin` wrote."""
    plan = shim.plan()
    # What the pins of a release say beside another distribution is looked at where that is installed too.
    here = {id for id in plan if plan[id].action != "not-installed"}
    known = plan.matrix.pins["megatron-core"]
    folder = Path(mtp.__file__).parents[3].name  # of a cell: the release or the commit
    name = folder if folder in known else testing.release()
    pins = {id: pin for id, pin in known[name].items() if id in here and pin.variant}
    wanted = {id for id in plan if plan[id].wanted}
    # On a commit a patch may have no pin, and proofs decide.
    assert pins.keys() <= wanted if name in plan.matrix.commits["megatron-core"] else pins.keys() == wanted
    for id, pin in pins.items():
        assert (plan[id].variant, plan[id].fingerprints) == (pin.variant, pin.fingerprints)
