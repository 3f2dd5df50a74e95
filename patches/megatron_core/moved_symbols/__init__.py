"""Names and arguments of later releases on earlier ones, so that a trainer needs no gate on the version.

What is wrong: trainers import names that megatron-core got later or has taken away, and pass arguments that earlier
functions refuse. An import without a guard ends the trainer. An import with a guard may end in silence: on 0.12 to 0.14
Megatron-Bridge takes plain GELU for `fused_bias_geglu.quick_gelu`, and the model computes another activation.
- 0.12 and 0.13 have no unwrap_model, no megatron.core.activations and no is_pp_first_stage, is_pp_last_stage,
  is_vp_first_stage and is_vp_last_stage. 0.12 also has none of get_pg_size, get_pg_rank,
  get_tensor_model_parallel_group_if_none, set_experimental_flag and is_experimental_enabled.
- 0.12 has get_moe_layer_wise_logging_tracker in parallel_state, and 0.13 in moe_utils.
- 0.14 has quick_gelu in activations alone, and 0.15 also in fused_bias_geglu.
- 0.17 has taken custom_layers.transformer_engine away, which was another name of extensions.transformer_engine.
- `vp_stage` came with 0.13, and `pp_rank` of three functions with 0.15.

The patch: if the release has the object under another name, the name gives the very same object, looked up whenever
it is read. If it has none, the name gets a small function that does what the later one does. A function that is
given `vp_stage` or `pp_rank` is computed as if the rank stood there. GPTModel and TransformerBlock accept the
`vp_stage` that parallel_state has, and raise for another one: their sharded_state_dict of 0.12 reads it there again.

Left alone are names that no release before has in any form, such as CudaGraphScope before 0.16, and names whose earlier
kin is another thing, such as ModelCommProcessGroups. docs/moved-symbols.md lists them with the reasons. The patch also
fills in no `vp_stage` that a call leaves out from 0.13 on: parallel_state holds 0 there until it is set, and the
wrong chunk would be taken in silence.

Upstream: these are no defects of a release.

Delete when: 0.16 is the oldest supported release, and trainers import megatron.core.extensions.transformer_engine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shim._errors import ShimError
from shim._resources import Bindings, Resource
from shim._threads import renew_in_children
from shim.patches._arguments import Function, add_parameters

CORE = "megatron.core"
STATE = "megatron.core.parallel_state"


# Names that the release has elsewhere


def _forwarding(module: str, to: str, names: tuple[str, ...]) -> Function:
    """A `__getattr__` for `module` that gives `names` as the module `to` has them now."""

    def __getattr__(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(to), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


class _Elsewhere(types.ModuleType):
    """A module that has no names of its own and gives those of another one."""

    def __init__(self, name: str, to: str) -> None:
        super().__init__(name, f"Names of {to}, by megatron-shim.")
        self._to = to

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home = importlib.import_module(self._to)
        if name != "__all__":
            return getattr(home, name)
        return getattr(home, "__all__", [public for public in vars(home) if not public.startswith("_")])

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._to))


# Names that the release has not


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """The innermost model beneath wrappers that hold it as `module`; for a list, the list of those.

    module_instances: the classes of wrappers. By default DistributedDataParallel, Float16Module and both kinds of FSDP.
    """
    if isinstance(model, list):
        return [unwrap_model(one, module_instances) for one in model]
    kinds: Any = _wrappers() if module_instances is None else module_instances
    while isinstance(model, kinds):
        model = model.module
    return model


def _wrappers() -> tuple[type, ...]:
    # A model can have no wrapper whose module was never loaded.
    places = {
        "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel",
        "megatron.core.distributed.torch_fully_sharded_data_parallel": "TorchFullyShardedDataParallel",
        "megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
        "megatron.core.transformer.module": "Float16Module",
    }
    found = (getattr(sys.modules.get(module), name, None) for module, name in places.items())
    return tuple(kind for kind in found if isinstance(kind, type))


def get_pg_size(group: Any = None) -> int:
    """The ranks of a process group; 1 for None, or without torch.distributed."""
    return 1 if group is None or not torch.distributed.is_initialized() else int(group.size())


def get_pg_rank(group: Any = None) -> int:
    """The rank of this process in a group; 0 for None, or without torch.distributed."""
    return 0 if group is None or not torch.distributed.is_initialized() else int(group.rank())


def get_tensor_model_parallel_group_if_none(
    tp_group: Any, is_expert: bool = False, check_initialized: bool = True
) -> Any:
    """`tp_group`, or parallel_state's if it is None; None without torch.distributed."""
    if not torch.distributed.is_initialized():
        return None
    if tp_group is not None:
        return tp_group
    if torch.distributed.get_rank() == 0:
        text = "tp_group is None: that of parallel_state is taken. Later releases require it."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    state = sys.modules[STATE]
    default = state.get_expert_tensor_parallel_group if is_expert else state.get_tensor_model_parallel_group
    return default(check_initialized=check_initialized)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), of any shape: the approximation of Hendrycks and Gimpel, arXiv 1606.08415."""
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by tanh, of any shape: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), arXiv 1606.08415."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, of any shape: arXiv 2109.08668."""
    return torch.square(F.relu(x))


