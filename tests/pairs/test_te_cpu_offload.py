"""Patch te-cpu-offload: regions of activation offloading restore TE's flag, and the variable that TE wants for it."""

import contextlib
import json

import fork_server
import pytest
import torch
import transformer_engine
from megatron.core.extensions import transformer_engine as extensions
from transformer_engine.pytorch import cpu_offload as engine

import shim
from shim import testing
from shim.patches.megatron_core.te_cpu_offload.proof import offload_manager
from shim.testing import Layout

CELLS = {"0.19.2+2.20.2": "all", "0.17.1+2.14.1": ["test_a_model_can_be_built"]}

ID = "te-cpu-offload"
MCORE = tuple(int(part) for part in testing.release().split(".")[:2])
TE = tuple(int(part) for part in transformer_engine.__version__.split(".")[:2])
VARIABLE = "NVTE_CPU_OFFLOAD_V1"

has_regions = pytest.mark.skipif(MCORE < (0, 16), reason="fine-grained offloading came with 0.16")
has_variable = pytest.mark.skipif(MCORE < (0, 16) or TE < (2, 10), reason="the variable came with TE 2.10")


def flag():
    return extensions.cpu_offload.CPUOffloadEnabled


@pytest.fixture
def region():
    with testing.layout_initialised(Layout()):
        yield offload_manager()
    extensions.cpu_offload.CPUOffloadEnabled = False


@has_regions
def test_stock_ends_the_outer_region_with_the_inner_one(region):
    with region:
        with region:
            assert (flag(), region.inside_context) == (True, True)
        assert (flag(), region.inside_context) == (False, False)


@has_regions
def test_a_region_gives_back_what_it_found(region):
    """Nested, after an exception, and inside a region that somebody else has opened."""
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        with region:
            with region:
                assert (flag(), region.inside_context) == (True, True)
            assert (flag(), region.inside_context) == (True, True)
            with pytest.raises(KeyError), region:
                raise KeyError
            assert (flag(), region.inside_context) == (True, True)
        assert (flag(), region.inside_context) == (False, False)
        extensions.cpu_offload.CPUOffloadEnabled = True
        with region:
            pass
        assert (flag(), region.inside_context) == (True, False)


@has_regions
def test_a_region_that_is_not_entered_changes_nothing(region):
    """Outside of any chunk, and where offloading is switched off."""
    with shim.patched(only=[ID], require=[ID]):
        region._cur_forward_chunk.do_offload = False
        with region:
            assert not flag()
        extensions.cpu_offload.CPUOffloadEnabled = True
        with region:
            assert flag()
        assert flag()


@has_regions
def test_a_region_that_cannot_be_entered_leaves_nothing(region, monkeypatch):
    with shim.patched(only=[ID], require=[ID]):
        if hasattr(region, "_saved_tensors_hooks"):
            monkeypatch.setattr(region, "_saved_tensors_hooks", None)
            expected = AttributeError
        else:
            monkeypatch.setattr(torch._C._autograd, "_push_saved_tensors_default_hooks", None)
            expected = TypeError
        with pytest.raises(expected), region:
            pass
        assert (flag(), region.inside_context) == (False, False)


@has_regions
def test_a_region_open_while_the_patch_comes_and_goes(region):
    """Entered on stock and left with the patch, and the other way round: stock's value, False, in the end."""
    region.__enter__()
    with shim.patched(only=[ID], require=[ID]):
        region.__exit__(None, None, None)
        assert not flag()
        region.__enter__()
    region.__exit__(None, None, None)
    assert not flag()
    with shim.patched(only=[ID], require=[ID]), region:
        assert flag()
    assert not flag()


@pytest.mark.skipif(MCORE != (0, 17), reason="0.17 alone passes the argument")
def test_a_model_can_be_built():
    """Stock: TypeError with TE 2.5 to 2.9."""
    refuses = (2, 5) <= TE < (2, 10)
    with testing.layout_initialised(Layout()):
        with pytest.raises(TypeError, match="retain_pinned") if refuses else contextlib.nullcontext():
            testing.build_gpt(mtp_num_layers=None)
        with shim.patched(only=[ID], require=[ID]):
            model = testing.build_gpt(mtp_num_layers=None)
            testing.run_packed(model, testing.pack(testing.random_sequences([5, 7, 4])))


