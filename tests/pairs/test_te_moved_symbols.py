"""Patches te-moved-symbols and te-skip-weight-update: what a pair of releases loses, and that it is there again."""

import importlib
import inspect
import json

import fork_server
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.transformer.moe.moe_utils  # noqa: F401
import pytest
import torch
import transformer_engine
from transformer_engine.pytorch import cpp_extensions
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

import shim
from shim import testing
from shim.testing import Layout

CELLS = {
    "0.16.1+2.12.0": "all",
    "0.12.0+2.3.0": ["test_fused_rope_is_called_as_this_engine_takes_it"],
    "0.18.2+2.16.1": ["test_the_norm_of_gradients_is_that_of_transformer_engine"],
}

ABOUT = ["te-moved-symbols", "te-skip-weight-update"]  # the patches, see chosen.py

ID, SKIP = "te-moved-symbols", "te-skip-weight-update"
MCORE = tuple(int(part) for part in testing.release().split(".")[:3])
TE = tuple(int(part) for part in transformer_engine.__version__.split(".")[:2])

EXTENSIONS = "megatron.core.extensions.transformer_engine"
ROPE = "megatron.core.models.common.embeddings.rope_utils"
SPLIT = [(EXTENSIONS, "SplitAlongDim"), ("megatron.core.transformer.attention", "SplitAlongDim")]
FUSED_ROPE = [(m, "fused_apply_rotary_pos_emb" + end) for m in (EXTENSIONS, ROPE) for end in ("", "_thd")]
GEMM = [(EXTENSIONS, "te_general_gemm"), ("megatron.core.transformer.moe.moe_utils", "te_general_gemm")]
LAYERS, CLIP = "megatron.core.tensor_parallel.layers", "megatron.core.optimizer.clip_grads"
WGRAD = [(LAYERS, "get_dummy_wgrad")]
PLACES = [*SPLIT, *FUSED_ROPE, *GEMM, *WGRAD]

ROPE_MOVED_IN = (2, 2) if MCORE == (0, 12, 0) else (2, 3)
moved_rope = MCORE < (0, 13) and TE >= ROPE_MOVED_IN
LOST = {
    f"{module}:{name}"
    for places, lost in (
        (SPLIT, TE >= (2, 3)),
        (FUSED_ROPE, moved_rope),
        (GEMM, (0, 13) <= MCORE < (0, 17) and TE >= (2, 10)),
        (WGRAD, MCORE >= (0, 14) and TE < (2, 3)),
    )
    for module, name in places
    if lost
}
NEEDED_FROM = (2, 2) if MCORE < (0, 13) else (2, 3)
APPLIES = TE >= NEEDED_FROM or MCORE >= (0, 14)

# Places that the release has at all.
KNOWN = {
    f"{module}:{name}"
    for module, name in PLACES
    if not ((module, name) in GEMM and MCORE < (0, 13)) and not ((module, name) in WGRAD and MCORE < (0, 14))
}

needs_it = pytest.mark.skipif(not APPLIES, reason="no name has moved in this pair")


def absent():
    """Places where megatron-core holds nothing or None, of those that the release knows."""
    found = {f"{module}:{name}" for module, name in PLACES if not there(module, name)}
    return found & KNOWN


def there(module, name):
    return getattr(importlib.import_module(module), name, None) is not None


def snapshot():
    return {place: vars(importlib.import_module(place[0])).get(place[1], "missing") for place in PLACES}


def test_stock_has_lost_what_has_moved():
    """Without a word: the modules were imported without an error."""
    assert absent() == LOST


def test_everything_is_there_again_after_megatron_was_imported():
    before = snapshot()
    with shim.patched(only=[ID]) as report:
        assert report[ID].state == ("applied" if APPLIES else "not-needed"), str(report)
        assert absent() == set()
        assert shim.status()[ID].state == report[ID].state
    after = snapshot()
    assert all(before[place] is after[place] for place in PLACES)


EARLY = """
import importlib, json, sys
from shim import testing
testing.transformer_engine_on_cpu()
import shim
places = json.load(sys.stdin)

def absent():
    found = []
    for module, name in places:
        if getattr(importlib.import_module(module), name, None) is None:
            found.append(module + ":" + name)
    return found

shim.apply(only=["te-moved-symbols"])
import megatron.core.models.gpt.gpt_layer_specs
applied = absent()
state = shim.status()["te-moved-symbols"].state
shim.revert()
print(json.dumps([applied, state, absent()]))
"""


