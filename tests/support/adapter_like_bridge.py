"""A LoRA adapter around an output layer, of the structure of Megatron-Bridge's, under the names of its modules.

Written anew, for cells without Megatron-Bridge; tests/integration/test_megatron_bridge.py has the real classes.
"""

import contextlib
import sys
from types import ModuleType
from unittest import mock

import torch


class ParallelLinearAdapter(torch.nn.Module):
    """number * linear_out(linear_in(dropout(x))), with the rank's states gathered over ranks and the logits not."""

    def __init__(self, base, rank, dropout=0.0, dropout_position="pre"):
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()
        self.config, self.gathers = base.config, base.sequence_parallel
        self.dropout_position, self.number = dropout_position, 3.0 / rank
        self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
        self.config.sequence_parallel = False
        given = {"config": self.config, "init_method": torch.nn.init.normal_, "bias": False}
        self.linear_in = ColumnParallelLinear(
            base.input_size, rank, gather_output=True, disable_grad_reduce=self.gathers, **given
        )
        self.linear_out = ColumnParallelLinear(rank, base.output_size, gather_output=False, **given)
        self.config.sequence_parallel = self.gathers

    def forward(self, x, *_, **__):
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        if self.dropout_position == "pre":
            x = self.dropout(x)
        x = gather_from_sequence_parallel_region(x) if self.gathers else x
        logits, _ = self.linear_out(self.linear_in(x)[0])
        if self.dropout_position == "post":
            logits = self.dropout(logits)
        return logits * self.number


class LoRALinear(torch.nn.Module):
    """to_wrap(x) + adapter(x), while the adapter is enabled."""

    def __init__(self, to_wrap, adapter):
        super().__init__()
        self.to_wrap, self.adapter, self.enabled = to_wrap, adapter, True

    @property
    def weight(self):
        return self.to_wrap.weight

    def forward(self, x, *args, **kwargs):
        result = self.to_wrap(x, *args, **kwargs)
        assert isinstance(result, tuple)
        self.returns_tuple = True
        logits, bias = result
        if self.enabled:
            logits = logits + self.adapter(x.contiguous(), *args, **kwargs).reshape(logits.shape)
        return logits, bias


@contextlib.contextmanager
def under_the_names_of_bridge():
    modules = {"lora_layers": LoRALinear, "utils": ParallelLinearAdapter}
    names = {f"megatron.bridge.peft.{module}": ModuleType(module) for module in modules}
    for module, content in zip(names.values(), modules.values()):
        setattr(module, content.__name__, content)
    with mock.patch.dict(sys.modules, names):
        yield


def with_adapter(model, rank=4, frozen=True, **options):
    """The model with an adapter around its output layer, the same on every rank and in every call."""
    if not model.post_process:
        return model
    torch.manual_seed(3)
    base = model.output_layer
    model.output_layer = LoRALinear(base, ParallelLinearAdapter(base, rank, **options).to(base.config.params_dtype))
    if base.weight is not None:
        base.weight.requires_grad_(not frozen)
    return model
