"""Proofs of rope-fusion, with stand-ins for the fused kernels on a CPU and with the real ones on a GPU."""

from __future__ import annotations

import copy
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.testing.proof import CannotRunError, Here, proof

HEADS, WIDTH, ROTARY = 2, 64, 32
LENGTHS = (8, 16, 24)  # multiples of four, so that two ranks can cut each by zigzag
TOKENS = sum(LENGTHS)
MSCALE = 1.25
FORMS = ("unpacked", "packed")
ASKED = ("nothing", "interleaved", "mscale", "mla", "row per token")  # what a call wants beside a plain rotation
EXTENSION = "megatron.core.extensions.transformer_engine"


class Group:
    """A context-parallel group of one process's imagination."""

    def __init__(self, ranks: int = 1, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


def takes(name: str) -> bool:
    """Whether apply_rotary_pos_emb of this release has such an argument."""
    from megatron.core.models.common.embeddings import rope_utils

    return name in inspect.signature(rope_utils.apply_rotary_pos_emb).parameters


@contextmanager
def on_rank(ranks: int = 1, rank: int = 0) -> Iterator[dict[str, Any]]:
    """Lets this process be a context-parallel rank, and gives the argument that says so where there is one."""
    from megatron.core import parallel_state

    with ExitStack() as undo:
        for name, value in (("world_size", ranks), ("rank", rank)):
            told = mock.patch.object(parallel_state, f"get_context_parallel_{name}", lambda value=value: value)
            undo.enter_context(told)
        yield {"cp_group": Group(ranks, rank)} if takes("cp_group") else {}


def places_of(length: int, ranks: int = 1, rank: int = 0) -> list[int]:
    """The positions of a sequence that a rank holds: one half from the front, the other from the back."""
    if ranks == 1:
        return list(range(length))
    half = length // (2 * ranks)
    return [*range(rank * half, (rank + 1) * half), *range(length - (rank + 1) * half, length - rank * half)]


def longest(freqs: Tensor, row_per_token: bool, lengths: Sequence[int] = LENGTHS) -> dict[str, int]:
    """The argument of the longest sequence, if apply_rotary_pos_emb of this release has it.

    A table for positions ends there: in a longer one such a release sees a row for each token.
    """
    return {"max_seqlen": max(lengths) if row_per_token else freqs.size(0)} if takes("max_seqlen") else {}


@contextmanager
def kernels() -> Iterator[list[tuple[str, bool]]]:
    """Stand-ins for the fused functions: they do what the kernels do with what they are given, and record that."""
    from megatron.core.models.common.embeddings import rope_utils

    given: list[tuple[str, bool]] = []

    def fused(t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False) -> Tensor:
        given.append(("unpacked", interleaved))
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

    def fused_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
    ) -> Tensor:
        given.append(("packed", interleaved))
        rows = [place for length in cu_seqlens.diff().tolist() for place in places_of(length, cp_size, cp_rank)]
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[rows], rotary_interleaved=interleaved)[:, 0]

    there: dict[str, Callable[..., Any]] = {
        "fused_apply_rotary_pos_emb": fused,
        "fused_apply_rotary_pos_emb_thd": fused_thd,
    }
    with ExitStack() as undo:
        for name, function in there.items():
            undo.enter_context(mock.patch.object(rope_utils, name, function))
        undo.enter_context(mock.patch.object(rope_utils, "is_te_min_version", lambda *_, **__: True, create=True))
        if EXTENSION in inspect.unwrap(rope_utils.apply_rotary_pos_emb).__code__.co_names:
            undo.enter_context(_imported(there))  # 0.12.1 to 0.13 import one of them in the call
        yield given