@needs_it
def test_everything_is_there_where_megatron_is_imported_after_apply():
    """In a process of its own; revert() leaves what stock would have had."""
    places = [place.split(":") for place in sorted(KNOWN)]
    done = fork_server.run(EARLY, stdin=json.dumps(places), share_loaded=True)
    assert done.returncode == 0, done.stderr[-2000:]
    applied, state, reverted = json.loads(done.stdout.splitlines()[-1])
    assert (applied, state) == ([], "applied")
    assert set(reverted) == LOST


@pytest.mark.skipif(TE < (2, 3), reason="stock has it")
def test_attention_splits_by_it_and_trains_the_same():
    """Every layer splits its QKV through it, and no bit of losses and gradients changes."""
    calls = []

    def step():
        model = testing.build_gpt(mtp_num_layers=None)
        return testing.run_packed(model, testing.pack(testing.random_sequences([5, 7, 4])))

    with testing.layout_initialised(Layout()):
        if MCORE[:2] == (0, 17) and TE < (2, 10):
            pytest.skip("0.17 asks TE for an offload option of 2.10: no model can be built")
        stock = step()
        with shim.patched(only=[ID], require=[ID]):
            attention = importlib.import_module("megatron.core.transformer.attention")
            split = attention.SplitAlongDim
            attention.SplitAlongDim = lambda *args: calls.append(args) or split(*args)
            try:
                mine = step()
            finally:
                attention.SplitAlongDim = split
    assert len(calls) == 2
    assert all(torch.equal(stock.grads[name], mine.grads[name]) for name in stock.grads)
    assert torch.equal(stock.main, mine.main)


@pytest.mark.skipif(not moved_rope, reason="this pair has fused RoPE")
def test_fused_rope_is_called_as_this_engine_takes_it(monkeypatch):
    """A stand-in for TE's function, which ends in a CUDA kernel, binds the arguments to the real signature."""
    home = "attention" if TE < (2, 3) else "attention.rope"
    module = importlib.import_module(f"transformer_engine.pytorch.{home}")
    real, calls = inspect.signature(module.apply_rotary_pos_emb), []

    def stand_in(*args, **kwargs):
        calls.append(dict(real.bind(*args, **kwargs).arguments))
        return args[0]

    t, freqs, cu_seqlens = torch.ones(4, 1, 2, 8), torch.ones(4, 1, 1, 8), torch.tensor([0, 4])
    with shim.patched(only=[ID], require=[ID]):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", stand_in)  # behind apply(): it is read at each call
        rope = importlib.import_module(ROPE)
        rope.fused_apply_rotary_pos_emb(t, freqs, transpose_output_memory=True)
        rope.fused_apply_rotary_pos_emb_thd(t[:, 0], cu_seqlens, freqs, cp_size=2, cp_rank=1)
        if TE >= (2, 3):
            importlib.import_module(EXTENSIONS).fused_apply_rotary_pos_emb(t, freqs, interleaved=True)
        else:
            with pytest.raises(ValueError, match=r"from 2\.3 on"):
                rope.fused_apply_rotary_pos_emb(t, freqs, interleaved=True)
    plain, packed, *interleaved = calls
    assert (plain["tensor_format"], plain["fused"], plain.get("start_positions")) == ("sbhd", True, None)
    assert (packed["tensor_format"], packed["fused"], packed["cp_size"], packed["cp_rank"]) == ("thd", True, 2, 1)
    assert packed["cu_seqlens"] is cu_seqlens and packed.get("start_positions") is None
    assert [call["interleaved"] for call in interleaved] == [True] * (TE >= (2, 3))


@pytest.mark.skipif(not (0, 12, 1) <= MCORE < (0, 13) or TE != (2, 2), reason="0.12.1 to 0.12.3 with TE 2.2")
def test_an_argument_that_came_with_the_next_release_is_not_passed(monkeypatch):
    """Stock passes `interleaved`, which TE 2.2 does not know: a TypeError for all fused RoPE."""
    rope, t = importlib.import_module(ROPE), torch.ones(4, 1, 2, 8)
    with pytest.raises(TypeError, match="interleaved"):
        rope.fused_apply_rotary_pos_emb(t, t)
    with shim.patched(only=[ID], require=[ID]):
        assert rope.fused_apply_rotary_pos_emb is importlib.import_module(EXTENSIONS).fused_apply_rotary_pos_emb
        with pytest.raises(testing.CompiledOpError):
            rope.fused_apply_rotary_pos_emb(t, t)


