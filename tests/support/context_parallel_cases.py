"""What the tests of mtp-packed-sequences under context parallelism share: the patch in a rank, rows, a rank's share.

A rank holds the chunks of a row that zigzag gives it. Functions named `..._in_rank` run in every rank of a pool at
once; what they return is judged in the test.
"""

import contextlib
import itertools

import megatron.core.transformer.multi_token_prediction as mtp
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shim
from shim import testing
from shim.ops import packed_roll
from shim.patches.megatron_core.mtp_recompute.proof import OneSequence as Unpacked
from shim.testing import Layout

ID = "mtp-packed-sequences"
LOSS = "mtp-loss-cp"  # without it a rank divides the loss by its own count
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
WITHIN_LAYOUT, ACROSS_LAYOUTS = 1e-6, 5e-6
CP2, CP4 = Layout(cp=2), Layout(cp=4)
# In a rank: what undoes the patches that are applied, which they are, and options. Planning and reverting for each test
# would take longer than the tests.
APPLIED = []


def apply_in_rank(ids, options):
    """These patches, with options of mtp-packed-sequences, or stock, for as long as nothing else is asked for."""
    wanted = [ids, options] if ids else []
    if APPLIED[1:] != wanted:
        if APPLIED:
            APPLIED[0].close()
        APPLIED.clear()
        if ids:
            undo = contextlib.ExitStack()
            undo.enter_context(shim.patched(only=ids, require=ids, options={ID: options}))
            APPLIED.extend([undo, ids, options])


@contextlib.contextmanager
def in_layout(layout, shimmed=True, ids=(ID, LOSS), **options):
    """A rank's surroundings: CPU substitutions, these patches or stock, and the layout."""
    with testing.megatron_on_cpu():
        apply_in_rank([*ids] if shimmed else [], options)
        with testing.layout_initialised(layout):
            yield


def build(layout, lora=False, **model):
    gpt = testing.build_gpt(sequence_parallel=layout.sequence_parallel, **model)
    if lora:
        testing.add_lora(gpt)
    return gpt


def row_of(lengths, align, masks=None):
    return testing.pack(testing.random_sequences(lengths), align=align, loss_masks=masks)


def unpacked(length, mask=None):
    return Unpacked(**vars(row_of((length,), 1, None if mask is None else [mask])))


def against_alone(gpt, row, **options):
    return testing.differences(testing.run_packed(gpt, row, **options), testing.run_alone(gpt, row, **options))


def places_of(slots, rank, ranks):
    """Where the tokens of a rank lie in the row: of every slot the front chunk, then the tail chunk.

    slots: where slots end. A share that is odd has the longer front.
    """
    places = []
    for start, end in itertools.pairwise([0, *slots]):
        share = (end - start) // ranks
        front, tail = (share + 1) // 2, share // 2
        places += range(start + rank * front, start + (rank + 1) * front)
        back = start + ranks * front + (ranks - 1 - rank) * tail
        places += range(back, back + tail)
    return torch.tensor(places, dtype=torch.int64)


def zeros_but(length, *places):
    mask = torch.zeros(length)
    mask[list(places)] = 1
    return mask


def rank_of(group):
    return dist.get_rank(group)


def cp_group():
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def params(valid, padded=None, group=None):
    from megatron.core.packed_seq_params import PackedSeqParams

    valid, padded = (None if cu is None else torch.tensor(cu, dtype=torch.int32) for cu in (valid, padded))
    slots = {} if padded is None else {"cu_seqlens_q_padded": padded}
    row = PackedSeqParams(qkv_format="thd", cu_seqlens_q=valid, **slots)
    if group is not None:
        row.cp_group = group  # a field from 0.16; releases before that have no such name, and take it all the same
    return row


def whole_and_rolled(valid, padded, dtype, before=(), after=()):
    """A row of shape [*before, T, *after] with no zero in it, and what it is after a roll."""
    length = (padded or valid)[-1]
    shape = [*before, length, *after]
    whole = (torch.arange(1, 1 + torch.Size(shape).numel()) % 100 + 1).view(shape).float().to(dtype)
    cu = [None if x is None else torch.tensor(x) for x in (valid, padded)]
    return whole, packed_roll(whole, *cu, dim=len(before))


def rolls_in_rank(layout, rows, dtypes, shapes, shimmed=True, partition="sequence"):
    """Cases in which the roll of this rank's share is not the share of the rolled row."""
    options = {"partition": partition} if shimmed else {}
    with in_layout(layout, shimmed=shimmed, **options):
        wrong, group = [], cp_group()
        for (valid, padded), dtype, (before, after) in itertools.product(rows, dtypes, shapes):
            whole, expected = whole_and_rolled(valid, padded, dtype, before, after)
            slots = list(padded or valid)[1:] if partition == "sequence" else [whole.size(len(before))]
            places, dim = places_of(slots, rank_of(group), group.size()), len(before)
            row = params(valid, padded)
            # Every other way to name a dimension.
            dims = dim if len(after) % 2 else dim - whole.dim()
            share = whole.index_select(dim, places)
            rolled, total = mtp.roll_tensor(share, shifts=-1, dims=dims, cp_group=group, packed_seq_params=row)
            right = expected.index_select(dim, places)
            if rolled.dtype != dtype or not torch.equal(rolled, right) or not torch.equal(total, right.sum()):
                wrong.append((valid, padded, dtype, before, after, rolled.tolist()))
        return wrong


class Messages(TorchDispatchMode):
    """Counts what goes out from this rank."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sent += str(func.overloadpacket) == "c10d.send"
        return func(*args, **(kwargs or {}))