@pytest.mark.skipif(MCORE != (0, 17) or not (2, 5) <= TE < (2, 10), reason="the pairs whose call is adjusted")
def test_the_function_beneath_is_read_at_each_call(monkeypatch):
    """As upstream reads it; somebody may replace it behind apply()."""
    calls = []
    with shim.patched(only=[ID], require=[ID]):
        monkeypatch.setattr(extensions, "_get_cpu_offload_context", lambda *args: calls.append(args))
        extensions.get_cpu_offload_context(True, 1, 2, True, False, False, True)
    assert calls == [(True, 1, 2, True, False, False)]


# The variable


IN_A_PROCESS = """
import json, os, sys, warnings
from shim import testing
testing.transformer_engine_on_cpu()
import shim
late = sys.stdin.read() == "late"
if late:
    import transformer_engine.pytorch
shim.apply(only=["te-cpu-offload"], options={"te-cpu-offload": {"set_variable": True}})
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1
import torch
weight = torch.nn.Parameter(torch.ones(2))
cpu_offload_v1.CPUOffloadEnabled = True
taken = cpu_offload.is_cpu_offload_enabled()
if taken:
    cpu_offload.mark_not_offload(weight)  # as TE's layers do, whose constructors need CUDA
applied = os.environ.get("NVTE_CPU_OFFLOAD_V1")
shim.revert()
print(json.dumps([applied, taken, getattr(weight, "_TE_do_not_offload", False), os.environ.get("NVTE_CPU_OFFLOAD_V1")]))
"""


def in_a_process(how):
    with pytest.MonkeyPatch.context() as undo:
        undo.delenv(VARIABLE, raising=False)
        done = fork_server.run(IN_A_PROCESS, stdin=how, share_loaded=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@has_variable
def test_the_variable_is_set_where_it_comes_before_the_import():
    """Then Transformer Engine heeds the flag and, from 2.15 on, marks weights so that 0.19 does not offload them."""
    (applied, taken, marked, reverted), _ = in_a_process("early")
    assert (applied, taken, reverted) == ("1", True, None)
    assert marked == (TE >= (2, 15))


@has_variable
def test_too_late_is_a_warning_and_without_it_the_flag_does_not_count():
    """What the option is for: no layer knows of the region, and no weight is marked."""
    found, said = in_a_process("late")
    assert found == [None, False, False, None]
    assert "transformer_engine.pytorch was imported before NVTE_CPU_OFFLOAD_V1=1 could be set" in said


@has_variable
def test_check_says_where_a_model_needs_it():
    """The config asks for offloading, and Transformer Engine in this process was imported without the variable."""
    assert not engine.NVTE_CPU_OFFLOAD_V1
    with testing.layout_initialised(Layout()), shim.patched(only=[ID]):
        model = testing.build_gpt(mtp_num_layers=None)
        assert shim.check(model)[ID].state == "applied"
        model.config.fine_grained_activation_offloading = True
        found = shim.check(model)[ID]
        assert found.state == "inactive"
        assert "fine_grained_activation_offloading is set" in found.reason
        assert "NVTE_CPU_OFFLOAD_V1=1" in found.remedy
    with testing.layout_initialised(Layout()), shim.patched(only=[ID], require=[ID]):
        with pytest.raises(shim.NotMetError, match="inactive"):
            shim.check(model)


@pytest.mark.skipif(MCORE < (0, 19) or TE < (2, 15), reason="0.19 heeds the mark that TE makes from 2.15 on")
def test_megatron_does_not_offload_what_is_marked(region, monkeypatch):
    """The device is a stand-in: megatron-core takes CUDA tensors alone."""
    chunk = region.cur_forward_chunk()
    monkeypatch.setattr(type(chunk), "_can_manage_tensor_for_offload", staticmethod(lambda tensor: True))
    weight = torch.ones(4)
    assert chunk.tensor_need_offloading_checker(weight)
    weight._TE_do_not_offload = True
    assert not chunk.tensor_need_offloading_checker(weight)
