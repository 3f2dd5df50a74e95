"""A layout that shim.testing.Layout does not have: expert parallelism on the ranks of tensor parallelism."""

import functools
from unittest import mock

from megatron.core import parallel_state


def spread_experts():
    """Where tensor parallelism is 2, that of experts is 1, and their parallelism is 2."""
    initialise = parallel_state.initialize_model_parallel

    @functools.wraps(initialise)
    def initialize_model_parallel(*args, **kwargs):
        if kwargs["tensor_model_parallel_size"] == 2:
            kwargs |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        return initialise(*args, **kwargs)

    return mock.patch.object(parallel_state, "initialize_model_parallel", initialize_model_parallel)
