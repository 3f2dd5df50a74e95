"""How the costs of shim grow: with steps, layers, modules, processes and patches' proofs; stock beside it.

    python benchmarks/growth.py [--release 0.18.2] [--release-dir DIR] [--only steps,layers,modules,processes,prove]

The lines are Markdown; docs/benchmarks.md has them. Python calls and operations have no noise. Seconds are CPU time, of
processes with all their children. A process with shim imports and applies it, and nothing else.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from on_release import SUPPORT, TOP, cpu_name, measured, parser_of

RELEASE = "0.18.2"
STEPS, LAYERS, MODULES, PROCESSES = (10, 1000), (2, 64), (1_000, 10_000), (1, 64)
PARTS = ("steps", "layers", "modules", "processes", "prove")


def patched(on: bool) -> Any:
    import shim

    return shim.patched() if on else nullcontext()


def after_steps(on: bool) -> list[str]:
    """What a step calls, and what the process holds, after few steps and after many."""
    import torch
    from trainings import Training, python_calls, stepping

    found = []
    with patched(on), stepping(Training("packed")) as step:
        done = 1
        for steps in STEPS:
            for _ in range(steps - done):
                step()
            done = steps
            gc.collect()
            objects = len(gc.get_objects())
            held = sum(each.nbytes for each in gc.get_objects() if isinstance(each, torch.Tensor))
            found.append(f"{python_calls(step):,} calls, {objects:,} objects, {held:,} B of tensors")
    return found


def after_layers(on: bool) -> list[str]:
    from trainings import Training, counts_of, python_calls, stepping

    found = []
    for layers in LAYERS:
        training = Training(optimizer="plain", options={"num_layers": layers})
        with patched(on), stepping(training) as step:
            operations = counts_of(step).operations
            found.append(f"{python_calls(step):,} calls, {operations:,} operations")
    return found


def after_modules(on: bool) -> list[str]:
    """CPU time of the first apply() behind the imports with that many more modules of ten names each."""
    import shim

    found, made = [], 0
    with patched(on):
        pass  # what only the first apply() of a process does
    for modules in MODULES:
        for number in range(made, modules):
            name = f"benchmark_module_{number}"
            sys.modules[name] = module = types.ModuleType(name)
            vars(module).update({f"name_{n}": object() for n in range(10)})
        made = modules
        found.append(f"{seconds(shim.apply) * 1e3:.0f} ms" if on else "0 ms")
        shim.revert()
    return found


def after_processes(on: bool) -> list[str]:
    """CPU time of each process, if one runs and if many do at once."""
    program = "import shim; shim.apply()" if on else "pass"
    found = []
    for processes in PROCESSES:
        before = seconds_of_children()
        running = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", program]) for _ in range(processes)]
        codes = {each.wait() for each in running}
        taken = seconds_of_children() - before
        found.append(f"{taken / processes * 1e3:.0f} ms" if codes == {0} else f"exit codes {sorted(codes)}")
    return found


def prove() -> str:
    """CPU time of all proofs of the release, stock and patched, with their ranks."""
    before = seconds_of_children()
    done = subprocess.run([sys.executable, "-m", "shim", "prove"], capture_output=True, text=True)
    return f"{seconds_of_children() - before:.0f} s, exit {done.returncode}"


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(release: str, parts: list[str]) -> int:
    import torch

    torch.set_num_threads(1)
    print(f"megatron-core {release}, torch {torch.__version__}, {cpu_name()}\n", flush=True)
    print("| | | stock | with shim |\n|---|---|---|---|", flush=True)
    tables: dict[str, tuple[tuple[int, int], Callable[[bool], list[str]]]] = {
        "steps": (STEPS, after_steps),
        "layers": (LAYERS, after_layers),
        "modules": (MODULES, after_modules),
        "processes": (PROCESSES, after_processes),
    }
    if {"steps", "layers", "modules"} & set(parts):
        import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for
    for part in parts:
        if part == "prove":
            print(f"| shim prove | all proofs | - | {prove()} |", flush=True)
            continue
        sizes, measure = tables[part]
        stock, mine = measure(False), measure(True)
        for size, theirs, ours in zip(sizes, stock, mine):
            print(f"| {part} | {size:,} | {theirs} | {ours} |", flush=True)
    return 0


def main() -> int:
    parser = parser_of("How the costs of shim grow.", RELEASE)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    arguments = parser.parse_args()
    if arguments.measure:
        return compare(arguments.release, arguments.only.split(","))
    return measured(__file__, arguments, {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([TOP, SUPPORT, ""])})


if __name__ == "__main__":
    raise SystemExit(main())
