"""What settings say of a run: conditions on their values, and the names of megatron-core's config and arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["MEGATRON", "OPEN", "Table", "facts_from", "judged", "names_in"]

# A word holds if one of its conditions does. "name": it is on. "!name": it is off. "name > 1", "name = a|b" and
# "name ~ part": a number above, one of these values, a part of the value. " & " joins conditions that all have to hold.
Table = Mapping[str, tuple[str, ...]]

MEGATRON: Table = {
    "mtp": ("mtp_num_layers > 0", "hybrid_layer_pattern ~ /"),
    "moe": ("num_moe_experts > 1", "num_experts > 1", "hybrid_layer_pattern ~ E"),
    "router-replay": ("moe_enable_routing_replay",),
    "mla": ("multi_latent_attention",),
    "gated-attention": ("attention_output_gate",),
    "mamba": ("is_hybrid_model", "hybrid_override_pattern ~ M", "hybrid_layer_pattern ~ M"),
    "gdn": (
        "experimental_attention_variant = gated_delta_net",
        "linear_attention_type = gated_delta_net",
        "hybrid_layer_pattern ~ G",
    ),
    "dsa": ("experimental_attention_variant = dsa", "hybrid_layer_pattern ~ D"),
    "mrope": ("mrope_section", "position_embedding_type = mrope"),
    "fused-rope": ("apply_rope_fusion",),
    "fp32-residual": ("fp32_residual_connection",),
    "expert-bias": ("moe_router_enable_expert_bias",),
    "per-token-loss": ("calculate_per_token_loss",),
    "max-logit": ("log_max_attention_logit", "qk_clip"),
    "packed": ("sequence_packing_scheduler",),
    "recompute": ("recompute_granularity", "moe_layer_recompute", "recompute_activations"),
    "label-smoothing": ("label_smoothing > 0",),
    "fused-loss": ("cross_entropy_loss_fusion & cross_entropy_fusion_impl = te",),
    "tp": ("tensor_model_parallel_size > 1",),
    "sp": ("sequence_parallel",),
    "cp": ("context_parallel_size > 1",),
    "pp": ("pipeline_model_parallel_size > 1",),
    "layout": ("pipeline_model_parallel_layout",),
    "ep": ("expert_model_parallel_size > 1",),
    "fp8": ("fp8", "fp4", "fp8_format", "fp4_format"),
    "cuda-graph": ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"),
    "distributed-optimizer": ("use_distributed_optimizer",),
    "offloaded-optimizer": ("optimizer_cpu_offload",),
    "muon": ("optimizer ~ muon",),
    "fsdp": ("use_megatron_fsdp", "use_custom_fsdp"),
    "param-groups": ("decoupled_lr", "vit_lr", "aligner_lr"),
}

_OFF = ("", "0", "0.0", "-1", "false", "no", "none", "null", "off", "disable", "disabled", "[]", "{}")
_CONDITION = re.compile(r"(!?)([\w.]+)(?: ([>=~]) (.+))?")


class _Open:
    """The value of a setting that is set to something that is not known; and the verdict on a word it decides."""

    def __repr__(self) -> str:
        return "OPEN"


OPEN: Final = _Open()


def is_on(value: Any) -> bool:
    return str(value).strip().lower() not in _OFF if isinstance(value, str | int | float) else bool(value)


def _above(least: float) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        try:
            return float(str(value)) > least
        except ValueError:
            return False

    return holds


@functools.cache
def _conditions(entry: str) -> tuple[tuple[str, Callable[[Any], bool], bool], ...]:
    """The name of each setting, what its value has to be, and whether None says nothing: of a pattern left empty."""
    found: list[tuple[str, Callable[[Any], bool], bool]] = []
    for text in entry.split(" & "):
        given = _CONDITION.fullmatch(text)
        assert given is not None, text
        negated, name, sign, operand = given.groups()
        holds: Callable[[Any], bool]
        if sign == ">":
            holds = _above(float(operand))
        elif sign == "=":
            holds = functools.partial(_is_one_of, operand.split("|"))
        elif sign == "~":
            holds = functools.partial(_has_part, operand.split("|"))
        else:
            holds = is_on
        found.append((name, functools.partial(_is_not, holds) if negated else holds, sign == "~"))
    return tuple(found)


def _is_not(holds: Callable[[Any], bool], value: Any) -> bool:
    return not holds(value)


def _is_one_of(words: Sequence[str], value: Any) -> bool:
    return str(getattr(value, "name", value)).lower() in words


def _has_part(parts: Sequence[str], value: Any) -> bool:
    """Parts in capitals stand for themselves: signs of a pattern of layers."""
    text = str(value)
    return any(part in (text if part.isupper() else text.lower()) for part in parts)


Read = Callable[[str], Sequence[Any]]


def judged(entries: Iterable[str], read: Read) -> bool | _Open | None:
    """Whether one of the conditions holds. OPEN if a value that is not known decides; None if all settings are absent.

    read: the values of a setting, by its name or by sections and its name (`peft.enabled`). Several models of a run
        may each have one.
    """
    found = [_one(entry, read) for entry in entries]
    return True if True in found else OPEN if OPEN in found else False if False in found else None


def _one(entry: str, read: Read) -> bool | _Open | None:
    found: list[bool | _Open | None] = []
    for name, holds, none_is_silent in _conditions(entry):
        values = [value for value in read(name) if value is not None or not none_is_silent]
        if any(value is not OPEN and holds(value) for value in values):
            found.append(True)
        else:
            found.append(OPEN if OPEN in values else False if values else None)
    return False if False in found else OPEN if OPEN in found else None if None in found else True


def facts_from(read: Read, words: Iterable[str] = MEGATRON) -> dict[str, bool]:
    """What settings say of each of `words`. Nothing of a word whose settings are all absent, or not known."""
    found = {word: judged(MEGATRON[word], read) for word in words}
    return {word: holds for word, holds in found.items() if isinstance(holds, bool)}


def names_in(table: Table) -> set[str]:
    """The names that a table reads, with the sections before them."""
    return {name for entries in table.values() for entry in entries for name, _, _ in _conditions(entry)}
