"""Proofs of cpu-offloaded-optimizer.

The optimizer itself runs as it is. A CPU has stand-ins for CUDA's streams and events and for what tells a GPU's tensors
from those of the host: `Tensor.is_cuda`, `.type()`, `.cpu()`, `.to()` and `.pin_memory()`, see `Devices`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import tempfile
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_offloading import offloading, take_step
from shim.testing import sharded
from shim.testing.proof import Here, proof

STEPS, SAVED_AT = 4, 2
SAVED_BY_BUCKETS = ("v0_15", "v0_16", "v0_20")  # the variants of the releases that have this format


class Training:
    """A GPT model in bf16, its optimizer, and its checkpoints. With LoRA all weights but one norm are frozen.

    aware: use_precision_aware_optimizer, with which the optimizer has the weights of the model, and no main params.
    fraction: of the weights, that whose updates are on the CPU. offload: False for the usual distributed optimizer.
    form: the format of the optimizer's state in a checkpoint of dist_checkpointing.
    norms: the dtype of the norms' weights.
    """

    def __init__(
        self,
        aware: bool = True,
        fraction: float = 1.0,
        offload: bool = True,
        form: str = "",
        lora: bool = True,
        seed: int = 7,
        norms: torch.dtype = torch.bfloat16,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.form, self.loading = form, False
        model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None, seed=seed)
        if lora:
            testing.add_lora(model, seed=seed)
            model.decoder.final_layernorm.weight.requires_grad_(True)
        self.model = model.bfloat16()
        for name, weight in model.named_parameters():
            weight.data = weight.data.to(norms if "norm" in name else weight.dtype)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        )
        self.ddp: Any = DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-2,
            weight_decay=0.1,
            clip_grad=0.0,
            bf16=True,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=aware,
            optimizer_cpu_offload=offload,
            optimizer_offload_fraction=fraction,
            **({"overlap_cpu_optimizer_d2h_h2d": True} if offload else {}),
        )
        self.optimizer = get_megatron_optimizer(config, [self.ddp])

    @property
    def distributed(self) -> Any:
        """The DistributedOptimizer."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]

    def train(self, first: int, last: int) -> Training:
        """The steps with these numbers, each with separate rows; every rank has the same."""
        for number in range(first, last):
            take_step(self.ddp, self.optimizer, number, rows=2)
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def sharded_state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.sharded_state_dict()}
        how = "metadata" in inspect.signature(type(self.distributed).sharded_state_dict).parameters
        form: Any = {"metadata": {"distrib_optim_sharding_type": self.form}} if how else {"sharding_type": self.form}
        state["optimizer"] = self.optimizer.sharded_state_dict(state["model"], is_loading=self.loading, **form)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, directory: str) -> None:
        """By dist_checkpointing."""
        self.loading = False
        sharded.save(self, directory)

    def load(self, directory: str) -> Training:
        self.loading = True
        sharded.load(self, directory)
        return self

    def save_files(self, directory: str) -> None:
        """As training does without dist_checkpointing."""
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], f"{directory}/common")
        self.distributed.save_parameter_state(f"{directory}/states")

    def load_files(self, directory: str) -> Training:
        model, optimizer = torch.load(f"{directory}/common", weights_only=False)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.distributed.load_parameter_state(f"{directory}/states")
        return self


def differing(found: dict[str, Tensor], truth: dict[str, Tensor]) -> int:
    """How many weights are not bit for bit the same."""
    assert found.keys() == truth.keys()
    return sum(not torch.equal(found[name], truth[name]) for name in truth)


def after_weights_were_loaded(**settings: Any) -> int:
    """Weights that differ from a training that was built with what is loaded here."""
    with offloading():
        whole = Training(**settings)
        start = Training(**settings, seed=9)
        start.model.load_state_dict(whole.model.state_dict())
        start.optimizer.reload_model_params()
        return differing(start.train(0, STEPS).weights(), whole.train(0, STEPS).weights())


def after_files_were_loaded(steps: int = STEPS, **settings: Any) -> int:
    """Weights that differ from an uninterrupted training after a resume from files, and up to this many steps."""
    with offloading(), tempfile.TemporaryDirectory() as directory:
        whole = Training(**settings).train(0, SAVED_AT)
        whole.save_files(directory)
        resumed = Training(**settings, seed=9).load_files(directory)
        return differing(resumed.train(SAVED_AT, steps).weights(), whole.train(SAVED_AT, steps).weights())


