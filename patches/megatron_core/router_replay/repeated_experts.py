"""Defect 5: a row of padding names an expert several times, and the all-to-all dispatcher counts each name.

The router (`router`) marks the routing map of a replay, and adds up the probabilities of an expert's names. The
dispatcher counts a marked map, as it counts the map of a capacity factor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from shim.patches._arguments import Function, argument

# Attributes: of a routing map that a replay has made, and of a dispatcher that waits earlier for its sake.
REPLAYED, SYNC_POINT = "_shim_replayed", "_shim_sync_point"


def add_up(probs: Any, experts: Any) -> None:
    """Give each expert the sum of the probabilities of its names. Upstream gives it the probability of one of them.

    probs: [tokens, experts], overwritten. experts: [tokens, topk]. Upstream's gradient is that of the sum already.
    """
    with torch.no_grad():
        names = (experts.unsqueeze(2) == experts.unsqueeze(1)).sum(2)
        probs.scatter_(1, experts, probs.gather(1, experts) * names)


def patch_preprocess(original: Function) -> Function:
    map_of = argument(original, "routing_map")

    @functools.wraps(original)
    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Upstream's point only ever comes earlier. That of a replay is for its own pass.
        self.cuda_sync_point = self.__dict__.pop(SYNC_POINT, self.cuda_sync_point)
        found = original(self, *args, **kwargs)
        routing_map = map_of((self, *args), kwargs)
        # With a capacity the number is that of the map or of the capacity already. A CUDA graph cannot wait.
        static = isinstance(self.num_out_tokens, int) and not self.drop_and_pad
        if static and getattr(routing_map, REPLAYED, False) and self.cuda_dtoh_point == "before_permutation_1":
            self.num_out_tokens = routing_map.sum()
            setattr(self, SYNC_POINT, self.cuda_sync_point)
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return found

    return preprocess
