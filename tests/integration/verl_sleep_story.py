"""verl's own functions that move a model and its optimizer to the host, beside shim.offload, on the pretended CUDA."""

from __future__ import annotations

from collections import Counter

import sleep_cases
from sleep_cases import Case

from shim._offload.found import Found
from shim.testing import Ranks

CASES = {
    "distributed": Case("distributed"),
    "LoRA": Case("distributed", lora=True),
    "precision-aware": Case("aware"),
    "plain": Case("plain"),
}


def verls(training):
    from verl.utils import megatron_utils as verl

    verl.offload_megatron_model_to_cpu([training.model])
    verl.offload_megatron_optimizer(training.optimizer)

    def restore():
        verl.load_megatron_model_to_gpu([training.model])
        verl.load_megatron_optimizer(training.optimizer)

    return restore


def shims(training):
    return sleep_cases.offloaded(training).restore


ORDERS = {"verl": (verls,), "shim": (shims,), "verl, shim": (verls, shims), "shim, verl": (shims, verls)}


def told(case, movers):
    """Bytes before, asleep and after, what stays by kind, and how many values differ; or the error."""
    left = Counter()

    def sleep(training):
        restores = [mover(training) for mover in movers]
        for piece in Found({"": training.model}, training.optimizer).pieces.values():
            left.update({kind: size for (kind, _), size in piece.shares().items()})

        def restore():
            for each in reversed(restores):
                each()

        return sleep_cases.others_handle(restore)

    try:
        slept = sleep_cases.slept(case, sleep)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {"bytes": slept.bytes, "left": dict(left), "differ": len(slept.differ)}


def tell():
    with Ranks(1) as ranks:
        return {
            f"{name}: {order}": ranks.run(told, case, movers)[0]
            for name, case in CASES.items()
            for order, movers in ORDERS.items()
        }