@contextmanager
def _imported(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Lets functions be found in megatron-core's extension."""
    before = sys.modules.get(EXTENSION)
    sys.modules[EXTENSION] = types.ModuleType(EXTENSION)
    vars(sys.modules[EXTENSION]).update(functions)
    try:
        yield
    finally:
        del sys.modules[EXTENSION]
        if before is not None:
            sys.modules[EXTENSION] = before


def config_of(ask: str = "nothing", fused: bool = True) -> Any:
    from megatron.core.transformer import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    # As trainers do it: what the constructor would refuse is set behind it.
    config.apply_rope_fusion = fused
    config.rotary_interleaved = ask == "interleaved"
    config.multi_latent_attention = ask == "mla"
    return config


def table(rows: int, interleaved: bool = False, device: str = "cpu") -> Tensor:
    """The angles of `rows` positions, [rows, 1, 1, ROTARY]."""
    angles = torch.arange(rows, device=device)[:, None] / torch.arange(1, ROTARY // 2 + 1, device=device)
    twice = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return twice[:, None, None]


def offsets(lengths: tuple[int, ...] | list[int] = LENGTHS, device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def call_of(form: str, ask: str, ranks: int = 1, rank: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Arguments of apply_rotary_pos_emb, without the config and the group."""
    shape = (TOKENS // ranks, HEADS, WIDTH) if form == "packed" else (TOKENS, 2, HEADS, WIDTH)
    t = torch.randn(shape, generator=torch.Generator().manual_seed(1 + rank)).to(device).requires_grad_()
    given: dict[str, Any] = {"t": t, "freqs": table(TOKENS, ask == "interleaved", device)}
    if form == "packed":
        given["cu_seqlens"] = offsets(device=device)
        if ask == "row per token":
            # Of text and images: in each sequence positions begin at zero.
            given["freqs"] = torch.cat([given["freqs"][:length] for length in LENGTHS])
        else:
            given["freqs"] = given["freqs"][: max(LENGTHS) + 3]
        given |= longest(given["freqs"], ask == "row per token")
    if ask == "mscale":
        given["mscale"] = MSCALE
    if ask == "mla" and takes("mla_rotary_interleaved"):
        given["mla_rotary_interleaved"] = True
    return given


def alone(config: Any, given: Mapping[str, Any], ranks: int = 1, rank: int = 0) -> Tensor:
    """The truth for these arguments, in fp64: each sequence alone, neither packed nor fused."""
    from megatron.core.models.common.embeddings import rope_utils

    config = copy.copy(config)
    config.apply_rope_fusion = False
    how = {name: value for name, value in given.items() if name in ("mscale", "mla_rotary_interleaved", "cp_group")}
    t, freqs = given["t"].double(), given["freqs"].double()
    if given.get("cu_seqlens") is None:
        return rope_utils.apply_rotary_pos_emb(t, freqs, config, **how)
    places = given["cu_seqlens"].tolist()
    per_token = freqs.size(0) == places[-1]
    pieces = []
    for start, end in pairwise(places):
        piece = t[start // ranks : end // ranks, None]
        rows = (freqs[start:end] if per_token else freqs)[places_of(end - start, ranks, rank)]
        pieces.append(rope_utils.apply_rotary_pos_emb(piece, rows, config, **how)[:, 0])
    return torch.cat(pieces)


def error_of(form: str, ask: str, ranks: int = 1, rank: int = 0, device: str = "cpu") -> float:
    """How far a fused call is from the truth, forward or backward, in units of its norm; 0 where it is refused."""
    from megatron.core.models.common.embeddings import rope_utils

    with on_rank(ranks, rank) as group:
        config, given = config_of(ask), call_of(form, ask, ranks, rank, device) | group
        t = given["t"]
        weights = torch.randn(t.shape, generator=torch.Generator().manual_seed(2)).to(device)
        try:
            found = rope_utils.apply_rotary_pos_emb(config=config, **given)
        except (AssertionError, ImportError, ValueError) as error:
            if "Only TE >=" in str(error):
                return 0.0
            if "not available" in str(error):
                raise CannotRunError(f"this megatron-core finds no fused rotation here: {error}") from None
            raise
        results = []
        for result in (found, alone(config, given, ranks, rank)):
            (gradient,) = torch.autograd.grad((result * weights).sum(), t)
            results.append((result.detach().double(), gradient.double()))
    return max(float((mine - right).norm() / right.norm()) for mine, right in zip(*results, strict=True))


TELLS = "off by {:.1e}"


@proof(f"rotations of packed tokens {TELLS}", bound=1e-6)
def fused_rotations_with_a_row_for_each_token(here: Here) -> float:
    """Fused rotary embeddings of packed rows take the wrong rows of a table that has one row for each token.

    To reproduce: call `apply_rotary_pos_emb(t, freqs, config, cu_seqlens)` with `config.apply_rope_fusion`, for three
    packed sequences, and with as many rows in `freqs` as there are tokens, as multimodal embeddings have them. Rotate
    each sequence alone, with its own rows of the table, and compare.

    The fused kernel counts positions from the beginning of each sequence. So all sequences but the first are rotated by
    rows of the first ones. Unfused, every token takes its own row (from 0.15 on). A call that the kernel cannot do
    should be made unfused. Seen in 0.12 to 0.20.
    """
    with kernels():
        return error_of("packed", "row per token")


@proof(f"rotations {TELLS}", bound=1e-6, variants=["v0_12", "v0_12_1", "v0_15", "v0_16", "v0_17", "v0_19"])
def fused_rotations_with_mscale(here: Here) -> float:
    """Fused rotary embeddings of packed rows ignore `mscale`, the factor of YaRN.

    To reproduce: call `apply_rotary_pos_emb(t, freqs, config, cu_seqlens, mscale=1.25)` with
    `config.apply_rope_fusion`, and compare with the same call without fusion. The result is not scaled.

    The factor is not passed to the fused kernel, which knows none. A call that the kernel cannot do should be made
    unfused, as those of unpacked rows are from 0.16 on; earlier the factor is also lost there. Seen in 0.12 to 0.19.
    """
    with kernels():
        return max(error_of(form, "mscale") for form in FORMS)


@proof(f"rotations {TELLS}", bound=1e-6, variants=["v0_12", "v0_12_1", "v0_15", "v0_16", "v0_17", "v0_19"])
def fused_rotations_with_the_interleaving_of_mla(here: Here) -> float:
    """Fused rotary embeddings of packed rows ignore the interleaving of multi-latent attention.

    To reproduce: call `apply_rotary_pos_emb(t, freqs, config, cu_seqlens)` with `config.apply_rope_fusion` and
    `config.multi_latent_attention` (from 0.19 on: `mla_rotary_interleaved=True`), and compare with the same call
    without fusion. The entries of each head are not put in order first, so other pairs are rotated.

    A call that the kernel cannot do should be made unfused, as those of unpacked rows are from 0.19 on; earlier the
    interleaving is also lost there. Seen in 0.12 to 0.19.
    """
    with kernels():
        return max(error_of(form, "mla") for form in FORMS)


@proof(f"rotations {TELLS}", bound=1e-6, variants=["v0_12", "v0_12_1", "v0_15", "v0_16"])
def fused_rotations_with_interleaved_pairs(here: Here) -> float:
    """Fused rotary embeddings of packed rows ignore `rotary_interleaved`.

    To reproduce: call `apply_rotary_pos_emb(t, freqs, config, cu_seqlens)` with `config.apply_rope_fusion` and
    `config.rotary_interleaved`, and compare with the same call without fusion. Each entry is paired with one of the
    other half of the head, instead of with its neighbour.

    The option is not passed to the fused kernel, although the kernel has it. Seen in 0.12 to 0.16; in 0.12.0 also for
    unpacked rows.
    """
    with kernels():
        return max(error_of(form, "interleaved") for form in FORMS)


@proof(f"rotations of packed tokens {TELLS}", bound=1e-6, variants=["v0_12", "v0_12_1"])
def unfused_rotations_with_a_row_for_each_token(here: Here) -> float:
    """Rotary embeddings of packed rows take the wrong rows of a table that has one row for each token, even unfused.

    To reproduce: call `apply_rotary_pos_emb(t, freqs, config, cu_seqlens)` without fusion, for three packed sequences,
    and with as many rows in `freqs` as there are tokens, as multimodal embeddings have them. Rotate each sequence
    alone, with its own rows of the table, and compare.

    The rows are taken from the beginning of the table for each sequence. So all sequences but the first are rotated by
    rows of the first ones. Seen in 0.12 to 0.14; from 0.15 on each token takes its own row.
    """
    from megatron.core.models.common.embeddings import rope_utils

    with on_rank() as group, torch.no_grad():
        config, given = config_of(fused=False), call_of("packed", "row per token") | group
        found, right = rope_utils.apply_rotary_pos_emb(config=config, **given), alone(config, given)
        return float((found - right).norm() / right.norm())


# sine and cosine of the kernels need not round as those of torch do
@proof(f"fused rotations {TELLS}", bound=1e-4, devices=("cuda",), te=True)
def fused_and_unfused_rotations_on_a_gpu(here: Here) -> float:
    """Fused rotary embeddings do something else than the unfused ones, with Transformer Engine's real kernels.

    To reproduce on a GPU: call `apply_rotary_pos_emb` with `config.apply_rope_fusion` and without, for unpacked rows
    and for packed ones (`cu_seqlens`), on one context-parallel rank and on two, with `rotary_interleaved`, with
    `mscale`, with the interleaving of multi-latent attention, and with one row of the table for each packed token.

    Results and gradients differ wherever the call does not pass on what it is asked for; which these are changes from
    0.12 to 0.20. Those calls should be made unfused.
    """
    return max(
        error_of(form, ask, ranks, rank, here.device)
        for form in FORMS
        for ask in ASKED
        for ranks in ((1, 2) if form == "packed" else (1,))
        for rank in range(ranks)
    )