def after_a_checkpoint(
    form: str = "dp_reshardable", directory: str | None = None, fresh: bool = False, **settings: Any
) -> int:
    """The same with dist_checkpointing, in this format.

    directory: an empty one that all ranks see; without it there has to be one rank. fresh: whether torch's Adam is
    loaded before it has stepped, as any other optimizer is.
    """
    offload = settings.get("offload", True)
    with contextlib.ExitStack() as inside:
        inside.enter_context(offloading(te=offload))
        directory = directory or inside.enter_context(tempfile.TemporaryDirectory())
        settings["form"] = form
        whole = Training(**settings).train(0, SAVED_AT)
        whole.save(directory)
        resumed = Training(**settings, seed=9)
        if not offload and not fresh:
            resumed.train(8, 9)
        resumed.load(directory)
        return differing(resumed.train(SAVED_AT, STEPS).weights(), whole.train(SAVED_AT, STEPS).weights())


class CountingAdam(torch.optim.Optimizer):
    """Keeps its step where FusedAdam of Transformer Engine and Apex does: in the parameter groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self.state[param].setdefault("exp_avg", torch.zeros_like(param)).add_(param.grad)


def fused_adams_step(steps: int) -> int:
    """What FusedAdam counts after this many steps, half of them before its state was saved."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def hybrid() -> Any:
        weights = [torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
        return HybridDeviceOptimizer(
            [{"params": weights, "lr": 1e-2, "weight_decay": 0.0}],
            offload_fraction=0.5,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=CountingAdam,
            param_update_in_fp32=True,
        )

    def stepped(optimizer: Any) -> int:
        for _ in range(steps // 2):
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.ones_like(weight)
            optimizer.step()
        return optimizer.gpu_optimizer.param_groups[0]["step"]

    with offloading():
        trained, resumed = hybrid(), hybrid()
        counted = stepped(trained)
        state = trained.state_dict()
        # DistributedOptimizer.state_dict() puts it into the groups.
        state["param_groups"] = [{**group, "step": counted} for group in state["param_groups"]]
        resumed.load_state_dict(state)
        return stepped(resumed)


def _first(here: Here, function: Any, aware: bool, *args: Any) -> int:
    return here.run(functools.partial(function, aware=aware), *args)[0]


@proof("{:.0f} of 9 trained weights differ after 4 steps", right="bit-equal")
def loaded_weights_are_those_that_it_steps_on(here: Here) -> int:
    """With optimizer_cpu_offload the first step puts the random initialisation back in the place of loaded weights.

    To reproduce: wrap a GPTModel in bf16 in DistributedDataParallel, and make its optimizer by get_megatron_optimizer
    with `OptimizerConfig(bf16=True, use_distributed_optimizer=True, optimizer_cpu_offload=True,
    optimizer_offload_fraction=1.0)`. Load other weights into the model, call `optimizer.reload_model_params()`, and
    train. Compare with the same training whose optimizer was made after the weights were loaded.

    HybridDeviceOptimizer steps on copies of the main params, which nobody refreshes, and
    `DistributedOptimizer._copy_model_params_to_main_params` returns before it copies to the main params. Both should be
    done. In 0.12 the same happens with `use_precision_aware_optimizer=True`. See Megatron-LM pull request 5071.
    """
    return _first(here, after_weights_were_loaded, False)


@proof(
    "{:.0f} of 9 trained weights differ after 4 steps",
    right="bit-equal",
    crashes=r"^KeyError: (tensor\(|'step'$)",
)
def main_params_are_loaded(here: Here) -> int:
    """With optimizer_cpu_offload, and without use_precision_aware_optimizer, no optimizer state can be loaded.

    To reproduce: make model and optimizer as above, train two steps, and save `model.state_dict()`,
    `optimizer.state_dict()` and, by `save_parameter_state()`, the states. Load all three into a new model and a new
    optimizer, and train on.

    `HybridDeviceOptimizer._update_fp32_params_by_new_state` looks every weight up among those with an fp32 copy, and
    weights in fp32, such as main params, have none: KeyError. Main skips them since Megatron-LM pull request 5929. So
    `_set_main_param_and_optimizer_states` raises the next one there, because `step` is not among what is loaded.
    Training should go on as if nothing had been saved and loaded.
    """
    return _first(here, after_files_were_loaded, False)


@proof("{:.0f} of 9 trained weights differ after 4 steps", right="bit-equal")
def states_from_files_reach_the_copies(here: Here) -> int:
    """With optimizer_cpu_offload the first step after a resume from files puts back what was before it.

    To reproduce: as above, with `use_precision_aware_optimizer=True`. The same happens with dist_checkpointing in the
    format dp_zero_gather_scatter.

    `load_parameter_state_from_dp_zero` puts the loaded master weights into `optimizer.state`, and does not tell
    HybridDeviceOptimizer, which goes on with its own. Training should go on as if nothing had been saved and loaded.
    """
    return _first(here, after_files_were_loaded, True)


@proof("{:.0f} of 9 trained weights differ before the first step", right="bit-equal")
def a_first_load_leaves_weights_alone(here: Here) -> int:
    """With optimizer_cpu_offload loading an optimizer state changes the weights of the model.

    To reproduce: load the weights of a model, and then a state into its new optimizer, as training does without
    dist_checkpointing. Compare the weights before and after the second.

    `HybridDeviceOptimizer.dummy_step` makes the states that are to be filled by a step with random gradients. It steps
    on copies that are older than the loaded weights, and copies the result over these. So the first forward pass runs
    on a random initialisation. Weights should stay as they are.
    """
    return _first(here, after_files_were_loaded, True, SAVED_AT)


@proof(
    "{:.0f} of 9 trained weights differ after 4 steps",
    right="bit-equal",
    crashes=r"^ModelError: saving, AssertionError: \(torch\.Size\(\[\]\), 0, ",
    variants=SAVED_BY_BUCKETS,
)
def a_resume_from_dp_reshardable_keeps_the_step(here: Here) -> int:
    """With optimizer_cpu_offload Adam's step starts anew after a resume from a dp_reshardable checkpoint.

    To reproduce: train two steps with `optimizer_cpu_offload` and `use_precision_aware_optimizer`, save by
    dist_checkpointing with `metadata={"distrib_optim_sharding_type": "dp_reshardable"}`, load into a new model and
    optimizer, and train on. `step` in the states of `HybridDeviceOptimizer` is 1 and not 2 after the load.

    `load_state_dict` takes the step of the parameter groups. Then `load_parameter_state_from_dp_reshardable` takes that
    of the state before the load, which is not in the file (LocalNonpersistentObject). Training should go on as if
    nothing had been saved and loaded. In 0.15 saving raises an AssertionError, because `step` has no shape of a shard.
    """
    return _first(here, after_a_checkpoint, True)


@proof(
    "{:.0f} of 9 trained weights differ after 4 steps",
    right="bit-equal",
    crashes=r"^ModelError: saving, AssertionError: \(torch\.Size\(\[\]\), 0, ",
    variants=SAVED_BY_BUCKETS,
)
def torchs_adam_keeps_the_step(here: Here) -> int:
    """Torch's Adam in the distributed optimizer counts wrong steps after a resume from a dp_reshardable checkpoint.

    To reproduce: as above, without optimizer_cpu_offload, where neither Transformer Engine nor Apex is installed. Let
    the new optimizer take a step before it is loaded. After the load `step` is 1 and not 2. After two steps with nine
    weights it is 19, because `DistributedOptimizer.load_state_dict` gives all of them the same tensor. It should be 4,
    and each weight should have a separate tensor.
    """
    return here.run(functools.partial(after_a_checkpoint, aware=False, offload=False))[0]


@proof(
    "{:.0f} of 9 trained weights differ after 4 steps",
    right="bit-equal",
    defect="crash",
    crashes=r"^ModelError: loading, AssertionError$",
    beside=("checkpoint-write-format",),
)
def torchs_adam_is_loaded_before_its_first_step(here: Here) -> int:
    """Torch's Adam in the distributed optimizer cannot be loaded by dist_checkpointing before its first step.

    To reproduce, where neither Transformer Engine nor Apex is installed: wrap a GPTModel in bf16 in
    DistributedDataParallel, make its optimizer by get_megatron_optimizer with `OptimizerConfig(bf16=True,
    use_distributed_optimizer=True)`, train two steps, and save by dist_checkpointing. Load into a new model and
    optimizer with `optimizer.sharded_state_dict(..., is_loading=True)`.

    `DistributedOptimizer.state_dict` asserts that all states have one step, and a new optimizer has no states:
    AssertionError. Training should go on as if nothing had been saved and loaded.
    """
    load = functools.partial(after_a_checkpoint, fresh=True, aware=False, offload=False)
    return here.run(load, "dp_zero_gather_scatter")[0]


@proof("{:.0f} steps lost of 4", right="all 4 steps counted")
def fused_adam_counts_on(here: Here) -> int:
    """With a part of the weights on the GPU, the step of FusedAdam stands still after a resume.

    To reproduce: make a HybridDeviceOptimizer with `offload_fraction=0.5`, whose optimizer for the GPU keeps `step` in
    its parameter groups, as FusedAdam does. Let it take two steps, and load its state, with `step` in the parameter
    groups as `DistributedOptimizer.state_dict()` puts it there, into another. Let that also take two steps.

    Every step `_sync_hdo_param_groups_to_sub_optimizers` writes the groups of HybridDeviceOptimizer, with the loaded
    step, over those of FusedAdam, so it counts 3 forever. It should count 4.
    """
    return 4 - here.run(fused_adams_step, 4)[0]
