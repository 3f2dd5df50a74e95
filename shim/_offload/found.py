"""What a model and its optimizer hold on a device, whatever their classes: each storage once, and whose it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GRADIENTS", "KINDS", "MAIN", "OPTIMIZER", "WEIGHTS", "Found", "Piece", "unknown_optimizer"]

KINDS = OPTIMIZER, MAIN, GRADIENTS, WEIGHTS = "optimizer", "main_weights", "gradients", "weights"

# Other objects than optimizers and those of these packages may hold anything, and are not looked into.
_PACKAGES = {"megatron", "transformer_engine", "apex", "emerging_optimizers"}
_CONTAINERS = (list, tuple, set, frozenset, Mapping)
# Words in names of attributes and keys -> what lies there. The innermost name that has one decides.
_WORDS = {
    **dict.fromkeys(("state", "scaler", "param_groups"), OPTIMIZER),
    "grad": GRADIENTS,
    **dict.fromkeys(("master", "main", "fp32"), MAIN),
}


class Piece:
    """A storage of the device. kinds: what it is for. parts: (kind, name of the parameter) -> bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.data  # of no graph, and with a version of its own
        self.storage = tensor.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.kinds: set[str] = set()
        self.parts: dict[tuple[str, str], int] = {}

    def shares(self) -> dict[tuple[str, str], int]:
        """The parts, of which those that are said twice, as of a view of all, are left out; and padding."""
        rest, shares = self.nbytes, {}
        for (kind, name), nbytes in self.parts.items():
            shares[kind, name] = min(nbytes, rest)
            rest -= shares[kind, name]
        shares[kind, f"padding beside {name}"] = rest
        return {part: nbytes for part, nbytes in shares.items() if nbytes}

    def obstacle(self) -> str:
        """Why its memory cannot be freed, or ""."""
        if not self.storage.resizable():
            return "its memory belongs to other code and cannot be freed"
        return "its bytes are no whole number of elements" if self.nbytes % self.tensor.itemsize else ""

    def flat(self) -> Tensor:
        """All of its bytes, uint8 [nbytes]. Cannot be made while the storage has no memory."""
        return self.tensor.as_strided((self.nbytes // self.tensor.itemsize,), (1,), 0).view(torch.uint8)


class Found:
    """pieces: by storage. modules: with tensors of their own. optimizers: those of megatron-core and those inside."""

    def __init__(self, models: Mapping[str, nn.Module], optimizer: Any) -> None:
        """models: by a prefix for the names of their parameters."""
        self.pieces: dict[int, Piece] = {}
        self.modules: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self._names: dict[int, str] = {}  # id of a tensor -> the parameter that it is, or is made from
        self._seen: set[int] = set()
        for start, model in models.items():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                self._names.setdefault(id(value), start + name)
                self._tensor(value, WEIGHTS, start + name, sure=True)
        for start, model in models.items():  # after all weights, because the rest may be views of them
            for path, module in model.named_modules():
                self.modules += [module] if module is model or module._parameters or module._buffers else []
                for name, value in list(vars(module).items()):
                    if name not in ("_parameters", "_buffers", "_modules"):
                        self._inside(value, (name,), start + f"{path}.{name}".lstrip("."), WEIGHTS)
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            groups = getattr(getattr(each, "optimizer", None), "param_groups", [])
            places = getattr(each, "model_param_group_index_map", {}) if groups else {}
            for param, (group, place) in places.items():
                self._names.setdefault(id(groups[group]["params"][place]), self._names.get(id(param), "a weight"))
        self._inside(optimizer, ("optimizer",), "optimizer", OPTIMIZER)

    def _inside(self, value: Any, path: tuple[str, ...], name: str, kind: str) -> None:
        """All tensors that `value` is, or holds. kind: of those whose names tell nothing else."""
        if isinstance(value, Tensor):
            self._tensor(value, _kind_of(path, kind), self._names.get(id(value), name), sure=False)
        held = {} if id(value) in self._seen else _held(value)
        self._seen |= {id(value)} if held else set()  # others may be gone, and their number with another
        self.optimizers += [value] if held and hasattr(value, "step") and hasattr(value, "state_dict") else []
        for key, each in held.items():
            if not isinstance(key, Tensor):
                self._inside(each, (*path, str(key)), f"{name}.{key}", kind)
                continue
            self._inside(key, path, name, kind)
            for part, state in each.items() if isinstance(each, Mapping) else [("", each)]:
                self._inside(state, (*path, str(part)), self._names.get(id(key), f"{name}.{part}"), kind)

    def _tensor(self, tensor: Tensor, kind: str, name: str, sure: bool) -> None:
        """Note a tensor, its gradient, and tensors that are its attributes: main_grad, main_param, the data of FP8.

        sure: whether it adds its kind to a storage that is known already.
        """
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        self._add(tensor, kind, name, sure)
        own = dict(vars(tensor))
        with contextlib.suppress(RuntimeError):  # a view of memory that is asleep cannot tell
            own["grad"] = tensor.grad if tensor.is_leaf else None
        for key, held in own.items():
            if isinstance(held, Tensor):
                inner = _kind_of((key,), kind)
                self._names.setdefault(id(held), name)
                self._tensor(held, inner, name, sure and inner != MAIN)  # one in fp32 may be the weight itself

    def _add(self, tensor: Tensor, kind: str, name: str, sure: bool) -> None:
        storage = tensor.untyped_storage()
        try:
            if tensor.device.type in ("cpu", "meta") or not storage.data_ptr() or not storage.nbytes():
                return
        except RuntimeError:  # a tensor that holds its data in attributes, as one of FP8, has no memory
            return
        piece = self.pieces.get(storage._cdata)
        if piece is None:
            piece = self.pieces[storage._cdata] = Piece(tensor)
        elif not sure and (kind == WEIGHTS or piece.kinds != {kind}):
            return  # a view of what is known
        piece.kinds.add(kind)
        piece.parts.setdefault((kind, name), tensor.numel() * tensor.itemsize)


def _kind_of(path: Iterable[str], otherwise: str) -> str:
    for name in reversed([name.lower() for name in path]):
        found = next((kind for word, kind in _WORDS.items() if word in name), None)
        if found or "param" in name:
            return found or (MAIN if otherwise == OPTIMIZER else otherwise)
    return otherwise


def unknown_optimizer(optimizer: Any) -> Any:
    """The object, `optimizer` or one of those in it, whose tensors cannot be found; None if there is none."""
    if isinstance(optimizer, _CONTAINERS):
        every = (unknown_optimizer(each) for each in _held(optimizer).values())
        return next((each for each in every if each is not None), None)
    return None if optimizer is None or _held(optimizer) else optimizer


def _held(value: Any) -> dict[Any, Any]:
    """What a container or an object holds, by key or name."""
    if isinstance(value, _CONTAINERS):
        return dict(value if isinstance(value, Mapping) else enumerate(value))
    own = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    known = (own & _PACKAGES or isinstance(value, torch.optim.Optimizer)) and not isinstance(value, (nn.Module, Tensor))
    return dict(getattr(value, "__dict__", {})) if known else {}
