"""Packing against the plain statement of its rule, a loop over rows."""

import math
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import shim.ops.packing as packing_module  # noqa: E402
from shim.ops import Packing, fp8_alignment, pack_thd, packed_roll, unpack_thd  # noqa: E402


def of(values):
    return torch.tensor(values)


@st.composite
def masks(draw):
    """bool [B, S] with holes, or padded on one side; rows may be empty, and so may be all."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    side = draw(st.sampled_from(["left", "right", "holes"]))
    if side == "holes":
        return of(
            draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
        ).bool()
    mask = torch.arange(width) < of(draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows)))[:, None]
    return mask.flip(1) if side == "left" else mask


@pytest.fixture(params=[0, 16], ids=["index", "runs"])
def few(request, monkeypatch):
    """An index of all tokens, and runs of them, which a CPU takes if there are few."""
    monkeypatch.setattr(packing_module, "_FEW", request.param)


ways = st.sampled_from([0, 16])


@contextmanager
def taking(few):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "_FEW", few)
        yield


def rounded_up(number, multiple):
    return -(-number // multiple) * multiple


def packed_one_by_one(tensor, mask, alignment, slot, fill, total=None):
    """The rule itself: (row, lengths, slots)."""
    pieces = [row[kept] for row, kept in zip(tensor, mask)]
    lengths = [len(piece) for piece in pieces]
    slots = [rounded_up(length, slot) for length in lengths]
    slots[-1] += (rounded_up(sum(slots), math.lcm(alignment, slot)) if total is None else total) - sum(slots)
    row = torch.cat([torch.cat([p, p.new_full((n - len(p), *p.shape[1:]), fill)]) for p, n in zip(pieces, slots)])
    return row, lengths, slots


def zigzag_one_by_one(row, slots, cp, rank):
    """The rule itself: every slot cut in 2 * cp chunks, of which a rank has one from each end."""
    chunks = [part.chunk(2 * cp) if len(part) else [part] * (2 * cp) for part in row.split(slots)]
    return torch.cat([part for of_slot in chunks for part in (of_slot[rank], of_slot[2 * cp - 1 - rank])])


def offsets(lengths):
    return of([0, *lengths]).cumsum(0).int()


@settings(deadline=None, max_examples=120, derandomize=True)
@given(masks(), st.sampled_from([1, 2, 3, 16]), st.sampled_from([1, 4]), st.sampled_from([0, 7]), ways)
def test_it_is_the_loop_over_rows_and_back(mask, alignment, slot, fill, few):
    batch = torch.arange(1, mask.numel() + 1).view(mask.shape)
    expected, lengths, slots = packed_one_by_one(batch, mask, alignment, slot, fill)
    with taking(few):
        packed, packing = pack_thd(batch, mask, alignment=alignment, sequence_alignment=slot, fill=fill)
    assert (packing.places.runs is not None) == bool(few)
    assert torch.equal(packed, expected) and packing.total == len(expected) == sum(slots)
    assert torch.equal(packing.cu_seqlens, offsets(lengths)) and packing.cu_seqlens.dtype == torch.int32
    assert torch.equal(packing.cu_seqlens_padded, offsets(slots)) and packing.cu_seqlens_padded.dtype == torch.int32
    assert packing.max_seqlen == max(slots)
    assert torch.equal(unpack_thd(packed, packing, fill=-1), batch.masked_fill(~mask, -1))
    assert torch.equal(packing.attention_mask, mask)
    places = [torch.arange(n).masked_fill(torch.arange(n) >= length, 0) for n, length in zip(slots, lengths)]
    assert torch.equal(packing.positions, torch.cat(places)) and packing.positions.dtype == torch.int64
    assert torch.equal(packing.valid, torch.cat([torch.arange(n) < length for n, length in zip(slots, lengths)]))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(masks(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([None, "delayed"]), st.booleans(), ways)
def test_shares_are_the_zigzag_and_come_back(mask, cp, recipe, parallel, few):
    batch = torch.arange(1, mask.numel() + 1).view(mask.shape)
    alignment = fp8_alignment(recipe, 2, cp, parallel)
    slot = 2 * cp if cp > 1 else 1
    row, _, slots = packed_one_by_one(batch, mask, alignment, slot, 0)
    with taking(few):
        whole = Packing.from_mask(mask, alignment=alignment, cp=cp)
    ranks = [whole.on_rank(rank) for rank in range(cp)]
    shares = [rank.pack(batch) for rank in ranks]
    for number, (rank, share) in enumerate(zip(ranks, shares)):
        expected = zigzag_one_by_one(row, slots, cp, number) if cp > 1 else row
        assert torch.equal(share, expected) and torch.equal(rank.split(row), expected)
        assert torch.equal(rank.valid, share != 0) and rank.total == len(row)
        assert torch.equal(rank.positions, rank.split(whole.positions))
        assert torch.equal(rank.unpack(share), batch * rank.attention_mask)
    assert torch.equal(sum(rank.unpack(share) for rank, share in zip(ranks, shares)), batch * mask)
    assert torch.equal(whole.merge(shares), row) and torch.equal(ranks[0].merge(torch.cat(shares)), row)
    assert torch.equal(unpack_thd(shares, ranks[-1]), batch * mask)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.sampled_from(["left", "right"]), st.integers(1, 3), ways)
def test_lengths_do_as_a_mask_does(lengths, side, cp, few):
    mask = torch.arange(7) < of(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    options = {"alignment": 8, "cp": cp}
    expected = Packing.from_mask(mask, **options)
    for given_as in (lengths, of(lengths), of(lengths).short()):
        with taking(few):
            found = Packing.from_lengths(given_as, 7, padding_side=side, **options)
        assert torch.equal(found.places.numbers, expected.places.numbers)
        assert torch.equal(found.cu_seqlens, expected.cu_seqlens) and found.cu_seqlens.dtype == torch.int32
        assert torch.equal(found.cu_seqlens_padded, expected.cu_seqlens_padded)
        assert (found.total, found.max_seqlen, found.batch) == (expected.total, expected.max_seqlen, expected.batch)


MASK = of([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("total", [10, 16, 40])
def test_a_fixed_total_only_lengthens_the_last_slot(total):
    batch = torch.arange(1, 21).view(4, 5)
    packed, packing = pack_thd(batch, MASK, alignment=2, total=total)
    assert torch.equal(packed, packed_one_by_one(batch, MASK.bool(), 2, 1, 0, total)[0])
    assert packing.max_seqlen == total, "a bound, as nothing was read"
    assert pack_thd(batch, MASK, alignment=2, total=total, max_seqlen=35)[1].max_seqlen == 35
    assert torch.equal(packing.unpack(packed), batch * MASK)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fill", [0, 2])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_any_dtype_and_any_further_dimensions(dtype, fill):
    batch = torch.arange(1, 121).view(4, 5, 2, 3).to(dtype)
    packed, packing = pack_thd(batch, MASK, alignment=16, fill=fill)
    assert packed.dtype == dtype and packed.shape == (16, 2, 3)
    assert torch.equal(packed, packed_one_by_one(batch, MASK.bool(), 16, 1, fill)[0])
    assert torch.equal(packing.unpack(packed)[MASK.bool()], batch[MASK.bool()])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fill", [0, 2])
def test_floats_of_eight_bits(fill):
    batch = torch.arange(1, 21).view(4, 5).to(torch.float8_e4m3fn)
    packed, packing = pack_thd(batch, MASK, alignment=16, fill=fill)
    expected = packed_one_by_one(batch.float(), MASK.bool(), 16, 1, fill)[0]
    assert torch.equal(packed.float(), expected)
    assert torch.equal(packing.unpack(packed, fill=fill).float(), batch.float().where(MASK.bool(), fill))


@pytest.mark.usefixtures("few")
def test_not_a_number_in_padding_stays_behind():
    batch = torch.ones(4, 5).masked_fill(~MASK.bool(), math.nan)
    packed, packing = pack_thd(batch, MASK, alignment=16)
    assert not packed.isnan().any() and packing.unpack(packed.where(packing.valid, math.nan)).sum() == MASK.sum()


@pytest.mark.usefixtures("few")
def test_views_that_are_not_contiguous_and_the_input_stays():
    batch = torch.arange(40).view(5, 4, 2).transpose(0, 1)
    before = batch.clone()
    packed, _ = pack_thd(batch, MASK.t().contiguous().t())
    assert torch.equal(packed, batch[MASK.bool()]) and torch.equal(batch, before)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fill", [0, 1.5])
def test_gradients_go_back_exactly(fill):
    torch.manual_seed(0)
    batch = torch.randn(4, 5, 2, dtype=torch.float64, requires_grad=True)
    whole = Packing.from_mask(MASK, alignment=8, cp=2)
    rank = whole.on_rank(1)
    row = torch.randn(whole.total, dtype=torch.float64, requires_grad=True)
    share = torch.randn(whole.total // 2, 2, dtype=torch.float64, requires_grad=True)
    for move, tensor in (
        (lambda x: whole.pack(x, fill), batch),
        (lambda x: rank.pack(x, fill), batch),
        (lambda x: whole.unpack(x, fill), row),
        (lambda x: rank.unpack(x, fill), share),
        (rank.split, row),
        (lambda x: whole.merge([x, x]), share),
    ):
        assert torch.autograd.gradcheck(move, tensor)
        assert torch.autograd.gradgradcheck(lambda x, move=move: move(x) ** 2, tensor)


@pytest.mark.usefixtures("few")
def test_a_rank_without_tokens_has_a_gradient_of_zeros():
    """Its backward has to run, because other ranks wait there for its messages."""
    mask = torch.zeros(2, 4, dtype=torch.bool)
    empty = Packing.from_mask(mask, cp=2, alignment=8).on_rank(1)
    other = Packing.from_lengths([1], 4, cp=2).on_rank(1)  # rank 0 has the token
    for move, size in (
        (empty.pack, (2, 4)),
        (other.pack, (1, 4)),
        (other.unpack, (2,)),
        (Packing.from_mask(mask).pack, (2, 4)),
        (Packing.from_mask(mask).unpack, (0,)),
    ):
        tensor = torch.randn(size, requires_grad=True)
        move(tensor).sum().backward()
        assert torch.equal(tensor.grad, torch.zeros(size))


def test_a_frozen_tensor_gets_no_gradient():
    batch = torch.randn(4, 5, requires_grad=True)
    packing = Packing.from_mask(MASK)
    assert not packing.pack(batch.detach()).requires_grad
    with torch.no_grad():
        assert not packing.pack(batch).requires_grad


def test_it_is_what_the_packed_roll_takes():
    """Labels that are made in the packed row are those that are made in the batch."""
    batch = torch.arange(1, 21).view(4, 5)
    mask = MASK.bool()
    packed, packing = pack_thd(batch, mask, alignment=16, sequence_alignment=4)
    rolled = packing.unpack(packed_roll(packed, packing.cu_seqlens, packing.cu_seqlens_padded))
    follows = mask & torch.cat([mask[:, 1:], torch.zeros(4, 1, dtype=torch.bool)], 1)
    assert torch.equal(rolled, batch.roll(-1, 1) * follows)


@pytest.mark.parametrize("attend_padding", [False, True])
def test_arguments_of_attention(attend_padding):
    packing = Packing.from_mask(MASK, alignment=16, cp=2)
    for of_rank in (packing, packing.on_rank(1)):
        found = of_rank.thd_arguments(attend_padding=attend_padding)
        assert found.pop("qkv_format") == "thd"
        for side in ("q", "kv"):
            expected = packing.cu_seqlens_padded if attend_padding else packing.cu_seqlens
            assert found.pop(f"cu_seqlens_{side}") is expected
            assert found.pop(f"cu_seqlens_{side}_padded") is packing.cu_seqlens_padded
            assert found.pop(f"max_seqlen_{side}") == packing.max_seqlen == 8
        assert not found


# Nothing is read


def everything(packing, batch):
    """All moves, forward and backward."""
    for one in (packing, packing.on_rank(1)):
        packed = one.pack(batch)
        (one.unpack(packed, 3.0).sum() + packed.sum()).backward()
        assert one.positions.shape == one.valid.shape and one.attention_mask.shape == batch.shape[:2]
    share = packing.on_rank(0).split(packing.pack(batch))
    packing.merge([share, share]).sum().backward()
    assert batch.grad.shape == batch.shape


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Values are checked as on a GPU. Tensors on the meta device have no values, so reading one raises."""
    monkeypatch.setattr(packing_module, "require", torch._assert_async)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: Packing.from_mask(torch.empty(4, 5, device="meta"), total=64, **options),
        lambda **options: Packing.from_mask(torch.empty(4, 5, device="meta"), total=64, max_seqlen=48, **options),
        lambda **options: Packing.from_mask(MASK, device="meta", **options),
        lambda **options: Packing.from_lengths([3, 2, 0, 5], 5, device="meta", **options),
        lambda **options: Packing.from_lengths(torch.empty(4, device="meta").int(), 5, total=64, **options),
    ],
    ids=["mask, total", "mask, total, longest", "mask on the CPU", "lengths on the CPU", "lengths, total"],
)
def test_nothing_is_read(as_on_a_gpu, make):
    packing = make(cp=2, alignment=32)
    assert packing.cu_seqlens.is_meta and packing.places.numbers.is_meta and packing.total in (32, 64)
    everything(packing, torch.empty(4, 5, 3, device="meta", requires_grad=True))