def is_pp_first_stage(pp_group: Any) -> bool:
    """Whether this rank is the first of its pipeline."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: Any) -> bool:
    """Whether this rank is the last of its pipeline."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether this is the first of `vp_size` virtual stages. Without virtual stages each one is."""
    return _alone(vp_stage, vp_size) or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether this is the last of `vp_size` virtual stages. Without virtual stages each one is."""
    return _alone(vp_stage, vp_size) or (vp_size is not None and vp_stage == vp_size - 1)


def _alone(vp_stage: int | None, vp_size: int | None) -> bool:
    if vp_size is not None and vp_size > 1:
        return False
    if vp_stage:
        raise AssertionError(f"vp_stage is {vp_stage}, and there are no virtual stages (vp_size is {vp_size})")
    return True


def set_experimental_flag(flag: bool) -> None:
    """Allow or refuse experimental features: ENABLE_EXPERIMENTAL of megatron.core.config."""
    setattr(sys.modules["megatron.core.config"], "ENABLE_EXPERIMENTAL", flag)  # noqa: B010 - a module of any release


def is_experimental_enabled() -> bool:
    """Whether experimental features are allowed."""
    return bool(getattr(sys.modules["megatron.core.config"], "ENABLE_EXPERIMENTAL", False))


# Arguments that the release does not take

# Where a rank stands is a global variable of the release.
_STANDING = threading.RLock()
renew_in_children(sys.modules[__name__], "_STANDING", threading.RLock)


@contextmanager
def _standing_at(vp_stage: int | None, pp_rank: int | None) -> Iterator[None]:
    """Let parallel_state say that this rank stands at another place, until the end of the region."""
    state: Any = sys.modules[STATE]
    places = {"_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": vp_stage, "_MPU_PIPELINE_MODEL_PARALLEL_RANK": pp_rank}
    with _STANDING:
        before = {name: getattr(state, name) for name, value in places.items() if value is not None}
        try:
            for name in before:
                setattr(state, name, places[name])
            yield
        finally:
            for name, value in before.items():
                setattr(state, name, value)


def _take(count: int, added: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Take the arguments `added`, which stand behind the first `count`, out of a call. Returns their values."""
    by_position = dict(zip(added, args[count:], strict=False))
    return tuple(by_position[name] if name in by_position else kwargs.pop(name, None) for name in added)


def _places(parameters: Mapping[str, inspect.Parameter]) -> int:
    """How many arguments of upstream's a call may pass by position; behind *args there is no place for an added one."""
    open_ended = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    return sys.maxsize if open_ended else len(parameters)


def _placed(original: Function, *names: str) -> Function:
    """`original` with further arguments, which say for which place it is to be computed."""
    parameters = inspect.signature(original).parameters
    added, count = tuple(name for name in names if name not in parameters), _places(parameters)

    @functools.wraps(original)
    def placed(*args: Any, **kwargs: Any) -> Any:
        if len(args) > count + len(added):
            return original(*args, **kwargs)  # which says that they are too many
        given = dict(zip(added, _take(count, added, args, kwargs), strict=True))
        if all(value is None for value in given.values()):
            return original(*args[:count], **kwargs)
        with _standing_at(given.get("vp_stage"), given.get("pp_rank")):
            return original(*args[:count], **kwargs)

    add_parameters(placed, original, *added)
    return placed


def _built(original: Function) -> Function:
    """A constructor that accepts the `vp_stage` at which parallel_state stands."""
    parameters = inspect.signature(original).parameters
    count, name = _places(parameters), original.__qualname__.partition(".")[0]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > count:
            original(self, *args, **kwargs)  # which says that they are too many
            return
        (vp_stage,) = _take(count - 1, ("vp_stage",), args, kwargs)
        if vp_stage is not None:
            state: Any = sys.modules[STATE]
            here = state.get_virtual_pipeline_model_parallel_rank()
            if state.get_virtual_pipeline_model_parallel_world_size() is not None and here != vp_stage:
                raise ShimError(
                    f"moved-symbols: {name} was given vp_stage={vp_stage}, and parallel_state stands at {here}. This "
                    f"release of megatron-core (before 0.13) has one virtual rank for the whole process: call "
                    f"parallel_state.set_virtual_pipeline_model_parallel_rank({vp_stage}) before, and again before "
                    f"sharded_state_dict"
                )
        original(self, *args[: count - 1], **kwargs)

    add_parameters(__init__, original, "vp_stage")
    return __init__


