"""Embeddings of multi-token prediction on another pipeline stage than the last.

What is wrong (0.16 to 0.20): a pipeline_model_parallel_layout may put the layers of multi-token prediction (MTP) on
another stage than the last. That stage has a copy of the embeddings, which has to begin with the same values and to get
the sum of both gradients. The sum is taken over the embedding group. By default that is the first and the last stage,
because parallel_state makes it before it knows a layout.
- The copy begins with zeros unless a checkpoint is loaded, gets the gradient of MTP alone, and drifts apart.
- If embeddings and output layer are not tied, the last stage has no copy. Its output layer is taken for one: both begin
  with the sum of their values, and both get the sum of their gradients.
- If a caller puts the stage of MTP into the group, its virtual stages without a copy are asked for theirs, and raise.
A caller that passes get_embedding_ranks to initialize_model_parallel is spared the first two, as megatron.training is.

The patch lets the first stage and that of MTP send each other what they lack: the values when the model sets its
embeddings up, and in each step the gradient of the copy to the first stage, and the sum back, in parts of 16 MiB over
the pipeline group. A tied last stage takes part by the embedding group, as on stock. An untied one is left out. A model
whose layout has MTP on the last stage, and one whose embedding group has the stage of MTP, send nothing more.

Not covered: the first values of a model that was built before shim.apply(), groups of a caller that does not use
parallel_state, and Megatron-FSDP.

Upstream: open. megatron.training passes get_embedding_ranks from a script (pretrain_gpt.py).

Delete when: megatron-core itself puts the stage of MTP into the embedding group of a layout, and the releases before
that are not supported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shim.patches._arguments import Function, argument

MODULE = "megatron.core.models.common.language_module.language_module:LanguageModule."
SETUP = MODULE + "setup_embeddings_and_output_layer"
IS_IN_GROUP = MODULE + "_is_in_embd_group"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
ALLREDUCE = f"{FINALIZE}:_allreduce_word_embedding_grads"
PARALLEL_STATE = "megatron.core.parallel_state"
PART = 2**24  # bytes that are sent at once


def _stage_of_mtp(model: Any) -> int | None:
    """The pipeline rank of MTP if it is not the last; else None."""
    layout = getattr(model.config, "pipeline_model_parallel_layout", None)
    if not model.config.mtp_num_layers or layout is None:
        return None
    for stage, parts in enumerate(layout.layout[:-1]):
        if any(layer.name == "mtp" for part in parts for layer in part):
            return stage
    return None


def _lacks_a_sum(model: Any) -> bool:
    """Whether MTP is on another stage than the last, and the embedding group is that of the first and the last one."""
    stage = _stage_of_mtp(model)
    if stage is None or not dist.is_initialized() or (stage == 0 and model.share_embeddings_and_output_weights):
        return False
    state = sys.modules[PARALLEL_STATE]
    group = state.get_embedding_group(check_initialized=False)
    if model.pp_group is not state.get_pipeline_model_parallel_group(check_initialized=False):
        return False
    if model.embd_group is not group:
        return False
    ranks = dist.get_process_group_ranks(model.pp_group)
    # Stages between the first and the last know no group by default.
    return group is None or dist.get_process_group_ranks(group) == [ranks[0], ranks[-1]]


def _holds_a_copy(model: Any) -> bool:
    return bool(
        model.pre_process or model.mtp_process or (model.post_process and model.share_embeddings_and_output_weights)
    )


def _send(tensor: torch.Tensor, model: Any, *, back: bool, use: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """From the stage of MTP to the first one, or back. The receiver calls use(its part, what it got) for each part."""
    stage = _stage_of_mtp(model)
    if not stage:
        return  # on the first stage both are the same weight
    ranks = dist.get_process_group_ranks(model.pp_group)
    first, predicting = ranks[0], ranks[stage]
    source, target = (first, predicting) if back else (predicting, first)
    for part in tensor.view(-1).split(PART // tensor.element_size()):
        if dist.get_rank() == source:
            dist.send(part, target, group=model.pp_group)
        else:
            got = torch.empty_like(part)
            dist.recv(got, source, group=model.pp_group)
            use(part, got)


def _setup(original: Function) -> Function:
    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if (
            _lacks_a_sum(self)
            and (self.pre_process or self.mtp_process)
            and not getattr(self.config, "init_model_with_meta_device", False)
        ):
            weight = self.shared_embedding_or_output_weight()
            weight.data = weight.data.cuda()  # as stock does, because some groups send nothing else
            _send(weight.data, self, back=True, use=torch.Tensor.copy_)
        return found

    return setup_embeddings_and_output_layer


def _is_in_group(original: Function) -> Function:
    @functools.wraps(original)
    def _is_in_embd_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Of the virtual stages of a rank one holds a copy, and an untied last stage none.
        no_copy = not _holds_a_copy(self) or (_lacks_a_sum(self) and not self.share_embeddings_and_output_weights)
        if _stage_of_mtp(self) is not None and no_copy:
            return False
        return original(self, *args, **kwargs)

    return _is_in_embd_group


def _language_model(chunk: Any) -> Any:
    """What is inside of the wrappers of a chunk: a LanguageModule, or None."""
    while chunk is not None and not hasattr(chunk, "embd_group"):
        chunk = getattr(chunk, "module", None)
    return chunk


def _allreduce(original: Function) -> Function:
    chunks_of = argument(original, "model")

    @functools.wraps(original)
    def _allreduce_word_embedding_grads(*args: Any, **kwargs: Any) -> Any:
        chunks = chunks_of(args, kwargs)
        models = [_language_model(chunk) for chunk in chunks]
        is_fsdp = getattr(getattr(chunks[0], "ddp_config", None), "use_megatron_fsdp", False)
        if None in models or is_fsdp or not _lacks_a_sum(models[0]):
            return original(*args, **kwargs)
        model = next((model for model in models if model.pre_process or model.mtp_process), None)
        gradient = None if model is None else _gradient(model.shared_embedding_or_output_weight())
        if gradient is not None:  # None if it is frozen, or on another stage
            _send(gradient, model, back=False, use=torch.Tensor.add_)
        found = original(*args, **kwargs) if models[0].share_embeddings_and_output_weights else None
        if gradient is not None:
            _send(gradient, model, back=True, use=torch.Tensor.copy_)
        return found

    return _allreduce_word_embedding_grads


def _gradient(weight: Any) -> torch.Tensor | None:
    gradient: torch.Tensor | None = getattr(weight, sys.modules[FINALIZE]._get_main_grad_attr(weight), None)
    return gradient


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {SETUP: _setup, IS_IN_GROUP: _is_in_group, ALLREDUCE: _allreduce}
