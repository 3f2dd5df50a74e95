"""What one process with verl has to tell: its real functions patch megatron-core, and shim comes before or after them.

Orders: "verl alone" (no shim), "shim first", "verl first". Only what needs a GPU is a stand-in: the stream that verl's
backward records tensors on, and the norm that saves its output.
"""

import contextlib
import dataclasses
import io
import site
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import leftovers
import torch
import trainers
from norm_that_keeps_its_output import KeepsItsOutput

import shim
from shim import testing

PACKAGES = ("megatron", "transformer_engine", "verl")
_SHIM = Path(shim.__file__).resolve().parents[1]
_OURS = [f"{_SHIM / 'shim'}/_", str(_SHIM / "patches")]

# Lengths and alignment.
ROWS = {"plain": ((6, 8, 4), 1), "padded": ((5, 7, 4), 4)}
METHODS = {
    "none": {},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}
MODELS = {"whole": {}, "LoRA": {"lora": True}, "detached": {"detach": True}}


def start_verl(replay=False):
    """As a worker does: it imports the engine, whose construction patches megatron-core on a machine with CUDA."""
    import verl.workers.engine.megatron.transformer_impl as engine
    from verl.models.mcore.patch import apply_patch_megatron_recomputation_backward

    if replay:
        with contextlib.redirect_stdout(io.StringIO()):
            engine.apply_router_replay_patch()
    apply_patch_megatron_recomputation_backward()


@contextlib.contextmanager
def on_cpu():
    """megatron-core on CPU, tensor-parallel over all ranks, and what only a tensor on a GPU has."""
    trainers.join()
    layout = testing.Layout(tp=torch.distributed.get_world_size())
    record = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda self, stream: None
    try:
        with testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), testing.layout_initialised(layout):
            yield
    finally:
        torch.Tensor.record_stream = record


# Models


def build(method="none", lora=False, norm=torch.nn.LayerNorm, **verl):
    """A GPTModel of the release as verl's engine leaves it. `verl`: see patched_by_verl."""
    model = testing.build_gpt(mtp_num_layers=2, **METHODS[method])
    # Beside Transformer Engine the block takes its norm, which needs a GPU.
    model.decoder.final_layernorm = norm(model.config.hidden_size)
    if lora:
        testing.add_lora(model)
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return patched_by_verl(model, **verl)


def patched_by_verl(model, detach=False, gives_loss=True, own_recompute=True):
    """Let verl bind its methods on the model and its MTP layers.

    gives_loss: the model returns the main loss, as a model of megatron-core does, and not logits, as verl's does.
    own_recompute: False takes verl's recompute of MTP layers off again, by verl's own function.
    """
    from verl.utils.megatron_utils import patch_engine_mtp

    with contextlib.redirect_stdout(io.StringIO()):
        patch_engine_mtp([model], SimpleNamespace(mtp=SimpleNamespace(detach_encoder=detach)))
        if not own_recompute:
            import_module("verl.models.mcore.mtp_patch").unpatch_mtp_layer_checkpointed_forward(model)
    if gives_loss:
        model.register_forward_hook(_main_loss, with_kwargs=True)
    return model


def has_own_recompute(model):
    return any("_checkpointed_forward" in vars(layer) for layer in model.mtp.layers)


def _main_loss(model, args, kwargs, logits):
    return model.compute_language_model_loss(kwargs["labels"], logits.transpose(0, 1).contiguous())


class NormThatKeepsItsOutput(torch.nn.Module):
    """Stands in for a fused norm on a GPU."""

    def __init__(self, size):
        super().__init__()

    def forward(self, hidden):
        return KeepsItsOutput.apply(hidden)


# Steps


def row_of(kind):
    lengths, align = ROWS[kind]
    return testing.pack(testing.random_sequences(lengths), align=align)


def told(act):
    """What `act` returns, or its error in words: a trainer's error is a fact."""
    try:
        return act()
    except (AssertionError, TypeError, RuntimeError, shim.ShimError) as error:
        return f"{type(error).__name__}: {error}"


def packed_error(kind, method, **options):
    """The largest difference between a packed row and its sequences alone, unpacked and without recompute."""
    row = row_of(kind)
    packed, alone = testing.run_packed(build(method, **options), row), testing.run_alone(build(**options), row)
    return testing.worst(testing.differences(packed, alone))


