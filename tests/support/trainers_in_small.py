"""What other trainers bind in megatron-core, written anew and as small as shows how they bind it.

Each entry names a trainer, the patch of shim's that it meets, and a function that binds it. Trainers and where they do
it (read in their repositories; none of their text is here):

- SkyRL: a no-op in the place of process_mtp_loss, in every module that has it; TopKRouter._apply_expert_bias wrapped.
- Megatron-Bridge: TopKRouter._apply_expert_bias wrapped, with a mark on the wrapper.
- NeMo-RL: GPTModel.forward replaced by a function that finds the earlier one as an attribute of the class.
- slime: _allreduce_non_tensor_model_parallel_grads replaced in the module whose finalize_model_grads calls it.
- Primus: _checkpointed_forward of blocks and MTP layers wrapped, with the earlier function as an attribute, and
  GPTModel._postprocess; TopKRouter replaced by a subclass in the modules that have it.
- MindSpeed: a registry of patches that replaces a function in all of sys.modules, and restores it in all of them.
- wrapt: FunctionWrapper, which tools for tracing use.
"""

import functools
import importlib
import sys

import torch

RANDOM = "megatron.core.tensor_parallel.random"
MTP = "megatron.core.transformer.multi_token_prediction"
GPT = "megatron.core.models.gpt.gpt_model"
ROUTER = "megatron.core.transformer.moe.router"
ROPE = "megatron.core.models.common.embeddings.rope_utils"
BLOCK = "megatron.core.transformer.transformer_block"
FINALIZE = "megatron.core.distributed.finalize_model_grads"


class Undo:
    """Undoes what a trainer has bound: restores what each name held before, as a trainer would, without looking."""

    def __init__(self):
        self._before = []

    def set(self, owner, name, value):
        held = getattr(owner, name) if name.startswith("__") else vars(owner).get(name, self)
        self._before.append((owner, name, held))
        setattr(owner, name, value)

    def undo(self):
        for owner, name, value in reversed(self._before):
            if value is self:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before.clear()


def owner_of(module, qualname):
    """The module or class that holds the last name of `qualname`, and that name."""
    *path, name = qualname.split(".")
    return functools.reduce(getattr, path, importlib.import_module(module)), name


# SkyRL


def skyrl_no_mtp_loss(undo, seen):
    """The states of the main model come back, and nothing is added to any loss."""
    module = sys.modules[MTP]
    original = module.process_mtp_loss

    def skip(hidden_states, *args, **kwargs):
        seen.append("process_mtp_loss")
        return hidden_states.chunk(1 + kwargs["config"].mtp_num_layers, dim=0)[0]

    for loaded in list(sys.modules.values()):
        if getattr(loaded, "process_mtp_loss", None) is original:
            undo.set(loaded, "process_mtp_loss", skip)


def skyrl_expert_bias(undo, seen):
    router = sys.modules[ROUTER].TopKRouter
    original = router._apply_expert_bias

    def with_a_column(self, routing_map, padding_mask=None):
        seen.append("_apply_expert_bias")
        if padding_mask is not None and padding_mask.ndim == 1:
            padding_mask = padding_mask[:, None]
        return original(self, routing_map, padding_mask)

    undo.set(router, "_apply_expert_bias", with_a_column)
    undo.set(router, "_expert_bias_is_patched", True)


class SkyrlCapture:
    """Runs a model's MTP block once more behind its forward, on states and embeddings that pass no gradient on."""

    def __init__(self, model):
        self.model, self.given = model, {}

    def states(self, *inputs, **options):
        """What the MTP layer makes of a row: [T, 1, h]."""
        hook = self.model.mtp.register_forward_pre_hook(self._take, with_kwargs=True)
        try:
            self.model(*inputs, **options)
        finally:
            hook.remove()
        embedding, states = self.given["embedding"], self.given["hidden_states"]
        again = {"hidden_states": states.detach(), "embedding": lambda **given: embedding(**given).detach()}
        return self.model.mtp(**{**self.given, **again}).chunk(2)[1]

    def _take(self, module, args, kwargs):
        self.given = dict(kwargs)


# Megatron-Bridge


def bridge_expert_bias(undo, seen):
    router = sys.modules[ROUTER].TopKRouter
    current = router._apply_expert_bias

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        seen.append("_apply_expert_bias")
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1, 1)
            assert padding_mask.shape[0] == routing_map.shape[0]
        current(self, routing_map, padding_mask=padding_mask)

    _apply_expert_bias.is_compatible = True
    undo.set(router, "_apply_expert_bias", _apply_expert_bias)


# NeMo-RL


def nemo_forward(undo, seen):
    """Without its flag the model runs as ever, by the attribute that keeps the earlier forward."""
    model = sys.modules[GPT].GPTModel

    def forward(self, *args, return_logprobs=False, **kwargs):
        seen.append("forward")
        return self._forward_before(*args, **kwargs)

    undo.set(model, "_forward_before", model.forward)
    undo.set(model, "forward", forward)


def nemo_step(undo, seen):
    """The same on a function that shim binds; NeMo-RL itself does so on the forward alone."""
    model = sys.modules[GPT].GPTModel

    def _postprocess(self, *args, **kwargs):
        seen.append("_postprocess")
        return self._postprocess_before(*args, **kwargs)

    undo.set(model, "_postprocess_before", model._postprocess)
    undo.set(model, "_postprocess", _postprocess)


