"""Log-probabilities of a packed row by megatron-core with a trainer's loop, by other trainers, and by shim.ops.

    python benchmarks/packed_logprob.py [--release 0.18.2] [--release-dir DIR] [--peers DIR] [--repeats 7]

Each gets the logits of this rank's tokens, the tokens and cu_seqlens, and returns the log-probability of every token of
the row that is predicted, on every rank; forward and backward of their sum. All run in one process per rank, taking
turns, and are checked against fp64. `time` is CPU time of the slower rank, the median of the turns, over that of the
first; `messages` are collectives, sends and receives, forward + backward; `memory` is the largest number of bytes held,
in fp32 copies of this rank's logits (shim.testing.Footprint). Peers return the sequences unpacked, with padding to the
longest. shim has to take less memory and fewer messages than all, and no more time than the peers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from on_release import ALLOCATOR, measured, parser_of, peers_on_path

RELEASE = "0.18.2"
TOKENS, VOCABULARY = 1024, 16384
SEQUENCES = (4, 32, 128)
FIRST = "megatron-core, with a loop"
LIMIT, NOISE = 0.6, 0.15  # memory: the gradient, and scratch


class Row(NamedTuple):
    tokens: Any  # int64 [1, T]
    cu_seqlens: Any  # int32 [N + 1]; no padding, lengths are multiples of 4
    longest: int
    places: Any  # int64 [t], the tokens of this rank


class Found(NamedTuple):
    seconds: list[float]
    messages: tuple[int, int]
    memory: float
    error: float


def row_of(sequences: int, rank: int, ranks: int) -> Row:
    import torch

    generator = torch.Generator().manual_seed(sequences)
    cuts = torch.randperm(TOKENS // 4 - 1, generator=generator)[: sequences - 1].sort().values + 1
    cu = torch.cat([torch.zeros(1), cuts, torch.tensor([TOKENS / 4])]).mul(4).to(torch.int32)
    places = [mine for start, end in bounds(cu) for mine in cut(torch.arange(start, end), rank, ranks)]
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    return Row(tokens, cu, max(end - start for start, end in bounds(cu)), torch.cat(places))


def bounds(cu_seqlens: Any) -> list[tuple[int, int]]:
    offsets = cu_seqlens.tolist()
    return list(itertools.pairwise(offsets))


def cut(sequence: Any, rank: int, ranks: int) -> list[Any]:
    """A context-parallel rank's part of a sequence."""
    chunks = sequence.chunk(2 * ranks)
    return [sequence] if ranks == 1 else [chunks[rank], chunks[2 * ranks - 1 - rank]]


