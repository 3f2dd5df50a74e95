"""A stand-in for Transformer Engine's FusedAdam that is aware of precision, for proofs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shim.patches.megatron_core._proof_optimizer_resume import FusedAdam

TE = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")


class AwareAdam(FusedAdam):
    """It keeps each weight in fp32 as a state, and writes the weight itself."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps)

    def _stepped(self, weight: Any) -> tuple[Any, Any]:
        state = self.state[weight]
        if "master_param" not in state:
            state["master_param"] = weight.detach().float()
        gradient = weight.grad if weight.grad is not None else weight.decoupled_grad
        return state["master_param"], gradient.float()


@contextlib.contextmanager
def aware_adam() -> Iterator[None]:
    """Inside, megatron-core makes precision-aware optimizers of it, as if Transformer Engine were installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    adam: dict[str, Any] = {"Adam": AwareAdam, "USING_PYTORCH_OPTIMIZER": False}
    theirs: dict[str, Any] = {"Adam": AwareAdam, "HAVE_APEX_OR_TE": True}
    with contextlib.ExitStack() as undo:
        for owner in (optimizer, optimizer_config):
            undo.enter_context(mock.patch.object(owner, "is_te_min_version", lambda *_, **__: True, create=True))
        undo.enter_context(mock.patch.multiple(optimizer, create=True, **adam))
        undo.enter_context(mock.patch.multiple(distrib_optimizer, create=True, **theirs))
        yield


def aware_config(**settings: Any) -> Any:
    """A config of a precision-aware optimizer, which looks for Transformer Engine when it is made."""
    from megatron.core.optimizer import OptimizerConfig

    te: dict[str, Any] = {name: SimpleNamespace(FusedAdam=AwareAdam) for name in TE}
    with mock.patch.dict(sys.modules, te):
        return OptimizerConfig(optimizer="adam", use_precision_aware_optimizer=True, **settings)
