"""Log-probabilities of tokens by torch, megatron-core, other packages and shim.ops: time, memory, traffic, messages,
error, side by side.

    python benchmarks/logprob.py [--release 0.18.2] [--release-dir DIR] [--peers DIR] [--repeats 9]

All run in one process per rank, taking turns, forward and backward of a sum of log-probabilities, on logits that each
run gets afresh (megatron-core's plain function overwrites them). `time` is CPU time of the slower rank, the median of
the turns, over that of megatron-core's plain function, whose milliseconds are in its line. `memory` is the largest
number of bytes held at one time by storages made between the start of forward and the end of backward, the gradient
included, in units of one fp32 copy of this rank's logits; a dispatch mode sees every storage that an operation returns,
and the end of it, but no temporaries inside of one operation. `traffic` is what operations read and write, in the same
unit: all of a tensor each time it is an argument or a result, but of a tensor that is indexed only the entries that are
picked, and nothing of views. `far` is the part of it in storages of more than 4 MiB, which may not stay in a cache.
Code that is compiled for times (megatron-core's fused function) runs op by op for memory and traffic, because
nothing inside compiled code can be seen. `messages` are collectives in forward and backward. `logprob`, `gradient`:
largest error against fp64; with entropy, that of the sum of both.

Peers are found by logprob_peers.py; shim has to take less time than each that works in chunks of tokens.

The line of the linear form has the product with the output weight in it, also for megatron-core's function; its memory
includes the gradient of the weight, and its unit is the logits as well.

On an NVIDIA GPU: one more table, with times of CUDA events and peaks of CUDA's allocator; shim has to be
twice as fast as the fastest peer and to reach 70% of the memory's bandwidth, as a copy in the same run shows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from on_release import ALLOCATOR, TOP, cpu_name, measured, parser_of, peers_on_path

RELEASE = "0.18.2"
SHAPES = ((512, 32768), (128, 151936))  # tokens, global vocabulary
LINEAR = (512, 32768, 512)  # tokens, vocabulary, hidden
ON_GPU = (8192, 151936, 4096)  # the same, bf16
LIMIT = 1.5  # traffic in bf16: the logits are read forward and backward, their gradient is written
NOISE = 0.1
STOCK = "megatron-core"
SCRATCH = 4 << 20  # bytes, the default of token_logprobs on CPU
COLUMNS = {"time": 7, "ms": 7, "memory": 9, "traffic": 9, "far": 7, "messages": 10, "logprob": 10, "gradient": 10}


class Found(NamedTuple):
    """Of one implementation, on one rank."""

    seconds: list[float]
    memory: float
    traffic: tuple[float, float]
    messages: tuple[int, int] | None
    errors: tuple[float, float]


# In the processes that have the release on their path


def implementations(ranks: int, device: str = "cpu") -> dict[str, Callable[[Any, Any], Any]]:
    """name -> function(logits, target) -> what is summed. Those of megatron-core return the loss, which is negated."""
    import torch
    import torch.distributed as dist
    from logprob_peers import find

    from shim.ops.logprob import token_logprobs

    group = dist.group.WORLD if ranks > 1 else None
    found: dict[str, Callable[[Any, Any], Any]] = {}
    try:
        from megatron.core import parallel_state
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError as error:
        print(f"no megatron-core here ({error})", flush=True)
    else:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(ranks)
        found[STOCK] = lambda x, t: -vocab_parallel_cross_entropy(x, t)
        found["megatron-core, fused"] = lambda x, t: -fused_vocab_parallel_cross_entropy(x, t, dist.group.WORLD)

    def gathered(x: Any, t: Any) -> Any:
        return x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)

    if ranks == 1:
        cross_entropy = torch.nn.functional.cross_entropy
        found["torch, log_softmax"] = gathered
        found["torch, log_softmax in fp32"] = lambda x, t: gathered(x.float(), t)
        found["torch, cross_entropy in fp32"] = lambda x, t: (
            -cross_entropy(x.float().flatten(0, 1), t.flatten(), reduction="none").view_as(t)
        )
    found["shim"] = lambda x, t: token_logprobs(x, t, tp_group=group).logprob
    found["shim, in place"] = lambda x, t: token_logprobs(x, t, tp_group=group, inplace_backward=True).logprob

    def with_entropy(x: Any, t: Any) -> Any:
        result = token_logprobs(x, t, tp_group=group, entropy=True)
        return result.logprob + result.entropy

    found["shim, with entropy"] = with_entropy
    if ranks == 1:

        def plain_entropy(x: Any, t: Any) -> Any:
            log_p = x.float().log_softmax(-1)
            return log_p.gather(-1, t.unsqueeze(-1)).squeeze(-1) - (log_p.exp() * log_p).sum(-1)

        found["torch, with entropy"] = plain_entropy
    found.update(find(ranks, device).logits)
    return found


def watched() -> Any:
    """A footprint that also knows the bytes moved: all, and those of storages that do not fit the cache."""
    from shim.testing import Footprint
    from shim.testing.pretend_cuda.traffic import moved

    class Watching(Footprint):
        def __init__(self) -> None:
            super().__init__()
            self.traffic = [0, 0]

        @property
        def messages(self) -> int:
            return self.collectives.total()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(function, types, args, kwargs)
            for size, storage_size in moved(function, args, kwargs or {}, result):
                self.traffic[0] += size
                self.traffic[1] += size * (storage_size > SCRATCH)
            return result

    return Watching()


def watch(function: Callable[[Any, Any], Any], logits: Any, target: Any) -> tuple[Any, tuple[int, int], Any, Any]:
    """(what watched, collectives forward and backward, result, gradient) of one step, op by op."""
    import torch

    computed = logits.clone().requires_grad_() * 1
    with torch.compiler.set_stance("force_eager"), watched() as watching:
        result = function(computed, target)
        forward = watching.messages
        (gradient,) = torch.autograd.grad(result, computed, torch.ones_like(result))
    return watching, (forward, watching.messages - forward), result.detach(), gradient.detach().clone()


def seconds(function: Callable[[Any, Any], Any], logits: Any, target: Any, ranks: int) -> float:
    import torch
    import torch.distributed as dist

    computed = logits.clone().requires_grad_() * 1
    weights = torch.ones(target.shape)
    if ranks > 1:
        dist.barrier()
    start = time.process_time()
    result = function(computed, target)
    torch.autograd.grad(result, computed, weights.to(result.dtype))
    return time.process_time() - start


def has_entropy(name: str) -> bool:
    return name.endswith("with entropy")


def exact(logits: Any, target: Any, entropy: bool) -> tuple[Any, Any]:
    """Log-probability [T, 1], plus the entropy if wanted, and the gradient of their sum [T, 1, V], in fp64."""
    import torch

    log_p = logits.double().log_softmax(-1)
    at = target.unsqueeze(-1)
    result = log_p.gather(-1, at)
    gradient = -log_p.exp()
    if entropy:
        of_it = (gradient * log_p).sum(-1, keepdim=True)
        result += of_it
        gradient *= log_p.add_(of_it + 1)
    gradient.scatter_add_(-1, at, torch.ones_like(at, dtype=torch.float64))
    return result.squeeze(-1), gradient


def measure(tokens: int, vocabulary: int, dtype_name: str, ranks: int, repeats: int) -> dict[str, Found]:
    """The cost of each implementation on this rank."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(tokens)
    dtype = getattr(torch, dtype_name)
    logits = (torch.randn(tokens, 1, vocabulary, generator=generator) * 4).to(dtype)
    target = torch.randint(0, vocabulary, (tokens, 1), generator=generator)
    right = {entropy: exact(logits, target, entropy) for entropy in (False, True)}
    shard = logits.chunk(ranks, -1)[dist.get_rank()].clone()
    functions = implementations(ranks)
    found = {}
    for name, function in functions.items():
        watching, messages, result, gradient = watch(function, shard, target)
        unit = 4 * shard.numel()
        of_result, of_gradient = right[has_entropy(name)]
        errors = tuple(
            (mine.double() - true).abs_().max().item()
            for mine, true in ((result, of_result), (gradient, of_gradient.chunk(ranks, -1)[dist.get_rank()]))
        )
        traffic = (watching.traffic[0] / unit, watching.traffic[1] / unit)
        found[name] = Found([], watching.peak_bytes / unit, traffic, messages, errors)
        del result, gradient
    del right
    for function in functions.values():  # compile
        seconds(function, shard, target, ranks)
    for _ in range(repeats):
        for name, function in functions.items():
            found[name].seconds.append(seconds(function, shard, target, ranks))
    return found


