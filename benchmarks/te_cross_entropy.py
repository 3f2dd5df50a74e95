"""Transformer Engine's fused cross entropy on a GPU, stock and with its patches: memory, time and error of a step.

    python benchmarks/te_cross_entropy.py [--tree DIR]... [--tokens 8192] [--vocabulary 151936] [--dtype bfloat16]

Each --tree is an unpacked wheel of Transformer Engine (2.10 or later); by default 2.17.1, 2.18.0, 2.19.0 and 2.20.2 are
fetched. Its kernels are Triton's, so its compiled part need not be there: only the three files of the function are
imported. A step makes logits, computes losses and drops the logits, and runs backward of a weighted sum. `peak` is
the largest number of bytes that CUDA's allocator gave out during the step, the logits included; `between` is what it
holds between forward and backward. Both are in units of the logits, and in GB. Milliseconds are medians of CUDA events,
sides taking turns. `gradient` is the largest error of a gradient against fp64, over the largest gradient, in some rows.

--cpu checks the program on few logits without a GPU: kernels run in Triton's interpreter, which adds wrongly in bf16
(up to 2.17), bytes are those of shim.testing.Footprint, and nothing is timed. Exits with 1 if a patch takes more memory
than stock or a larger error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOP = str(Path(__file__).resolve().parent.parent)
RELEASES = ("2.17.1", "2.18.0", "2.19.0", "2.20.2")
PACKAGES = ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton")
TE = "transformer_engine"
PART = 128  # the part of the rows whose gradients are compared with fp64
NOISE = 1.02
SCRATCH = 4 << 20  # bytes that shim works on at a time on a CPU; kernels need none


@contextlib.contextmanager
def imported(tree: Path) -> Iterator[Any]:
    """The module of the function, of this tree, without the packages around it, which load compiled libraries."""
    for ending in PACKAGES:
        package = types.ModuleType(TE + ending)
        package.__path__ = [str(tree.joinpath(TE, *ending.split(".")))]
        sys.modules[TE + ending] = package
    jit = types.ModuleType(f"{TE}.pytorch.jit")
    jit.no_torch_dynamo = lambda *args, **kwargs: lambda function: function  # type: ignore[attr-defined]
    sys.modules[jit.__name__] = jit
    try:
        yield importlib.import_module(f"{TE}.pytorch.cross_entropy")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == TE]:
            del sys.modules[name]


def sides(module: Any, variant: str) -> dict[str, Callable[..., Any]]:
    """name -> the function. te-cross-entropy up to 2.17, te-cross-entropy-copy from 2.18 on."""
    import inspect

    from shim.patches.transformer_engine import te_cross_entropy, te_cross_entropy_copy

    stock = module.parallel_cross_entropy
    patch = te_cross_entropy_copy if variant in ("v2_18", "v2_19") else te_cross_entropy
    (factory,) = patch.bindings(variant, {}).values()
    found = {"stock": stock, "shim": factory(stock)}
    if "overwrite_input" in inspect.signature(stock).parameters:
        found["stock, overwrite_input"] = lambda *args: stock(*args, overwrite_input=True)
    return found


class Step:
    """One step of a side: its logits come from a function that keeps nothing."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.device = "cpu" if options.cpu else "cuda"
        self.shape = (options.tokens, 1, options.vocabulary)
        self.dtype = getattr(torch, options.dtype)
        torch.manual_seed(0)
        self.checked = max(options.tokens // PART, 1)
        self.values = torch.randn(self.checked, 1, options.vocabulary, device=self.device).to(self.dtype) * 3
        self.target = torch.randint(0, options.vocabulary, self.shape[:2], device=self.device)
        self.weights = torch.rand(self.shape[:2], device=self.device)
        self.bytes = options.tokens * options.vocabulary * self.dtype.itemsize
        self.rows: Any = None
        outer = self

        class Logits(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: Any) -> Any:
                logits = torch.empty(outer.shape, dtype=outer.dtype, device=outer.device)
                for part in logits.split(outer.checked):
                    part.copy_(outer.values[: len(part)])
                return logits

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                outer.rows = gradient[: outer.checked].clone()
                return gradient[0, 0, :1].float()

        self.make = Logits.apply
        self.weight = torch.zeros(1, device=self.device, requires_grad=True)

    def forward(self, function: Callable[..., Any]) -> Any:
        return (function(self.make(self.weight), self.target) * self.weights).sum()

    def error(self) -> float:
        """Of the gradients of the rows that the last step has kept."""
        import torch

        exact = self.values[: len(self.rows)].double().requires_grad_()
        count = len(self.rows)
        picked = exact.log_softmax(-1).gather(-1, self.target[:count].unsqueeze(-1)).squeeze(-1)
        (right,) = torch.autograd.grad(-(picked * self.weights[:count]).sum(), exact)
        return float((self.rows.double() - right).abs().max() / right.abs().max())


def memory(step: Step, function: Callable[..., Any]) -> tuple[float, float]:
    """(at the peak, between forward and backward) in bytes, beyond what was there before."""
    import torch

    if step.device == "cpu":
        from shim.testing import Footprint

        with Footprint() as footprint:
            loss = step.forward(function)
            gc.collect()  # cycles of Triton's interpreter hold its arguments
            between = footprint.held_bytes
            loss.backward()
        return footprint.peak_bytes, between
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = step.forward(function)
    between = torch.cuda.memory_allocated() - before
    loss.backward()
    return torch.cuda.max_memory_allocated() - before, between


def clocked(step: Step, function: Callable[..., Any]) -> tuple[float, float]:
    """Milliseconds of the function's forward, without making the logits, and of backward."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    logits = [step.make(step.weight)]
    events[0].record()
    losses = function(logits[0], step.target)
    events[1].record()
    logits.clear()
    loss = (losses * step.weights).sum()
    events[2].record()
    loss.backward()
    events[3].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])


def compare(tree: Path, options: argparse.Namespace) -> int:
    from shim._matrix.load import load_matrix
    from shim.testing.interpreted import interpreted

    release = next(tree.glob("transformer_engine-*.dist-info")).stem.partition("-")[2]
    found = load_matrix()
    wanted = [found.wanted(id, release) for id in ("te-cross-entropy-copy", "te-cross-entropy")]
    variant = next((name for name in wanted if str(name).startswith("v2_")), None)
    if variant is None:
        raise SystemExit(f"no patch for Transformer Engine {release}")
    step = Step(options)
    print(f"\nTransformer Engine {release}, {list(step.shape)} in {options.dtype}: {step.bytes / 1e9:.2f} GB of logits")
    print(f"{'':24} {'peak':>14} {'between':>14} {'forward ms':>11} {'backward ms':>12} {'gradient':>9}")
    with imported(tree) as module, contextlib.ExitStack() as stack:
        if step.device == "cpu":
            stack.enter_context(interpreted(sys.modules[f"{TE}.pytorch.triton.cross_entropy"]))
            module._validate_inputs = lambda *args: None  # from 2.19 it asks for CUDA tensors
        functions = sides(module, variant)
        errors, bytes_of, times = {}, {}, {name: [] for name in functions}  # type: ignore[var-annotated]
        for name, function in functions.items():
            step.forward(function).backward()  # compiles the kernels
            bytes_of[name] = memory(step, function)
            errors[name] = step.error()
        if step.device == "cuda":
            for _ in range(options.repeats):
                for name, function in functions.items():
                    times[name].append(clocked(step, function))
        for name in functions:
            cells = [f"{value / step.bytes:5.2f} {value / 1e9:5.2f} GB" for value in bytes_of[name]]
            ms = [f"{statistics.median(part):.2f}" for part in zip(*times[name])] or ["-", "-"]
            print(f"{name:24} {cells[0]:>14} {cells[1]:>14} {ms[0]:>11} {ms[1]:>12} {errors[name]:9.1e}", flush=True)
    scratch = SCRATCH if options.cpu else 0
    worse = any(mine > NOISE * theirs + scratch for mine, theirs in zip(bytes_of["shim"], bytes_of["stock"]))
    return int(worse or errors["shim"] > NOISE * errors["stock"] + 1e-7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="append", default=[], help="an unpacked wheel; can be repeated")
    parser.add_argument("--tokens", type=int, default=0, help="default 8192, and 16 with --cpu")
    parser.add_argument("--vocabulary", type=int, default=0, help="default 151936, and 2^18 with --cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="check the program without a GPU")
    options = parser.parse_args()
    options.tokens = options.tokens or (16 if options.cpu else 8192)
    options.vocabulary = options.vocabulary or (1 << 18 if options.cpu else 151936)
    sys.path.insert(0, TOP)
    import torch

    if not options.cpu and not torch.cuda.is_available():
        print("this machine has no GPU; --cpu checks the program without one")
        return 0
    if not options.cpu:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    trees = [Path(tree) for tree in options.tree]
    if not trees:
        from shim.testing import fetch

        trees = [Path(fetch(release, TE.replace("_", "-"))) for release in RELEASES]
    return max(compare(tree, options) for tree in trees)


if __name__ == "__main__":
    sys.exit(main())
