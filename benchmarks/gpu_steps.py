"""The steps of benchmarks/device.py on a real GPU: what the host waits for, kernels, time and memory, stock and shim.

    python benchmarks/gpu_steps.py [--release 0.19.2] [--step NAME] [--te]

A machine without a GPU has nothing to measure, and the program says so. Counts are torch.profiler's, of one step. Times
are those of the host for a step and for the wait behind it, medians of alternating turns. The models are small, so a
step takes as long as its launches. --te takes those of tests/support/te_steps.py, which are made of Transformer
Engine's layers, and needs it with its kernels. A step is also captured into a CUDA graph and replayed, which must give
the same bits.

The single rank has gloo, which copies each of stock's messages through the host: three waits for each loss that NCCL
does not have. Exits with 1 if a step under the patches waits more often than stock, or if a replay is wrong.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from on_release import measured, parser_of

SUPPORT = str(Path(__file__).resolve().parent.parent / "tests" / "support")
RELEASE = "0.19.2"
TURNS, STEPS_IN_A_TURN = 3, 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READS = ("experts", "experts, replay", "experts, FP8")  # whose sizes the host reads, on stock too: not captured
COLUMNS = ("waits", "kernels", "copies from the host", "ms", "MiB at peak")


class Side:
    """A step on stock or under patches: its counts, the milliseconds of each turn, and what a replayed graph gives."""

    def __init__(self, name: str, of: Any, ids: list[str]) -> None:
        self.name, self.of, self.ids = name, of, ids
        self.error = self.graph = ""
        self.counts: dict[str, int] = {}
        self.ms: list[float] = []
        self.peak = 0.0

    @contextlib.contextmanager
    def step(self) -> Any:
        import device_steps

        with device_steps.warmed(self.of, self.ids, contextlib.nullcontext) as run:
            run()
            yield run

    def count(self) -> None:
        """Counts and memory of one step; the error if it fails."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        try:
            with self.step() as run:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                run()
                self.peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                    run()
        except Exception as error:  # noqa: BLE001 - what stock cannot do has no counts
            self.error = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            return
        names = [event.name for event in seen.events()]
        # Leaving the profiler, torch waits once itself.
        waits = sum(name in WAITS for name in names) - 1
        kernels = sum("LaunchKernel" in name for name in names)
        self.counts = {
            "waits": waits,
            "kernels": kernels,
            "copies from the host": sum(name.startswith("Memcpy HtoD") for name in names),
        }

    def clock(self) -> None:
        """One turn: the milliseconds of a step, with its wait."""
        import torch

        with self.step() as run:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS_IN_A_TURN):
                run()
            torch.cuda.synchronize()
            self.ms.append((time.perf_counter() - start) / STEPS_IN_A_TURN * 1e3)

    def replay(self) -> None:
        """Capture the step and replay it: "equal", or what went wrong."""
        import torch

        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), self.step() as run:
                right = [gradient.clone() for gradient in run()]
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    gradients = run()
                for gradient in gradients:
                    gradient.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                wrong = sum(not torch.equal(one, other) for one, other in zip(gradients, right))
                self.graph = f"{wrong} of {len(right)} gradients differ" if wrong else "equal"
        except Exception as error:  # noqa: BLE001 - what cannot be captured
            self.graph = f"{type(error).__name__}: {error}".splitlines()[0][:120]

    def __str__(self) -> str:
        if self.error:
            return self.error
        cells = [f"{value:,}" for value in self.counts.values()]
        cells += [f"{statistics.median(self.ms):.2f}", f"{self.peak:.1f}"]
        return " | ".join(cells)


def compare(release: str, only: str, te: bool) -> int:
    """The table of one release, in a process that has it; 1 if the patches wait more often, or a replay is wrong."""
    import torch

    if not torch.cuda.is_available():
        print("no GPU: nothing measured")
        return 0
    sys.path.insert(0, SUPPORT)
    import device_steps
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for

    import shim

    ids = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    print(f"megatron-core {release}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"| step | side | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    missed: list[str] = []
    captured: list[Side] = []
    for name, step in (import_module("te_steps") if te else device_steps).STEPS.items():
        if step.layout.world > 1 or (only and only != name):
            continue
        sides = {"stock": Side(name, step, []), "shim": Side(name, step, ids)}
        for side in sides.values():
            side.count()
        for _ in range(TURNS):
            for side in sides.values():
                if not side.error:
                    side.clock()
        for label, side in sides.items():
            print(f"| {name if label == 'stock' else ''} | {label} | {side} |", flush=True)
        stock, patched = sides["stock"], sides["shim"]
        if patched.error and not stock.error:
            missed.append(f"{name}: {patched.error}")
        elif not stock.error and patched.counts["waits"] > stock.counts["waits"]:
            missed.append(f"{name}: {patched.counts['waits']} waits, stock {stock.counts['waits']}")
        elif not patched.error and name not in READS:
            captured.append(patched)
    # Last: a capture that fails may leave the device unusable.
    for side in captured:
        side.replay()
        print(f"{side.name}, captured and replayed under shim: {side.graph}", flush=True)
        if side.graph != "equal":
            missed.append(f"{side.name}: {side.graph}")
    print("\n".join(f"MISSED: {each}" for each in missed) or "All demands are met.")
    return 1 if missed else 0


def main() -> int:
    parser = parser_of("Steps on a real GPU, stock and shim side by side.", RELEASE)
    parser.add_argument("--step", default="", help="this step only")
    parser.add_argument("--te", action="store_true", help="steps of Transformer Engine's layers")
    arguments = parser.parse_args()
    if arguments.measure:
        return compare(arguments.release, arguments.step, arguments.te)
    return measured(__file__, arguments, {})


if __name__ == "__main__":
    raise SystemExit(main())
