"""Proofs of router-replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_features import need_option
from shim.testing.proof import CannotRunError, Here, proof
from shim.testing.schedules import run_microbatches

LAYERS, TOPK, OF, TOKENS, STEPS, LR = 2, 2, 4, 6, 2, 0.5
ROUNDING = 1e-5
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "mtp_num_layers": None,
    "share_embeddings_and_output_weights": False,
    "num_moe_experts": OF,
    "moe_router_topk": TOPK,
    "moe_router_load_balancing_type": "none",
    "moe_enable_routing_replay": True,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def replay_module() -> Any:
    """The module of upstream's router replay."""
    need_option("moe_enable_routing_replay", "router replay")
    if find_spec("megatron.core.transformer.moe.router_replay") is None:
        raise CannotRunError("router replay of this release is in another module")
    from megatron.core.transformer.moe import router_replay

    return router_replay


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No router of an earlier model is there, and none stays. 0.16 looks up a name that it has with TE only."""
    from megatron.core.transformer.moe import moe_utils

    clear = replay_module().RouterReplay.clear_global_router_replay_instances
    clear()
    try:
        with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
            yield
    finally:
        clear()


def experts(seed: int, layers: int = LAYERS) -> list[Tensor]:
    """For each layer the experts that its tokens are to take, [tokens, topk]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(TOKENS, OF, generator=generator).topk(TOPK).indices for _ in range(layers)]


def row() -> Tensor:
    """Token ids, [1, tokens]."""
    return torch.arange(TOKENS)[None] + 3


def losses(model: Any) -> Tensor:
    """Of one row, [1, tokens]."""
    found: Tensor = model(row(), torch.arange(TOKENS)[None], None, labels=row().roll(-1, 1))
    return found


def replay(indices: Sequence[Tensor]) -> None:
    """Let the next forward pass take these experts."""
    module = replay_module()
    module.RouterReplay.set_replay_data(list(indices))
    module.RouterReplay.set_global_router_replay_action(module.RouterReplayAction.REPLAY_FORWARD)


def learnt(model: Any, rate: float = LR) -> Tensor:
    """The gradients of all weights, in one row. The weights move by them, and the gradients go."""
    found = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight.sub_(rate * weight.grad)
                weight.grad = None
    return found


def gradients_behind_log_probabilities(**options: Any) -> Tensor:
    """Each step is a pass without gradients and one with them; each replays its own experts."""
    module = replay_module()
    with alone():
        model, found = testing.build_gpt(**MODEL, **options), []
        for step in range(STEPS):
            replay(experts(10 * step))
            with torch.no_grad():
                losses(model)
            replay(experts(10 * step + 1))
            loss = losses(model).mean()
            module.RouterReplay.set_global_router_replay_action(module.RouterReplayAction.REPLAY_BACKWARD)
            loss.backward()
            found.append(learnt(model))
        return torch.cat(found)


