"""Tiny rotations by a function in the place of upstream's, and their truth (rope-thd, rope-fusion)."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim._torch_names import required
from shim.patches.megatron_core._packed_rotation import ROPE, OneRank

APPLY, THD = ROPE + "apply_rotary_pos_emb", ROPE + "_apply_rotary_pos_emb_thd"
HEADS, WIDTH, ROTARY = 2, 8, 4
LENGTHS = (2, 3, 4)  # later sequences are longer, so that the rows of the first one do not do for them

_Mode: Any = required("torch.utils._python_dispatch:TorchDispatchMode")


class Operations(_Mode):  # type: ignore[misc]
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def configs_of(models: Sequence[Any]) -> list[Any]:
    return [model.config for model in models if hasattr(model, "config")]


def plain_config() -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)


def _release_passes(target: str) -> Mapping[str, Any]:
    """The arguments of this release's callers. Its two functions got each of them together, and one is not tried."""
    sibling = vars(sys.modules[ROPE[:-1]])[(THD if target == APPLY else APPLY).rpartition(":")[2]]
    return inspect.signature(sibling).parameters


def is_cut(target: str) -> bool:
    """Whether the functions of this release ask the process itself which part of a row they get, and get a part."""
    from megatron.core import parallel_state

    return "cp_group" not in _release_passes(target) and bool(parallel_state.get_context_parallel_world_size() > 1)


class Rotation:
    """A call for rows of `lengths`, packed or two alike, that asks for one thing beside a plain rotation.

    ask: "interleaved", "mscale", "mla", "row per token" (a table with a row for each token, as multimodal embeddings
    have it), or "".
    """

    def __init__(self, ask: str, packed: bool, lengths: Sequence[int] = LENGTHS, device: str = "cpu") -> None:
        self.ask, self.lengths, self.mscale = ask, lengths if packed else (), 1.25 if ask == "mscale" else 1.0
        places = torch.cat([torch.arange(length) for length in lengths]) if packed else torch.arange(sum(lengths))
        angles = torch.arange(sum(lengths))[:, None] * torch.tensor([1.0, 0.3])
        angles = angles.repeat_interleave(2, -1) if ask == "interleaved" else torch.cat((angles, angles), -1)
        self.angles = angles[places].double()
        table = angles[places] if ask == "row per token" else angles[: max(lengths)] if packed else angles
        self.table = table[:, None, None].to(device)
        shape = (sum(lengths), HEADS, WIDTH) if packed else (sum(lengths), 2, HEADS, WIDTH)
        self.t = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        self.cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32) if packed else None

    def call(self, function: Callable[..., Any], target: str, config: Any, fused: bool = False) -> Any:
        """What the function makes of it, called as this release calls `target`, with a copy of `config`."""
        named: dict[str, Any] = {"cp_group": OneRank(), "max_seqlen": max(self.lengths, default=None)}
        named |= {"mla_rotary_interleaved": self.ask == "mla"}
        given: dict[str, Any] = {name: value for name, value in named.items() if name in _release_passes(target)}
        if self.ask == "mscale":
            given["mscale"] = self.mscale
        if target == APPLY:
            config = self._asking(config, fused)
            return function(self.t, self.table, config=config, cu_seqlens=self.cu_seqlens, **given)
        if "mla_rotary_interleaved" not in given:
            given["multi_latent_attention"] = self.ask == "mla"
        given["rotary_interleaved"] = self.ask == "interleaved"
        return function(self.t, self.cu_seqlens, self.table, **given)

    def _asking(self, config: Any, fused: bool) -> Any:
        config = copy.copy(config)
        fields = {"apply_rope_fusion": fused, "mrope_section": None, "rotary_interleaved": self.ask == "interleaved"}
        for name, value in {**fields, "multi_latent_attention": self.ask == "mla"}.items():
            object.__setattr__(config, name, value)
        return config

    def is_right(self, made: Any) -> bool:
        """Whether values and gradient are those of each sequence alone."""
        if not isinstance(made, Tensor) or made.shape != self.t.shape:
            return False
        right = self._alone(self.t.double().cpu())
        weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).double()
        (expected,) = torch.autograd.grad((right * weights).sum(), self.t)
        (found,) = torch.autograd.grad((made * weights.to(made)).sum(), self.t)
        pairs = ((made, right), (found, expected))
        return all(torch.allclose(mine.double().cpu(), truth.double().cpu(), atol=1e-4) for mine, truth in pairs)

    def _alone(self, t: Tensor) -> Tensor:
        angles = self.angles[(...,) + (None,) * (t.dim() - 2) + (slice(None),)]
        turned, rest = t[..., :ROTARY], t[..., ROTARY:]
        if self.ask == "mla":  # pairs of neighbours come in, and halves go out
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
        if self.ask == "interleaved":
            across = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            across = torch.cat((-second, first), -1)
        return torch.cat(((turned * angles.cos() + across * angles.sin()) * self.mscale, rest), -1)
