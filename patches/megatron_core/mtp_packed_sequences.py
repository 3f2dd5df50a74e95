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

The roll itself is shim.ops.packed_roll; this module wires it in. Up to 0.15 the row reaches the roll through a scope
that belongs to the thread, because roll_tensor is not told of it; whatever runs again in a recompute gets it through
the recomputed function instead, since by then the scope is gone. The expert all-to-all overlap path asserts on its
own against packed rows, in a nested function that cannot be reached: it stays unsupported.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim._errors import ShimError
from shim.ops.packed_roll import continues_mask, roll_with, valid_mask

MTP = "megatron.core.transformer.multi_token_prediction:"
GPT = "megatron.core.models.gpt.gpt_model:GPTModel."
TRANSFORMER_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer."


class _Step(threading.local):
    """What rolls and layers of the model step that this thread is in have to know without being told."""

    row: Any = None  # the PackedSeqParams of the step
    continues: Any = None  # its mask [T], computed at the first roll of the step and gone with the step
    handed: Any = None  # the PackedSeqParams that an MTP layer, told of none, has to hand to its transformer layer
    counts_divide: bool = False  # the caller divides by the count that a roll returns


STEP = _Step()


class _Scope:
    """Sets fields of STEP for a region and restores them, also under exceptions."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __enter__(self) -> None:
        self.before = {name: getattr(STEP, name) for name in self.fields}
        for name, value in self.fields.items():
            setattr(STEP, name, value)

    def __exit__(self, *exception: object) -> None:
        for name, value in self.before.items():
            setattr(STEP, name, value)


def _step_of(row: Any, **fields: Any) -> _Scope:
    """The scope of a model step. One that is open for the same row already keeps its mask."""
    if STEP.row is row:
        return _Scope(**fields)
    return _Scope(row=row, continues=None, **fields)


def _parameter(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """A getter for the argument `name` of a call of `function`, however it was passed."""
    position = list(inspect.signature(function).parameters).index(name)

    def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name)

    return get


def _replacing(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any], Any], tuple]:
    """A function that returns the arguments of a call of `function` with another value for `name`."""
    position = list(inspect.signature(function).parameters).index(name)

    def put(args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > position:
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    return put


# The roll


def _mask_of(row: Any, length: int, device: torch.device) -> Tensor:
    if row is not STEP.row:
        return continues_mask(row.cu_seqlens_q, row.cu_seqlens_q_padded, length, device)
    found = STEP.continues
    if found is None or found.numel() != length or found.device != device:
        found = STEP.continues = continues_mask(row.cu_seqlens_q, row.cu_seqlens_q_padded, length, device)
    return found


def _roll_row(tensor: Tensor, shifts: int, dims: int, row: Any) -> tuple[Tensor, Tensor]:
    if shifts != -1:
        raise ValueError(f"packed rows roll left by one (shifts=-1), not by {shifts}")
    if row.cu_seqlens_q is None:
        raise ValueError("packed_seq_params has no cu_seqlens_q, so the sequences of the row are not known")
    rolled = roll_with(tensor, _mask_of(row, tensor.size(dims), tensor.device), dims)
    return rolled, rolled.sum()


def _parallel(cp_group: Any) -> bool:
    return cp_group is not None and cp_group.size() > 1


def _refuse_context_parallel(cp_group: Any) -> None:
    if cp_group is None:
        from megatron.core import parallel_state

        parallel = parallel_state.is_initialized() and parallel_state.get_context_parallel_world_size() > 1
    else:
        parallel = _parallel(cp_group)
    if parallel:
        raise ShimError(
            "mtp-packed-sequences: multi_token_prediction:roll_tensor of megatron-core below 0.16 cannot roll packed "
            "rows under context parallelism. Remedy: context_parallel_size=1, or megatron-core 0.16 and later."
        )


def _divisor(count: Tensor) -> Tensor:
    """The count, or one where it is zero: 0 / 0 would be NaN where every target is masked."""
    return count + (count == 0)


def _roll_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Up to 0.16: returns counts that can divide. Up to 0.15: rolls the row it is told of, else that of the step."""
    takes_row = "packed_seq_params" in inspect.signature(original).parameters
    takes_group = "cp_group" in inspect.signature(original).parameters

    @functools.wraps(original)
    def roll_tensor(
        tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> Any:
        if tensor is None:
            return None, None
        row = STEP.row if packed_seq_params is None else packed_seq_params
        if takes_row:
            rolled, count = original(tensor, shifts, dims, cp_group, packed_seq_params)
        elif row is not None:
            _refuse_context_parallel(cp_group)
            rolled, count = _roll_row(tensor, shifts, dims, row)
        elif takes_group:
            rolled, count = original(tensor, shifts, dims, cp_group)
        else:
            rolled, count = original(tensor, shifts, dims)
        return rolled, _divisor(count) if STEP.counts_divide else count

    _add_parameters(roll_tensor, original, "cp_group", "packed_seq_params")
    return roll_tensor


def _roll_tensor_packed_seq(original: Callable[..., Any]) -> Callable[..., Any]:
    """From 0.16: takes the place of the loop over sequences, outside of context parallelism."""

    @functools.wraps(original)
    def _roll_tensor_packed_seq(
        tensor: Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None
    ) -> Any:
        if _parallel(cp_group):
            return original(tensor, shifts, dims, packed_seq_params, cp_group)
        return _roll_row(tensor, shifts, dims, packed_seq_params)

    return _roll_tensor_packed_seq


# The step


def _block_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.12 and 0.13: the block rolls everything and computes the loss."""
    row_of, labels_of = _parameter(original, "packed_seq_params"), _parameter(original, "labels")
    hidden_states_of = _parameter(original, "hidden_states")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if labels_of(args, kwargs) is None:
            return hidden_states_of(args, kwargs)  # nothing to predict: the main model's states go on as they are
        with _step_of(row_of(args, kwargs), counts_divide=True):
            return original(*args, **kwargs)

    return forward


def _postprocess_without_labels(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.14 to 0.16: the model computes the loss. labels=None gives logits, without MTP."""
    parameters = list(inspect.signature(original).parameters)
    row_of, labels_of = _parameter(original, "packed_seq_params"), _parameter(original, "labels")
    put_states = _replacing(original, "hidden_states")
    put_mtp = _replacing(original, "mtp_in_postprocess")
    states_of, mtp_of = _parameter(original, "hidden_states"), _parameter(original, "mtp_in_postprocess")
    assert parameters[0] == "self"

    @functools.wraps(original)
    def _postprocess(*args: Any, **kwargs: Any) -> Any:
        model = args[0]
        if labels_of(args, kwargs) is None and model.post_process and model.config.mtp_num_layers is not None:
            # States of MTP layers on earlier stages come behind those of the main model.
            earlier = _mtp_layers_before(model, here=bool(mtp_of(args, kwargs)))
            args, kwargs = put_states(args, kwargs, states_of(args, kwargs).chunk(1 + earlier, dim=0)[0])
            args, kwargs = put_mtp(args, kwargs, False)
            return original(_without_mtp(model), *args[1:], **kwargs)
        with _step_of(row_of(args, kwargs), counts_divide=True):
            return original(*args, **kwargs)

    return _postprocess


def _mtp_layers_before(model: Any, here: bool) -> int:
    """How many MTP layers earlier pipeline stages ran (possible from 0.16)."""
    if not here:
        return model.config.mtp_num_layers if not model.mtp_process and _has_layout(model.config) else 0
    if not _has_layout(model.config):
        return 0
    from megatron.core.transformer.multi_token_prediction import get_mtp_layer_offset

    return get_mtp_layer_offset(model.config, getattr(model, "vp_stage", None))


def _has_layout(config: Any) -> bool:
    return getattr(config, "pipeline_model_parallel_layout", None) is not None


def _without_mtp(model: Any) -> Any:
    """A shallow copy of the model that says it has no MTP; parameters and submodules are the model's own."""
    view = copy.copy(model)
    view.mtp_process = False
    view.config = copy.copy(model.config)
    view.config.mtp_num_layers = None
    return view


def _postprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """From 0.17: keeps the mask of the row for all rolls of the step."""
    row_of = _parameter(original, "packed_seq_params")

    @functools.wraps(original)
    def _postprocess(*args: Any, **kwargs: Any) -> Any:
        with _step_of(row_of(args, kwargs)):
            return original(*args, **kwargs)

    return _postprocess


def _process_mtp_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """From 0.17: without a loss mask, all valid tokens count, and padding does not."""
    names = list(inspect.signature(original).parameters)
    row_of, mask_of = _parameter(original, "packed_seq_params"), _parameter(original, "loss_mask")
    group_of, put_mask = _parameter(original, "cp_group"), _replacing(original, "loss_mask")
    sources = [_parameter(original, name) for name in ("labels", "input_ids") if name in names]

    @functools.wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is not None and mask_of(args, kwargs) is None and not _parallel(group_of(args, kwargs)):
            like = next((tensor for get in sources if (tensor := get(args, kwargs)) is not None), None)
            if like is not None:
                valid = valid_mask(row.cu_seqlens_q, row.cu_seqlens_q_padded, like.size(-1), like.device)
                args, kwargs = put_mask(args, kwargs, valid.to(like.dtype).expand_as(like))
        with _step_of(row):
            return original(*args, **kwargs)

    return process_mtp_loss


# The layer


def _layer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.12 to 0.15: the layer refuses rows, so it is told of none, and its transformer layer is handed the row."""
    row_of, put_row = _parameter(original, "packed_seq_params"), _replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        row = row_of(args, kwargs)
        if row is None:
            return original(*args, **kwargs)
        args, kwargs = put_row(args, kwargs, None)
        with _step_of(row, handed=row):
            result = original(*args, **kwargs)
            if STEP.handed is not None:
                raise ShimError(
                    "mtp-packed-sequences: no transformer layer took the packed row inside "
                    f"{type(args[0]).__qualname__}.forward, so its attention would mix sequences. Remedy: build the "
                    "MTP layer with megatron-core's TransformerLayer, or exclude mtp-packed-sequences."
                )
        return result

    return forward


def _take_handed(given: Any) -> Any:
    """The row that was given, else the one the MTP layer hands on, once."""
    if given is not None:
        return given
    handed, STEP.handed = STEP.handed, None
    return handed


def _transformer_layer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.12 and 0.13: the first transformer layer that runs inside an MTP layer takes the row."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if STEP.handed is not None:
            kwargs["packed_seq_params"] = _take_handed(kwargs.get("packed_seq_params"))
        return original(self, *args, **kwargs)

    return forward


def _proj_and_transformer_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.14 and 0.15: hands the row to the transformer layer."""
    row_of, put_row = _parameter(original, "packed_seq_params"), _replacing(original, "packed_seq_params")

    @functools.wraps(original)
    def _proj_and_transformer_layer(*args: Any, **kwargs: Any) -> Any:
        if STEP.handed is not None:
            args, kwargs = put_row(args, kwargs, _take_handed(row_of(args, kwargs)))
        return original(*args, **kwargs)

    return _proj_and_transformer_layer


def _checkpointed_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.14 to 0.18: recomputes an MTP layer of a packed row, the row and all that has no gradient in the closure.

    Method block does not recompute MTP layers, as upstream from 0.16; rows train all the same.
    """
    takes_function = "forward_func" in inspect.signature(original).parameters

    @functools.wraps(original)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        row = _take_handed(kwargs.get("packed_seq_params"))
        if row is None:
            return original(self, *args, **kwargs)
        if takes_function and args:
            function, args = args[0], args[1:]
        else:
            function = kwargs.pop("forward_func", None) or self._proj_and_transformer_layer
        kept = {**kwargs, "packed_seq_params": row}
        saved = {name: kept.pop(name) for name in list(kept) if _is_saved(name, kept[name])}

        def run(*values: Any, **named: Any) -> Any:
            return function(*args, **dict(zip(saved, values)), **named, **kept)

        if self.config.recompute_method == "block":
            return run(**saved)
        if self.config.fp8:
            if takes_function:
                return original(self, run, **saved)
            if kwargs.get("padding_mask") is None:
                kwargs.pop("padding_mask", None)
            return original(self, *args, **kwargs)
        if self.config.recompute_method != "uniform":
            return original(self, *([function] if takes_function else []), *args, **kwargs)
        from megatron.core import tensor_parallel

        return tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, *saved.values())

    if not takes_function:
        _add_parameters(_checkpointed_forward, original, "padding_mask")
    return _checkpointed_forward


def _is_saved(name: str, value: Any) -> bool:
    """Whether a checkpoint has to save this input: the activations always, anything else for its gradient."""
    return isinstance(value, Tensor) and (name in ("hidden_states", "decoder_input") or value.requires_grad)


def _add_parameters(wrapper: Any, original: Callable[..., Any], *names: str) -> None:
    """Give the wrapper upstream's signature and, behind it, parameters that a later release has."""
    signature = inspect.signature(original)
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in names
        if name not in signature.parameters
    ]
    wrapper.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])


