"""Proof of te-flash-head-size: what Transformer Engine's own get_attention_backend chooses for a B300.

Neither such a GPU nor FlashAttention is needed. Stand-ins say that FlashAttention 2 is there, that the compute
capability is 10.3, and that cuDNN has no attention for the heads. Nothing is computed.
"""

from __future__ import annotations

from shim.patches.transformer_engine._proof_flash_attention import (
    chosen,
)
from shim.testing.proof import Here, proof

B300 = (10, 3)


def takes_flash(head: int, capability: tuple[int, int] = B300) -> bool:
    return bool(chosen(capability, head_dim_qk=head, head_dim_v=head)[0])


@proof(
    "FlashAttention 2 refused for {:.0f} of 3 head sizes", right="FlashAttention 2 for all", defect="memory", te=True
)
def heads_of_200_to_256_on_a_b300(here: Here) -> int:
    """Transformer Engine refuses FlashAttention 2 for heads above 192 on a B300, and takes unfused attention.

    To reproduce, on a GPU of compute capability 10.3 with FlashAttention 2 and NVTE_FUSED_ATTN=0: run
    `DotProductAttention` in bf16 with kv_channels=256 under NVTE_DEBUG=1, or call `get_attention_backend` with
    `AttentionParams(head_dim_qk=256, head_dim_v=256)`. Here stand-ins say that such a GPU and FlashAttention are there.

    The check is `device_compute_capability not in ((8, 0), (9, 0), (10, 0), (12, 0))`. Unfused attention keeps the
    matrix of all pairs of tokens. Right is what FlashAttention takes, heads up to 256. Pull request 2836 fixed it,
    2629 brought it back, 3360 is open.
    """
    return sum(not found for found in here.run(lambda: [takes_flash(head) for head in (200, 224, 256)])[0])
