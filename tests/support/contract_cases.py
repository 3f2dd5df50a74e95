"""What others read of a function that shim has wrapped, beside calling it: the contracts that nobody wrote down."""

import contextlib
import functools
import importlib
import inspect
import pickle
import types

import megatron.core.transformer.multi_token_prediction as mtp
from megatron.core.tensor_parallel.random import CheckpointFunction

import shim
from shim import testing
from shim._engine.engine import ENGINE
from shim._engine.names import MISSING, unwrap

# What a backport adds to upstream's signature, always with a default: the parameters of a later release.
ADDED = {
    "Float16Module.forward": {"fp32_output"},
    "GPTModel.__init__": {"vp_stage"},
    "MultiTokenPredictionLayer._checkpointed_forward": {"padding_mask"},
    "TransformerBlock.__init__": {"vp_stage"},
    "get_gpt_decoder_block_spec": {"vp_stage", "pp_rank"},
    "get_gpt_mtp_block_spec": {"vp_stage"},
    "get_num_layers_to_build": {"vp_stage", "pp_rank"},
    "get_transformer_layer_offset": {"vp_stage", "pp_rank"},
    "is_pipeline_first_stage": {"vp_stage"},
    "is_pipeline_last_stage": {"vp_stage"},
    "roll_tensor": {"cp_group", "packed_seq_params"},
    "vocab_parallel_cross_entropy": {"tp_group"},
}
# Names that hold a function of megatron-core's own where an import has failed. te-moved-symbols binds what was to be
# imported: another function for the same calls, which must not pass for the one that no longer runs.
EXCHANGED = {
    f"megatron.core.optimizer.clip_grads:{name}"
    for name in ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")
}
# Up to Transformer Engine 2.9 the apply of an autograd function, of which nobody reads more than that it can be called.
APPLIES = {"transformer_engine.pytorch.cross_entropy:parallel_cross_entropy"}
# Bound under one alias alone, and named by it. At home is upstream's function, which pickle would find by its name.
AWAY = {target for decision in shim.plan().decisions.values() if decision.wanted for target in decision.no_aliases}
CACHED, OF_CACHE = type(functools.lru_cache(len)), ("cache_info", "cache_clear", "cache_parameters")
NAMES = ("__module__", "__qualname__", "__name__", "__doc__", "__annotations__")


def can_be_imported(decision):
    """Whether all modules that a patch binds can be. The hybrid stack of 0.12 needs Transformer Engine."""
    for module in decision.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "transformer_engine":
                raise
            return False
    return True


def import_targets(plan):
    """Import every module with a target of this plan, and return the targets in loaded modules, in order."""
    wanted = [decision for decision in plan.decisions.values() if decision.wanted and can_be_imported(decision)]
    return sorted({target for decision in wanted for target in decision.targets})


def broken_contracts(target):
    """What is not as upstream's object on a bound target has it, in words."""
    chain = ENGINE.binder.chains[target]
    before, after = chain.base, chain.top
    if before is MISSING or before is None:
        return []  # a name that the release lacks, or whose import it guards: nobody can have read it
    names = dict(zip(("__module__", "__qualname__"), target.split(":"), strict=True)) if target in AWAY else {}
    if target in APPLIES and isinstance(before, types.MethodType) and callable(after):
        return []
    if isinstance(before, CACHED) and type(after) is types.FunctionType:
        gone = [
            f"{name} of the cache is gone" for name in OF_CACHE if getattr(after, name, None) != getattr(before, name)
        ]
        return [*gone, *_broken(before, after, set(), names)]
    if type(before) is not type(after):
        return [f"a {type(before).__name__} became a {type(after).__name__}"]
    if not isinstance(unwrap(before), types.FunctionType):
        return []
    if target in EXCHANGED:
        return list(_broken_exchange(before, after))
    found = list(_broken(unwrap(before), unwrap(after), ADDED.get(target.partition(":")[2], set()), names))
    bound = getattr(chain.owner, chain.name)  # of a classmethod the bound method
    pickled = _pickled(bound)
    return found if pickled == bound else [*found, f"it is not pickled by its name: {pickled}"]


