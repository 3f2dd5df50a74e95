"""Proofs of rope-fusion, with stand-ins for the fused kernels on a CPU and with the real ones on a GPU."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_rotations import (
    HEADS,
    LENGTHS,
    WIDTH,
    alone,
    config_of,
    longest,
    offsets,
    on_rank,
    places_of,
    table,
    takes,
)
from shim.testing.proof import CannotRunError, Here, proof

TOKENS = sum(LENGTHS)
MSCALE = 1.25
FORMS = ("unpacked", "packed")
ASKED = ("nothing", "interleaved", "mscale", "mla", "row per token")  # what a call wants beside a plain rotation
EXTENSION = "megatron.core.extensions.transformer_engine"


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