@pytest.mark.skipif(not (0, 13) <= MCORE < (0, 17) or TE < (2, 10), reason="this pair has its general_gemm")
def test_general_gemm_is_called_as_this_engine_takes_it(monkeypatch):
    """A stand-in for TE's function, which ends in a CUDA kernel, binds the arguments to the real signature."""
    real, calls = inspect.signature(cpp_extensions.general_gemm), []

    def stand_in(*args, **kwargs):
        calls.append(dict(real.bind(*args, **kwargs).arguments))

    a, b = torch.ones(2, 3), torch.ones(4, 3)
    with shim.patched(only=[ID], require=[ID]):
        monkeypatch.setattr(cpp_extensions, "general_gemm", stand_in)  # behind apply(): it is read at each call
        moe = importlib.import_module(GEMM[1][0])
        moe.te_general_gemm(a, b, torch.float32, layout="NT", bias=a, grad=True)
    (call,) = calls
    assert (call["A"], call["B"], call["bias"]) == (a, b, a)
    assert (call["out_dtype"], call["layout"], call["grad"]) == (torch.float32, "NT", True)
    assert not set(call) & {"workspace"}


def as_the_kernel(A, B, out_dtype=None, layout="TN", out=None, bias=None, grad=False, **_):
    """TE's general_gemm on CPU, outside of FP8: A and B by layout, summed in fp32, in out_dtype.

    Its C++ code tells cuBLASLt no type of the bias. Then the bias is read as if it had the type of the output.
    """
    left, right = (B if layout[1] == "N" else B.t()).float(), (A.t() if layout[0] == "T" else A).float()
    made = left @ right
    if bias is not None:
        read = bias.detach().contiguous().view(out_dtype)
        read = torch.nn.functional.pad(read, (0, bias.numel() - read.numel()), value=float("nan"))  # beyond its end
        made = made + read
    return made.to(out_dtype), None, None, None


