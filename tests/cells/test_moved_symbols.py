"""moved-symbols: names of other releases are there by every kind of import, and gone after revert()."""

import importlib
import inspect
import json
import sys
from contextlib import contextmanager

import fork_server
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import shim
from shim._engine.engine import ENGINE
from shim.patches.megatron_core.moved_symbols.proof import SYMBOLS, missing

CELLS = {"0.12.3": "all"}

ID = "moved-symbols"
DECISION = shim.plan()[ID]
VARIANT, NEEDED = DECISION.variant, DECISION.wanted
CORE = "megatron.core."
STATE = "megatron.core.parallel_state"
VIRTUAL_RANK, RANK = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_RANK"
MODULES = {
    "v0_12": ["megatron.core.activations", "megatron.core.pipeline_parallel.utils"],
    "v0_13": ["megatron.core.activations"],
    "v0_17": ["megatron.core.transformer.custom_layers.transformer_engine"],
}.get(VARIANT, [])
SIZES = {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2}

needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
adds_modules = pytest.mark.skipif(not MODULES, reason="this variant adds no module")
old = pytest.mark.skipif(VARIANT != "v0_12", reason="this release takes vp_stage")
by_rank = pytest.mark.skipif(VARIANT in (None, "v0_17"), reason="this release takes pp_rank")


def patched():
    return shim.patched(only=[ID], require=[ID])


@pytest.fixture
def virtual(one_rank, monkeypatch):
    """As on the first of two pipeline ranks with two virtual stages."""
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    monkeypatch.setattr(parallel_state, VIRTUAL_RANK, 0)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    monkeypatch.setattr(parallel_state, RANK, 0)


@contextmanager
def unchanged_place():
    before = getattr(parallel_state, VIRTUAL_RANK), getattr(parallel_state, RANK)
    yield
    assert (getattr(parallel_state, VIRTUAL_RANK), getattr(parallel_state, RANK)) == before


def interleaved(**options):
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    return TransformerConfig(**SIZES, **sizes, pipeline_dtype=torch.float32, **options)


def function(target):
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(CORE + module), name)


def test_all_names_are_there(one_rank):
    """Those of the proof; on releases that have them all, stock gives them."""
    if not NEEDED:
        assert DECISION.action in ("upstream", "not-needed") and missing() == []
        return
    stock = missing()
    with patched():
        assert missing() == []
    assert stock and missing() == stock


@adds_modules
def test_a_module_comes_by_every_kind_of_import_and_goes():
    for name in MODULES:
        package, _, last = name.rpartition(".")
        with pytest.raises(ImportError):
            importlib.import_module(name)
        importlib.import_module(package)
        with patched():
            module = importlib.import_module(name)
            scope = {}
            exec(f"import {name} as one\nfrom {package} import {last} as two\nfrom {name} import *", scope)
            assert scope["one"] is scope["two"] is module
            assert {"TENorm", "quick_gelu", "is_pp_first_stage"} & scope.keys()
            assert importlib.util.find_spec(name) is module.__spec__
            assert not hasattr(module, "no_such_name") and not hasattr(module, "__path__")
            assert any(name in text for text in shim.status()[ID].holds)
        assert name not in sys.modules and not hasattr(sys.modules[package], last)
        with pytest.raises(ImportError):
            importlib.import_module(name)


@adds_modules
def test_a_module_that_a_fork_has_is_not_hidden(tmp_path, monkeypatch):
    """The package looks as on this release, and the file is there."""
    package, _, last = MODULES[0].rpartition(".")
    (tmp_path / f"{last}.py").write_text("own = True\n")
    owner = importlib.import_module(package)
    monkeypatch.setattr(owner, "__path__", [*owner.__path__, str(tmp_path)])
    try:
        with patched():
            assert importlib.import_module(MODULES[0]).own
        assert importlib.import_module(MODULES[0]).own
    finally:
        sys.modules.pop(MODULES[0], None)
        vars(owner).pop(last, None)


@needed
def test_who_took_a_name_keeps_it(one_rank):
    with patched():
        taken = [function(symbol) for symbol in SYMBOLS if symbol.startswith(("utils", "fusions"))]
    assert all(map(callable, taken))
    if VARIANT == "v0_17":
        return
    assert taken[-1](torch.tensor(2.0)) == pytest.approx(2 * torch.sigmoid(torch.tensor(3.404)).item())


@pytest.mark.skipif(VARIANT not in ("v0_12", "v0_14"), reason="nothing is elsewhere here")
def test_what_is_elsewhere_is_the_very_object():
    places = {
        "v0_12": ("transformer.moe.moe_utils", "parallel_state", "get_moe_layer_wise_logging_tracker"),
        "v0_14": ("fusions.fused_bias_geglu", "activations", "quick_gelu"),
    }
    new, home, name = places[VARIANT]
    module = importlib.import_module(CORE + new)
    with patched():
        assert getattr(module, name) is function(f"{home}:{name}")
        with pytest.raises(AttributeError, match=f"module '{CORE}{new}' has no attribute 'no_such_name'"):
            module.no_such_name
    assert not hasattr(module, name)


