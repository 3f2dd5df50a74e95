"""Proofs of mtp-recompute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shim import testing
from shim.testing.oracle import Result
from shim.testing.proof import CannotRunError, Here, proof

LAYERS, TOKENS = 2, 16
BLOCK: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": LAYERS}
UNIFORM: dict[str, Any] = {**BLOCK, "recompute_method": "uniform"}

RAISED = (
    "^NameError: name 'warnings' is not defined"  # 0.14 and 0.15, under block
    "|^TypeError: .*_checkpointed_forward.* got an unexpected keyword argument 'padding_mask'"  # 0.18
    "|^AssertionError: recompute_num_layers must be 1 for MTP recompute"
)


class OneSequence(testing.PackedRow):
    """A row of one sequence that the model gets without packed_seq_params."""

    def packed_seq_params(self, **extra: Any) -> None:
        return None


def one_sequence() -> testing.PackedRow:
    return OneSequence(**vars(testing.pack(testing.random_sequences((TOKENS,)))))


class Saved:
    """What the forward of one layer saves for backward, weights left out, each storage once."""

    def __init__(self, layer: nn.Module, weights: set[int]) -> None:
        self._weights = weights
        self._storages: dict[int, tuple[int, Tensor]] = {}
        self._watching: list[Any] = []
        self._handles = [layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)]

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self._storages.values())

    def close(self) -> None:
        """Also where the layer has raised."""
        self._leave()
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        self._watching.append(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self._watching[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        while self._watching:
            self._watching.pop().__exit__(None, None, None)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so that no address is used twice
        return tensor


@contextlib.contextmanager
def saved_bytes(model: Any) -> Iterator[Callable[[], list[int]]]:
    """Per MTP layer the bytes that its own forward saves for backward."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    with contextlib.ExitStack() as undo:
        layers = [undo.enter_context(contextlib.closing(Saved(layer, weights))) for layer in model.mtp.layers]
        yield lambda: [saved.nbytes for saved in layers]


def trained(model: Any) -> tuple[Result, int]:
    """The result of a step, and the bytes that its MTP layers save."""
    with saved_bytes(model) as count:
        result, saved = testing.run_packed(model, one_sequence()), sum(count())
    if not saved:
        raise CannotRunError("the model does not run its layers of multi-token prediction when it gets labels")
    return result, saved


def times_its_inputs() -> float:
    """The bytes that MTP layers save under the method block, over those of hidden states and embeddings [s, b, h]."""
    model: Any = testing.build_gpt(mtp_num_layers=LAYERS, **BLOCK)
    return trained(model)[1] / (LAYERS * 2 * TOKENS * model.config.hidden_size * 4)


@proof("MTP layers keep {:.1f} times their inputs", bound=1.25, defect="memory", crashes=RAISED)
def the_method_block_recomputes_mtp_layers(here: Here) -> float:
    """Layers of multi-token prediction keep all their activations under `recompute_method="block"`.

    To reproduce: build a GPTModel with `mtp_num_layers=2`, `recompute_granularity="full"`, `recompute_method="block"`
    and `recompute_num_layers=2`. Add up the bytes that the forward passes of its MTP layers save for backward, without
    those of weights, by `torch.autograd.graph.saved_tensors_hooks`.

    Right are the inputs of the layers, hidden states and embeddings [s, b, h], as the decoder's layers keep theirs.
    Stock keeps twelve times as much, because it recomputes no MTP layer: 0.12 and 0.13 under no method, 0.16 to 0.20
    not under block, and they only warn. 0.14 and 0.15 raise a NameError in place of that warning, and 0.18 a
    TypeError about padding_mask under every method. Open upstream.
    """
    times: float = here.run(times_its_inputs)[0]
    return times


def gradient_error() -> float:
    """Of two layers to a chunk, against no recompute."""
    found, right = (trained(testing.build_gpt(mtp_num_layers=LAYERS, **how))[0] for how in (UNIFORM, {}))
    return testing.worst(testing.differences(found, right))


@proof(
    "losses and gradients off by {:.1e}",
    right="bit-equal",
    defect="crash",
    crashes=RAISED,
    variants=("v0_14", "v0_15"),
)
def two_layers_to_a_chunk_train(here: Here) -> float:
    """Multi-token prediction cannot be trained with `recompute_num_layers` above 1.

    To reproduce: build a GPTModel with `mtp_num_layers=2`, `recompute_granularity="full"`, `recompute_method="uniform"`
    and `recompute_num_layers=2`, and run a step. MultiTokenPredictionLayer raises "recompute_num_layers must be 1 for
    MTP recompute", although the option says how many layers of the decoder make a chunk. 0.18 raises a TypeError about
    padding_mask in every step with full recompute.

    Right are the losses and gradients without recompute, to the bit. MTP layers could be recomputed one by one,
    whatever the chunks of the decoder.

    From 0.14 to 0.20. Open upstream.
    """
    error: float = here.run(gradient_error)[0]
    return error
