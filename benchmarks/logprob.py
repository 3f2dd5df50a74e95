"""Log-probabilities of tokens: time, memory, messages and error of torch, megatron-core and shim.ops, side by side.

    python benchmarks/logprob.py [--release 0.18.2] [--release-dir DIR] [--repeats 9]

All run in one process per rank, taking turns, forward and backward of a sum of log-probabilities, on logits that each
run gets afresh (megatron-core's plain function overwrites them). `time` is CPU time of the slower rank, the median of
the turns, over that of megatron-core's plain function, whose milliseconds are in its own line. `memory` is the largest
number of bytes held at one time by storages made between the start of forward and the end of backward, the gradient
included, in units of one fp32 copy of this rank's logits; a dispatch mode sees every storage that an operation returns,
and the end of it, but no temporaries inside of one operation. megatron-core's fused function is compiled where time is
taken, and runs op by op where memory is, because storages inside compiled code cannot be seen. `messages` are
collectives in forward and backward. `logprob`, `gradient`: largest error against fp64.

The line of the linear form has the product with the output weight in it, for megatron-core's function too; its memory
includes the gradient of the weight, and its unit is the logits as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TOP = str(Path(__file__).resolve().parent.parent)
RELEASE = "0.18.2"
SHAPES = ((512, 32768), (128, 151936))  # tokens, global vocabulary
LINEAR = (512, 32768, 512)  # tokens, vocabulary, hidden
NOISE = 0.1
# Freed memory stays with the process, as CUDA's allocator keeps it: else the fresh pages of a gradient cost as much as
# the work, and megatron-core has none for fp32, where it overwrites the logits.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
STOCK = "megatron-core"
SCRATCH = 4 << 20  # bytes, the default of token_logprobs on CPU


class Found(NamedTuple):
    """Of one implementation, on one rank."""

    seconds: list[float]
    memory: float
    messages: tuple[int, int]
    errors: tuple[float, float]


# In the processes that have the release on their path


def implementations(ranks: int) -> dict[str, Callable[[Any, Any], Any]]:
    """name -> function(logits, target) -> what is summed. Those of megatron-core return the loss, which is negated."""
    import torch
    import torch.distributed as dist

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
    return found


def watched() -> Any:
    """A dispatch mode with the largest number of bytes held, and the collectives called."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Watching(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.held = self.most = self.messages = 0
            self.known: set[int] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            import torch

            self.messages += function._schema.name.startswith("c10d::")
            given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
            result = function(*args, **(kwargs or {}))
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self.known | given:
                    storage = value.untyped_storage()
                    self.known.add(storage._cdata)
                    self.held += storage.nbytes()
                    weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
            self.most = max(self.most, self.held)
            return result

        def freed(self, storage: int, size: int) -> None:
            self.known.discard(storage)
            self.held -= size

    return Watching()


def watch(function: Callable[[Any, Any], Any], logits: Any, target: Any) -> tuple[float, tuple[int, int], Any, Any]:
    """(memory in bytes, collectives forward and backward, result, gradient) of one step, op by op."""
    import torch

    computed = logits.clone().requires_grad_() * 1
    with torch.compiler.set_stance("force_eager"), watched() as watching:
        result = function(computed, target)
        forward = watching.messages
        (gradient,) = torch.autograd.grad(result, computed, torch.ones_like(result))
    return watching.most, (forward, watching.messages - forward), result.detach(), gradient.detach().clone()


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


