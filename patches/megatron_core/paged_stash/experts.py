"""What experts stash in one step: which forward passes, which rows of them, and until when."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim import ops
from shim._errors import OptionError
from shim.ops._checks import capturing
from shim.ops._stash_layout import OVERFLOW
from shim.patches.megatron_core.paged_stash.settings import Settings, cannot_gain
from shim.patches.megatron_core.paged_stash.stashes import Stashes

WIRE = "moe_dispatch_fwd_dtype"


class ExpertStash(Stashes):
    """The stash of one apply(): takes forward passes of experts, and knows where the step stands.

    A forward without the fused operations is one call (`run`). One with them is three calls of upstream (`begin`,
    `open`, `commit`) inside `enter_module` and `leave_module`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options["overflow"] not in OVERFLOW:
            raise OptionError(f"option overflow is {options['overflow']!r}; it must be one of {', '.join(OVERFLOW)}")
        super().__init__(options)
        self.enabled = True  # set by upstream's reset; False while evaluating
        self.rerunning = False
        self.runners = 0
        self.random_state: Callable[[], None] | None = None
        self._settings: Settings | None = None
        self._current = threading.local()

    # One forward

    def wanted(self, config: Any) -> bool:
        """Whether to stash a forward under this config. Cheap, because all experts ask."""
        return self.asked(config) and self.usable() and torch.is_grad_enabled()

    def usable(self) -> bool:
        return self.enabled and not self.rerunning and not torch.compiler.is_compiling()

    def run(self, forward: Callable[[], Any], module: Any, hidden: Tensor, probs: Tensor) -> Any:
        """Call forward() of the experts in `module`, for rows `hidden` [rows, h] with the router's `probs` [rows].

        A row that the dispatcher added to fill the capacity has a probability of zero. So it takes no part in the
        gradients of parameters and of routed tokens.
        """
        config, rows = module.config, hidden.shape[0]
        settings = self.settings(config)
        reason = cannot_gain(config, settings)
        if not reason and (probs.numel() != rows or hidden.dim() != 2):
            reason = f"probabilities {tuple(probs.shape)} are not those of rows {tuple(hidden.shape)}"
        if reason:
            self._stash_of(module, settings).skip(reason)
            return forward()
        padded = config.moe_pad_expert_input_to_capacity
        valid = probs.detach().reshape(rows) != 0 if padded else None
        expected = int(rows // max(config.moe_expert_capacity_factor, 1.0)) if padded else rows
        with self.group(module, settings, rows, valid, expected, (hidden, probs), _weights_of(module)) as group:
            output = forward()
        group.commit(output)
        return output

    # Upstream's three calls around the fused experts

    def enter_module(self, module: Any) -> Any:
        """Note the module whose forward this thread is in. Returns the outer module, for `leave_module`."""
        outer, self._current.module = getattr(self._current, "module", None), module
        return outer

    def leave_module(self, outer: Any) -> None:
        self._current.module, self._current.inputs, self._current.group = outer, (), None

    def begin(self, tensor: Tensor) -> None:
        """Note the input of the experts."""
        self._current.inputs = (tensor,)

    def open(self, rows: int, count: Tensor, expected: int | None) -> contextlib.AbstractContextManager[Any]:
        if not self.usable():
            return contextlib.nullcontext()
        module = getattr(self._current, "module", None)
        settings = self.settings(module.config) if module is not None else self._settings or self.settings(None)
        weights = () if module is None else _weights_of(module)
        # What comes quantized from other ranks has its scales behind all rows, so it does not count as rows of values.
        quantized = module is not None and getattr(module.config, WIRE, "bf16") != "bf16"
        inputs = () if quantized else getattr(self._current, "inputs", ())
        expected = rows if expected is None else expected
        group = self.group(module, settings, rows, count, expected, inputs, weights, _marked)
        self._current.group = group
        return group

    def commit(self, output: Tensor) -> None:
        group, self._current.group, self._current.inputs = getattr(self._current, "group", None), None, ()
        if group is not None:
            group.commit(output)

    # Steps

    def step_begins(self, enabled: bool, config: Any) -> None:
        self.enabled = enabled
        if config is not None:
            self._settings = self.settings(config)
        if enabled:
            self._drop_unused()
            for stash in self._all():
                stash.settle()
                stash.warn_if_idle()
            self.note_spilled()

    def step_ends(self) -> None:
        """Called before gradients are used. Raises if tensors were lost, unless a runner repeats the step."""
        if not self._stashes or self.runners or capturing():  # most runs have no stash
            return
        lost = []
        for stash in self._all():
            try:
                stash.check() if stash.may_lose else stash.warn_if_idle()
            except ops.StashOverflowError as error:  # collect from all stashes, because each check resets the count
                lost.append(error)
        self._drop_unused()
        if lost:
            raise lost[0] if len(lost) == 1 else ops.StashOverflowError(" ".join(map(str, lost)))


def _weights_of(module: Any) -> Iterable[Tensor]:
    from shim.ops.paged_stash import weights_of  # here, because most runs have no stash

    return weights_of(module)


def _marked(tensor: Tensor) -> int | None:
    """The rows per row of a tensor, by Transformer Engine's mark: False for rows, True for scales of 32 rows."""
    mark = getattr(tensor, "grouped_tensor_scale_inv", None)
    return None if mark is None else 32 if mark else 1
