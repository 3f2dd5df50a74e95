"""Proofs of sp-unscattered-embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_trained_weights import Weights, distance, trained_weights
from shim.testing import Layout
from shim.testing.proof import CannotRunError, Here, proof


def build(sequence_parallel: bool = False, scatters: bool = False, **options: Any) -> Any:
    """The language model of a model for images and text. scatters: whether its embedding gives a rank its share."""
    return testing.build_gpt(
        sequence_parallel=sequence_parallel,
        model_kwargs={"scatter_embedding_sequence_parallel": scatters},
        **{"mtp_num_layers": None, **options},
    )


def trained(sequence_parallel: bool) -> Weights:
    return trained_weights(build(sequence_parallel))


RAISED = r"^IndexError: shape mismatch: indexing tensors could not be broadcast together with shapes \[16\], \[8\]"


@proof("weights off by {:.1e}", bound=1e-5, ranks=2, defect="crash", crashes=RAISED)
def a_language_model_that_does_not_scatter_trains_on_tokens(here: Here) -> float:
    """The language model of a model for images and text cannot be trained on tokens alone under sequence parallelism.

    To reproduce: on two tensor-parallel ranks build a GPTModel with `sequence_parallel=True` and
    `scatter_embedding_sequence_parallel=False`, and run a step on eight tokens and their labels: "IndexError: shape
    mismatch: indexing tensors could not be broadcast together with shapes [16], [8]".

    Each rank has the embeddings of the whole row, and takes them for its share of a row that is twice as long. Right
    are the weights that one rank trains.

    From 0.12 to 0.18. Fixed in 0.19 (Megatron-LM pull request 5628).
    """
    (expected,) = here.run(trained, False)
    return distance(here.run(trained, True, layout=Layout(tp=here.world, sequence_parallel=True)), expected)


def build_hybrid(sequence_parallel: bool = False, scatters: bool = False) -> Any:
    """The same of attention and MLP layers. HybridModel has the argument too, and hands it to the embedding."""
    model: Any = testing.build_hybrid("*-*-", sequence_parallel=sequence_parallel)
    if not scatters:
        model.embedding.scatter_to_sequence_parallel = False
        model.embedding.reduce_scatter_embeddings = model.embedding.word_embeddings.reduce_scatter_embeddings = False
    return model


def trained_hybrid(sequence_parallel: bool) -> Weights:
    return trained_weights(build_hybrid(sequence_parallel))


@proof("weights off by {:.1e}", bound=1e-5, ranks=2, defect="crash", crashes=RAISED, variants=("v0_18",))
def a_hybrid_model_that_does_not_scatter_trains_on_tokens(here: Here) -> float:
    """A hybrid model cannot be trained on tokens alone under sequence parallelism, if it does not scatter them.

    To reproduce: as above, with a HybridModel of attention and MLP layers.

    From 0.12 (as MambaModel up to 0.17) to 0.18. Fixed in 0.19 (Megatron-LM pull request 5628).
    """
    if tuple(int(part) for part in testing.release().split(".")[:2]) < (0, 17):
        raise CannotRunError("the specs of hybrid models need their kernels")
    (expected,) = here.run(trained_hybrid, False)
    return distance(here.run(trained_hybrid, True, layout=Layout(tp=here.world, sequence_parallel=True)), expected)


def logits(sequence_parallel: bool) -> Tensor:
    """Of this rank's columns [b, s, v]."""
    row = torch.arange(8)[None]
    with torch.no_grad():
        made: Tensor = build(sequence_parallel)(row, row, None)
    return made


@proof("{:.0f} tokens too many", right="a row of logits for each token", ranks=2)
def it_returns_as_many_rows_of_logits_as_tokens(here: Here) -> int:
    """The same model returns logits of a row that is TP times as long, if it gets no labels.

    To reproduce: as above, without labels, as for log-probabilities. The logits of eight tokens have 16 rows.

    From 0.12 to 0.18. Fixed in 0.19 (Megatron-LM pull request 5628).
    """
    found: Tensor = here.run(logits, True, layout=Layout(tp=here.world, sequence_parallel=True))[0]
    return found.size(1) - 8
