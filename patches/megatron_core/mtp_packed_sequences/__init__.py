"""Packed sequences (THD rows) in multi-token prediction.

What is wrong, since when:
- 0.12 to 0.15 refuse packed rows with an AssertionError, and under ``python -O`` train on tokens of the neighbouring
  sequence: the MTP gradient is off by 4e-2.
- 0.16 to 0.19 roll inside sequences but read cu_seqlens_q only, while attention and rope use the padded offsets: with
  padding between sequences the gradient is off by 9e-2. Without a loss mask, padding is trained on.
- up to 0.16 a row whose targets are all masked gives NaN, and labels=None (RL, inference) raises.
- 0.14 to 0.18 cannot recompute an MTP layer of a packed row.

The rule: cu_seqlens stay as they are. Inside each sequence tokens move left by one; the last valid position and the
padding become zero, and count neither in the loss nor in the number of tokens.

Upstream: Megatron-LM pull requests 6205 and 4494 (padding; open). Delete a variant when its releases are no longer
supported, and the patch when padding is respected upstream.

Context parallelism: a row may be cut over ranks, each sequence by zigzag (option partition="sequence", the default) or
the row as a whole (partition="row"). 0.12 and 0.13, which pass no group to the roll, get that of parallel_state, for
unpacked rows too. Each rank divides by its own count of targets, as upstream does; with option global_normalizer=True
it divides by the count of all ranks, from one all-reduce per step.

The roll itself is in shim.ops; this module wires it in, and _packed_step holds what the rolls of a step share. Up to
0.15 the row reaches the roll through a scope that belongs to the thread, because roll_tensor is not told of it;
whatever runs again in a recompute gets it through the recomputed function instead, since by then the scope is gone. The
expert all-to-all overlap path asserts on its own against packed rows, in a nested function that cannot be reached: it
stays unsupported.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, ones_like

from shim._errors import ShimError
from shim.ops.context_parallel_roll import PARTITIONS
from shim.patches._arguments import Function, add_parameters, argument, replacing
from shim.patches.megatron_core._mtp_checkpoint import checkpointed_forward, has_layout, layers_on_earlier_stages
from shim.patches.megatron_core._packed_step import (
    STEP,
    GlobalNormaliser,
    Scope,
    group_of,
    index_of,
    is_parallel,
    roll_row,
    roll_unpacked_on_rank,
    step_of,
    take_handed,
    unpacked_index,
    whole_row,
)

MTP = "megatron.core.transformer.multi_token_prediction:"
GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
MAMBA = "megatron.core.models.mamba.mamba_model:MambaModel."  # 0.17
HYBRID = "megatron.core.models.hybrid.hybrid_model:HybridModel."  # its name from 0.18
TRANSFORMER_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer."

Options = Mapping[str, Any]


# The roll


def _rolled(tensor: Tensor, roll: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A roll, and beside it the sum of the rolled tensor, made fit for what the step does with it."""
    rolled, count = roll(tensor) if STEP.normaliser is None else STEP.normaliser.roll(tensor, roll)
    # 0 / 0 would be NaN where every target is masked; one instead of zero divides a sum that is zero.
    return rolled, count + (count == 0) if STEP.counts_divide else count