def same_bits(kind, method, **options):
    """Whether recompute changes nothing, to the last bit."""
    one, other = (testing.run_packed(build(chosen, **options), row_of(kind)) for chosen in ("none", method))
    pairs = [(one.main, other.main), (one.logged, other.logged), *zip(one.mtp, other.mtp, strict=True)]
    pairs += [(one.grads[name], other.grads.get(name)) for name in one.grads]
    return one.grads.keys() == other.grads.keys() and all(torch.equal(*pair) for pair in pairs)


def freed(method="uniform", **options):
    """How many storages verl's backward frees: of tensors that MTP layers get, and of inputs of decoder layers."""
    model = build(method, **options)
    of_mtp, of_decoder = {}, {}

    def remember(found, module, args, kwargs):
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        found.update((id(storage), storage) for storage in (tensor.untyped_storage() for tensor in tensors))

    for layers, found in ((model.mtp.layers, of_mtp), (model.decoder.layers, of_decoder)):
        for layer in layers:
            layer.register_forward_pre_hook(lambda *call, found=found: remember(found, *call), with_kwargs=True)
    for layer in model.mtp.layers:  # what it makes of its embeddings is an input of the checkpoint too
        norm = layer.enorm
        norm.register_forward_pre_hook(lambda *call: remember(of_mtp, *call), with_kwargs=True)
    testing.run_packed(model, row_of("plain"))
    counts = {"mtp": of_mtp.values(), "decoder": of_decoder.values()}
    return {name: sum(storage.size() == 0 for storage in storages) for name, storages in counts.items()}


def error_of_verls_rows(bucket=None, method="none"):
    """verl's own forward, with its own collator and loss, against the sequences alone. `bucket`: pads the row to it."""
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine
    from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits

    prompt, sequences = 2, testing.random_sequences((6, 8, 4))
    masks = [torch.ones(len(sequence) - 1) for sequence in sequences]
    for mask in masks:
        mask[: prompt - 1] = mask[-1] = 0  # the first token is not predicted, and nothing follows the last one
    ids = _nested([sequence[:-1] for sequence in sequences])
    model = build(method, gives_loss=False)
    found = gptmodel_forward_model_engine(
        model,
        ids,
        {},
        logits_processor=lambda logits, label: {
            "log_probs": vocab_parallel_log_probs_from_logits(logits.clone(), label)
        },
        logits_processor_args={"label": ids, "loss_mask": _nested([torch.ones(len(mask) - prompt) for mask in masks])},
        mtp_enable_train=True,
        pad_to_length_bucket=bucket,
    )
    counted = torch.cat(masks)
    (-(found["log_probs"].values() * counted).sum() / counted.sum()).backward()
    alone = testing.run_alone(build(), testing.pack(sequences, loss_masks=masks))
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return testing.worst(testing.differences(dataclasses.replace(alone, grads=grads), alone))


