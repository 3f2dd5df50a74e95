"""What the ranks of test_other_trainers_ranks.py run: functions at the top level of a module, which can be pickled."""

import contextlib
from types import SimpleNamespace

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
import torch.distributed as dist
import trainers_in_small as trainers
from trainer_cases import COUNTS_PADDING, Together, padding_does_not_count, rotation_is_per_token

import shim
from shim import testing
from shim.testing import Layout


def in_the_order(*orders):
    """The digest and the truth on this rank, which binds in its own order and checks with the others."""
    expert_bias = trainers.skyrl_expert_bias, padding_does_not_count
    bind, truth = expert_bias if COUNTS_PADDING else (trainers.mindspeed_rope, rotation_is_per_token)
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        with Together(bind, orders[dist.get_rank()]):
            return shim.check().digest, truth()


class Reloadable(dist.ProcessGroup):
    """slime's groups: an object that passes for the group inside, which a trainer may destroy and make again."""

    def __init__(self, group):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group


@contextlib.contextmanager
def groups_unwrapped():
    """As slime has it: every function of torch.distributed takes the group out of such an object."""

    def unwrapping(function):
        def call(*args, **kwargs):
            args = [getattr(arg, "group", arg) if isinstance(arg, Reloadable) else arg for arg in args]
            kwargs = {name: arg.group if isinstance(arg, Reloadable) else arg for name, arg in kwargs.items()}
            return function(*args, **kwargs)

        return call

    names = ["get_rank", "get_world_size", "get_backend", "get_process_group_ranks"]
    names += ["all_gather", "all_gather_object", "all_reduce"]
    with pytest.MonkeyPatch.context() as undo:
        for name in names:
            undo.setattr(dist, name, unwrapping(getattr(dist, name)))
        for name in ("__new__", "__init__"):
            undo.setattr(dist.P2POp, name, unwrapping(getattr(dist.P2POp, name)))
        yield


def through_reloadable_groups():
    """A packed row rolled over two ranks through a group and through its wrapper, and check() with the wrapper."""
    offsets = torch.tensor([0, 4, 12], dtype=torch.int32)
    row = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 10], dtype=torch.int32), cu_seqlens_q_padded=offsets)
    mine = torch.arange(1, 7)[None] + 10 * dist.get_rank()
    with shim.patched():
        plain = mtp.roll_tensor(mine, -1, -1, dist.group.WORLD, row)[0]
        with groups_unwrapped():
            group = Reloadable(dist.group.WORLD)
            wrapped = mtp.roll_tensor(mine, -1, -1, group, row)[0]
            digest = shim.check(group=group).digest
    return plain.tolist(), wrapped.tolist(), digest
