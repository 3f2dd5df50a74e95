"""Proof of cp-comm-type-list."""

from __future__ import annotations

from typing import Any
from unittest import mock

from shim import testing
from shim.testing import Layout
from shim.testing.attention import CPUCoreAttention
from shim.testing.proof import Here, proof

KINDS = ["p2p", "all_gather", "a2a", "p2p"]


def taken(*, kinds: Any = None, **options: Any) -> list[str]:
    """The cp_comm_type that each core attention of a model is built with, in the order of the layers.

    The list is the one that the config has, and stays the one it has.
    """
    found, init = [], CPUCoreAttention.__init__

    def recording(self: Any, *args: Any, cp_comm_type: str | None = None, **kwargs: Any) -> None:
        found.append(cp_comm_type or "")
        init(self, *args, **kwargs)

    with mock.patch.object(CPUCoreAttention, "__init__", recording):
        testing.build_chunks(num_layers=len(KINDS), cp_comm_type=KINDS if kinds is None else kinds, **options)
    return found


def others_on_rank() -> int:
    return sum(mine != true for mine, true in zip(taken(mtp_num_layers=None), KINDS, strict=True))


@proof(
    "{:.0f} of 4 layers with another entry",
    right="every layer has its entry",
    ranks=2,
    defect="crash",
    crashes=r"^IndexError: list index out of range",
)
def each_layer_takes_its_entry(here: Here) -> int:
    """A model cannot be built with a list of `cp_comm_type`, one for each layer.

    To reproduce: build a GPTModel of 4 layers on two context-parallel ranks, with
    `cp_comm_type=["p2p", "all_gather", "a2a", "p2p"]` in its TransformerConfig, and look at the `cp_comm_type` that
    each core attention is built with.

    The last layer raises an IndexError. TransformerLayer.__init__ takes `config.cp_comm_type[self.layer_number]`, and
    layers are numbered from one: each of the others gets the entry of the next layer, as pipeline stages without the
    last layer show. Right is the entry at `layer_number - 1`. From 0.12 to 0.16; fixed in 0.17 (Megatron-LM pull
    request 3389).
    """
    return max(here.run(others_on_rank, layout=Layout(cp=here.world)))