def _nested(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


def carried():
    """What a checkpointed function sees in its forward pass and in its recompute by verl's backward, outside of both:
    the overridden value of a config's field, and whether the FP8 region is open."""
    import transformer_engine.pytorch as te
    from megatron.core import tensor_parallel
    from transformer_engine.common import recipe as recipes

    manager = te.fp8.FP8GlobalStateManager
    config, seen = SimpleNamespace(field="plain"), {"override": [], "region": []}
    x = torch.ones(2, requires_grad=True)

    def run(value):
        seen["override"].append(config.field)
        seen["region"].append(manager.is_fp8_enabled())
        return value * 2 + len(config.field)

    with shim.config_override(config, field="overridden"):
        tensor_parallel.checkpoint(run, False, x * 1).sum().backward()
        loss = tensor_parallel.checkpoint(run, False, x * 1).sum()
    loss.backward()
    inside = seen["override"]
    region = te.autocast if hasattr(te, "autocast") else te.fp8_autocast
    name = "recipe" if hasattr(te, "autocast") else "fp8_recipe"
    seen["region"] = []
    with region(enabled=True, **{name: recipes.DelayedScaling()}):
        loss = tensor_parallel.checkpoint(run, False, x * 1).sum()
    loss.backward()
    return {"override": inside[:4], "region": seen["region"]}


# What shim says


def checked(model):
    """What check(model) raises, and the states with what others do."""
    raised = None
    try:
        report = shim.check(model)
    except shim.ShimError as error:
        raised, report = f"{type(error).__name__}: {error}", shim.status()
    states = {p.id: [p.state, p.reason, list(p.others)] for p in report.patches.values()}
    return {"raised": raised, "states": states, "digest": report.digest}


def tell(order):
    """Everything of one process, see the tests."""
    if order == "shim first":
        shim.apply()
    start_verl()
    story = {}
    with on_cpu():
        build("uniform")
        before = leftovers.reachable(PACKAGES)
        if order == "verl first":
            shim.apply()
        cases = [(model, kind, method) for model in MODELS for kind in ROWS for method in METHODS]
        story["error"] = {" ".join(c): told(lambda c=c: packed_error(*c[1:], **MODELS[c[0]])) for c in cases}
        recomputed = [case for case in cases if case[2] != "none"]
        story["same"] = {" ".join(c): told(lambda c=c: same_bits(*c[1:], **MODELS[c[0]])) for c in recomputed}
        story["verl's rows"] = {str(b): told(lambda b=b: error_of_verls_rows(b, "uniform")) for b in (None, 16)}
        story["own recompute"] = has_own_recompute(build())
        story["freed"] = told(freed)
        # A freed output of the norm ends the process, so verl's own recompute is taken off where it frees.
        safe = {"own_recompute": False, "norm": NormThatKeepsItsOutput}
        story["freed without it"] = told(lambda: freed(**safe))
        story["same without it"] = {m: told(lambda m=m: same_bits("plain", m, **safe)) for m in ("uniform", "block")}
        if order != "verl alone":
            story["carried"] = carried()
            story["checked"] = checked(build("uniform"))
            story["checked without it"] = checked(build("uniform", own_recompute=False))
            shim.revert()
            after = leftovers.reachable(PACKAGES)
            story["left"] = (
                leftovers.made_by(after, _OURS) if order == "shim first" else leftovers.changed(before, after)
            )
    return story


def tell_edited():
    """Of a copy of verl without the lines that docs/trainers.yaml says can go. Nothing here applies shim: it does."""
    start_verl()
    engine = sys.modules["verl.workers.engine.megatron.transformer_impl"]
    story = {"of": engine.__file__}
    with on_cpu():
        cases = [(model, kind, method) for model in MODELS for kind in ROWS for method in METHODS]
        story["error"] = {" ".join(c): told(lambda c=c: packed_error(*c[1:], **MODELS[c[0]])) for c in cases}
        recomputed = [case for case in cases if case[2] != "none"]
        story["same"] = {" ".join(c): told(lambda c=c: same_bits(*c[1:], **MODELS[c[0]])) for c in recomputed}
        story["freed"] = told(freed)
        story["checked"] = checked(build("uniform"))
    return story


def tell_of_classes(order):
    """verl's patches of whole classes: of GPTModel._postprocess (on NPUs), of MLA (up to 0.16.1), of MoE's router."""
    if order == "shim first":
        shim.apply()
    start_verl(replay=True)
    patches = import_module("verl.models.mcore.patch")
    patches.apply_mtp_inference_patch()
    patches.apply_patch()
    with on_cpu():
        model = testing.build_gpt(mtp_num_layers=2)
        before = leftovers.reachable(PACKAGES)
        if order == "verl first":
            shim.apply()
        model.decoder.final_layernorm = torch.nn.LayerNorm(model.config.hidden_size)
        row = row_of("padded")
        pair = testing.run_packed(model, row), testing.run_alone(model, row)
        story = {"error": testing.worst(testing.differences(*pair)), "checked": checked(model)}
        shim.revert()
        after = leftovers.reachable(PACKAGES)
        story["left"] = leftovers.made_by(after, _OURS) if order == "shim first" else leftovers.changed(before, after)
        return story


def tell_on_a_rank(order):
    """One rank of a tensor-parallel model."""
    if order == "shim first":
        shim.apply()
    start_verl()
    with on_cpu():
        if order == "verl first":
            shim.apply()
        errors = {f"{kind} {method}": packed_error(kind, method) for kind in ROWS for method in METHODS}
        return {"error": errors, "checked": checked(build("uniform"))}


def tell_where(place):
    """A place where verl imports what its user names: here a module that applies shim."""
    if place == "plugin":
        with tempfile.TemporaryDirectory() as installed:
            metadata = Path(installed, "applies_shim-1.dist-info")
            metadata.mkdir()
            (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: applies-shim\nVersion: 1\n")
            (metadata / "entry_points.txt").write_text("[verl.plugins]\nshim = applies_shim\n")
            site.addsitedir(installed)
            import_module("verl")
    else:
        import_module("verl")
    told = {"megatron": "megatron.core" in sys.modules, "applied": "applies_shim" in sys.modules}
    start_verl()
    if place == "external_lib":
        import_module("verl.utils.import_utils").import_external_libs("applies_shim")
    with on_cpu():
        return told | {"error": packed_error("padded", "none"), "checked": checked(build())}
