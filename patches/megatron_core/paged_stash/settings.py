"""The sizes that a model's config and the options ask for, and whether a stash of these sizes gains anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from shim._errors import OptionError

FLAG = "moe_paged_stash"
HOST_FACTOR = "moe_paged_stash_buffer_size_factor_cpu"
SIZES = "moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda", HOST_FACTOR
EXACT = "the experts' buffers have no spare rows (no moe_pad_expert_input_to_capacity), and there is no host pool"
RANKED = (
    "rows that moe_expert_rank_capacity_factor adds are known to the fused operations only, and there is no host pool"
)


class Settings(NamedTuple):
    """The sizes that a config and options ask for.

    Factors are upstream's: a positive factor multiplies the expected rows, a negative one the maximum so far.
    """

    page_size: int
    factor: float
    host_factor: float


def check_settings(options: Mapping[str, Any], settings: Settings) -> None:
    """Raise OptionError for impossible settings. Not checked by apply(), because only a model has a config."""

    def refuse(what: str, remedy: str) -> None:
        raise OptionError(f"paged-stash: {what}. Remedy: {remedy}, in the model's config or by the option of that name")

    size = settings.page_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        refuse(f"{SIZES[0]} is {size!r}", "set it to a whole number of rows, at least 1")
    for name, factor in zip(SIZES[1:], settings[1:], strict=True):
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            refuse(f"{name} is {factor!r}", "set it to a finite number")
    if options["overflow"] == "spill" and not settings.host_factor:
        refuse("overflow='spill' needs a host pool, and there is none", f"set {HOST_FACTOR} to other than 0")
    if settings.host_factor and torch.cuda.is_available() and find_spec("triton") is None:
        refuse("a GPU reads its host pool by Triton, which is not installed", f"install it, or set {HOST_FACTOR} to 0")


def cannot_gain(config: Any, settings: Settings) -> str:
    """Why experts with this config gain nothing from a stash; "" if they may gain."""
    padded = getattr(config, "moe_pad_expert_input_to_capacity", False)
    offloaded = {"expert_fc1", "moe_act"} & set(getattr(config, "offload_modules", None) or ())
    if offloaded and getattr(config, "fine_grained_activation_offloading", False):
        return f"offload_modules has {', '.join(sorted(offloaded))}, which are the experts' own"
    if padded and getattr(config, "moe_apply_probs_on_input", False):
        return "with moe_apply_probs_on_input, rows that fill the capacity have a part in gradients"
    if settings.host_factor:
        return ""
    if not padded:
        return EXACT if getattr(config, "moe_expert_rank_capacity_factor", None) is None else RANKED
    if config.moe_expert_capacity_factor <= 1.0:
        return f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} leaves no rows to spare"
    return ""
