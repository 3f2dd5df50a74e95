"""Seconds that a training takes to sleep and to wake, on a GPU: shim's way, megatron-core's, and verl's.

    python benchmarks/sleep.py [--release 0.19.2] [--gb 8] [--pretend]

Beside the seconds of a copy of as many bytes in pinned memory, which is what the link can do. The training is a GPT in
bf16 with a distributed optimizer and Adam, of as many layers as hold --gb of weights, main weights and states. Its
gradients are zero, as they are before a rollout. Each way runs three times; the first one pins memory of the host. A
way whose weights differ after a sleep ends the run with 1. --pretend takes a small one on the pretended CUDA, whose
seconds say nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from on_release import measured, parser_of

RELEASE = "0.19.2"
HIDDEN = 4096
BYTES = 2 + 4 + 8  # a parameter: weight, main weight, two moments
PATCHES = ("sleep-methods", "optimizer-restored-shards")
Wake = Callable[[], Any]


def shims(model: Any, optimizer: Any) -> Wake:
    import shim

    wake: Wake = shim.offload(model, optimizer).restore
    return wake


def megatron_cores(model: Any, optimizer: Any) -> Wake:
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    optimizer.offload_to_cpu()
    for buffer in buffers:
        buffer.offload_to_cpu()

    def wake() -> None:
        for buffer in buffers:
            buffer.reload_from_cpu()
        optimizer.restore_from_cpu()

    return wake


def verls(model: Any, optimizer: Any) -> Wake:
    """The copies that verl 0.9.1 makes: buffers to memory that is pinned anew, all else to memory that is not."""
    import torch

    buffers = [*model.buffers, *model.expert_parallel_buffers]
    copies = [buffer.param_data.cpu().pin_memory() for buffer in buffers]
    storages = [each.untyped_storage() for buffer in buffers for each in (buffer.param_data, buffer.grad_data)]
    sizes = [storage.nbytes() for storage in storages]
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    main = [each for one in chained for group in one.shard_fp32_from_float16_groups for each in group]
    states = [state for one in chained for state in one.optimizer.state.values()]

    def move(device: str) -> None:
        for weight in main:
            weight.data = weight.data.to(device, non_blocking=True)
        for state in states:
            state |= {name: state[name].to(device, non_blocking=True) for name in ("exp_avg", "exp_avg_sq")}

    def wake() -> None:
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.grad_data.zero_()
            buffer.param_data.copy_(copy, non_blocking=True)
        move("cuda")

    for storage in storages:
        storage.resize_(0)
    move("cpu")
    torch.cuda.empty_cache()
    return wake


WAYS = {"shim.offload": shims, "megatron-core's methods": megatron_cores, "as verl does": verls}


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    done = call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, done


def training(gb: float, hidden: int) -> tuple[Any, Any]:
    """A model in DDP and its optimizer, with states, of about this many GB."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from shim import testing

    layers = max(1, round(gb * 1e9 / BYTES / (12 * hidden**2)))
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 4 * hidden}
    half: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
    built: Any = testing.build_gpt(mtp_num_layers=None, **sizes, **half).bfloat16().cuda()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    model: Any = DistributedDataParallel(built.config, ddp, built)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [model])
    for weight in model.parameters():
        weight.main_grad.fill_(1e-3)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad_buffer()
    return model, optimizer


def link(nbytes: int) -> tuple[float, float]:
    """Seconds of one copy to pinned memory, and back."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    down, up = (functools.partial(host.copy_, device, non_blocking=True), functools.partial(device.copy_, host, True))
    return min(seconds(down)[0] for _ in range(3)), min(seconds(up)[0] for _ in range(3))


def measure(gb: float, hidden: int) -> list[str]:
    """The lines of the table."""
    import torch

    import shim

    model, optimizer = training(gb, hidden)
    size = BYTES * sum(weight.numel() for weight in model.parameters())
    down, up = link(size)
    lines = [f"{size / 1e9:.3f} GB, in GB/s: the first time to the host and back, later to the host and back"]
    lines.append(f"{'the link':26}{'':18}{size / down / 1e9:9.2f}{size / up / 1e9:9.2f}")
    right = [weight.detach().clone() for weight in model.parameters()]
    ids = [id for id in PATCHES if shim.plan()[id].wanted]
    with shim.patched(only=ids, require=ids):
        for name, way in WAYS.items():
            times = []
            for _ in range(3):
                to_host, wake = seconds(functools.partial(way, model, optimizer))
                times.append((to_host, seconds(wake)[0]))
            first, later = times[0], [min(both) for both in zip(*times[1:], strict=True)]
            lines.append(f"{name:26}" + "".join(f"{size / each / 1e9:9.2f}" for each in (*first, *later)))
            if not all(map(torch.equal, right, model.parameters())):
                raise SystemExit(f"{name}: weights differ")
    return lines


@contextlib.contextmanager
def device(pretend: bool) -> Iterator[None]:
    """The GPU, or a pretended one, with one rank."""
    from shim import testing
    from shim.testing import pretend_cuda
    from shim.testing.cpu import storage_shared_in_python

    with contextlib.ExitStack() as undo:
        if pretend:
            undo.enter_context(pretend_cuda.cuda_pretended())
            undo.enter_context(storage_shared_in_python())
        from megatron.core.optimizer import distrib_optimizer

        # 0.12 needs Transformer Engine for it, also without FP8.
        undo.enter_context(mock.patch.object(distrib_optimizer, "quantize_param_shard", lambda *_, **__: None))
        undo.enter_context(testing.layout_initialised(testing.Layout()))
        yield


def main() -> int:
    parser = parser_of("Seconds to sleep and to wake, on a GPU.", RELEASE)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--pretend", action="store_true", help="a small training on the pretended CUDA")
    arguments = parser.parse_args()
    if not arguments.measure:
        return measured(str(Path(__file__).resolve()), arguments, {})
    import torch

    if not arguments.pretend and not torch.cuda.is_available():
        print("there is no GPU, so there is nothing to measure; --pretend shows that it runs")
        return 0
    print(f"megatron-core {arguments.release}, {'pretended' if arguments.pretend else torch.cuda.get_device_name()}")
    with device(arguments.pretend):
        print("\n".join(measure(*((0.001, 64) if arguments.pretend else (arguments.gb, HIDDEN)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
