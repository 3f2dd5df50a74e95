"""Megatron-Bridge's own workarounds beside shim: for fp32 copies of an offloaded optimizer, and for YaRN."""

import contextlib
from types import SimpleNamespace

import trainers

import shim
from shim import testing


def tell(order):
    """order: "stock", or when shim is applied, "first" or "late": before or after the package puts its functions in."""
    if order == "first":
        shim.apply()
    import bridge_on_cpu  # noqa: F401 - what its package needs here
    from megatron.bridge.models import gpt_provider  # noqa: F401 - puts its function in
    from megatron.bridge.training.optim import sync_hybrid_device_optimizer_fp32_master_copies as synchronise

    if order == "late":
        shim.apply()
    trainers.join()
    on_cpu = testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), testing.multi_tensor_ops()
    with contextlib.ExitStack() as stack:
        for each in (*on_cpu, testing.layout_initialised(testing.Layout())):
            stack.enter_context(each)
        told = {
            "weights": {name: after_weights(use) for name, use in (("alone", None), ("beside", synchronise))},
            "resume": {name: after_a_resume(use) for name, use in (("alone", None), ("beside", synchronise))},
        }
    told["YaRN"] = factors()
    status = shim.status()
    told["states"] = {name: status[name].state for name in ("cpu-offloaded-optimizer", "yarn-none-fields")}
    return told


def after_weights(synchronise):
    """Weights that differ after training from those of an optimizer made after the weights were loaded."""
    from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import STEPS, Training, differing, offloading

    with offloading():
        whole, start = Training(aware=False), Training(aware=False, seed=9)
        start.model.load_state_dict(whole.model.state_dict())
        start.optimizer.reload_model_params()
        if synchronise is not None:
            assert synchronise(start.optimizer)
        return differing(start.train(0, STEPS).weights(), whole.train(0, STEPS).weights())


def after_a_resume(synchronise):
    """Weights that differ from an uninterrupted training, or what raises."""
    import tempfile

    from shim.patches.megatron_core.cpu_offloaded_optimizer.proof import (
        SAVED_AT,
        STEPS,
        Training,
        differing,
        offloading,
    )

    with offloading(), tempfile.TemporaryDirectory() as directory:
        whole = Training(aware=False).train(0, SAVED_AT)
        whole.save_files(directory)
        try:
            resumed = Training(aware=False, seed=9).load_files(directory)
        except KeyError as error:
            return f"KeyError: {error}"[:40]
        if synchronise is not None:
            assert synchronise(resumed.optimizer)
        return differing(resumed.train(SAVED_AT, STEPS).weights(), whole.train(SAVED_AT, STEPS).weights())


def factors():
    """Of a model without YaRN, and of one with a scaling of 4 and no other field."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    names = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
    return [
        yarn._yarn_get_concentration_factor_from_config(SimpleNamespace(**dict(zip(names, values, strict=True))))
        for values in ((None, None, None), (4.0, None, None))
    ]
