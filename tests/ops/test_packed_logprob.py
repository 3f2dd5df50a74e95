"""Log-probabilities of a packed row, over TP and CP too, against fp64 of each sequence alone."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from rank_shares import offsets, places_of  # noqa: E402

from shim.ops import linear_packed_logprobs, packed_logprobs, token_logprobs  # noqa: E402
from shim.testing import Footprint, Ranks  # noqa: E402

VOCABULARY, WIDTH = 12, 5
GARBAGE = 10**6  # what padding may hold: no token of the vocabulary
ROWS = {  # (valid lengths, slot lengths); 2 and 4 ranks share the slots out
    "one": ([8], [8]),
    "three": ([8, 16, 8], [8, 16, 8]),
    "padded": ([5, 13, 1, 0, 8], [8, 16, 8, 8, 8]),
    "odd shares": ([4, 2, 12, 3], [4, 4, 12, 4]),
    "no token": ([0, 0], [0, 4]),
    "no sequence": ([], []),
}
BEHIND = 4  # tokens of the row behind the last slot


class Row:
    """A packed row: logits in fp64 as a product, labels with a prompt that is left out, weights of a loss."""

    def __init__(self, name, seed=0):
        self.valid, self.slots = ROWS[name]
        self.cu, self.padded = offsets(self.valid), offsets(self.slots)
        self.total = sum(self.slots) + BEHIND
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(self.total, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
        self.bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits = self.hidden @ self.weight.t() + self.bias
        self.temperature = torch.rand(self.total, generator=generator, dtype=torch.float64) + 0.5
        self.loss = torch.randn(2, self.total, generator=generator, dtype=torch.float64)
        self.tokens = torch.full((self.total,), GARBAGE)
        for start, end in self.spans():
            self.tokens[start:end] = torch.randint(0, VOCABULARY, (end - start,), generator=generator)
        self.tokens[2:4] = -100  # of the first sequence

    def spans(self):
        starts = offsets(self.slots).tolist()
        return [(start, start + length) for start, length in zip(starts, self.valid)]

    def alone(self, logits, temperature=None):
        """(logprob, entropy, mask) [T]: each sequence by itself, from all logits [T, V] in fp64."""
        logprob, entropy = (torch.zeros(self.total, dtype=torch.float64) for _ in range(2))
        mask = torch.zeros(self.total, dtype=torch.bool)
        for start, end in self.spans():
            for place in range(start, end - 1):
                following = self.tokens[place + 1].item()
                if following == -100:
                    continue
                x = logits[place] if temperature is None else logits[place] / temperature[place]
                p = x.softmax(0)
                logprob[place], entropy[place], mask[place] = p[following].log(), -(p * p.log()).sum(), True
        return logprob, entropy, mask

    def truth(self, *leaves, temperature=None, weights=None):
        """Results, and gradients of the weighted sum of both for `leaves`: logits, or hidden, weight and bias."""
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t() + leaves[2]
        logprob, entropy, mask = self.alone(logits, temperature)
        of_logprob, of_entropy = self.loss if weights is None else weights
        total = (logprob * of_logprob + entropy * of_entropy).sum() + 0 * logits.sum()
        return (logprob.detach(), entropy.detach(), mask), torch.autograd.grad(total, leaves)


def close(found, true):
    torch.testing.assert_close(found, true, rtol=0, atol=1e-12)


def compare(found, true):
    close(found.logprob.flatten(), true[0])
    close(found.entropy.flatten(), true[1])
    assert torch.equal(found.mask.flatten(), true[2])


# On one rank


@pytest.mark.parametrize("name", ROWS)
def test_every_sequence_is_as_alone(name):
    row = Row(name)
    true, (gradient,) = row.truth(row.logits)
    logits = row.logits.clone().requires_grad_()
    found = packed_logprobs(logits, row.tokens, row.cu, row.padded, entropy=True)
    compare(found, true)
    (found.logprob * row.loss[0] + found.entropy * row.loss[1]).sum().backward()
    close(logits.grad, gradient)
    assert logits.grad[~true[2]].count_nonzero() == 0


@pytest.mark.parametrize("name", ROWS)
def test_the_linear_form_is_as_alone(name):
    row = Row(name)
    true, gradients = row.truth(row.hidden, row.weight, row.bias)
    leaves = [leaf.clone().requires_grad_() for leaf in (row.hidden, row.weight, row.bias)]
    found = linear_packed_logprobs(
        leaves[0], leaves[1], row.tokens, row.cu, row.padded, bias=leaves[2], entropy=True, chunk_size=3
    )
    compare(found, true)
    (found.logprob * row.loss[0] + found.entropy * row.loss[1]).sum().backward()
    for leaf, gradient in zip(leaves, gradients):
        close(leaf.grad, gradient)


@pytest.mark.parametrize("between", [lambda x: x, lambda x: x[None], lambda x: x[:, None]])
def test_shapes_and_temperatures(between):
    row = Row("padded")
    true, _ = row.truth(row.logits, temperature=row.temperature)
    for tokens in (row.tokens, row.tokens[None].int()):
        found = packed_logprobs(
            between(row.logits), tokens, row.cu, row.padded, entropy="no_grad", temperature=row.temperature
        )
        assert {part.shape for part in found} == {tokens.shape}
        compare(found, true)
    found = packed_logprobs(between(row.logits), row.tokens, row.cu, row.padded, temperature=0.7)
    assert found.entropy is None
    close(found.logprob, row.truth(row.logits, temperature=torch.full((row.total,), 0.7, dtype=torch.float64))[0][0])


def test_without_padding_and_in_half_precision():
    row = Row("three")
    logits = row.logits[:-BEHIND].bfloat16()
    found = packed_logprobs(logits, row.tokens[:-BEHIND], row.cu)
    expected = row.alone(torch.cat([logits.double(), torch.zeros(BEHIND, VOCABULARY, dtype=torch.float64)]))[0]
    torch.testing.assert_close(found.logprob.double(), expected[:-BEHIND], rtol=0, atol=2e-6)
    assert found.logprob.dtype == torch.float32


def test_in_place_the_logits_become_their_gradient():
    row = Row("padded")
    leaf = row.logits.clone().requires_grad_()
    logits = leaf * 1
    found = packed_logprobs(logits, row.tokens, row.cu, row.padded, inplace_backward=True)
    with Footprint() as memory:
        (gradient,) = torch.autograd.grad(found.logprob.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr() and memory.peak_bytes < 2 * logits.nbytes
    weights = torch.stack([torch.ones(row.total), torch.zeros(row.total)])
    close(gradient, row.truth(row.logits, weights=weights)[1][0])


@pytest.mark.parametrize("leading", [(), (1,)])
def test_a_row_without_tokens(leading):
    logits = torch.zeros(*leading, 0, 4, requires_grad=True)
    found = packed_logprobs(logits, torch.zeros(*leading, 0, dtype=torch.int64), offsets([]), entropy=True)
    assert {part.shape for part in found} == {(*leading, 0)}
    found.logprob.sum().backward()


def test_another_index_may_mean_left_out():
    row = Row("three")
    tokens = row.tokens.masked_fill(row.tokens == -100, 7)
    found = packed_logprobs(row.logits, tokens, row.cu, row.padded, ignore_index=7)
    assert torch.equal(
        found.mask, packed_logprobs(row.logits, tokens, row.cu, row.padded).mask & (tokens.roll(-1) != 7)
    )


def test_what_does_not_fit_is_said():
    row = Row("three")
    good = (row.logits, row.tokens, row.cu, row.padded)

    def refused(message, *given, **options):
        with pytest.raises(ValueError, match=message):
            packed_logprobs(*given, **options)

    refused(r"tokens have the shape \[35\]; with 36 positions on each of 1", row.logits, row.tokens[1:], *good[2:])
    refused(r"\[t, 1, n\], not \[2, 18, 12\]", row.logits.view(2, 18, -1), *good[1:])
    refused(r"\[t, 1, n\], not \[1, 36, 1, 12\]", row.logits.view(1, 36, 1, -1), *good[1:])
    refused("cu_seqlens exceeds the row of 30 tokens", row.logits[:30], row.tokens[:30], *good[2:])
    refused("partition is 'zigzag'", *good, partition="zigzag")
    refused("gather is 'whole'", *good, gather="whole")
    refused("entropy is 'yes'", *good, entropy="yes")
    refused("cu_seqlens_padded has the shape", row.logits, row.tokens, row.cu, row.padded[1:])
    refused("vocabulary of 12", row.logits, row.tokens + 20, *good[2:])


class Second:
    """The second of two context-parallel ranks; a whole row needs no message to the first."""

    size, rank = (lambda self: 2), (lambda self: 1)


@pytest.mark.parametrize("group", [None, Second()])
@pytest.mark.parametrize("linear", [False, True])
def test_the_host_reads_nothing_and_no_sequence_is_looped_over(group, linear, monkeypatch):
    """A tensor on the device `meta` has no values: to read one raises. Value checks are assertions on a GPU."""
    from shim.ops import _logprob_rows, context_parallel_roll, packed_logprob

    for module in (_logprob_rows, context_parallel_roll, packed_logprob):
        monkeypatch.setattr(module, "require", lambda condition, message: None)
    counts = []
    for name in ("three", "padded"):
        row = Row(name)
        length = row.total if group is None else row.total // 2
        outputs = [row.hidden[:length], row.weight] if linear else [row.logits[:length]]
        outputs = [output.to("meta").requires_grad_() for output in outputs]
        function = linear_packed_logprobs if linear else packed_logprobs
        with Footprint() as footprint:
            found = function(
                *outputs, row.tokens.to("meta"), row.cu, row.padded, cp_group=group, entropy=True, chunk_size=1000
            )
            (found.logprob + found.entropy).sum().backward()
        assert found.logprob.shape == (length,) and all(output.grad is not None for output in outputs)
        counts.append(footprint.operations)
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("group", [None, Second()])
def test_the_host_does_not_wait_for_a_gpu(group):
    row = Row("padded")
    length = row.total if group is None else row.total // 2
    logits = row.logits[:length].float().cuda().requires_grad_()
    given = row.tokens.cuda(), row.cu.cuda(), row.padded.cuda()
    found = packed_logprobs(logits, *given, cp_group=group, entropy=True)
    (found.logprob + found.entropy).sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = packed_logprobs(logits, *given, cp_group=group, entropy=True)
        (found.logprob + found.entropy).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if group is None:
        torch.testing.assert_close(found.logprob.double().cpu(), row.truth(row.logits)[0][0], rtol=0, atol=1e-5)


def test_a_compiled_function_calls_it():
    row = Row("padded")
    _, (gradient,) = row.truth(row.logits)

    def loss(logits, tokens):
        found = packed_logprobs(logits * 1, tokens, row.cu, row.padded, entropy=True)
        return (found.logprob * row.loss[0] + found.entropy * row.loss[1]).sum()

    logits = row.logits.clone().requires_grad_()
    torch.compile(loss, backend="eager")(logits, row.tokens).backward()
    close(logits.grad, gradient)


# Over ranks


def groups(tp, cp):
    """(tensor-parallel, context-parallel) of this rank; TP ranks are neighbours."""
    grid = torch.arange(tp * cp).view(cp, tp)
    mine = []
    for lines in (grid, grid.t()):
        made = [(line.tolist(), dist.new_group(line.tolist())) for line in lines]
        mine += [group for ranks, group in made if dist.get_rank() in ranks]
    return mine


def of_a_row(name, tp_group, cp_group):
    """All options against the truth; the collectives of a cut, a whole row and a gather, forward and backward."""
    counts = {}
    tp, ranks, rank = tp_group.size(), cp_group.size(), cp_group.rank()
    row = Row(name)
    columns = VOCABULARY // tp
    shard = slice(tp_group.rank() * columns, (tp_group.rank() + 1) * columns)
    weights = torch.stack([row.loss * (1 + other) for other in range(ranks)])
    truths = {}
    for sums, loss in ((True, weights.sum(0)), (False, row.loss)):
        of_logits = row.truth(row.logits, temperature=row.temperature, weights=loss)
        leaves = row.hidden, row.weight, row.bias
        truths[sums] = *of_logits, row.truth(*leaves, temperature=row.temperature, weights=loss)[1]
    for partition in ("sequence", "row") if name == "padded" else ("sequence",):
        places = places_of(row.total, [*row.slots, BEHIND], rank, ranks, partition)
        options = {"tp_group": tp_group, "cp_group": cp_group, "partition": partition, "entropy": True}
        options["temperature"] = row.temperature[places]
        for what, tokens, gather in (
            ("cut", row.tokens[places], False),
            ("whole", row.tokens, False),
            ("gathered", row.tokens[places][None], True),
            ("own", row.tokens, "own_grad"),
        ):
            # Behind a gather, each rank has a loss of its own over the whole row.
            true, (gradient,), right = truths[gather is True]
            logits = row.logits[places, shard].clone().requires_grad_()
            with Footprint() as forward:
                found = packed_logprobs(logits, tokens, row.cu, row.padded, gather=gather, **options)
            compare(found, true if gather else [part[places] for part in true])
            mine = weights[rank] if gather is True else row.loss if gather else row.loss[:, places]
            loss = (found.logprob * mine[0] + found.entropy * mine[1]).sum()
            with Footprint() as backward:
                loss.backward()
            close(logits.grad, gradient[places, shard])
            counts[what] = (dict(forward.collectives), dict(backward.collectives))

            leaves = [row.hidden[places], row.weight[shard], row.bias[shard]]
            leaves = [leaf.clone().requires_grad_() for leaf in leaves]
            found = linear_packed_logprobs(
                leaves[0], leaves[1], tokens, row.cu, row.padded, bias=leaves[2], gather=gather, **options
            )
            compare(found, true if gather else [part[places] for part in true])
            (found.logprob * mine[0] + found.entropy * mine[1]).sum().backward()
            close(leaves[0].grad, right[0][places])
            for leaf, gradient in zip(leaves[1:], right[1:]):
                dist.all_reduce(leaf.grad, group=cp_group)  # each CP rank has its tokens' part
                close(leaf.grad, gradient[shard])
    return counts


def a_gather_keeps_apart_what_has_a_gradient(group):
    row = Row("padded")
    places = places_of(row.total, [*row.slots, BEHIND], group.rank(), group.size(), "sequence")
    for entropy in (False, "no_grad"):
        logits = row.logits[places].clone().requires_grad_()
        found = packed_logprobs(logits, row.tokens, row.cu, row.padded, cp_group=group, gather=True, entropy=entropy)
        assert found.logprob.requires_grad and (found.entropy is None or not found.entropy.requires_grad)
        found.logprob.sum().backward()
        ones = torch.tensor([[float(group.size())], [0.0]]).expand(2, row.total)
        close(logits.grad, row.truth(row.logits, weights=ones)[1][0][places])
    with torch.no_grad():
        found = packed_logprobs(row.logits[places], row.tokens, row.cu, row.padded, cp_group=group, gather=True)
    close(found.logprob, row.truth(row.logits)[0][0])
    with pytest.raises(ValueError, match=r"on each of 4 context-parallel ranks it must be \[11\] or \[44\]"):
        packed_logprobs(row.logits[:11], row.tokens[:12], row.cu, row.padded, cp_group=group)
    for tokens in (row.tokens[places], row.tokens):
        with pytest.raises(ValueError, match="multiple of the 4 ranks"):
            packed_logprobs(row.logits[places], tokens, offsets([6, 8]), cp_group=group, gather=len(tokens) == 13)
    return True


def all_of_it():
    """{layout: {row: counts}} of every row at TP 2 with CP 2, and of some at CP 4."""
    found = {}
    for tp, cp, names in ((2, 2, ROWS), (1, 4, ("padded", "odd shares"))):
        mine = groups(tp, cp)
        found[tp, cp] = {name: of_a_row(name, *mine) for name in names}
    return found, a_gather_keeps_apart_what_has_a_gradient(dist.group.WORLD)


@pytest.fixture(scope="module")
def found():
    with Ranks(4) as world:
        yield world.run(all_of_it)


def test_results_and_gradients_over_ranks_are_those_of_each_sequence_alone(found):
    assert all([len(rows) for rows in rank.values()] == [len(ROWS), 2] for rank, _ in found)
    assert all(rest for _, rest in found)


def test_messages(found):
    """A whole row needs none over CP; a gather is one; a summed gradient is one."""
    tp = {"_allgather_base_": 1}
    for rank, (counts, _) in enumerate(found):
        of_row = counts[2, 2]["padded"]
        assert of_row["whole"] == (tp, {})
        assert of_row["cut"] == ({**tp, "send": 1, "recv_": 1}, {})
        assert of_row["own"] == ({"_allgather_base_": 2}, {})
        assert of_row["gathered"] == ({"_allgather_base_": 2, "send": 1, "recv_": 1}, {"allreduce_": 1}), rank


def test_a_loop_over_sequences_gives_the_same():
    """What a trainer writes: one call for each sequence."""
    row = Row("padded")
    expected = torch.zeros(row.total, dtype=torch.float64)
    for start, end in row.spans():
        if end - start > 1:
            of_it = token_logprobs(row.logits[start : end - 1], row.tokens[start + 1 : end])
            expected[start : end - 1] = of_it.logprob
    assert torch.equal(packed_logprobs(row.logits, row.tokens, row.cu, row.padded).logprob, expected)