# What each variant binds


def _missing(value: Any) -> Function:
    return lambda original: original if callable(original) else value


def _module(module: types.ModuleType) -> Function:
    package = module.__name__.rpartition(".")[0]

    def put(original: Any) -> Any:
        # A fork may have the file. This search imports nothing.
        own = PathFinder.find_spec(module.__name__, getattr(sys.modules.get(package), "__path__", None))
        if own is not None or isinstance(original, types.ModuleType):
            return original
        # `import` finds it here. The attribute of the package, which the engine writes, is for `from package import`.
        return sys.modules.setdefault(module.__name__, module)

    return put


def _made(name: str, *functions: Function) -> types.ModuleType:
    module = types.ModuleType(name, "Functions of a later release, by megatron-shim.")
    vars(module).update({function.__name__: function for function in functions})
    return module


def _with_spec(module: types.ModuleType) -> types.ModuleType:
    module.__spec__ = ModuleSpec(module.__name__, None, origin="megatron-shim")
    return module


FIRST_AND_LAST = (is_pp_first_stage, is_pp_last_stage, is_vp_first_stage, is_vp_last_stage)
OF_GROUPS = (get_pg_size, get_pg_rank, get_tensor_model_parallel_group_if_none)
ACTIVATIONS = (quick_gelu, fast_gelu, squared_relu)
OF_PLACES = (
    f"{CORE}.transformer.transformer_block:get_num_layers_to_build",
    f"{CORE}.transformer.transformer_layer:get_transformer_layer_offset",
    f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
)


def _by_place(*names: str) -> dict[str, Function]:
    return {target: lambda original: _placed(original, *names) for target in OF_PLACES}


def _names(module: str, *functions: Function) -> dict[str, Function]:
    return {f"{CORE}.{module}:{function.__name__}": _missing(function) for function in functions}


def _before_0_14() -> dict[str, Function]:
    return {**_names("utils", unwrap_model), **_names("fusions.fused_bias_geglu", quick_gelu)}


def _variant(name: str) -> tuple[dict[str, Function], tuple[types.ModuleType, ...]]:
    """Target -> factory, and the modules that the variant adds."""
    if name == "v0_12":
        moe = f"{CORE}.transformer.moe.moe_utils"
        moved = _forwarding(moe, STATE, ("get_moe_layer_wise_logging_tracker",))
        functions = {
            **_before_0_14(),
            **_names("utils", *OF_GROUPS),
            **_names("config", set_experimental_flag, is_experimental_enabled),
            f"{moe}:__getattr__": _missing(moved),
            **_by_place("vp_stage", "pp_rank"),
            f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec": lambda original: _placed(original, "vp_stage"),
            f"{STATE}:is_pipeline_first_stage": lambda original: _placed(original, "vp_stage"),
            f"{STATE}:is_pipeline_last_stage": lambda original: _placed(original, "vp_stage"),
            f"{CORE}.models.gpt.gpt_model:GPTModel.__init__": _built,
            f"{CORE}.transformer.transformer_block:TransformerBlock.__init__": _built,
        }
        stages = _made(f"{CORE}.pipeline_parallel.utils", *FIRST_AND_LAST)
        return functions, (_made(f"{CORE}.activations", *ACTIVATIONS), stages)
    if name == "v0_13":
        functions = {**_before_0_14(), **_names("pipeline_parallel.utils", *FIRST_AND_LAST), **_by_place("pp_rank")}
        return functions, (_made(f"{CORE}.activations", *ACTIVATIONS),)
    if name == "v0_14":
        geglu = f"{CORE}.fusions.fused_bias_geglu"
        moved = _forwarding(geglu, f"{CORE}.activations", ("quick_gelu",))
        return {f"{geglu}:__getattr__": _missing(moved), **_by_place("pp_rank")}, ()
    custom = f"{CORE}.transformer.custom_layers.transformer_engine"
    return {}, (_Elsewhere(custom, f"{CORE}.extensions.transformer_engine"),)


def _keeping(module: types.ModuleType) -> Resource:
    def tells() -> str:
        return f"the module {module.__name__}" if sys.modules.get(module.__name__) is module else ""

    def release() -> None:
        if tells():
            del sys.modules[module.__name__]

    return Resource(tells, release)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Target -> factory for a variant, and the modules that it adds, until the patch goes."""
    functions, modules = _variant(variant)
    added = {"{}:{}".format(*module.__name__.rsplit(".", 1)): _module(_with_spec(module)) for module in modules}
    return Bindings({**functions, **added}, *map(_keeping, modules))