@needed
@pytest.mark.skipif(VARIANT not in ("v0_12", "v0_13"), reason="this release has unwrap_model")
def test_the_innermost_model_beneath_all_wrappers(one_rank):
    config = TransformerConfig(**SIZES, bf16=True, params_dtype=torch.bfloat16)
    model = torch.nn.Linear(2, 2)
    half = Float16Module(config, model)
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(), half)
    with patched():
        unwrap_model = function("utils:unwrap_model")
        assert unwrap_model(parallel) is model
        assert unwrap_model([parallel, half, model]) == [model] * 3
        assert unwrap_model(parallel, (DistributedDataParallel,)) is half
        assert unwrap_model([]) == []


@by_rank
def test_the_place_is_that_of_the_call_alone(virtual):
    """By name and by position; an exception inside leaves it too, and an argument too many is refused as on stock."""
    with patched(), unchanged_place():
        offset = function("transformer.transformer_layer:get_transformer_layer_offset")
        config = interleaved()
        assert [offset(config, stage, rank) for stage in range(2) for rank in range(2)] == [0, 2, 4, 6]
        assert offset(config, pp_rank=1, vp_stage=1) == 6
        assert offset(config, vp_stage=0) == 0
        with pytest.raises(AttributeError):
            offset(None, vp_stage=0, pp_rank=1)
        with pytest.raises(TypeError):
            offset(config, 0, 1, 2)
        with pytest.raises(TypeError):
            offset(config, vp_stage=0, no_such_argument=1)
        assert {"vp_stage", "pp_rank"} <= inspect.signature(offset).parameters.keys()


@by_rank
def test_the_layers_of_a_block_spec_are_those_of_the_place(virtual):
    with patched(), unchanged_place():
        spec_of = function("models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec")
        for rank in range(2):
            spec = spec_of(interleaved(), use_transformer_engine=False, vp_stage=1, pp_rank=rank)
            assert len(spec.layer_specs) == 2


@old
def test_without_the_argument_it_is_stock(virtual):
    """Also with None: the virtual rank of parallel_state decides."""
    offset = "transformer.transformer_layer:get_transformer_layer_offset"
    for rank in range(2):
        setattr(parallel_state, VIRTUAL_RANK, rank)
        stock = function(offset)(interleaved())
        with patched():
            assert function(offset)(interleaved()) == function(offset)(interleaved(), vp_stage=None) == stock
            assert parallel_state.is_pipeline_first_stage(vp_stage=0)
            assert not parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=1)
            assert parallel_state.is_pipeline_first_stage(ignore_virtual=True, vp_stage=1)
            assert not parallel_state.is_pipeline_last_stage(False, 1)


def model_of(**options):
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8, **options)


@old
def test_a_model_is_built_where_parallel_state_stands(one_rank, monkeypatch):
    stock = model_of().state_dict()
    with patched():
        mine = model_of(vp_stage=0).state_dict()
        assert all(torch.equal(mine[name], stock[name]) for name in stock if torch.is_tensor(stock[name]))
        monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
        monkeypatch.setattr(parallel_state, VIRTUAL_RANK, 1)
        model_of(vp_stage=1)
        with pytest.raises(shim.ShimError, match=r"GPTModel .*call parallel_state\.set_virtual_pipeline_model"):
            model_of(vp_stage=0)
    with pytest.raises(TypeError, match="vp_stage"):
        model_of(vp_stage=0)


EARLY = """
import json, sys
import shim
FIRST
taken = []
for module, name in json.load(sys.stdin):
    try:
        exec(f"from megatron.core.{module} import {name} as found\\nimport megatron.core.{module}")
    except ImportError as error:
        taken.append(str(error))
report = shim.status()["moved-symbols"]
shim.revert()
print(json.dumps([taken, report.state, sorted(name for name in ADDED if name in sys.modules)]))
"""


@needed
@pytest.mark.parametrize("imported", [False, True])
def test_the_import_may_come_before_or_after_apply(imported):
    """In a process of its own: the symbols of the proof, except those behind Transformer Engine."""
    first = "import megatron.core.models.gpt\n" * imported + "shim.apply(only=['moved-symbols'])"
    code = EARLY.replace("FIRST", first).replace("ADDED", repr(MODULES))
    symbols = [symbol.split(":") for symbol in SYMBOLS if "custom_layers" not in symbol or VARIANT == "v0_17"]
    done = fork_server.run(code, stdin=json.dumps(symbols), share_loaded=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[], "applied", []]


@needed
def test_nothing_stays_behind():
    targets = DECISION.targets
    with patched():
        assert shim.status()[ID].state in ("applied", "pending", "idle")
    assert not any(target in ENGINE.binder.chains for target in targets)
    assert not shim.status()[ID].holds
