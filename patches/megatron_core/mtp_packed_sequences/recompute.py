"""0.14 to 0.18: full recompute of an MTP layer on a packed row. mtp-recompute handles unpacked rows.

Upstream's own recompute crashes on packed rows (0.16 to 0.18), or under method block (0.14, 0.15). From 0.19 on it is
right.
"""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function
from shim.patches.megatron_core._mtp_checkpoint import checkpointed_forward
from shim.patches.megatron_core.mtp_packed_sequences.refused_row import WithRow
from shim.patches.megatron_core.mtp_packed_sequences.rolls import Options


def patch_checkpointed_forward(original: Function, options: Options) -> Function:
    packed = checkpointed_forward(original)

    @functools.wraps(packed)
    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # 0.14 and 0.15 pass a function that has the row, instead of the row.
        function = args[0] if args else kwargs.get("forward_func")
        has_row = kwargs.get("packed_seq_params") is not None or isinstance(function, WithRow)
        return (packed if has_row else original)(self, *args, **kwargs)

    return _checkpointed_forward
