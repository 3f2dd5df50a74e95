"""What a model and its optimizer hold on a device: each storage once, with what it is for and whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GRADIENTS", "KINDS", "MAIN", "OPTIMIZER", "WEIGHTS", "Found", "Piece"]

KINDS = OPTIMIZER, MAIN, GRADIENTS, WEIGHTS = "optimizer", "main_weights", "gradients", "weights"

# Other objects than optimizers and those of these packages may hold anything, and are not looked into.
_PACKAGES = {"megatron", "transformer_engine", "apex", "emerging_optimizers"}
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

    def add(self, kind: str, name: str, nbytes: int) -> None:
        """Note that `nbytes` of it are for `name`. What is said twice, as of a view of all, is left out."""
        self.kinds.add(kind)
        nbytes = min(nbytes, self.nbytes - sum(self.parts.values()))
        if nbytes:
            self.parts.setdefault((kind, name), nbytes)

    def shares(self) -> dict[tuple[str, str], int]:
        """The parts; what belongs to no parameter is padding."""
        (kind, name), rest = next(iter(self.parts)), self.nbytes - sum(self.parts.values())
        return {**self.parts, (kind, f"padding beside {name}"): rest} if rest else self.parts

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
        modules = [
            (f"{start}{path}." if path else start, module)
            for start, model in models.items()
            for path, module in model.named_modules()
        ]
        for path, module in modules:
            own = {**module._parameters, **module._buffers}
            for name, value in own.items():
                if value is not None:
                    self._names.setdefault(id(value), path + name)
                    self._tensor(value, WEIGHTS, path + name, sure=True)
            if any(value is not None for value in own.values()) or module in models.values():
                self.modules.append(module)
        for path, module in modules:  # after all weights, because the rest may be views of them
            for name, value in list(vars(module).items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    self._inside(value, (name,), path + name, WEIGHTS)
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
        elif id(value) in self._seen or isinstance(value, (str, bytes, int, float, type, nn.Module)):
            return
        elif isinstance(value, (list, tuple, set, frozenset)):
            self._seen.add(id(value))
            for place, held in enumerate(value):
                self._inside(held, path, f"{name}.{place}", kind)
        elif isinstance(value, Mapping) or _is_looked_into(value):
            self._seen.add(id(value))
            if hasattr(value, "step") and hasattr(value, "state_dict"):
                self.optimizers.append(value)
            for key, held in list((value if isinstance(value, Mapping) else vars(value)).items()):
                if not isinstance(key, Tensor):
                    self._inside(held, (*path, str(key)), f"{name}.{key}", kind)
                    continue
                self._inside(key, path, name, kind)
                for part, state in held.items() if isinstance(held, Mapping) else [("", held)]:
                    self._inside(state, (*path, str(part)), self._names.get(id(key), f"{name}.{part}"), kind)

    def _tensor(self, tensor: Tensor, kind: str, name: str, sure: bool) -> None:
        """Note a tensor, its gradient, and tensors that are its attributes: main_grad, main_param, the data of FP8.

        sure: whether it adds its kind to a storage that is known already.
        """
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        self._add(tensor, kind, name, sure)
        for key, held in list(vars(tensor).items()):
            if isinstance(held, Tensor):
                inner = _kind_of((key,), kind)
                self._names.setdefault(id(held), name)
                self._tensor(held, inner, name, sure and inner != MAIN)  # one in fp32 may be the weight itself
        if tensor.is_leaf and tensor.grad is not None:
            self._tensor(tensor.grad, GRADIENTS, name, sure)

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
        piece.add(kind, name, tensor.numel() * tensor.itemsize)


def _kind_of(path: Iterable[str], otherwise: str) -> str:
    for name in reversed([name.lower() for name in path]):
        found = next((kind for word, kind in _WORDS.items() if word in name), None)
        if found or "param" in name:
            return found or (MAIN if otherwise == OPTIMIZER else otherwise)
    return otherwise


def _is_looked_into(value: Any) -> bool:
    own = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return hasattr(value, "__dict__") and (bool(own & _PACKAGES) or isinstance(value, torch.optim.Optimizer))