def _roll_tensor(original: Function, options: Options) -> Function:
    """Up to 0.16: returns counts that can divide. Up to 0.15: rolls the row it is told of, else that of the step."""
    known = inspect.signature(original).parameters

    @functools.wraps(original)
    def roll_tensor(
        tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> Any:
        if tensor is None:
            return None, None
        row = STEP.row if packed_seq_params is None else packed_seq_params
        if "packed_seq_params" in known and packed_seq_params is not None:
            return original(tensor, shifts, dims, cp_group, packed_seq_params)  # to _roll_tensor_packed_seq

        def roll(tensor: Tensor) -> tuple[Tensor, Tensor]:
            if "packed_seq_params" not in known and row is not None:
                rolled = roll_row(tensor, shifts, dims, row, group_of(row, cp_group), options["partition"])
            elif "cp_group" in known:
                return original(tensor, shifts, dims, cp_group)
            elif is_parallel(STEP.group):
                rolled = roll_unpacked_on_rank(tensor, dims, STEP.group)
            else:
                return original(tensor, shifts, dims)
            return rolled, rolled.sum()

        return _rolled(tensor, roll)

    add_parameters(roll_tensor, original, "cp_group", "packed_seq_params")
    return roll_tensor


def _roll_tensor_packed_seq(original: Function, options: Options) -> Function:
    """From 0.16: takes the place of the loop over sequences and of its messages for each of them."""

    @functools.wraps(original)
    def _roll_tensor_packed_seq(
        tensor: Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None
    ) -> Any:
        group = group_of(packed_seq_params, cp_group)

        def roll(tensor: Tensor) -> tuple[Tensor, Tensor]:
            rolled = roll_row(tensor, shifts, dims, packed_seq_params, group, options["partition"])
            return rolled, rolled.sum()

        return _rolled(tensor, roll)

    return _roll_tensor_packed_seq


# The step


def _valid_tokens(like: Tensor, row: Any, group: Any, options: Options) -> Tensor:
    """The loss mask of a row for which none was given: ones in the dtype and shape of `like`, zero on padding."""
    if row is None:
        return ones_like(like)
    index = index_of(row, like.size(-1), like.device, group, options["partition"])
    return index.valid.to(like.dtype).expand_as(like)


def _index_for(mask: Tensor, row: Any, group: Any, options: Options) -> Any:
    """The index of the row, or of an unpacked one, which is a row of one sequence."""
    if row is not None:
        return index_of(row, mask.size(-1), mask.device, group, options["partition"])
    return unpacked_index(mask.size(-1), mask.device, group)


def _context_parallel_group() -> Any:
    """The group of 0.12 and 0.13, which pass none around."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group() if parallel_state.is_initialized() else None


def _block_forward(original: Function, options: Options) -> Function:
    """0.12 and 0.13: the block rolls everything and computes the loss."""
    row_of, labels_of = argument(original, "packed_seq_params"), argument(original, "labels")
    states_of, with_mask = argument(original, "hidden_states"), _with_mask(original, options)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = labels_of(args, kwargs)
        if labels is None:
            return states_of(args, kwargs)  # nothing to predict: the main model's states go on as they are
        row = row_of(args, kwargs)
        group = group_of(row, _context_parallel_group())
        with step_of(row, group=group, counts_divide=True):
            args, kwargs, normaliser = with_mask(args, kwargs, args[0].config, labels, row, group)
            with Scope(normaliser=normaliser):
                return original(*args, **kwargs)

    return forward


def _with_mask(original: Function, options: Options) -> Callable[..., tuple[Any, Any, Any]]:
    """Arguments of a call with a loss mask of our own where none was given, and the normaliser that knows the mask."""
    mask_of, put_mask = argument(original, "loss_mask"), replacing(original, "loss_mask")

    def prepare(args: Any, kwargs: Any, config: Any, like: Tensor, row: Any, group: Any, **kind: Any) -> Any:
        mask = mask_of(args, kwargs)
        if mask is None:
            mask = _valid_tokens(like, row, group, options)
            args, kwargs = put_mask(args, kwargs, mask)
        normaliser = None
        if options["global_normalizer"] and is_parallel(group):
            normaliser = GlobalNormaliser(mask, _index_for(mask, row, group, options), config, group, **kind)
            args, kwargs = put_mask(args, kwargs, normaliser.mask)
        return args, kwargs, normaliser

    return prepare


def _postprocess_without_labels(original: Function, options: Options) -> Function:
    """0.14 to 0.16: the model computes the loss. labels=None gives logits, without MTP."""
    row_of, labels_of = argument(original, "packed_seq_params"), argument(original, "labels")
    states_of, put_states = argument(original, "hidden_states"), replacing(original, "hidden_states")
    mtp_of, put_mtp = argument(original, "mtp_in_postprocess"), replacing(original, "mtp_in_postprocess")
    with_mask = _with_mask(original, options)

    @functools.wraps(original)
    def _postprocess(*args: Any, **kwargs: Any) -> Any:
        model, labels, row = args[0], labels_of(args, kwargs), row_of(args, kwargs)
        if not model.post_process or model.config.mtp_num_layers is None:
            with step_of(row):
                return original(*args, **kwargs)
        if labels is None:
            # States of MTP layers on earlier stages come behind those of the main model.
            earlier = _mtp_layers_before(model, here=bool(mtp_of(args, kwargs)))
            args, kwargs = put_states(args, kwargs, states_of(args, kwargs).chunk(1 + earlier, dim=0)[0])
            args, kwargs = put_mtp(args, kwargs, False)
            return original(_without_mtp(model), *args[1:], **kwargs)
        group = group_of(row, model.cp_group)
        with step_of(row, counts_divide=True):
            args, kwargs, normaliser = with_mask(args, kwargs, model.config, labels, row, group)
            with Scope(normaliser=normaliser):
                return original(*args, **kwargs)

    return _postprocess


def _mtp_layers_before(model: Any, here: bool) -> int:
    """How many MTP layers earlier pipeline stages ran (possible from 0.16)."""
    if here:
        return layers_on_earlier_stages(model.config, getattr(model, "vp_stage", None))
    return 0 if model.mtp_process or not has_layout(model.config) else model.config.mtp_num_layers


def _without_mtp(model: Any) -> Any:
    """A shallow copy of the model that says it has no MTP; parameters and submodules are the model's own."""
    view = copy.copy(model)
    view.mtp_process = False
    # On the last of several stages with MTP the weight of tied embeddings is the embedding's; the head's own is stale.
    view.shared_embedding_or_output_weight = model.shared_embedding_or_output_weight
    view.config = copy.copy(model.config)
    view.config.mtp_num_layers = None
    return view


def _model_step(original: Function, options: Options) -> Function:
    """From 0.17: keeps the index of the row for all rolls of the step."""
    row_of = argument(original, "packed_seq_params")

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        with step_of(row_of(args, kwargs)):
            return original(*args, **kwargs)

    return step


def _process_mtp_loss(original: Function, options: Options) -> Function:
    """From 0.17: without a loss mask, all valid tokens count, and padding does not."""
    known = inspect.signature(original).parameters
    row_of, group_from = argument(original, "packed_seq_params"), argument(original, "cp_group")
    config_of, labels_of = argument(original, "config"), argument(original, "labels")
    ids_of = argument(original, "input_ids") if "input_ids" in known else lambda args, kwargs: None
    put_row, with_mask = replacing(original, "packed_seq_params"), _with_mask(original, options)

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        labels, row, config = labels_of(args, kwargs), row_of(args, kwargs), config_of(args, kwargs)
        like = labels if labels is not None else ids_of(args, kwargs)
        if like is None:
            return original(*args, **kwargs)  # nothing to predict, and nothing is rolled
        group = group_of(row, group_from(args, kwargs))
        if row is None and options["global_normalizer"] and is_parallel(group):
            # The roll of unpacked rows is upstream's own here, and would count on this rank alone.
            row = whole_row(like.size(-1), like.device, group)
            args, kwargs = put_row(args, kwargs, row)
        with step_of(row):
            kind = {"clamps": True, "derived_labels": labels is None}
            args, kwargs, normaliser = with_mask(args, kwargs, config, like, row, group, **kind)
            with Scope(normaliser=normaliser):
                return original(*args, **kwargs)

    return process_mtp_loss


# The layer


def _layer_forward(original: Function, options: Options) -> Function:
    """0.12 to 0.15: the layer refuses rows, so it is told of none, and its transformer layer is handed the row."""
    row_of, put_row = argument(original, "packed_seq_params"), replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None:
            return original(*args, **kwargs)
        args, kwargs = put_row(args, kwargs, None)
        with step_of(row, handed=row):
            result = original(*args, **kwargs)
            if STEP.handed is not None:
                raise ShimError(
                    "mtp-packed-sequences: no transformer layer took the packed row inside "
                    f"{type(args[0]).__qualname__}.forward, so its attention would mix sequences. Remedy: build the "
                    "MTP layer with megatron-core's TransformerLayer, or exclude mtp-packed-sequences."
                )
        return result

    return forward


def _transformer_layer_forward(original: Function, options: Options) -> Function:
    """0.12 and 0.13: the first transformer layer that runs inside an MTP layer takes the row."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if STEP.handed is not None:
            kwargs["packed_seq_params"] = take_handed(kwargs.get("packed_seq_params"))
        return original(self, *args, **kwargs)

    return forward


def _proj_and_transformer_layer(original: Function, options: Options) -> Function:
    """0.14 and 0.15: hands the row to the transformer layer."""
    row_of, put_row = argument(original, "packed_seq_params"), replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def _proj_and_transformer_layer(*args: Any, **kwargs: Any) -> Any:
        if STEP.handed is not None:
            layer = args[0]
            if layer.training and layer.config.recompute_granularity == "full":
                # The checkpoint below takes the row with it, so this one is somebody else's.
                raise ShimError(
                    "mtp-packed-sequences: something else than shim's _checkpointed_forward recomputes "
                    f"{type(layer).__qualname__}, and the packed row would be gone when the layer runs again. Remedy: "
                    "call the method of MultiTokenPredictionLayer there, or pass packed_seq_params on."
                )
            args, kwargs = put_row(args, kwargs, take_handed(row_of(args, kwargs)))
        return original(*args, **kwargs)

    return _proj_and_transformer_layer


def _checkpointed_forward(original: Function, options: Options) -> Function:
    """0.14 to 0.18: recomputes an MTP layer of a packed row; one that is not packed is mtp-recompute's business."""
    packed = checkpointed_forward(original)

    @functools.wraps(packed)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        row = take_handed(kwargs.get("packed_seq_params"))
        if row is None:
            return original(self, *args, **kwargs)
        return packed(self, *args, **{**kwargs, "packed_seq_params": row})

    return _checkpointed_forward


def _get_embeddings(original: Function, options: Options) -> Function:
    """From 0.18: padding stays padding for the router, where a plain roll would call it tokens."""
    row_of, mask_of = argument(original, "packed_seq_params"), argument(original, "padding_mask")
    put_mask = replacing(original, "padding_mask")

    @functools.wraps(original)
    def _get_embeddings(*args: Any, **kwargs: Any) -> Any:
        row, mask = row_of(args, kwargs), mask_of(args, kwargs)
        if row is None or mask is None:
            return original(*args, **kwargs)
        args, kwargs = put_mask(args, kwargs, None)
        input_ids, position_ids, _, *rest = original(*args, **kwargs)
        rolled = _rolled_padding(args[0], row, mask, input_ids.size(-1), options["partition"])
        return (input_ids, position_ids, rolled, *rest)

    return _get_embeddings


def _rolled_padding(layer: Any, row: Any, mask: Tensor, length: int, partition: str) -> Tensor:
    group = group_of(row, layer.cp_group)
    padding = ~index_of(row, length, mask.device, group, partition).valid
    if mask.size(-1) == length:
        return roll_row(mask, -1, -1, row, group, partition) | padding
    # Under sequence parallelism this rank holds one share of the tokens, whose neighbours are elsewhere.
    share = mask.size(-1)
    return mask | padding.narrow(0, layer.tp_group.rank() * share, share)


BINDINGS: dict[str, dict[str, Callable[..., Function]]] = {
    "block": {  # 0.12, 0.13: the MTP block rolls and computes the loss
        MTP + "roll_tensor": _roll_tensor,
        MTP + "MultiTokenPredictionBlock.forward": _block_forward,
        MTP + "MultiTokenPredictionLayer.forward": _layer_forward,
        TRANSFORMER_LAYER + "forward": _transformer_layer_forward,
    },
    "layer": {  # 0.14, 0.15: layers roll their inputs, the model rolls labels and masks
        MTP + "roll_tensor": _roll_tensor,
        MTP + "MultiTokenPredictionLayer.forward": _layer_forward,
        MTP + "MultiTokenPredictionLayer._proj_and_transformer_layer": _proj_and_transformer_layer,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": _checkpointed_forward,
        GPT + "_postprocess": _postprocess_without_labels,
    },
    "loop": {  # 0.16: packed rows, by a loop that does not know of padding
        MTP + "roll_tensor": _roll_tensor,
        MTP + "_roll_tensor_packed_seq": _roll_tensor_packed_seq,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": _checkpointed_forward,
        GPT + "_postprocess": _postprocess_without_labels,
    },
    "loss": {  # 0.17: the loss in a function of its own
        MTP + "_roll_tensor_packed_seq": _roll_tensor_packed_seq,
        MTP + "process_mtp_loss": _process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": _checkpointed_forward,
        GPT + "_postprocess": _model_step,
        MAMBA + "forward": _model_step,
    },
    "mask": {  # 0.18: a padding mask for the router
        MTP + "_roll_tensor_packed_seq": _roll_tensor_packed_seq,
        MTP + "process_mtp_loss": _process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._get_embeddings": _get_embeddings,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": _checkpointed_forward,
        GPT + "_postprocess": _model_step,
        HYBRID + "forward": _model_step,
    },
    "recompute": {  # 0.19: recomputes packed rows itself
        MTP + "_roll_tensor_packed_seq": _roll_tensor_packed_seq,
        MTP + "process_mtp_loss": _process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._get_embeddings": _get_embeddings,
        GPT + "_postprocess": _model_step,
        HYBRID + "forward": _model_step,
    },
}


def bindings(variant: str, options: Options) -> Mapping[str, Callable[[Function], Function]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    if options["partition"] not in PARTITIONS:
        raise ValueError(f"partition is {options['partition']!r}; it must be one of {', '.join(PARTITIONS)}")
    return {target: functools.partial(factory, options=options) for target, factory in BINDINGS[variant].items()}
