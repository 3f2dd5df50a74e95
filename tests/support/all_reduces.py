"""What a rank reduces with others."""

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def sizes_of_all_reduces():
    """How many numbers each tensor has that this rank reduces in the block, in their order."""
    sizes, reduce = [], torch.distributed.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(torch.distributed, "all_reduce", counted):
        yield sizes
