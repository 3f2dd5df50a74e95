"""Proofs of mtp-stage-embeddings."""

from __future__ import annotations

from typing import Any

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, LacksFeatureError, proof

STAGES = [["embedding", "decoder"], ["decoder", "mtp"], ["loss"]]


def model_of_stage(stages: list[list[str]], **options: Any) -> Any:
    """The model of this rank, with DistributedDataParallel around it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model: Any = testing.build_gpt(
        mtp_num_layers=1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_model_parallel_layout=[list(stage) for stage in stages],
        **options,
    )
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def summed(tied: bool) -> dict[str, float]:
    """The gradients of this stage's embeddings and output layer, which were 1, 2 and 3 on the stages before the sum."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    whole = model_of_stage(STAGES, share_embeddings_and_output_weights=tied)
    found = {}
    for weight in whole.module.parameters():
        weight.main_grad.fill_(parallel_state.get_pipeline_model_parallel_rank() + 1.0)
    finalize_model_grads([whole])
    for name, weight in whole.module.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            found[name] = float(weight.main_grad.mean())
    return found


def on_three_stages(here: Here, tied: bool) -> list[dict[str, float]]:
    """What each rank has `summed`."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    if not hasattr(ModelParallelConfig, "mtp_standalone"):
        raise LacksFeatureError("this release has MTP on the last stage only")
    found: list[dict[str, float]] = here.run(summed, tied, layout=Layout(pp=3))
    return found


@proof("gradients off by {:.0f}", right="embeddings get the sum of their copies, an output layer its own", ranks=3)
def gradients_of_embeddings_on_three_stages(here: Here) -> float:
    """Embeddings of MTP on another stage than the last get no sum of gradients, and an untied output layer gets one.

    To reproduce: on three pipeline stages build a GPTModel with `mtp_num_layers=1`, untied embeddings, and the
    `pipeline_model_parallel_layout` embedding+decoder, decoder+mtp, loss. Fill the gradients with 1, 2 and 3 on the
    first, second and third stage, and call `finalize_model_grads`.

    The embeddings of the first stage get 4, those of MTP stay at 2, and the output layer gets 4. Right are 3, 3 and 3:
    the sum of both copies, and the output layer's own. From 0.16 to 0.19.
    """
    ranks = on_three_stages(here, tied=False)
    return max(abs(value - 3.0) for found in ranks for value in found.values())


@proof("gradients off by {:.0f}", right="all copies get the sum", ranks=3)
def gradients_of_tied_embeddings_on_three_stages(here: Here) -> float:
    """Tied embeddings of MTP on another stage than the last get no sum of gradients, and give none to the others.

    To reproduce: as with untied embeddings. The embeddings of the first stage and the output layer get 4, those of MTP
    stay at 2. Right is 6 on each, the sum of the three copies. From 0.16 to 0.19.
    """
    ranks = on_three_stages(here, tied=True)
    return max(abs(value - 6.0) for found in ranks for value in found.values())