def measure(tokens: int, vocabulary: int, dtype_name: str, ranks: int, repeats: int) -> dict[str, Found]:
    """What each implementation takes on this rank."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(tokens)
    dtype = getattr(torch, dtype_name)
    logits = (torch.randn(tokens, 1, vocabulary, generator=generator) * 4).to(dtype)
    target = torch.randint(0, vocabulary, (tokens, 1), generator=generator)
    reference = logits.double().log_softmax(-1)
    of_logprob = reference.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    of_gradient = -reference.exp_()
    of_gradient.scatter_add_(-1, target.unsqueeze(-1), torch.ones_like(target, dtype=torch.float64).unsqueeze(-1))
    of_gradient = of_gradient.chunk(ranks, -1)[dist.get_rank()]
    shard = logits.chunk(ranks, -1)[dist.get_rank()].clone()
    functions = implementations(ranks)
    found = {}
    for name, function in functions.items():
        memory, messages, result, gradient = watch(function, shard, target)
        errors = (float("nan"), float("nan"))
        if "entropy" not in name or "cross_entropy" in name:
            of_it = (gradient.double() - of_gradient).abs_().max().item()
            errors = ((result.double() - of_logprob).abs().max().item(), of_it)
        found[name] = Found([], memory / (4 * shard.numel()), messages, errors)
        del result, gradient
    del reference, of_gradient
    for function in functions.values():  # compile
        seconds(function, shard, target, ranks)
    for _ in range(repeats):
        for name, function in functions.items():
            found[name].seconds.append(seconds(function, shard, target, ranks))
    return found


def measure_linear(repeats: int) -> dict[str, Found]:
    import torch

    from shim.ops.logprob import linear_token_logprobs

    tokens, vocabulary, width = LINEAR
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 1, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / 8
    target = torch.randint(0, vocabulary, (tokens, 1), generator=generator)
    sides: dict[str, Callable[[Any, Any], Any]] = {}
    stock = implementations(1).get(STOCK)
    if stock is not None:
        sides[STOCK] = lambda h, w: stock(h @ w.t(), target)
    sides["torch, log_softmax"] = lambda h, w: (h @ w.t()).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    sides["shim, linear"] = lambda h, w: linear_token_logprobs(h, w, target).logprob

    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    result = (exact[0] @ exact[1].t()).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    right = torch.autograd.grad(result.sum(), exact)

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
            watching.most -= 4 * (hidden.numel() + weight.numel())  # the clones
        errors = max((mine - true).abs().max().item() for mine, true in zip(gradients, right))
        found[name] = Found(
            [], watching.most / (4 * tokens * vocabulary), (0, 0), ((value - result).abs().max().item(), errors)
        )
        del value, gradients
    for _ in range(max(3, repeats // 3)):
        for name, side in sides.items():
            found[name].seconds.append(step(side)[0])
    return found


def table(title: str, found: list[dict[str, Found]], bound: float | None, verdicts: list[str]) -> None:
    """Print what the ranks found; add to `verdicts` what is missed. bound: of the memory of "shim"."""
    print(f"\n{title}\n{'':<30}{'time':>8}{'ms':>8}{'memory':>9}{'messages':>10}{'logprob':>11}{'gradient':>11}")
    times = {
        name: statistics.median(max(turn) for turn in zip(*(rank[name].seconds for rank in found))) for name in found[0]
    }
    base = times.get(STOCK)
    for name, first in found[0].items():
        memory = max(rank[name].memory for rank in found)
        errors = [max(rank[name].errors[place] for rank in found) for place in range(2)]
        shown = "".join(f"{'-' if error != error else f'{error:.1e}':>11}" for error in errors)
        ratio = "-" if base is None else f"{times[name] / base:.2f}"
        print(
            f"{name:<30}{ratio:>8}{times[name] * 1e3:8.0f}{memory:9.2f}"
            f"{f'{first.messages[0]} + {first.messages[1]}':>10}{shown}",
            flush=True,
        )
        if name == "shim" and base is not None and times[name] > base * (1 + NOISE):
            verdicts.append(f"{title}: slower than {STOCK}")
        if name == "shim" and bound is not None and memory > bound:
            verdicts.append(f"{title}: {memory:.2f} of memory, more than {bound:.2f}")
        if name == "shim" and errors[0] > 1e-5:
            verdicts.append(f"{title}: an error of {errors[0]:.1e}")


def compare(release: str, repeats: int) -> int:
    """All tables; 0 when shim takes no more time than megatron-core, and no more memory and error than it promises."""
    import torch

    import shim.ops.logprob
    from shim.testing import Ranks

    assert shim.ops.logprob.__file__.startswith(TOP)
    torch.set_num_threads(1)
    print(f"megatron-core {release}, torch {torch.__version__}, {torch.get_num_threads()} thread per process")
    verdicts: list[str] = []
    for ranks in (1, 2):
        with Ranks(ranks) as world:
            for tokens, vocabulary in SHAPES:
                for dtype in ("float32", "bfloat16"):
                    found = world.run(measure, tokens, vocabulary, dtype, ranks, repeats, timeout=900)
                    title = f"{tokens} tokens, vocabulary {vocabulary}, {dtype}, TP {ranks}"
                    unit = 4 * tokens * vocabulary // ranks
                    # What there is for each token is far below one percent.
                    table(title, found, (1 if dtype == "float32" else 0.5) + SCRATCH / unit + 0.01, verdicts)
            if ranks == 1:
                tokens, vocabulary, width = LINEAR
                title = f"{tokens} tokens, vocabulary {vocabulary}, hidden {width}, float32, TP 1"
                table(title, world.run(measure_linear, repeats, timeout=900), None, verdicts)
    print("\n" + ("\n".join(f"MISSED: {verdict}" for verdict in verdicts) or "All demands are met."))
    return 1 if verdicts else 0


# In the process that is started by hand


def main() -> int:
    parser = argparse.ArgumentParser(description="Log-probabilities of torch, megatron-core and shim, side by side.")
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--release-dir", help="an unpacked megatron-core of that release; default: fetched")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return compare(arguments.release, arguments.repeats)
    sys.path.insert(0, TOP)
    from shim.testing import environment, fetch

    release = arguments.release_dir or fetch(arguments.release, progress=print)
    # Ranks are daemons, which may not have the processes that a parallel compilation starts.
    settings = {"PYTHONPATH": TOP, "PYTHONWARNINGS": "ignore", "TORCHINDUCTOR_COMPILE_THREADS": "1", **ALLOCATOR}
    environ = environment(release, {**os.environ, **settings})
    command = [sys.executable, __file__, "--measure", "--release", arguments.release]
    return subprocess.run([*command, "--repeats", str(arguments.repeats)], env=environ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
