"""What probes of overrides share: a view of a module with stubs in the place of its weights, and a tiny packed row."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

WIDTH = 4  # the hidden size of stubs


def device_of(module: Any) -> torch.device:
    first = next(iter(module.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def view_of(module: Any, config: Any, **parts: Any) -> Any:
    """A copy of the module that shares its attributes, with another config and with `parts` in the place of its own.

    What an override sets on the view stays there. Methods bound to the module are bound to the view. ValueError for a
    function of the instance that is no method: it would run on the module itself.
    """
    view = object.__new__(type(module))
    own: dict[str, Any] = {}
    for name, value in vars(module).items():
        if type(value) is types.MethodType and value.__self__ is module:
            own[name] = types.MethodType(value.__func__, view)
        elif type(value) in (types.FunctionType, functools.partial) and hasattr(type(module), name):
            raise ValueError(f"the instance has a function {name} that is no method, so shim can only run it for real")
        else:
            own[name] = value
    # nn.Module keeps weights, buffers and submodules in dictionaries of their own.
    for name in ("_parameters", "_buffers", "_modules"):
        own[name] = {key: value for key, value in own.get(name, {}).items() if key not in parts}
    vars(view).update(own, **{"config": config, **parts})
    return view


def holder_of(module: Any, name: str, models: Iterable[Any]) -> Any:
    """The module in `models` whose part `name` is `module` or holds it; None if there is none."""
    for model in models:
        for holder in model.modules():
            part = getattr(holder, "_modules", {}).get(name)
            if part is not None and any(inner is module for inner in part.modules()):
                return holder
    return None


def config_of(module: Any, **fields: Any) -> Any:
    """A copy of the module's config with other fields, as far as the release has them. No rank cuts a tensor there."""
    config = copy.copy(module.config)
    alone = {"sequence_parallel": False, "tensor_model_parallel_size": 1, "context_parallel_size": 1}
    for name, value in {**alone, "distribute_saved_activations": False, **fields}.items():
        if hasattr(config, name):
            object.__setattr__(config, name, value)
    return config


def names_of(method: str) -> tuple[str, ...]:
    """The parameters of a method of the installed release, given as ``package.module:Class.name``."""
    module, _, qualname = method.partition(":")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = vars(found)[part]
    return tuple(inspect.signature(found).parameters)


def taken_by(function: Callable[..., Any], usual: Iterable[str], **given: Any) -> dict[str, Any]:
    """Those of the arguments `given` that a function names. If it takes any keyword, those in `usual` too."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = {*parameters, *(usual if takes_any else ())}
    return {name: value for name, value in given.items() if name in names}


class PaddedRow:
    """A packed row of two sequences, of four and three tokens, padded to five each. No token is like another.

    ids, labels, position_ids: [1, 10]. The padding has ids and labels too, so that whoever takes it for tokens is seen.
    followed: the positions after which a token of the same sequence comes.
    """

    length = 10
    followed = (0, 1, 2, 5, 6)
    padding = (4, 8, 9)

    def __init__(self, device: torch.device) -> None:
        from megatron.core.packed_seq_params import PackedSeqParams

        offsets = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
        padded = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
        self.params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=5,
            max_seqlen_kv=5,
        )
        self.ids = torch.arange(1, 11, device=device)[None]
        self.labels = self.ids + 20
        self.position_ids = torch.arange(5, device=device).repeat(2)[None]

    def moved(self, found: Any, row: Tensor) -> bool:
        """Whether `found` [1, 10] has the next token of its sequence wherever there is one."""
        return (
            isinstance(found, Tensor)
            and found.shape == row.shape
            and all(found[0, at] == row[0, at + 1] for at in self.followed)
        )


class Embedding:
    """[1, s] ids -> [s, 1, WIDTH], each token as its number. Keeps the ids of each call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, position_ids: Any = None, **rest: Any) -> Tensor:
        self.seen.append(input_ids)
        return input_ids.t()[..., None].expand(-1, -1, WIDTH).float()
