"""Training steps of models with a vision tower (LLaVAModel), with random options, drawn by a seed.

A row has one or more samples, as of a batch: text with images in it. One rank can compute each sample alone.
"""

import random
from dataclasses import dataclass

import torch
from drawn_steps import VERSION, _recompute

from shim import testing
from shim.testing import Layout

IMAGE = -200  # the id of an image in the text
TOWERS = ("clip", "siglip", "internvit", "radio")
FROZEN = ("language", "tower", "language tower", "projection", "patches")  # the last: all before the tower's layers
PATCH = {"radio": 16}  # pixels; RADIO has a position for each patch of 2048 pixels
LONGEST = 64  # tokens: what stages of a pipeline send


@dataclass(frozen=True)
class Step:
    """A training step.

    tower: the type of the vision model. world: the number of ranks. language, vision, projection: options of the three
    configs. whole: for LLaVAModel. grid: patches of an image, by height and width. rows: for each data-parallel rank
    and microbatch its samples, each (tokens of text, ((place of an image, tiles), ...)). prompts: whether a loss mask
    leaves out a part of the text. frozen: one of FROZEN, or "".
    """

    seed: int
    tower: str
    layout: Layout
    world: int
    language: dict
    vision: dict
    projection: dict
    whole: dict
    grid: tuple
    rows: tuple
    prompts: bool
    frozen: str

    @property
    def patch(self):
        return PATCH.get(self.tower, 4)

    @property
    def image(self):
        """Pixels of an image, by height and width."""
        return tuple(side * self.patch for side in self.grid)


@dataclass(frozen=True)
class Sample:
    """Text with images. tokens, labels, mask: [n]. tiles: of each image. pictures: [tiles, 3, height, width]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    tiles: tuple
    pictures: torch.Tensor

    @property
    def counted(self):
        """The part of the mask that the loss has: neither an image nor the token before it predicts."""
        return self.mask * (self.tokens != IMAGE) * (self.labels != IMAGE)


def sample(step, replica, number, which):
    """A sample of a row."""
    length, images = step.rows[replica][number][which]
    seed = 1000 * step.seed + 100 * replica + 10 * number + which
    (text,) = testing.random_sequences([length], seed=seed)
    for place, _ in images:
        text[place] = IMAGE
    tiles = tuple(tiles for _, tiles in images)
    pictures = torch.randn(sum(tiles), 3, *step.image, generator=torch.Generator().manual_seed(seed)).double()
    mask = (torch.arange(length) >= length // 3).double() if step.prompts else torch.ones(length).double()
    return Sample(text[:-1], text[1:], mask, tiles, pictures)


def layouts():
    """Those of up to four ranks. Up to 0.17 LLaVAModel cuts rows for context parallelism by megatron.training."""
    found = [Layout(), Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)]
    found += [Layout(tp=2, pp=2, sequence_parallel=True)]
    return found + ([Layout(cp=2), Layout(tp=2, cp=2, sequence_parallel=True)] if VERSION >= (0, 18) else [])


def draw(seed):
    """The step of this seed on this release."""
    choose = random.Random(seed)
    tower, layout = choose.choice(TOWERS), choose.choice(layouts())
    world = layout.world * (choose.choice([1, 2]) if layout.world <= 2 else 1)
    frozen = choose.choice(FROZEN) if choose.random() < 0.6 else ""
    shuffled, tiles = choose.random() < 0.3, choose.random() < 0.5
    # Only whole squares of patches are shuffled, without a class token.
    drops = tower != "siglip" and (shuffled or choose.random() < 0.5)
    grid = (4, 4) if shuffled else choose.choice([(2, 2), (1, 3), (2, 1)])
    number = choose.choice([layout.pp, 2 * layout.pp])
    samples = (1, 1, 2) if layout.pp == 1 else (1,)  # the schedule tells stages the shape of a row of one
    rows = tuple(
        tuple(
            tuple(_sample(choose, tiles, "language" in frozen) for _ in range(choose.choice(samples)))
            for _ in range(number)
        )
        for _ in range(world // (layout.tp * layout.cp * layout.pp))
    )
    language = {
        "num_layers": layout.pp * choose.choice([1, 2]),
        "calculate_per_token_loss": choose.random() < 0.5,
        "normalization": choose.choice(["LayerNorm", "RMSNorm"]),
        "sequence_parallel": layout.sequence_parallel,
        "add_bias_linear": choose.random() < 0.3,
        **_gated(choose),
        **_recompute(choose, "dense"),
    }
    vision = {"num_layers": choose.choice([1, 2]), "add_bias_linear": choose.random() < 0.7, **_gated(choose)}
    if choose.random() < 0.4:
        vision |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    affine = choose.random() < 0.3
    # An affine projection adds the bias of a rank to the output of all (docs/left.md).
    projection = {"add_bias_linear": choose.random() < 0.5 and not (affine and layout.tp > 1)}
    whole = {
        "vision_projection_type": "affine" if affine else "mlp",
        "drop_vision_class_token": drops,
        "pixel_shuffle": shuffled,
        "share_embeddings_and_output_weights": choose.random() < 0.5,
        "language_position_embedding_type": choose.choice(["rope", "learned_absolute"]),
    }
    prompts = choose.random() < 0.5
    return Step(seed, tower, layout, world, language, vision, projection, whole, grid, rows, prompts, frozen)


def _gated(choose):
    return {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if choose.random() < 0.3 else {}


def _sample(choose, tiles, needs_image):
    """Tokens of text and images. A frozen language model trains nothing but images that text follows."""
    length = choose.randint(8, 14)
    before, numbers = (length // 2, [1, 2]) if needs_image else (length, [0, 1, 1, 2])
    places = sorted(choose.sample(range(before), choose.choice(numbers)))
    return length, tuple((place, choose.choice([1, 2]) if tiles else 1) for place in places)