def gradients_of_a_pipeline(**options: Any) -> Tensor:
    """Steps of the release's schedule, in which each microbatch replays its own experts."""
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_world_size()

    def forward(microbatch: int, chunk: Any) -> tuple[Tensor, Any]:
        replay(experts(microbatch, LAYERS // stages))
        return losses(chunk), lambda output: (output.mean(), {"loss": output.detach().mean()})

    with alone():
        model, found = testing.build_gpt(**MODEL, **options), []
        for _ in range(STEPS):
            run_microbatches(model, range(3), forward, TOKENS)
            found.append(learnt(model))
        return torch.cat(found)


def off(gradients: Any, **options: Any) -> float:
    """How far the gradients with full recompute are from those without, relative to the largest."""
    truth = gradients(**options)
    return float((gradients(**FULL, **options) - truth).abs().max() / truth.abs().max())


def off_behind_log_probabilities() -> float:
    """On the only rank."""
    return off(gradients_behind_log_probabilities)


def off_by_transformer_engine() -> float:
    """On the only rank, with layers that Transformer Engine checkpoints."""
    return off(gradients_behind_log_probabilities, fp8="hybrid")


def off_in_a_pipeline() -> float:
    """On this stage."""
    return off(gradients_of_a_pipeline)


@contextlib.contextmanager
def observed(model: Any) -> Iterator[list[Tensor]]:
    """The map of tokens and experts, [tokens, experts], of each router that runs."""
    from megatron.core.transformer.moe.router import TopKRouter

    found: list[Tensor] = []
    routers = [part for part in model.modules() if isinstance(part, TopKRouter)]
    hooks = [router.register_forward_hook(lambda _, inputs, outputs: found.append(outputs[1])) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def misrouted(model: Any, indices: Sequence[Tensor]) -> int:
    """Tokens of all layers that a step does not send where the replay says."""
    with observed(model) as maps:
        losses(model).mean().backward()
    wanted = [torch.zeros(TOKENS, OF, dtype=torch.bool).scatter(1, each, True) for each in indices]
    return sum(int((found != want).any(1).sum()) for found, want in zip(maps, wanted, strict=True))


def misrouted_after_a_rebuild() -> int:
    """A model goes, another comes, and replays."""
    with alone():
        model = testing.build_gpt(**MODEL)
        del model
        model = testing.build_gpt(**MODEL)
        replay(experts(1))
        return misrouted(model, experts(1))


def misrouted_by_a_fused_router() -> int:
    """A stand-in for Transformer Engine's fused function chooses each token's best experts, as that does."""
    from megatron.core.transformer.moe import moe_utils

    def fused(logits: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
        probs, map_of = moe_utils.topk_routing_with_score_function(logits, topk)
        return probs, map_of

    has_it = mock.patch.object(moe_utils, "HAVE_TE", True, create=True)
    with alone(), has_it, mock.patch.object(moe_utils, "fused_topk_with_score_function", fused, create=True):
        model: Any = testing.build_gpt(**MODEL)
        for layer in model.decoder.layers:
            layer.mlp.router.config.moe_router_fusion = True
        replay(experts(1))
        return misrouted(model, experts(1))


def named_twice() -> Tensor:
    """Experts of six tokens, of which four name one more than once, [tokens, 3]. The first is a row of padding."""
    return torch.tensor([[0, 0, 0], [0, 0, 1], [2, 1, 2], [0, 1, 2], [3, 0, 1], [3, 3, 2]])


def by_hand(layer: Any, hidden: Tensor) -> Tensor:
    """For each token the outputs of the experts that it names, times their probabilities, summed; [tokens, h]."""
    logits = torch.nn.functional.linear(hidden, layer.router.weight)
    probabilities = logits.gather(1, named_twice()).softmax(1)
    outputs = torch.stack([expert(hidden)[0] for expert in layer.experts.local_experts], 1)
    chosen = outputs.gather(1, named_twice().unsqueeze(2).expand(-1, -1, hidden.shape[1]))
    return (probabilities.unsqueeze(2) * chosen).sum(1)


def off_with_experts_named_twice(dispatcher: str, **options: Any) -> float:
    """Outputs and gradients of a layer of experts against those by hand, relative to the largest."""
    with alone():
        model: Any = testing.build_gpt(
            **MODEL | {"num_layers": 1, "moe_router_topk": 3, "moe_token_dispatcher_type": dispatcher, **options}
        )
        layer, found = model.decoder.layers[0].mlp, []
        hidden = torch.randn(TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
        for run in (lambda inputs: by_hand(layer, inputs), lambda inputs: layer(inputs.unsqueeze(1))[0].squeeze(1)):
            inputs = hidden.clone().requires_grad_()
            replay([named_twice()])
            output = run(inputs)
            output.square().sum().backward()
            found.append((output.detach(), inputs.grad, learnt(layer, 0.0)))
        return max(float((b - a).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


@proof("gradient off by {:.0%} with recompute", right="bit-equal with and without recompute")
def a_recompute_replays_behind_a_pass_without_gradients(here: Here) -> float:
    """A recompute replays the experts of the last pass without gradients, and not those of its forward pass.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_enable_routing_replay=True` and full recompute. For
    each of two steps call `RouterReplay.set_replay_data` and run a forward pass under `torch.no_grad()`, as for
    log-probabilities. Then set other experts and train: REPLAY_FORWARD in the forward pass, REPLAY_BACKWARD in
    backward. Compare all gradients with those of the same steps without recompute.

    `set_target_indices` puts each entry into `replay_backward_list`. The pass without gradients leaves its entry there.
    In backward `get_replay_topk` pops it, and the layer is recomputed with experts that its forward pass did not use.
    No error is raised. Right is the same gradient, bit for bit.

    From 0.16 to 0.20, open.
    """
    found: float = here.run(off_behind_log_probabilities)[0]
    return found


@proof(
    "gradient off by {:.0%} with recompute",
    right="bit-equal with and without recompute",
    te=True,
    beside=("te-cpu-offload",),  # 0.17 builds no model beside Transformer Engine 2.5 to 2.9
)
def a_recompute_by_transformer_engine_replays_behind_a_pass_without_gradients(here: Here) -> float:
    """With FP8 a recompute replays the experts of the last pass without gradients, too.

    To reproduce: as in the proof before, with `fp8="hybrid"`. TransformerBlock then recomputes its layers by
    `te_checkpoint`, which is Transformer Engine's checkpoint. Layers without quantized parts will do. Right is the
    same gradient, bit for bit.

    From 0.16 to 0.20, open.
    """
    found: float = here.run(off_by_transformer_engine)[0]
    return found


@proof("gradient off by {:.0%} with recompute", right="bit-equal with and without recompute", ranks=2)
def a_recompute_replays_its_own_microbatch(here: Here) -> float:
    """Under pipeline parallelism the first microbatch is recomputed with the experts of a later one.

    To reproduce: as in the first proof, on two pipeline stages with one layer each and three microbatches. Each calls
    `RouterReplay.set_replay_data` with its own experts in `forward_step_func`, and the action stays REPLAY_FORWARD.

    The first stage runs two forward passes before the first backward. `target_topk_idx` is then that of the second
    microbatch, with which the first is recomputed. Right are the gradients without recompute, bit for bit.

    From 0.16 to 0.20, open. Only a trainer that sets REPLAY_BACKWARD between the passes of the schedule avoids it.
    """
    return max(here.run(off_in_a_pipeline, layout=testing.Layout(pp=here.world), timeout=60))


@proof(
    "{:.0f} of 12 tokens sent elsewhere",
    right="all tokens sent where the replay says",
    defect="crash",
    crashes=r"^ValueError: The number of replay tensors \(2\) does not match instances \(4\)",
)
def a_rebuilt_model_replays(here: Here) -> int:
    """After a model is rebuilt, router replay counts the routers of the one that is gone.

    To reproduce: build a GPTModel of two layers with `num_moe_experts=4` and `moe_enable_routing_replay=True`, delete
    it, build another, and call `RouterReplay.set_replay_data` with the experts of two layers.

    `RouterReplay.global_router_replay_instances` has four routers, two of them dead. `set_replay_data` raises a
    ValueError. Who assigns by position, as trainers do for pipeline stages, gives the experts to dead routers.

    From 0.16 to 0.20, open.
    """
    found: int = here.run(misrouted_after_a_rebuild)[0]
    return found


@proof("{:.0f} of 12 tokens sent elsewhere", right="all tokens sent where the replay says")
def a_fused_router_replays(here: Here) -> int:
    """With moe_router_fusion router replay does nothing, and says nothing.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_enable_routing_replay=True` and
    `moe_router_fusion=True`. Call `RouterReplay.set_replay_data` and set REPLAY_FORWARD. Look at the routing map of
    each router: `topk_routing_with_score_function` returns what Transformer Engine's fused function chooses, before it
    looks at `router_replay`. Recording gives None. A stand-in takes the place of the fused function, which needs a GPU.

    From 0.16 to 0.20, open.
    """
    found: int = here.run(misrouted_by_a_fused_router)[0]
    return found


@proof(
    "outputs and gradients off by {:.1e}",
    bound=ROUNDING,
    right="outputs and gradients are those by hand",
    defect="crash",
    crashes=r"^RuntimeError: split_with_sizes expects split_sizes to sum exactly to 18",
)
def experts_named_twice_are_dispatched(here: Here) -> float:
    """The all-to-all dispatcher raises if a replayed row names an expert twice, as rows of padding do.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_topk=3`, `moe_enable_routing_replay=True` and
    `moe_token_dispatcher_type="alltoall"`. Replay six tokens, one of which has the experts [0, 0, 0].

    `MoEAlltoAllTokenDispatcher.preprocess` sets `num_out_tokens` to tokens x top-k. The routing map has an expert once
    for each token, so fewer tokens are sent, and `split_with_sizes` raises. Right is a count of the routing map.

    From 0.17 to 0.20, open. 0.16 takes the number with `moe_permute_fusion` only.
    """
    found: float = here.run(off_with_experts_named_twice, "alltoall")[0]
    return found


@proof("outputs and gradients off by {:.1e}", bound=ROUNDING, right="outputs and gradients are those by hand")
def an_expert_gets_the_probabilities_of_all_its_names(here: Here) -> float:
    """A token that names an expert twice gives it the probability of one name, and the gradient of both.

    To reproduce: as in the proof before, with the all-gather dispatcher. Compare the output of the layer and all
    gradients with those by hand: the outputs of the experts that a token names, times their probabilities, summed.

    `topk_routing_with_score_function` scatters the probabilities of the names into [tokens, experts], where one of them
    stays. The backward pass of `scatter` gives all of them the gradient. The gradient is that of the sum, and the value
    is not. Right is the sum, as with `dense_output` and in an engine that runs the expert for each name.

    From 0.16 to 0.20, open.
    """
    found: float = here.run(off_with_experts_named_twice, "allgather")[0]
    return found
