"""The steps that benchmarks/gpu_steps.py --te measures run with all patches. They have not run on a GPU yet."""

import contextlib

import device_steps
import pytest
import te_steps
import torch

import shim

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", te_steps.STEPS)
def test_a_step_has_gradients(name):
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for

    ids = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    with device_steps.warmed(te_steps.STEPS[name], ids, contextlib.nullcontext) as run:
        gradients = run()
    assert gradients
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
