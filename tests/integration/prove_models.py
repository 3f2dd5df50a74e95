"""Functions as a user gives them to `shim prove --model`: models of mcore-bridge and of verl, small and on CPU.

What each trainer does to megatron-core is done when its model is built first. `tell` runs the generic proofs on one.
"""

import contextlib
import functools

import torch

import shim
from shim import testing
from shim.testing.generic import generic_proofs, overrides_of
from shim.testing.proof import Here, measure

_HELD = contextlib.ExitStack()  # until the process ends


@functools.cache
def start(trainer):
    """Import the trainer, with its patches, and what stands in for a GPU in this process."""
    from te_on_cpu import te_modules_on_cpu

    _HELD.enter_context(testing.te_cuda_stand_ins())
    _HELD.enter_context(te_modules_on_cpu())
    if trainer == "verl":
        from verl_story import start_verl

        torch.Tensor.record_stream = lambda self, stream: None  # verl's backward needs it, and a stream
        start_verl()
    else:
        from mcore_bridge_story import import_all

        import_all()


def bridge_build(**overrides):
    """mcore-bridge's dense model with multi-token prediction, by its own loader."""
    start("mcore-bridge")
    from bridge_models import build

    return build(float_masks=False, **{"mtp_num_layers": 1, **overrides})


def bridge_lora_build(**overrides):
    """The same with its own LoRA layers, and all else frozen."""
    from bridge_models import with_lora

    return with_lora(bridge_build(**overrides))


def bridge_lora_without_fc1_build(**overrides):
    from bridge_models import LINEAR, with_lora

    return with_lora(bridge_build(**overrides), names=[name for name in LINEAR if name != "linear_fc1"])


def verl_build(**overrides):
    """A GPTModel of the release with the methods that verl's engine binds on it and on its layers of MTP."""
    start("verl")
    from verl_story import patched_by_verl

    model = testing.build_gpt(mtp_num_layers=2, **overrides)
    # Beside Transformer Engine the block takes its norm, which needs a GPU.
    model.decoder.final_layernorm = torch.nn.LayerNorm(model.config.hidden_size)
    return patched_by_verl(model, gives_loss=False)


def tell(name, order):
    """Of each proof: what `measure` says. And what shim says of the trainer's overrides, by patch.

    order: "stock" (no shim), "shim first" or "trainer first".
    """
    build = globals()[name]
    if order == "shim first":
        shim.apply()
    start("verl" if name.startswith("verl") else "mcore-bridge")
    if order == "trainer first":
        shim.apply()
    told = {}
    for found in generic_proofs(build):
        side = measure(found, Here(world=found.ranks))
        told[found.name] = {"state": side.state, "text": side.text, "seconds": side.seconds, "details": side.details}
    overrides = Here().run(_overrides, build)[0] if order != "stock" else []
    return {"proofs": told, "overrides": overrides}


def _overrides(build):
    return overrides_of(build())