def linear_sides(target: Any, stock: Callable[[Any, Any], Any] | None, device: str) -> dict[str, Callable[..., Any]]:
    """name -> function(hidden [T, 1, H], weight [V, H]) -> logprob [T, 1]."""
    from logprob_peers import find

    from shim.ops.logprob import linear_token_logprobs

    def of_peer(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda h, w: function(h, w, target)

    sides: dict[str, Callable[[Any, Any], Any]] = {}
    if stock is not None:
        sides[STOCK] = lambda h, w: stock(h @ w.t(), target)
    sides["torch, log_softmax"] = lambda h, w: (h @ w.t()).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    sides["shim, linear"] = lambda h, w: linear_token_logprobs(h, w, target).logprob
    sides.update((name, of_peer(function)) for name, function in find(1, device).linear.items())
    return sides


def measure_linear(repeats: int) -> dict[str, Found]:
    import torch

    tokens, vocabulary, width = LINEAR
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 1, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / 8
    target = torch.randint(0, vocabulary, (tokens, 1), generator=generator)
    sides = linear_sides(target, implementations(1).get(STOCK), "cpu")

    doubles = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    result = (doubles[0] @ doubles[1].t()).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    right = torch.autograd.grad(result.sum(), doubles)

    def step(side: Callable[[Any, Any], Any]) -> Any:
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        start = time.process_time()
        result = side(*leaves)
        gradients = torch.autograd.grad(result.sum(), leaves)
        return time.process_time() - start, result, gradients

    found = {}
    for name, side in sides.items():
        with watched() as watching:
            _, value, gradients = step(side)
        clones, unit = 4 * (hidden.numel() + weight.numel()), 4 * tokens * vocabulary
        traffic = ((watching.traffic[0] - 2 * clones) / unit, (watching.traffic[1] - 2 * clones) / unit)
        errors = max((mine - true).abs().max().item() for mine, true in zip(gradients, right))
        shown = ((value - result).abs().max().item(), errors)
        found[name] = Found([], (watching.peak_bytes - clones) / unit, traffic, None, shown)
        del value, gradients
    for _ in range(max(3, repeats // 3)):
        for name, side in sides.items():
            found[name].seconds.append(step(side)[0])
    return found


def on_gpu(repeats: int, verdicts: list[str]) -> None:
    """The same on one GPU, for logits in bf16 and for the linear form. Prints; adds to `verdicts` what is missed."""
    import torch
    import torch.distributed as dist

    tokens, vocabulary, width = ON_GPU
    unit = 4 * tokens * vocabulary
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)

    def clocked(step: Callable[[], Any]) -> tuple[float, Any]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, result

    def run(sides: dict[str, Callable[..., Any]], leaves: list[Any], at: tuple[Any, ...]) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for turn in range(repeats + 1):  # the first compiles, and shows memory and errors
            for name, side in sides.items():
                given = [leaf.clone().requires_grad_() for leaf in leaves]
                if at:
                    given = [leaf * 1 for leaf in given]  # logits are no leaf

                def step(side: Callable[..., Any] = side, given: list[Any] = given) -> Any:
                    result = side(*given, *at)
                    return result.detach(), torch.autograd.grad(result.float().sum(), given)

                before = torch.cuda.memory_allocated()  # all of the last turn but its results is free by now
                torch.cuda.reset_peak_memory_stats()
                taken, (result, gradients) = clocked(step)
                if turn:
                    found[name].seconds.append(taken)
                    continue
                memory = (torch.cuda.max_memory_allocated() - before) / unit
                errors = (float("nan"), float("nan"))
                if at:
                    some = slice(0, 128)  # fp64 of all would not fit
                    right = exact(leaves[0][some], target[some], has_entropy(name))
                    mine = (result[some], gradients[0][some])
                    errors = tuple((one.double() - true).abs_().max().item() for one, true in zip(mine, right))
                found[name] = Found([], memory, (float("nan"), float("nan")), None, errors)
        return found

    target = torch.randint(0, vocabulary, (tokens, 1))
    functions = implementations(1, "cuda")
    logits = torch.randn(tokens, 1, vocabulary, **options) * 4
    found = run(functions, [logits], (target,))
    title = f"{torch.cuda.get_device_name()}: {tokens} tokens, vocabulary {vocabulary}, bfloat16, TP 1"
    times = table(title, [found], 0.51, verdicts)
    other = torch.empty_like(logits)
    copied = min(clocked(lambda: other.copy_(logits))[0] for _ in range(10))  # half a unit read, half a unit written
    share = LIMIT * copied / times["shim"]
    print(f"shim reaches {share:.0%} of the memory's bandwidth, {unit / copied / 1e12:.2f} TB/s")
    if share < 0.7:
        verdicts.append(f"{title}: {share:.0%} of the memory's bandwidth")
    peers = [name for name in find_peers("cuda").logits if not has_entropy(name)]
    fastest = min(peers, key=lambda name: times[name], default=None)
    if fastest is not None and times["shim"] > times[fastest] / 2:
        verdicts.append(f"{title}: only {times[fastest] / times['shim']:.2f} times as fast as {fastest}")
    leaves = [torch.randn(tokens, 1, width, **options), torch.randn(vocabulary, width, **options) / 16]
    found = run(linear_sides(target, functions.get(STOCK), "cuda"), leaves, ())
    table(f"{title}, hidden {width}", [found], None, [])  # no demand on the linear form here
    dist.destroy_process_group()


def find_peers(device: str) -> Any:
    from logprob_peers import find

    return find(1, device)


def table(title: str, found: list[dict[str, Found]], bound: float | None, verdicts: list[str]) -> dict[str, float]:
    """Print what the ranks found; add to `verdicts` what is missed. bound: of the memory of "shim". Seconds by name."""
    heads = "".join(f"{head:>{width}}" for head, width in COLUMNS.items())
    print(f"\n{title}\n{'':<31}{heads}")
    times = {
        name: statistics.median(max(turn) for turn in zip(*(rank[name].seconds for rank in found))) for name in found[0]
    }
    base = times.get(STOCK)
    for name, first in found[0].items():
        memory = max(rank[name].memory for rank in found)
        errors = [max(rank[name].errors[place] for rank in found) for place in range(2)]
        cells = [
            "-" if base is None else f"{times[name] / base:.2f}",
            f"{times[name] * 1e3:.{0 if times[name] > 0.02 else 2}f}",
            f"{memory:.2f}",
            *("-" if part != part else f"{part:.1f}" for part in first.traffic),
            "-" if first.messages is None else f"{first.messages[0]} + {first.messages[1]}",
            *("-" if error != error else f"{error:.1e}" for error in errors),
        ]
        print(f"{name:<31}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values())), flush=True)
        if "chunked" in name and times[mine := "shim" + name.partition("chunked")[2]] >= times[name]:
            print(f"{mine} is not faster than {name} on this CPU")
        if name != "shim":
            continue
        if base is not None and times[name] > base * (1 + NOISE):
            print(f"slower than {STOCK} on this CPU")
        if base is not None and first.traffic[1] > found[0][STOCK].traffic[1]:
            verdicts.append(f"{title}: more traffic beyond the cache than {STOCK}: {first.traffic[1]:.1f}")
        if bound is not None and memory > bound:
            verdicts.append(f"{title}: {memory:.2f} of memory, more than {bound:.2f}")
        if first.messages not in (None, (0, 0), (1, 0)):
            verdicts.append(f"{title}: {first.messages} messages")
        if errors[0] > 1e-5:
            verdicts.append(f"{title}: an error of {errors[0]:.1e}")
    return times


def compare(release: str, repeats: int, gpu: bool) -> int:
    """All tables, or that of a GPU alone; 0 if shim moves no more bytes beyond the cache than megatron-core, and no
    more memory, messages and error than it promises."""
    import torch

    import shim.ops.logprob
    from shim.testing import Ranks

    assert shim.ops.logprob.__file__.startswith(TOP)
    torch.set_num_threads(1)
    threads = f"{torch.get_num_threads()} thread per process"
    print(f"megatron-core {release}, torch {torch.__version__}, {threads}, {cpu_name()}")
    peers = find_peers("cpu")
    print(f"peers: {'; '.join([*peers.logits, *peers.linear]) or 'none'}")
    for package, reason in peers.missing.items():
        print(f"not here: {package} ({reason})")
    verdicts: list[str] = []
    for ranks in () if gpu else (1, 2):
        with Ranks(ranks) as world:
            for tokens, vocabulary in SHAPES:
                for dtype in ("float32", "bfloat16"):
                    found = world.run(measure, tokens, vocabulary, dtype, ranks, repeats, timeout=900)
                    title = f"{tokens} tokens, vocabulary {vocabulary}, {dtype}, TP {ranks}"
                    unit = 4 * tokens * vocabulary // ranks
                    # Tensors with one value for each token are far below one percent.
                    table(title, found, (1 if dtype == "float32" else 0.5) + SCRATCH / unit + 0.01, verdicts)
            if ranks == 1:
                tokens, vocabulary, width = LINEAR
                title = f"{tokens} tokens, vocabulary {vocabulary}, hidden {width}, float32, TP 1"
                table(title, world.run(measure_linear, repeats, timeout=900), None, verdicts)
    if torch.cuda.is_available():  # asked behind the last fork
        on_gpu(repeats, verdicts)
    else:
        print("\nNo NVIDIA GPU here: nothing measured on one.")
    print("\n" + ("\n".join(f"MISSED: {verdict}" for verdict in verdicts) or "All demands are met."))
    return 1 if verdicts else 0


# In the process that is started by hand


def main() -> int:
    parser = parser_of(
        "Log-probabilities of torch, megatron-core and shim, side by side.", RELEASE, peers=True, repeats=9
    )
    parser.add_argument("--gpu", action="store_true", help="the table of a GPU alone")
    arguments = parser.parse_args()
    if arguments.measure:
        peers_on_path(arguments)
        return compare(arguments.release, arguments.repeats, arguments.gpu)
    # Ranks are daemons, which may not have the processes that a parallel compilation starts.
    return measured(__file__, arguments, {"TORCHINDUCTOR_COMPILE_THREADS": "1", **ALLOCATOR})


if __name__ == "__main__":
    raise SystemExit(main())
