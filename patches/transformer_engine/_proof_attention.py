"""Attention of Transformer Engine without its kernels, for proofs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDNN = (9, 23, 0)
PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"


class OnGpu(TorchFunctionMode):
    """Tensors say that they lie on a GPU, for Transformer Engine's checks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked: Any = torch.Tensor.is_cuda
        return True if func == asked.__get__ else func(*args, **(kwargs or {}))


RANKS, HEADS, HEAD, LENGTH, BATCH = 2, 2, 8, 16, 2
CACHES = ("_cu_seqlens_cache", "_cu_seqlens_info_with_cp_cache")


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Transformer Engine's caches of offsets, empty, and as they were afterwards."""
    with contextlib.ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            for cache in CACHES if name.startswith("transformer_engine.pytorch") else ():
                undo.enter_context(mock.patch.dict(vars(module).get(cache, {}), clear=True))
        yield


def own_tokens(rank: int, ranks: int) -> Tensor:
    """Which tokens of a row the rank has: of 2 * ranks chunks the rank-th from both ends."""
    chunks = torch.arange(LENGTH).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else torch.arange(LENGTH)