def test_without_a_total_there_is_one_read(as_on_a_gpu, monkeypatch):
    mask = torch.empty(4, 5, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        Packing.from_mask(mask, cp=2)
    reads = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or [32, 20])
    packing = Packing.from_mask(mask, cp=2, alignment=32)
    assert (packing.total, packing.max_seqlen) == (32, 20)
    everything(packing, torch.empty(4, 5, device="meta", requires_grad=True))
    assert reads == [(2,)]


def test_the_number_of_operations_does_not_depend_on_the_number_of_sequences():
    def operations(rows):
        names = []

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                names.append(function)
                return function(*args, **(kwargs or {}))

        mask = torch.ones(rows, 3, dtype=torch.bool)
        with Counting():
            packing = Packing.from_mask(mask, alignment=16, cp=2).on_rank(1)
            packing.unpack(packing.pack(mask))
        return len(names)

    assert operations(17) == operations(200) < 120
    assert operations(1) == operations(8) < 40, "of few rows, one copy of all runs"


def test_one_graph_under_torch_compile():
    torch._dynamo.reset()
    packing = Packing.from_mask(MASK, total=32, cp=2).on_rank(0)

    def step(batch):
        return packing.unpack(packing.pack(batch) * 2, 1.5)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    batch = torch.arange(1.0, 21).view(4, 5)
    assert torch.equal(compiled(batch), step(batch))
    (expected,) = torch.autograd.grad(step(batch.requires_grad_()).sum(), batch)
    (found,) = torch.autograd.grad(compiled(batch).sum(), batch)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_it_does_not_wait_for_the_gpu():
    """Host synchronisation raises in this mode."""
    batch, mask = torch.randn(4, 5, device="cuda", requires_grad=True), MASK.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packing = Packing.from_mask(mask, alignment=32, cp=2, total=64)
        everything(packing, batch)
        packed = packing.pack(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = Packing.from_mask(MASK, alignment=32, cp=2, total=64)
    assert torch.equal(packed.cpu(), on_cpu.pack(batch.cpu()))


# What does not fit


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Packing.from_mask(torch.ones(3)), r"shape \[B, S\], not \[3\]"),
        (lambda: Packing.from_mask(torch.ones(0, 3)), "at least one row"),
        (lambda: Packing.from_mask(MASK, alignment=0), "at least 1"),
        (lambda: Packing.from_mask(MASK, cp=0), "cp is 0"),
        (lambda: Packing.from_mask(MASK, cp=2, sequence_alignment=2), "multiple of 4"),
        (lambda: Packing.from_mask(MASK, total=12, alignment=16), "multiple of 16"),
        (lambda: Packing.from_mask(MASK, total=1 << 31), r"below 2\*\*31"),
        (lambda: Packing.from_mask(MASK, total=9), "do not fit a total of 9 tokens"),
        (lambda: Packing.from_mask(MASK, max_seqlen=4), "max_seqlen, which is 4"),
        (lambda: Packing.from_mask(MASK, total=16, max_seqlen=8), "max_seqlen, which is 8"),
        (lambda: Packing.from_lengths([3], 5, padding_side="both"), "'left' or 'right'"),
        (lambda: Packing.from_lengths([3.0], 5), "integers"),
        (lambda: Packing.from_lengths([], 5), "integers|at least one row"),
        (lambda: Packing.from_lengths([6], 5), "between 0 and the width 5"),
        (lambda: Packing.from_lengths([-1], 5), "between 0 and the width 5"),
        (lambda: Packing.from_lengths([1] * 2, 1 << 30), r"fewer than 2\*\*31"),
        (lambda: Packing.from_mask(MASK).pack(torch.ones(4, 6)), r"\[4, 5, \.\.\.\] here, not \[4, 6\]"),
        (lambda: Packing.from_mask(MASK).pack(torch.ones(20)), r"not \[20\]"),
        (lambda: Packing.from_mask(MASK).unpack(torch.ones(1, 10)), r"\[10, \.\.\.\] here, not \[1, 10\]"),
        (lambda: Packing.from_mask(MASK).pack(torch.ones(4, 5, device="meta")), "device='meta'"),
        (lambda: Packing.from_mask(MASK, cp=2).on_rank(2), "cp_rank is 2"),
        (lambda: Packing.from_mask(MASK, cp=2).on_rank(0).on_rank(1), "packing of rank 0 already"),
        (lambda: Packing.from_mask(MASK, cp=2).split(torch.ones(16)), "packing of one rank"),
        (lambda: Packing.from_mask(MASK, cp=2).merge([torch.ones(8)]), r"\[16, \.\.\.\] here, not \[8\]"),
        (lambda: pack_thd(MASK, MASK, cp=2), "cp_rank must say"),
    ],
)
def test_what_does_not_fit_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