def _broken(before, after, added, names):
    if type(after) is not types.FunctionType:
        yield f"it is a {type(after).__name__}"
        return
    for name in NAMES:
        expected = names.get(name, getattr(before, name))
        if expected != getattr(after, name):
            yield f"{name} is {getattr(after, name)!r}, not {expected!r}"
    old, new = inspect.signature(before).parameters, inspect.signature(after).parameters
    if [p for name, p in new.items() if name in old] != list(old.values()) or not set(new) - set(old) <= added:
        yield f"its signature is {inspect.signature(after)}, not {inspect.signature(before)}"
    if inspect.signature(before).return_annotation != inspect.signature(after).return_annotation:
        yield "its signature returns something else"
    if not any(one is before for one in _wrapped_by(after)):
        yield "__wrapped__ does not lead to upstream's function"
    if inspect.unwrap(after) is not inspect.unwrap(before):
        yield "inspect.unwrap ends elsewhere"
    if _source(after) != _source(before):
        yield "inspect.getsource gives another body"
    kept = {name: value for name, value in vars(before).items() if name != "__wrapped__"}
    yield from (f"the attribute {name} is gone" for name, value in kept.items() if vars(after).get(name) is not value)
    if bool(getattr(before, "__isabstractmethod__", False)) != bool(getattr(after, "__isabstractmethod__", False)):
        yield "it is abstract no longer, or only now"
    if inspect.iscoroutinefunction(before) != inspect.iscoroutinefunction(after):
        yield "it is a coroutine no longer, or only now"


def _broken_exchange(before, after):
    """What is wrong with another function in the place of `before`. Its annotations are its own."""
    old, new = ([p.replace(annotation=p.empty) for p in _parameters(function)] for function in (before, after))
    if old != new:
        yield f"its signature is {inspect.signature(after)}, not {inspect.signature(before)}"
    if after is not before and (hasattr(after, "__wrapped__") or after.__module__ == before.__module__):
        yield f"it passes for {before.__qualname__}"


def _parameters(function):
    return inspect.signature(function).parameters.values()


def _wrapped_by(function):
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _source(function):
    try:
        return inspect.getsource(function)
    except (OSError, TypeError) as error:
        return repr(error)


def _pickled(function):
    try:
        return pickle.loads(pickle.dumps(function))
    except (pickle.PicklingError, AttributeError) as error:
        return repr(error)


def places():
    """Every name that shim has written: (owner, name), targets and aliases."""
    return [(slot.owner, slot.name) for slot in ENGINE.binder.slots.values()]


def stand_in_for(owner, name):
    """Something that a test may put on a name: of the same kind, and foreign."""
    value = vars(owner)[name]
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(_stand_in)
    return _stand_in if callable(value) else object()


def _stand_in(*args, **kwargs):
    return None


def reported():
    """The whole report as data."""
    return shim.status().to_dict()


# What a checkpoint is given


class Watched:
    """Replaces the backward of a class of checkpoints, as trainers do, and notes which functions it would run again."""

    def __init__(self, undo, holder=CheckpointFunction):
        self.functions, upstream = [], holder.backward

        def backward(ctx, *gradients):
            self.functions.append(ctx.run_function)
            return upstream(ctx, *gradients)

        undo.setattr(holder, "backward", staticmethod(backward))

    def layers(self):
        """For each function the MTP layer directly in its closure, or None."""
        held = [[cell.cell_contents for cell in getattr(f, "__closure__", None) or ()] for f in self.functions]
        return [next((v for v in cells if isinstance(v, mtp.MultiTokenPredictionLayer)), None) for cells in held]


def step(model, row, override):
    """One step; what is overridden is so in the forward pass alone, and backward runs outside."""
    packed = testing.pack(testing.random_sequences([5, 7, 4] if row else [16]), align=row or 1)
    params = packed.packed_seq_params() if row else None
    with shim.config_override(model, layernorm_epsilon=1e-4) if override else contextlib.nullcontext():
        loss = model(
            packed.input_ids,
            packed.position_ids,
            None,
            labels=packed.labels,
            loss_mask=packed.loss_mask,
            packed_seq_params=params,
        )
    loss.sum().backward()
