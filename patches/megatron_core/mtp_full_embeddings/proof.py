"""Proof of mtp-full-embeddings."""

from __future__ import annotations

from typing import Any

import torch

from shim import testing
from shim.patches.megatron_core._proof_trained_weights import Weights, descend, distance, trained_weights
from shim.testing import Layout
from shim.testing.proof import Here, proof

TOKENS = 8


def build(sequence_parallel: bool = False, scatters: bool = False, **options: Any) -> Any:
    """The language model of a model for images and text. scatters: whether its embedding gives a rank its share."""
    return testing.build_gpt(
        sequence_parallel=sequence_parallel,
        model_kwargs={"scatter_embedding_sequence_parallel": scatters},
        **{"num_layers": 1, "mtp_num_layers": 2, **options},
    )


def step(model: Any, seed: int) -> None:
    """A step of SGD, as a wrapper makes it: it adds an image to the embeddings, and gives each rank its share."""
    from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, 64, (1, TOKENS), generator=generator)
    places = torch.arange(TOKENS)[None]
    image = torch.randn(TOKENS, 1, model.config.hidden_size, generator=generator)
    model.zero_grad()
    states = model.embedding(input_ids=row, position_ids=places) + image
    if model.config.sequence_parallel:
        states = scatter_to_sequence_parallel_region(states)
    losses = model(row, places, None, decoder_input=states, labels=row.roll(-1, 1), loss_mask=torch.ones(1, TOKENS))
    losses.mean().backward()
    descend(model)


def trained(sequence_parallel: bool) -> Weights:
    """The weights after some steps."""
    return trained_weights(build(sequence_parallel), step)


def error(here: Here) -> float:
    (expected,) = here.run(trained, False)
    return distance(here.run(trained, True, layout=Layout(tp=here.world, sequence_parallel=True)), expected)


RAISED = r"^RuntimeError: Sizes of tensors must match except in dimension 2"


@proof("weights off by {:.1e}", bound=1e-5, ranks=2, defect="crash", crashes=RAISED, variants=("v0_14",))
def a_language_model_that_does_not_scatter_trains_as_on_one_rank(here: Here) -> float:
    """Multi-token prediction crashes under sequence parallelism in the language model of a model for images and text.

    To reproduce: on two tensor-parallel ranks build a GPTModel with `mtp_num_layers=2`, `sequence_parallel=True` and
    `scatter_embedding_sequence_parallel=False`. Compute its embeddings of the whole row, scatter them along the
    sequence, and run a step with them as `decoder_input`: "RuntimeError: Sizes of tensors must match except in
    dimension 2. Expected size 8 but got size 4".

    `MultiTokenPredictionLayer._get_embeddings` calls the embedding, which returns the whole row, and the layer joins
    that with the hidden states of the rank's share. Right are the weights that one rank trains.

    From 0.12 to 0.19. Fixed in 0.20 (Megatron-LM pull request 6256).
    """
    return error(here)


@proof(
    "weights off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=RAISED,
    variants=("v0_12",),
    beside=("mtp-gather-gradient",),
)
def in_0_12_and_0_13_it_trains_as_on_one_rank_too(here: Here) -> float:
    """The same in 0.12 and 0.13, where `MultiTokenPredictionBlock.forward` calls the embedding.

    To reproduce: as above. Both sides run with mtp-gather-gradient, because without it 0.12 trains multi-token
    prediction wrongly on several tensor-parallel ranks.
    """
    return error(here)
