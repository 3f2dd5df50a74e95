"""A training that saves and resumes its optimizer, for the proofs of checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor

from shim import testing
from shim.testing import sharded
from shim.testing.cpu import type_on_a_gpu
from shim.testing.proof import CannotRunError

# No size is a multiple of 128, so that nearly every bucket ends in padding.
MODEL = {"num_layers": 2, "mtp_num_layers": None, "hidden_size": 24, "ffn_hidden_size": 40, "vocab_size": 60}

# Ranks of a layout that share experts are replicas of a model without experts.
REPLICAS = {"expert_model_parallel_size": 1}
BUCKET = 500  # elements

STEPS = 3


class FusedAdam(torch.optim.Optimizer):
    """Adam as in Apex and Transformer Engine: a group has the number of steps, and a weight the two moments.

    With the optimizers of torch the distributed optimizer cannot be loaded from these checkpoints.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (first, second), step = group["betas"], group["step"]
            for weight in group["params"]:
                main, gradient = self._stepped(weight)
                state = self.state[weight]
                if "exp_avg" not in state:
                    state.update(exp_avg=torch.zeros_like(main), exp_avg_sq=torch.zeros_like(main))
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
                size = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
                main.sub_(group["lr"] / (1 - first**step) * state["exp_avg"] / size)
                if main is not weight:
                    weight.copy_(main)

    def _stepped(self, weight: Any) -> tuple[Any, Any]:
        """What the step changes, and its gradient."""
        return weight, weight.grad


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Inside, megatron-core uses FusedAdam, as if Apex were installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    names: dict[str, Any] = {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}
    theirs: dict[str, Any] = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True}
    if testing.release().startswith("0.12."):  # asks Transformer Engine for its version, also if no weight is in FP8
        theirs["quantize_param_shard"] = lambda *args, **kwargs: None
    with (
        mock.patch.multiple(optimizer, create=True, **names),
        mock.patch.multiple(distrib_optimizer, create=True, **theirs),
        # The sharding of releases up to 0.15 is written for numpy 1.
        mock.patch.object(numpy, "product", numpy.prod, create=True),
    ):
        yield


class Training:
    """A small GPT model, trained by the distributed optimizer, whose gradients have several buckets.

    All ranks have the same row, and their shares of its gradient add up exactly. So a training is the same, bit for
    bit, with any number of data-parallel replicas that is a power of two.
    metadata: the argument of the optimizer's sharded_state_dict; None to leave it out. bf16: all weights are; mixed:
    but those of norms, which are in fp32. lora: only adapters are trained; norms: and norms. saved: whether it is about
    checkpoints.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any] | None,
        *,
        lora: bool = False,
        bucket: int | None = BUCKET,
        saved: bool = True,
        **model: Any,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        if saved and not hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable"):
            raise CannotRunError("this release has none of the checkpoints that this is about")
        half, mixed, norms = (bool(model.pop(name, False)) for name in ("bf16", "mixed", "norms"))
        dtypes: dict[str, Any] = {}
        if half:
            dtypes = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
        self.model: Any = testing.build_gpt(**{**MODEL, **REPLICAS, **dtypes, **model})
        params_dtype = dtypes.get("params_dtype", torch.float32)
        if half and not mixed:  # the norms, too
            self.model.bfloat16()
        if lora:
            testing.add_lora(self.model)
        for name, weight in self.model.named_parameters():
            if norms and "norm" in name:
                weight.requires_grad_()
        self.metadata, self.loading = metadata, False
        self.wrapped = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=bucket is not None, bucket_size=bucket
            ),
            self.model,
        )
        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True, bf16=half,
            params_dtype=params_dtype,
        )  # fmt: skip
        with mock.patch.object(torch.Tensor, "type", type_on_a_gpu):
            self.optimizer = get_megatron_optimizer(config, [self.wrapped])

    def train(self, steps: int = STEPS) -> Training:
        """Take steps on one row."""
        row = torch.arange(8)[None]
        for _ in range(steps):
            self.wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.wrapped(row, row, None, labels=row).float().mean().backward()
            self.wrapped.finish_grad_sync()
            assert self.optimizer.step()[0]
        return self

    def save(self, directory: str) -> Training:
        """Write model and optimizer by megatron.core.dist_checkpointing."""
        sharded.save(self, directory)
        return self

    def load(self, directory: str) -> Training:
        """Load both, the model first."""
        self.loading = True
        sharded.load(self, directory)
        self.loading = False
        return self

    def sharded_state_dict(self) -> dict[str, Any]:
        """What is saved, or what shall be loaded."""
        model = self.model.sharded_state_dict()
        given = {} if self.metadata is None else {"metadata": dict(self.metadata)}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=self.loading, **given)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded."""
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> list[Tensor]:
        """A copy of every weight of the model, frozen ones among them."""
        return [weight.detach().clone() for weight in self.model.parameters()]

    def states(self) -> list[dict[str, Tensor]]:
        """What this rank's optimizer keeps of its part of every weight: the main weight and both moments."""
        inner = [each.optimizer for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]
        return [
            {"param": weight.detach().clone(), **{key: value.clone() for key, value in each.state[weight].items()}}
            for each in inner
            for group in each.param_groups
            for weight in group["params"]
        ]


def weights_after(steps: int, metadata: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> list[Tensor]:
    """The weights of this rank after an uninterrupted training."""
    with fused_adam():
        return Training(metadata, **settings).train(steps).weights()


def save_after(steps: int, directory: str, metadata: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> None:
    """Train, and save on all ranks together."""
    with fused_adam():
        Training(metadata, **settings).train(steps).save(directory)


def weights_resumed(
    steps: int, directory: str, metadata: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> list[Tensor]:
    """The weights of this rank after a training that began with the checkpoint."""
    with fused_adam():
        # Weights of another seed: all comes from the file, but what is frozen, which a trainer loads before.
        return Training(metadata, **{"seed": 8, **settings}).load(directory).train(steps).weights()


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The norm of the difference over the norm of the second, over all weights together."""
    wrong = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True))
    return math.sqrt(wrong / sum(float(b.double().square().sum()) for b in other))


BY_DATA = {"distrib_optim_sharding_type": "dp_reshardable"}
