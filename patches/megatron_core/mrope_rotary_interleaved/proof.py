"""Proofs of mrope-rotary-interleaved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing import CPUCoreAttention
from shim.testing.proof import Here, proof

VOCABULARY, TOKENS, ROWS = 64, 12, 2
SECTION = [2, 1, 1]  # of the four angles of a head: time, height, width
BASE = 10000
ERROR = r"^RuntimeError: view size is not compatible with input tensor's size and stride"


def build(**overrides: Any) -> Any:
    defaults = {"num_layers": 1, "mtp_num_layers": None, "vocab_size": VOCABULARY, "rotary_interleaved": True}
    return testing.build_gpt(**{**defaults, **overrides})


def build_multimodal(**overrides: Any) -> Any:
    return build(**{"position_embedding_type": "mrope", "mrope_section": SECTION, **overrides})


def rows() -> tuple[Tensor, Tensor]:
    """ids and labels, [b, s]."""
    drawn = torch.randint(VOCABULARY, (2, ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return drawn[0], drawn[1]


def text() -> Tensor:
    """The positions of text: time, height and width are alike, [3, b, s]."""
    return torch.arange(TOKENS).expand(3, ROWS, -1)


def image() -> Tensor:
    """Positions of which time, height and width differ, and those of the rows, [3, b, s]."""
    return torch.randint(100, (3, ROWS, TOKENS), generator=torch.Generator().manual_seed(2))


def step(model: Any, positions: Tensor) -> Tensor:
    """The losses of all tokens and the gradients of all weights, in one vector."""
    ids, labels = rows()
    losses = model(ids, positions, None, labels=labels)
    losses.sum().backward()
    return torch.cat([losses.detach().flatten(), *(weight.grad.flatten() for weight in model.parameters())])


def wrong_numbers() -> tuple[int, int]:
    """How many losses and gradients of text are not those of a model with plain positions, and of how many."""
    found, right = step(build_multimodal(), text()), step(build(), text())
    return int((found != right).sum()), len(right)


@proof("{:.0%} of losses and gradients differ", right="bit-equal", defect="crash", crashes=ERROR)
def text_with_multimodal_positions_is_text_with_plain_ones(here: Here) -> float:
    """Multimodal rotary embeddings (mrope) raise with `rotary_interleaved`.

    To reproduce: run a GPTModel with `position_embedding_type="mrope"`, `mrope_section=[2, 1, 1]` and
    `rotary_interleaved=True` on text, whose three `position_ids` are alike. Compare losses and gradients with those of
    `position_embedding_type="rope"`: they should have the same bits.

    MultimodalRotaryEmbedding.forward calls `view` on frequencies that it has transposed, a RuntimeError. Behind it is
    another, for a table with the size of `freqs.shape[0]`, the three kinds of positions, in the place of the number of
    tokens. RotaryEmbedding is right. From 0.12 on.
    """
    wrong, of = here.run(wrong_numbers)[0]
    return wrong / of


def attended(positions: Tensor) -> list[Tensor]:
    """Queries and keys that attention gets in a step with these positions, [s, b, heads, d] each."""
    model, got = build_multimodal(), []
    core = next(module for module in model.modules() if isinstance(module, CPUCoreAttention))
    core.register_forward_pre_hook(lambda module, args: got.extend(args[:2]))
    step(model, positions)
    return [tensor.detach() for tensor in got]


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Queries or keys, [s, b, heads, d], whose neighbours are rotated as complex numbers, in fp64.

    Pair j of d/2 turns by p / BASE^(2j/d), with p the position of the section that j lies in
    (Su et al. 2021, RoFormer; Wang et al. 2024, Qwen2-VL, for the sections).
    """
    pairs = torch.view_as_complex(heads.double().unflatten(-1, (-1, 2)))
    section = torch.arange(3).repeat_interleave(torch.tensor(SECTION))
    frequencies = BASE ** (-torch.arange(len(section), dtype=torch.float64) / len(section))
    angles = positions[section].permute(2, 1, 0) * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    return torch.view_as_real(pairs * turns).flatten(-2)


def error_of_rotation() -> float:
    # At position 0 nothing turns.
    found, still = attended(image()), attended(torch.zeros_like(image()))
    right = [rotated(heads, image()) for heads in still]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


@proof("queries or keys off by {:.1e}", bound=1e-5, defect="crash", crashes=ERROR)
def pairs_turn_by_the_position_of_their_section(here: Here) -> float:
    """Multimodal rotary embeddings (mrope) raise with `rotary_interleaved`, and have pairs of other sections.

    To reproduce: run a GPTModel with `position_embedding_type="mrope"`, `mrope_section=[2, 1, 1]` and
    `rotary_interleaved=True` on `position_ids` that differ in time, height and width. Compare the queries and keys that
    the core attention gets with those at position 0, each pair of neighbours rotated by the angle of its section.

    MultimodalRotaryEmbedding.forward raises. Without the two errors it would cut the sections [2, 1, 1, 2, 1, 1] from
    columns of which two belong to one angle. So the first angle would take time, and the second height in one column
    and width in the other, which is no rotation. Right is [4, 2, 2]: each angle takes the position that it takes
    without `rotary_interleaved`. From 0.12 on; on the dev branch (9304a25642) the sections are wrong, in silence.
    """
    off: float = here.run(error_of_rotation)[0]
    return off
