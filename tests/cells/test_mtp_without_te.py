"""mtp-without-te: a model with multi-token prediction can be built without Transformer Engine."""

import contextlib

import fork_server
import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from needed import needed

import shim
import shim.testing.model
from shim import testing

CELLS = {"0.17.1": "all"}

ID = "mtp-without-te"
pytestmark = needed(ID)


@pytest.fixture(autouse=True)
def stock(monkeypatch):
    """Stock as it is: shim.testing otherwise stands classes in for what is missing without Transformer Engine."""
    monkeypatch.setattr(shim.testing.model, "inference_layers_are_classes", contextlib.nullcontext)
    with testing.layout_initialised(testing.Layout()):
        yield


def a_step(**model):
    row = testing.pack(testing.random_sequences((5, 7)))
    return testing.run_packed(testing.build_gpt(**model), row)


def test_stock_cannot_build_the_layer():
    with pytest.raises(TypeError, match="isinstance"):
        testing.build_gpt()


def test_the_patch_fixes_it():
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied", str(report)
        assert a_step(mtp_num_layers=2).main.isfinite().all()
        assert shim.check(testing.build_gpt())[ID].state == "applied"


def test_a_hybrid_model_too():
    with shim.patched(only=[ID], require=[ID]):
        assert testing.build_hybrid().mtp is not None


def test_revert_gives_stock_back():
    before = mtp.is_inference_column_parallel_linear
    with shim.patched(only=[ID], require=[ID]):
        assert mtp.is_inference_column_parallel_linear is not before
    assert mtp.is_inference_column_parallel_linear is before
    with pytest.raises(TypeError, match="isinstance"):
        testing.build_gpt()


def test_layers_for_inference_are_recognised_where_they_are_classes(monkeypatch):
    """As with Transformer Engine; the classes here are stand-ins, because theirs need its compiled part."""
    import megatron.core.tensor_parallel.inference_layers as layers

    first, second = (type(name, (torch.nn.Module,), {}) for name in ("Linear", "LayerNormLinear"))
    monkeypatch.setattr(layers, "InferenceColumnParallelLinear", first)
    monkeypatch.setattr(layers, "InferenceLayerNormColumnParallelLinear", second)
    with shim.patched(only=[ID], require=[ID]):
        asked = mtp.is_inference_column_parallel_linear
        assert [asked(given) for given in (first(), second(), torch.nn.Linear(1, 1), None)] == [
            True,
            True,
            False,
            False,
        ]


def test_before_and_after_the_import():
    """In a process of its own, without anything of shim.testing."""
    code = """
import shim, torch
{apply}
from megatron.core.transformer.multi_token_prediction import is_inference_column_parallel_linear as asked
{later}
from megatron.core.transformer import multi_token_prediction as mtp
assert mtp.is_inference_column_parallel_linear(torch.nn.Linear(1, 1)) is False
"""
    apply = "shim.apply(only=['mtp-without-te'], require=['mtp-without-te'])"
    for when in ({"apply": apply, "later": ""}, {"apply": "", "later": apply}):
        done = fork_server.run(code.format(**when), share_loaded=True)
        assert done.returncode == 0, done.stderr[-2000:]
