"""The cost of each patch if it has little to do: stock against shim, few tokens and many.

    python benchmarks/overhead.py [--release 0.18.2] [--te-release 2.16.1] [--release-dir DIR] [--quick]

For each patch, work that stock also does right, through the functions that the patch binds: forward and backward.
Both run in one process, in pairs that are next to each other and begin in turns with the one and the other; a ratio is
the median of those of the pairs, in CPU time. Work that only a fix does is not in it, and savings only if stock has the
same work. The patches of Transformer Engine are measured on a pair, whose compiled part has a stand-in; work that needs
a kernel of a GPU has a line that says so. A ratio above the limit is reported, and is exit code 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from on_release import ALLOCATOR, TOP

RELEASE, TE_RELEASE = "0.18.2", "2.16.1"
PAIRS, QUICK = 25, 3
TURN = 0.02  # seconds
LIMIT, NOISE = 1.0, 0.1  # shim / stock
TOKENS = {"small": 16, "medium": 128, "large": 1024}
VOCABULARY = {"small": 64, "medium": 8192, "large": 16384}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
EXPERTS |= {"moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "alltoall"}


# The work of each patch: called with a size, returns the function that is timed


def model_step(packed: bool = False, **options: Any) -> Callable[[str], Callable[[], Any]]:
    """A step of a small GPT."""

    def work(size: str) -> Callable[[], Any]:
        import torch

        from shim import testing

        tokens = TOKENS[size]
        model = testing.build_gpt(**{"mtp_num_layers": None, "max_sequence_length": tokens, **options})
        if packed:
            row = testing.pack(testing.random_sequences((tokens // 2, tokens // 2)))
            return lambda: testing.run_packed(model, row)
        ids = torch.randint(0, 64, (1, tokens))
        places = torch.arange(tokens).unsqueeze(0)
        return lambda: model(ids, places, None, labels=ids).sum().backward()

    return work


def checkpoint(size: str) -> Callable[[], Any]:
    """A recompute of one product."""
    import torch
    from megatron.core import tensor_parallel

    x, weight = torch.randn(TOKENS[size], 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    return lambda: tensor_parallel.checkpoint(lambda x: x @ weight, False, x).sum().backward()


def te_checkpoint(size: str) -> Callable[[], Any]:
    import torch
    from transformer_engine.pytorch import distributed

    x, weight = torch.randn(TOKENS[size], 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    return lambda: distributed.checkpoint(lambda x: x @ weight, x).sum().backward()


def te_checkpoint_in_fp8(size: str) -> Callable[[], Any]:
    """The recompute of a region of FP8, whose state is Python's, of a product that has no kernel of FP8."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import distributed

    x, weight = torch.randn(TOKENS[size], 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def work() -> None:
        with te.fp8_autocast(enabled=True):
            result = distributed.checkpoint(lambda x: x @ weight, x)
        result.sum().backward()

    return work


def losses(fused: bool, dtype_name: str) -> Callable[[str], Callable[[], Any]]:
    def work(size: str) -> Callable[[], Any]:
        import torch
        from megatron.core import parallel_state
        from megatron.core.fusions import fused_cross_entropy
        from megatron.core.tensor_parallel import cross_entropy

        tokens, vocabulary = TOKENS[size], VOCABULARY[size]
        logits = torch.randn(tokens, 1, vocabulary).to(getattr(torch, dtype_name))
        leaf, target = logits.requires_grad_(), torch.randint(0, vocabulary, (tokens, 1))

        def step() -> None:
            computed = leaf * 1  # stock overwrites it
            if fused:
                group = parallel_state.get_tensor_model_parallel_group()
                found = fused_cross_entropy.fused_vocab_parallel_cross_entropy(computed, target, group)
            else:
                found = cross_entropy.vocab_parallel_cross_entropy(computed, target)
            torch.autograd.grad(found.sum(), computed)

        return step

    return work


def packed_rotation(size: str) -> Callable[[], Any]:
    """Of four sequences. A row of one has no loop to save: rope_thd.py measures it."""
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from shim import testing

    tokens, config = TOKENS[size], testing.build_gpt(mtp_num_layers=None).config
    t, freqs = torch.randn(tokens, 4, 64, requires_grad=True), torch.randn(tokens + 1, 1, 1, 64)
    cu_seqlens = torch.arange(5, dtype=torch.int32) * (tokens // 4)
    return lambda: rope_utils.apply_rotary_pos_emb(t, freqs, config, cu_seqlens).sum().backward()


def rotation(size: str) -> Callable[[], Any]:
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from shim import testing

    config = testing.build_gpt(mtp_num_layers=None).config
    t, freqs = torch.randn(TOKENS[size], 1, 4, 64, requires_grad=True), torch.randn(TOKENS[size], 1, 1, 64)
    return lambda: rope_utils.apply_rotary_pos_emb(t, freqs, config).sum().backward()


# patch -> what is measured, by name
WORK: dict[str, dict[str, Callable[[str], Callable[[], Any]]]] = {
    "mtp-packed-sequences": {"": model_step(packed=True, mtp_num_layers=1)},
    "mtp-recompute": {"": model_step(mtp_num_layers=1)},
    "fp8-fp4-recompute": {"": checkpoint},
    "frozen-recompute": {"": model_step(**FULL)},
    "label-smoothing": {"": losses(False, "float32")},
    "chunked-logprob": {
        "fp32": losses(False, "float32"),
        "bf16": losses(False, "bfloat16"),
        "fp32, fused": losses(True, "float32"),
        "bf16, fused": losses(True, "bfloat16"),
    },
    "rope-thd": {"": packed_rotation},
    "rope-fusion": {"": rotation},
    "config-override": {"": checkpoint},
    "paged-stash": {"off": model_step(**EXPERTS)},
}
WORK_OF_PAIR = {
    "te-fp8-state": {"": te_checkpoint, "FP8": te_checkpoint_in_fp8},
    "te-config-override": {"": te_checkpoint},
}
NOT_HERE = {
    "paged-stash": "on: its experts are kernels of a GPU; benchmarks/paged_stash.py has its parts",
    "mla-rope-table": "the table of fused MLA is made for kernels of a GPU",
    "te-moved-symbols": "what its names call are kernels of a GPU",
    "te-cpu-offload": "a region copies on streams of a GPU",
    "te-skip-weight-update": "what it skips are kernels of a GPU",
}


def seconds(work: Callable[[], Any], times: int) -> float:
    import torch

    # The mode that takes CUDA for the CPU costs more for each call from Python than most calls do.
    with torch._C.DisableTorchFunction():
        start = time.process_time()
        for _ in range(times):
            work()
        return (time.process_time() - start) / times


def measured(patch: str, work: Callable[[], Any], pairs: int) -> tuple[float, float, float]:
    """Microseconds of CPU time (stock, shim), and the median of the ratios of the pairs."""
    import shim

    def stock(times: int) -> float:
        seconds(work, 1)  # for results that are made once
        return seconds(work, times)

    def mine(times: int) -> float:
        with shim.patched(only=[patch], require=[patch]):
            return stock(times)

    times = max(1, int(TURN / stock(3)))
    mine(1)
    found = []
    for turn in range(pairs):
        if turn % 2:
            found.append((stock(times), mine(times)))
        else:
            found.append(tuple(reversed((mine(times), stock(times)))))
    ours, theirs = (statistics.median(side) * 1e6 for side in zip(*found))
    return ours, theirs, statistics.median(mine / stock for stock, mine in found)


def compare(release: str, te_release: str, pairs: int) -> int:
    """The table, in a separate process; 0 if no patch is slower than stock."""
    import torch

    import shim
    from shim import testing

    if te_release:
        testing.transformer_engine_on_cpu()
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for

    torch.set_num_threads(1)
    torch._dynamo.config.suppress_errors = True
    name = f"megatron-core {release}" + (f", Transformer Engine {te_release} without kernels" if te_release else "")
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} thread; us of CPU time")
    print(f"{'patch':<22}{'work':<13}{'size':<8}{'stock':>9}{'shim':>9}{'shim / stock':>14}")
    slower = []
    with ExitStack() as stack:
        stack.enter_context(testing.megatron_on_cpu())
        stack.enter_context(testing.layout_initialised(testing.Layout()))
        if te_release:
            stack.enter_context(testing.te_cuda_stand_ins())
        for id, decision in shim.plan().decisions.items():
            works = (WORK_OF_PAIR if te_release else WORK).get(id, {})
            if bool(te_release) != id.startswith("te-"):
                continue
            for kind, make in works.items() if decision.wanted else ():
                for size in TOKENS:
                    torch.manual_seed(0)
                    stock, mine, ratio = measured(id, make(size), pairs)
                    print(f"{id:<22}{kind:<13}{size:<8}{stock:9.0f}{mine:9.0f}{ratio:14.2f}", flush=True)
                    if ratio > LIMIT + NOISE:
                        slower.append(f"{id} ({' '.join(filter(None, (kind, size)))})")
            if not decision.wanted:
                print(f"{id:<22}{decision.action}")
            elif id in NOT_HERE or not works:
                print(f"{id:<22}not measured: {NOT_HERE.get(id, 'no work here that stock also does')}")
    missed = f"MISSED by {', '.join(slower)}" if slower else "ok"
    print(f"At most {LIMIT}, and {NOISE:.0%} for noise: {missed}")
    return 1 if slower else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="What each patch costs per call, as ratios to stock.")
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--te-release", default=TE_RELEASE, help="for the patches of Transformer Engine")
    parser.add_argument("--release-dir", help="an unpacked megatron-core of that release; default: fetched")
    parser.add_argument("--quick", action="store_true", help="fewer pairs: noisier, in less than two minutes")
    parser.add_argument("--measure", choices=["alone", "pair"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        te_release = arguments.te_release if arguments.measure == "pair" else ""
        return compare(arguments.release, te_release, QUICK if arguments.quick else PAIRS)
    sys.path.insert(0, TOP)
    from shim.testing import environment, fetch

    release = arguments.release_dir or fetch(arguments.release, progress=print)
    engine = fetch(arguments.te_release, "transformer-engine", progress=print)
    given = {**os.environ, "PYTHONPATH": TOP, "PYTHONWARNINGS": "ignore", **ALLOCATOR}
    codes = []
    for which, paths in (("alone", [release]), ("pair", [release, engine])):
        command = [sys.executable, __file__, "--measure", which, *sys.argv[1:]]
        codes.append(subprocess.run(command, env=environment(paths, given)).returncode)
    return max(codes, key=abs)


if __name__ == "__main__":
    raise SystemExit(main())