@pytest.mark.skipif(MCORE[:2] != (0, 16) or TE < (2, 10), reason="0.16, whose router has a bias, and TE 2.10")
@pytest.mark.parametrize("of_router", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
def test_the_router_adds_its_bias(monkeypatch, of_weights, of_router):
    """Also a bias whose type is not that of the product, as with moe_router_dtype="fp32" and weights in bf16."""
    moe, generator = importlib.import_module(GEMM[1][0]), torch.Generator().manual_seed(0)

    def leaves():
        generator.manual_seed(0)
        made = (torch.randn(*shape, generator=generator, dtype=of_weights) for shape in ((6, 8), (4, 8), (4,)))
        return [leaf.requires_grad_() for leaf in made]

    def step():
        given = leaves()
        output = moe.router_gating_linear(*given, of_router)
        output.float().square().sum().backward()
        return [output.detach(), *(leaf.grad for leaf in given)]

    expected = step()  # stock's product in torch
    with shim.patched(only=[ID], require=[ID]):
        monkeypatch.setattr(cpp_extensions, "general_gemm", as_the_kernel)  # behind apply(): it is read at each call
        found = step()
    for mine, true in zip(found, expected, strict=True):
        assert mine.dtype == true.dtype
        assert (mine - true).float().norm() <= 1e-2 * true.float().norm()


@pytest.mark.skipif(MCORE[:2] != (0, 16) or TE < (2, 10), reason="0.16 with the batch-invariant mode, and TE 2.10")
def test_the_router_follows_the_batch_invariant_mode(monkeypatch):
    """Which replaces Transformer Engine's function when it is switched on, after apply(), and puts it back. Its
    kernels need a GPU, so what is called instead is a stand-in under upstream's name."""
    mode = importlib.import_module("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    moe, calls = importlib.import_module(GEMM[1][0]), []

    def of_the_mode(weight, inp, dtype=None, layout="TN", bias=None, **_):
        calls.append(layout)
        return [(inp @ weight.T).to(dtype)]

    monkeypatch.setattr(mode, "_te_general_gemm_patched", of_the_mode)
    weight, inp = torch.randn(4, 8), torch.randn(3, 8)
    with shim.patched(only=[ID], require=[ID]):
        mode._te_patch_for_batch_invariant()
        try:
            found = moe.router_gating_linear(inp, weight, None, torch.float32)
        finally:
            mode._te_unpatch_for_batch_invariant()
        assert calls == ["TN"] and torch.equal(found, inp @ weight.T)
        with pytest.raises(testing.CompiledOpError):
            moe.router_gating_linear(inp, weight, None, torch.float32)


@needs_it
@pytest.mark.skipif(TE < (2, 3), reason="stock has it")
def test_the_split_is_read_at_each_call(monkeypatch):
    utils, calls = importlib.import_module("transformer_engine.pytorch.utils"), []

    class Other:
        apply = staticmethod(lambda *args: calls.append(args))

    with shim.patched(only=[ID], require=[ID]):
        monkeypatch.setattr(utils, "SplitAlongDim", Other)
        for module, name in SPLIT:
            vars(importlib.import_module(module))[name](torch.ones(2), 0, [1, 1])
    assert len(calls) == 2


@pytest.mark.skipif(MCORE < (0, 14) or TE >= (2, 3), reason="this pair has get_dummy_wgrad")
def test_a_placeholder_of_a_gradient_is_made_once():
    layers = importlib.import_module(LAYERS)
    assert not layers.HAVE_TE
    with shim.patched(only=[ID], require=[ID]):
        assert layers.HAVE_TE
        first = layers.get_dummy_wgrad([2, 3], torch.bfloat16, zero=True)
        assert (first.shape, first.dtype, first.abs().sum()) == ((2, 3), torch.bfloat16, 0)
        assert layers.get_dummy_wgrad([2, 3], torch.bfloat16).data_ptr() == first.data_ptr()
        assert layers.get_dummy_wgrad([3, 2], torch.bfloat16).data_ptr() != first.data_ptr()
        assert layers.get_dummy_wgrad([2, 3], torch.float32).dtype == torch.float32
    assert not layers.HAVE_TE and not hasattr(layers, "get_dummy_wgrad")


@pytest.mark.skipif(MCORE < (0, 17), reason="earlier releases import what every Transformer Engine has")
def test_the_norm_of_gradients_is_that_of_transformer_engine(monkeypatch):
    """One missing name takes none of its neighbours with it. The kernels are stand-ins that ask for their arguments."""
    clip = importlib.import_module(CLIP)
    lost = TE < (2, 14)
    local = importlib.import_module("megatron.core.utils").local_multi_tensor_applier
    assert (clip.multi_tensor_applier is local) == lost
    if not lost:
        return
    optimizers, calls = importlib.import_module("transformer_engine.pytorch.optimizers"), []

    def norm(chunk_size, noop_flag, tensor_lists, per_tensor):
        calls.append("norm")
        return torch.stack([t.norm() for t in tensor_lists[0]]).norm().view(1), None

    def scale(chunk_size, noop_flag, tensor_lists, factor):
        calls.append("scale")
        for source, target in zip(*tensor_lists, strict=True):
            target.copy_(source * factor)

    applier = optimizers.multi_tensor_applier

    def counting(*args):
        calls.append("applier")
        return applier(*args)

    monkeypatch.setattr(torch.Tensor, "type", lambda self: "torch.cuda.FloatTensor")
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))]
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    with testing.layout_initialised(Layout()), shim.patched(only=[ID], require=[ID]):
        assert importlib.import_module("megatron.core.utils").local_multi_tensor_applier is local
        for name, stand_in in (("l2norm", norm), ("scale", scale), ("applier", counting)):
            monkeypatch.setattr(optimizers, f"multi_tensor_{name}", stand_in)  # behind apply(): read at each call
        group = importlib.import_module("megatron.core.parallel_state").get_data_parallel_group()
        total = clip.get_grad_norm_fp32([weight.grad for weight in weights], grad_stats_parallel_group=group)
        assert total == pytest.approx(28**0.5)
        clip.clip_grad_by_total_norm_fp32(weights, 1.0, total)
    assert calls == ["applier", "norm", "applier", "scale"]
    assert weights[0].grad[0] == pytest.approx(2 / 28**0.5, rel=1e-5)
    assert clip.multi_tensor_applier is local


lacks_the_method = TE in ((2, 15), (2, 16))


def test_the_flag_of_weight_updates_can_be_set():
    """megatron-core calls the method when it captures and replays CUDA graphs."""
    name = "set_skip_fp8_weight_update_tensor"
    assert hasattr(FP8GlobalStateManager, name) != lacks_the_method
    with shim.patched(only=[SKIP]) as report:
        right = "not-needed" if TE < (2, 15) else "upstream"
        assert report[SKIP].state == ("applied" if lacks_the_method else right), str(report)
        if not lacks_the_method:
            return
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
        flag = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        assert (flag.dtype, flag.tolist()) == (torch.float32, [1.0])
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
        assert FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor is flag
        assert flag.tolist() == [0.0]
        FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor = None
    assert not hasattr(FP8GlobalStateManager, name)