def _get_embeddings(original: Callable[..., Any]) -> Callable[..., Any]:
    """From 0.18: padding stays padding for the router, where a plain roll would call it tokens."""
    names = list(inspect.signature(original).parameters)
    row_of, mask_of = _parameter(original, "packed_seq_params"), _parameter(original, "padding_mask")
    put_mask = _replacing(original, "padding_mask")
    assert "padding_mask" in names

    @functools.wraps(original)
    def _get_embeddings(*args: Any, **kwargs: Any) -> Any:
        row, mask = row_of(args, kwargs), mask_of(args, kwargs)
        if row is None or mask is None or _parallel(args[0].cp_group):
            return original(*args, **kwargs)
        args, kwargs = put_mask(args, kwargs, None)
        input_ids, position_ids, _, *rest = original(*args, **kwargs)
        return (input_ids, position_ids, _rolled_padding(args[0], row, mask, input_ids.size(-1)), *rest)

    return _get_embeddings


def _rolled_padding(layer: Any, row: Any, mask: Tensor, length: int) -> Tensor:
    padding = ~valid_mask(row.cu_seqlens_q, row.cu_seqlens_q_padded, length, mask.device)
    if mask.size(-1) == length:
        return roll_with(mask, _mask_of(row, length, mask.device)) | padding
    # Under sequence parallelism this rank holds one share of the row, whose neighbours are elsewhere.
    share = mask.size(-1)
    return mask | padding.narrow(0, layer.tp_group.rank() * share, share)


BINDINGS: dict[str, dict[str, Callable[..., Any]]] = {
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
        GPT + "_postprocess": _postprocess,
    },
    "mask": {  # 0.18: a padding mask for the router
        MTP + "_roll_tensor_packed_seq": _roll_tensor_packed_seq,
        MTP + "process_mtp_loss": _process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._get_embeddings": _get_embeddings,
        MTP + "MultiTokenPredictionLayer._checkpointed_forward": _checkpointed_forward,
        GPT + "_postprocess": _postprocess,
    },
    "recompute": {  # 0.19: recomputes packed rows itself
        MTP + "_roll_tensor_packed_seq": _roll_tensor_packed_seq,
        MTP + "process_mtp_loss": _process_mtp_loss,
        MTP + "MultiTokenPredictionLayer._get_embeddings": _get_embeddings,
        GPT + "_postprocess": _postprocess,
    },
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """The factories of a variant: target -> function from upstream's object to the one that takes its place."""
    return BINDINGS[variant]
