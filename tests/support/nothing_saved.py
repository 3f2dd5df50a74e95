"""What stock raises if a recompute takes an argument that nothing has saved."""

import pytest
import torch
from megatron.core.tensor_parallel import random
from packaging.version import Version


def raises_nothing_saved():
    """`pytest.raises` of that error: it depends on the release, and up to torch 2.12 on torch alone."""
    if Version(torch.__version__).release < (2, 13):
        return pytest.raises(RuntimeError, match="Trying to backward through the graph a second time")
    return pytest.raises(StopIteration if hasattr(random, "_load_args_from_ctx") else TypeError)
