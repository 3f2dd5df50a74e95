"""What one process with Liger has to tell: its real patches of megatron-core, and shim before or after them.

Liger's kernels run in Triton's interpreter, which TRITON_INTERPRET=1 turns on, on CPU tensors.
"""

import contextlib

import leftovers
import trainers
from verl_story import checked

import shim
from shim import testing

PACKAGES = ("megatron",)
OURS = ("chunked-logprob", "label-smoothing")


def import_all():
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model  # noqa: F401


def patch(cross_entropy):
    from liger_kernel.megatron import apply_liger_kernel_to_megatron

    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=cross_entropy, swiglu=True)


@contextlib.contextmanager
def counted_calls():
    """How often the losses of shim's patch are computed inside."""
    from shim.patches.megatron_core import chunked_logprob

    calls, compute = [], chunked_logprob.token_losses
    chunked_logprob.token_losses = lambda *args, **kwargs: (calls.append(1), compute(*args, **kwargs))[1]
    try:
        yield calls
    finally:
        chunked_logprob.token_losses = compute


def losses(**options):
    row = testing.pack(testing.random_sequences((6, 8)))
    return testing.run_packed(testing.build_gpt(mtp_num_layers=None, **options), row)


def tell(order, cross_entropy):
    import_all()
    trainers.join()
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        stock = losses()  # the fused ones round every gradient to bf16
        before = leftovers.reachable(PACKAGES)
        if order == "shim first":
            shim.apply()
            bound = leftovers.reachable(PACKAGES)
        patch(cross_entropy)
        patched = leftovers.reachable(PACKAGES)
        if order == "liger first":
            bound = before
            shim.apply()
        with counted_calls() as calls:
            found = [losses(), losses(**fused)]
        story = {
            "error": [testing.worst(testing.differences(one, stock)) for one in found],
            "shim's calls": len(calls),
            "checked": checked(testing.build_gpt(mtp_num_layers=None)),
        }
        story["remedies"] = {id: shim.status()[id].remedy for id in OURS}
        shim.apply(exclude=OURS)
        story["excluded"] = checked(testing.build_gpt(mtp_num_layers=None))
        shim.revert()
        after = leftovers.reachable(PACKAGES)
        if order == "liger first":
            story["left"] = leftovers.changed(patched, after)
        else:
            ours = (shim.__path__[0] + "/_", shim.__path__[0].rpartition("/")[0] + "/patches")
            story["left"] = leftovers.made_by(after, ours)
        story["replaced"] = leftovers.changed(bound, patched)
    return story
