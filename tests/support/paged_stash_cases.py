"""What the tests of the paged stash share: the toy experts of its proofs, and a runner that repeats a step."""

import megatron.core.transformer.moe.paged_stash as paged_stash  # noqa: F401  for the tests

from shim.patches.megatron_core.paged_stash.upstream_on_cpu import (  # noqa: F401  for the tests
    CAPACITY_FACTOR,
    HIDDEN,
    ROWS,
    GroupedMLP,
    build,
    equal_bits,
    evaluate,
    forward,
    fused_experts,
    fused_gradients,
    interpreted_kernels,
    run_twice,
    settings,
    train,
)
from shim.testing.cpu import unwritten_memory_is_nan  # noqa: F401 - for the tests