def with_a_loop(logits: Any, row: Row, group: Any) -> Any:
    """A trainer's code on megatron-core's cross entropy, once for each sequence."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    rank, ranks = group.rank(), group.size()
    pieces = [
        part for start, end in bounds(row.cu_seqlens) for part in cut(row.tokens[0, start:end].roll(-1), rank, ranks)
    ]
    logprob = -vocab_parallel_cross_entropy(logits, torch.cat(pieces)[None])[0]
    every = [logprob]
    if ranks > 1:
        every = [torch.empty_like(logprob) for _ in range(ranks)]
        dist.all_gather(every, logprob.detach(), group=group)
        every[rank] = logprob
    found = []
    for start, end in bounds(row.cu_seqlens):
        mine = [part[start // ranks : end // ranks] for part in every]
        if ranks > 1:
            halves = [part.chunk(2) for part in mine]
            mine = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        found.append(torch.cat(mine)[:-1])
    return torch.cat(found)


def implementations(group: Any) -> dict[str, Callable[[Any, Row, Any], Any]]:
    """name -> function(logits [1, t, V], row, group) -> log-probabilities whose sum is that of all predicted tokens."""
    from megatron.core import parallel_state

    from shim.ops import packed_logprobs

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=group.size())
    alone = parallel_state.get_tensor_model_parallel_group()
    found: dict[str, Callable[[Any, Row, Any], Any]] = {FIRST: with_a_loop}
    for name, module in (
        ("NeMo-RL", "nemo_rl.distributed.model_utils"),
        ("SkyRL", "skyrl.backends.skyrl_train.distributed.megatron.model_utils"),
    ):
        try:
            function = __import__(module, fromlist=["_"]).from_parallel_logits_to_logprobs_packed_sequences
        except (ImportError, AttributeError, RuntimeError, OSError):
            continue
        if name == "NeMo-RL" and group.size() > 1:
            continue  # its backward pins memory, which needs a GPU
        found[name] = lambda x, row, group, function=function: function(
            x, row.tokens, row.cu_seqlens, row.longest, 0, VOCABULARY, alone, cp_group=group
        )
    found["shim"] = lambda x, row, group: (
        packed_logprobs(x, row.tokens, row.cu_seqlens, cp_group=group, gather="own_grad").logprob
    )
    found["shim, of the cut"] = lambda x, row, group: (
        packed_logprobs(x, row.tokens[:, row.places], row.cu_seqlens, cp_group=group).logprob
    )
    return found


def measure(sequences: int, repeats: int) -> dict[str, Found]:
    """The cost of each implementation on this rank."""
    import torch
    import torch.distributed as dist

    from shim.testing import Footprint

    group = dist.group.WORLD
    row = row_of(sequences, group.rank(), group.size())
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(1, TOKENS, VOCABULARY, generator=generator) * 4).bfloat16()
    logits = whole[:, row.places].clone()
    log_p = whole.double().log_softmax(-1)
    right = sum(
        log_p[0, start : end - 1].gather(-1, row.tokens[0, start + 1 : end, None]).sum()
        for start, end in bounds(row.cu_seqlens)
    )

    def step(function: Callable[[Any, Row, Any], Any]) -> float:
        computed = logits.clone().requires_grad_() * 1
        dist.barrier()
        start = time.process_time()
        result = function(computed, row, group)
        torch.autograd.grad(result.sum(), computed)
        return time.process_time() - start

    functions, found = implementations(group), {}
    for name, function in functions.items():
        computed = logits.clone().requires_grad_() * 1
        with Footprint() as watching:
            result = function(computed, row, group)
            forward = watching.collectives.total()
            torch.autograd.grad(result.sum(), computed)
        messages = (forward, watching.collectives.total() - forward)
        total = result.double().sum()
        if name == "shim, of the cut":
            dist.all_reduce(total)
        error = ((total - right) / right).abs().item()
        found[name] = Found([], messages, watching.peak_bytes / (4 * logits.numel()), error)
        del result, computed
    for turn in range(repeats + 1):  # the first warms up
        for name, function in functions.items():
            taken = step(function)
            if turn:
                found[name].seconds.append(taken)
    return found


def compare(release: str, repeats: int) -> int:
    import torch

    from shim.testing import Ranks

    torch.set_num_threads(1)
    print(
        f"megatron-core {release}, torch {torch.__version__}, 1 thread per process; {TOKENS} tokens, vocabulary "
        f"{VOCABULARY}, bfloat16"
    )
    missed = []
    for ranks in (1, 2):
        with Ranks(ranks) as world:
            for sequences in SEQUENCES:
                found = world.run(measure, sequences, repeats, timeout=900)
                print(f"\nCP {ranks}, {sequences} sequences")
                print(f"{'':<28}{'time':>7}{'ms':>8}{'messages':>12}{'memory':>8}{'error':>10}")
                times = {
                    name: statistics.median(max(turn) for turn in zip(*(rank[name].seconds for rank in found)))
                    for name in found[0]
                }
                for name, mine in found[0].items():
                    messages = f"{mine.messages[0]} + {mine.messages[1]}"
                    print(
                        f"{name:<28}{times[name] / times[FIRST]:>7.2f}{times[name] * 1e3:>8.0f}"
                        f"{messages:>12}{mine.memory:>8.2f}{mine.error:>10.1e}",
                        flush=True,
                    )
                where, shim = f"CP {ranks}, {sequences} sequences", found[0]["shim"]
                for name, mine in found[0].items():
                    if name != FIRST and times["shim"] > times[name] * (1 + NOISE):
                        missed.append(f"{where}: {name} is faster")
                    if "shim" not in name and (mine.memory < shim.memory or sum(mine.messages) < sum(shim.messages)):
                        missed.append(f"{where}: {name} takes less memory or fewer messages")
                if shim.error > 1e-6 or shim.memory > LIMIT:
                    missed.append(f"{where}: {shim.memory:.2f} of memory, an error of {shim.error:.1e}")
    print("\n" + ("\n".join(f"MISSED: {what}" for what in missed) or "All demands are met."))
    return 1 if missed else 0


def main() -> int:
    what = "Log-probabilities of packed rows: megatron-core, trainers and shim."
    arguments = parser_of(what, RELEASE, peers=True, repeats=7).parse_args()
    if arguments.measure:
        peers_on_path(arguments)
        return compare(arguments.release, arguments.repeats)
    return measured(__file__, arguments, ALLOCATOR)


if __name__ == "__main__":
    raise SystemExit(main())
