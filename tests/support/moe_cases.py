"""What the tests of the paged stash on real experts share: MoE models, the steps they train, and what was stashed.

Experts are a SequentialMLP, the only kind whose constructor needs no GPU. With a capacity factor every expert computes
in a buffer of as many rows, of which those without a token are what a stash can gain.
"""

import contextlib
from dataclasses import dataclass
from importlib import import_module

import megatron.core.transformer.moe.experts  # noqa: F401  the patch waits for it
import megatron.core.transformer.moe.moe_utils as moe_utils
import torch
from megatron.core import distributed

import shim
from shim import testing
from shim.patches.megatron_core.paged_stash import proof as paged_stash_proof
from shim.patches.megatron_core.paged_stash.proof import TOKENS, configs, flags  # noqa: F401  for the tests
from shim.patches.megatron_core.paged_stash.proof import loss_of as forward

ID, PATCH = "paged-stash", "shim.patches.megatron_core.paged_stash"
VERSION = tuple(int(part) for part in testing.release().split(".")[:3])
NOT_TOLD = VERSION < (0, 12, 1)  # which rows are padding
# An expert's buffer of 36 tokens has 36, 27, 18 or 14 rows, and its weights 40 and 32, or transposed 32 and 20: what
# were taken for the other would not have its number of rows.
HIDDEN, EXPERT = 32, 20
MODEL = {**paged_stash_proof.MODEL, "moe_ffn_hidden_size": EXPERT}
DROPLESS = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
BFLOAT16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
SIZES = ("page_size", "buffer_size_factor_cuda", "buffer_size_factor_cpu")
HOST_ONLY = {"buffer_size_factor_cuda": 0.0, "buffer_size_factor_cpu": 1.1}

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # looked up, and without Transformer Engine not there


def build(build_model=testing.build_gpt, **model):
    return build_model(**{**MODEL, **model})


def experts_of(model):
    """Every expert: layer by layer, in the order in which they run."""
    return [expert for layer in model.decoder.layers for expert in getattr(layer.mlp, "experts", layer).local_experts]


@dataclass
class Step:
    """What one step gave: the loss of each microbatch, and the gradient of each weight that has one."""

    losses: list
    grads: dict

    def __eq__(self, other):
        """To the last bit; two steps that trained nothing are not equal."""
        return (
            bool(self.grads)
            and self.grads.keys() == other.grads.keys()
            and all(torch.equal(self.grads[name], other.grads[name]) for name in self.grads)
            and all(map(torch.equal, self.losses, other.losses))
        )


def forget(model):
    """Have upstream's dispatchers drop the last probabilities that they saw, and so the graph of their microbatch."""
    with torch.no_grad():
        forward(model, 0)


def train(model, number=0, microbatches=2):
    """Step `number`, other tokens each: all microbatches forward, all backward, and what comes before an optimizer."""
    model.zero_grad()
    losses = [forward(model, 100 * number + microbatch) for microbatch in range(microbatches)]
    for loss in losses:
        loss.backward()
    finish(model)
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return Step([loss.detach() for loss in losses], grads)


def finish(model):
    """finalize_model_grads, which trainers call before they use gradients."""
    model.finish_grad_sync = lambda *args, **kwargs: None  # of the wrapper that trainers put around a model
    distributed.finalize_model_grads([model])


def statistics():
    return import_module(PATCH).statistics()


def pools():
    stashes = [of_settings for stash in import_module(PATCH).STASHES for of_settings in stash._all()]
    return [pool for stash in stashes for pool in stash.pools.values()]


@contextlib.contextmanager
def patched(**options):
    """The patch by itself, and its report."""
    with shim.patched(only=[ID], require=[ID], options={ID: options}) as report:
        assert report[ID].state == "applied", str(report)
        yield report


@contextlib.contextmanager
def stashing(*modules, **values):
    """The patch with a new stash, if it is applied already, and all flags set in the configs of these modules."""
    for stash in import_module(PATCH).STASHES:
        stash.__init__(stash.options)
    with flags(modules, **values):
        yield


@contextlib.contextmanager
def buffers(model):
    """(rows, rows with a token) of every expert's buffer, in the order in which they run."""
    found, hooks = [], contextlib.ExitStack()
    with hooks:
        for expert in experts_of(model):
            hook = expert.register_forward_pre_hook(
                lambda module, args: found.append((len(args[0]), int(args[1].count_nonzero())))
            )
            hooks.callback(hook.remove)
        yield found
