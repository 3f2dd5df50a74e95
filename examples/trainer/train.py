"""A trainer with arguments like ms-swift's: `python train.py --mtp_num_layers 1 --packing true --lora_rank 8 --tp 2`.

It runs on CPUs with any megatron-core on the path: alone, by torchrun, on Ray (on_ray.py), under `shim run`. `# shim:`
marks what is about shim; docs/tutorial.md walks through it.
"""

import argparse
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from data import VOCABULARY, Batch, batch, rows
from torch import Tensor

import shim
from shim import testing
from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu


@dataclasses.dataclass(frozen=True)
class Arguments:
    num_experts: int = 0
    mtp_num_layers: int = 1
    mtp_loss_scaling_factor: float = 0.3
    lora_rank: int = 0  # 0 trains all weights
    packing: bool = True  # False: each sequence in a microbatch of its own, on one rank
    max_length: int = 256  # tokens of a row
    global_batch_size: int = 4  # rows of a step
    tp: int = 1  # sizes of tensor, context, pipeline and expert parallelism
    cp: int = 1
    pp: int = 1
    ep: int = 1
    train_iters: int = 8
    lr: float = 0.1
    save: str = ""  # a directory for the checkpoint after the last step
    load: str = ""  # a directory to resume from


def concerns(args: Arguments) -> list[str]:
    """What the run trains, in shim's words; `shim plan --help` has them all."""
    words = {"mtp": args.mtp_num_layers, "moe": args.num_experts, "packed": args.packing, "lora": args.lora_rank}
    words |= {name: getattr(args, name) > 1 for name in ("tp", "cp", "pp", "ep")}
    return ["per-token-loss", *(word for word, holds in words.items() if holds)]


def built(args: Arguments) -> Any:
    """The model, for which a trainer has a provider, wrapped for data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    moe = {"num_moe_experts": args.num_experts, "moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp64"}
    model: Any = testing.build_gpt(
        mtp_num_layers=args.mtp_num_layers or None,
        mtp_loss_scaling_factor=args.mtp_loss_scaling_factor,
        vocab_size=VOCABULARY,
        max_sequence_length=args.max_length,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **(moe if args.num_experts else {}),
    )
    if args.lora_rank:
        testing.add_lora(model, args.lora_rank)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def microbatches(args: Arguments, step: int) -> list[Batch]:
    """Those of this rank."""
    from megatron.core import parallel_state as ranks

    every, size = rows(args.max_length), args.global_batch_size
    of_step = [every[(step * size + i) % len(every)] for i in range(size)]
    mine = of_step[ranks.get_data_parallel_rank() :: ranks.get_data_parallel_world_size()]
    if args.packing:
        return [batch(row, args.max_length, args.cp, ranks.get_context_parallel_rank()) for row in mine]
    return [batch([sequence]) for row in mine for sequence in row]


def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """For megatron-core's schedules, which call it once for each microbatch."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    inputs, lengths = next(batches)

    def loss_func(per_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, tokens = (per_token * inputs["loss_mask"]).sum(), inputs["loss_mask"].sum()
        log = MTPLossLoggingHelper.tracker  # the mean loss of each layer, added up until it is cleared
        mtp: Tensor = log.get("loss_values", log.get("values", torch.zeros(0)))  # renamed in 0.19
        log.clear()
        counts = torch.tensor([sum(max(n - layer, 0) for n in lengths) for layer in range(1, len(mtp) + 1)])
        return loss, tokens.int(), torch.cat([torch.stack([loss.detach(), tokens]), mtp * counts, counts])

    return model(**inputs), loss_func


def forward_backward(model: Any, args: Arguments, step: int) -> dict[str, float]:
    """By the schedule that the release chooses; the mean losses over all tokens of the step."""
    from megatron.core import parallel_state as ranks
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = microbatches(args, step)
    parts = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=args.max_length,
        micro_batch_size=1,
        forward_only=False,
    )
    sums = torch.stack(parts).sum(0) if parts else torch.zeros(2 + 2 * args.mtp_num_layers)  # the last stage has them
    dist.all_reduce(sums, group=ranks.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(sums, group=ranks.get_pipeline_model_parallel_group())
    mtp, counts = sums[2:].chunk(2)
    return {"loss": float(sums[0] / sums[1]), **({"mtp": float((mtp / counts).mean())} if len(mtp) else {})}


def train(args: Arguments) -> None:
    from megatron.core.optimizer import OptimizerConfig

    model, log = built(args), []  # the log: losses of each step
    report = shim.check(model)  # shim: raises if a required patch has no effect on this model, or if ranks differ
    say = print if dist.get_rank() == 0 else lambda *words, **how: None
    say(report.summary)
    optimizer = optimizer_on_cpu(OptimizerConfig(optimizer="sgd", lr=args.lr, clip_grad=1.0), [model])
    if args.load:
        saved = torch.load(Path(args.load) / f"rank-{dist.get_rank()}.pt", weights_only=False)  # written by this script
        shim.check_resume(saved["shim"])  # shim: warns if the checkpoint was trained with other patches
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        log = saved["log"]
    for step in range(len(log), args.train_iters):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        log.append(forward_backward(model, args, step))
        optimizer.step()
        bar = "#" * (20 * len(log) // args.train_iters)
        losses = (f"{name} {loss:.7f}" for name, loss in log[-1].items())
        say(f"[{bar:.<20}] {len(log)}/{args.train_iters}", *losses, sep="  ", flush=True)
    if args.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": log}
        state["shim"] = shim.checkpoint_state()  # shim: for check_resume
        Path(args.save).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(args.save) / f"rank-{dist.get_rank()}.pt")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Arguments):
        of_text = {bool: {"true": True, "false": False}.__getitem__}.get(type(field.default), type(field.default))
        parser.add_argument(f"--{field.name}", default=field.default, type=of_text)
    args = Arguments(**vars(parser.parse_args(given)))
    warnings.filterwarnings("ignore")  # megatron-core's, about kernels that a CPU has no use for
    # shim: before megatron is imported. `concerns` leaves out what the run cannot meet; `require` raises without it.
    needed = ["mtp-packed-sequences"] if args.mtp_num_layers and args.packing else []
    shim.apply(require=needed, concerns=concerns(args))
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    layout = testing.Layout(tp=args.tp, cp=args.cp, pp=args.pp, ep=args.ep)
    typed = mock.patch.object(torch.Tensor, "type", type_on_a_gpu)  # which clipping asks for
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), typed:  # in place of initialize_model_parallel
        train(args)


if __name__ == "__main__":
    main()