# slime


def slime_coalesced_gradients(undo, seen):
    """It sums what stock sums, each gradient alone."""
    module = sys.modules[FINALIZE]
    names = ["_allreduce_non_tensor_model_parallel_grads", "_allreduce_layernorm_grads"]

    def in_chunks(model, config, tp_group=None):
        seen.append("_allreduce")
        for chunk in model:
            for name, weight in module.get_attr_wrapped_model(chunk, "named_parameters")():
                of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
                of_tokens = config.sequence_parallel and getattr(weight, "sequence_parallel", False)
                if weight.requires_grad and (of_heads or of_tokens):
                    group = tp_group or module.parallel_state.get_tensor_model_parallel_group()
                    torch.distributed.all_reduce(weight.main_grad, group=group)

    for name in names:
        if hasattr(module, name):
            undo.set(module, name, in_chunks)


# Primus


def primus_recompute(undo, seen):
    """Wrappers that delegate where no layers are listed, with the function beneath as an attribute too."""
    for module, cls in ((BLOCK, "TransformerBlock"), (MTP, "MultiTokenPredictionLayer")):
        owner = getattr(sys.modules[module], cls)
        if hasattr(owner, "_checkpointed_forward"):  # of the block it is a function of a module from 0.18
            undo.set(owner, "_checkpointed_forward", _of_listed_layers(owner._checkpointed_forward, seen))


def _of_listed_layers(original, seen):
    def _checkpointed_forward(self, *args, **kwargs):
        seen.append(type(self).__name__)
        if getattr(self.config, "recompute_layer_ids", None):
            raise NotImplementedError
        return original(self, *args, **kwargs)

    _checkpointed_forward.before = original
    return _checkpointed_forward


def primus_chunked_head(undo, seen):
    """The loss in pieces of the row; a model with MTP falls through."""
    model = sys.modules[GPT].GPTModel
    original = model._postprocess

    def _postprocess(self, *args, **kwargs):
        seen.append("_postprocess")
        if self.mtp_process or kwargs.get("labels") is None:
            return original(self, *args, **kwargs)
        raise NotImplementedError

    undo.set(model, "_postprocess", _postprocess)


def primus_router(undo, seen):
    """A subclass in the modules that hold the class, and as the default where specs name none (from 0.18)."""
    original = sys.modules[ROUTER].TopKRouter

    class Router(original):
        def routing(self, *args, **kwargs):
            seen.append("routing")
            return super().routing(*args, **kwargs)

    layers = sys.modules["megatron.core.transformer.moe.moe_layer"]
    for module in (sys.modules[ROUTER], layers):
        undo.set(module, "TopKRouter", Router)
    make = layers.MoESubmodules.__init__
    defaults = tuple(Router if default is original else default for default in make.__defaults__ or ())
    undo.set(make, "__defaults__", defaults)


# MindSpeed


class Registry:
    """Patches by the name of what they replace. Functions in `wrappers` go around the function that was there first."""

    def __init__(self):
        self.patches = {}

    def register(self, module, qualname, wrapper):
        self.patches.setdefault((module, qualname), []).append(wrapper)

    def apply(self, undo):
        """Around what stands there now, in every module that holds it. `undo.undo` takes it back, to apply again."""
        for (module, qualname), wrappers in self.patches.items():
            owner, name = owner_of(module, qualname)
            current = getattr(owner, name)
            final = functools.reduce(lambda function, wrapper: wrapper(function), wrappers, current)
            for loaded in [owner, *sys.modules.values()]:
                if loaded is owner or getattr(loaded, name, None) is current:
                    undo.set(loaded, name, final)


def noting(name, seen):
    def wrapper(function):
        @functools.wraps(function)
        def noted(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return noted

    return wrapper


def mindspeed_rope(undo, seen):
    registry = Registry()
    registry.register(ROPE, "apply_rotary_pos_emb", noting("apply_rotary_pos_emb", seen))
    registry.apply(undo)


def mindspeed_around_everything(undo, seen):
    """Checkpoints and what no patch binds: constructors, configs, dispatchers of tokens, latent attention."""
    registry = Registry()
    transformer = "megatron.core.transformer."
    registry.register(RANDOM, "checkpoint", noting("checkpoint", seen))
    for module, qualname in (
        (RANDOM, "CheckpointWithoutOutput.__init__"),
        (transformer + "transformer_config", "TransformerConfig.__post_init__"),
        (transformer + "moe.token_dispatcher", "MoEAlltoAllTokenDispatcher.preprocess"),
        (transformer + "multi_latent_attention", "MultiLatentAttention.forward"),
    ):
        registry.register(module, qualname, noting(qualname, seen))
    registry.apply(undo)


# wrapt


def wrapt_around(module, qualname):
    def bind(undo, seen):
        import wrapt

        owner, name = owner_of(module, qualname)

        def traced(wrapped, instance, args, kwargs):
            seen.append(name)
            return wrapped(*args, **kwargs)

        undo.set(owner, name, wrapt.FunctionWrapper(vars(owner)[name], traced))

    return bind
