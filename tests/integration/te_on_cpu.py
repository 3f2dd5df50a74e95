"""Transformer Engine's own modules on CPU: built by its code and megatron-core's, computed by torch.

Only what needs a kernel is a stand-in: the forward of its linear layers and norms, without FP8.
Their weights, their classes and everything that megatron-core and a trainer put around them are real.
"""

import contextlib

import torch
import torch.nn.functional as F


def _norm(kind, x, weight, bias, eps, zero_centered):
    weight = weight + 1 if zero_centered else weight
    if kind == "RMSNorm":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _linear(self, inp, is_first_microbatch=None, **ignored):
    return _parallel(self, inp)


def _parallel(self, inp):
    """The product of this rank's part of the weight, with what tensor parallelism does before and after it."""
    if self.tp_size == 1 or self.parallel_mode is None:
        return F.linear(inp, self.weight, _used(self.bias))
    from megatron.core.tensor_parallel import mappings

    if self.parallel_mode == "column":
        enter = mappings.gather_from_sequence_parallel_region if self.sequence_parallel else None
        inp = (enter or mappings.copy_to_tensor_model_parallel_region)(inp)
        return F.linear(inp, self.weight, _used(self.bias))
    leave = mappings.reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else None
    out = (leave or mappings.reduce_from_tensor_model_parallel_region)(F.linear(inp, self.weight))
    return out if _used(self.bias) is None else out + self.bias


def _layernorm_linear(self, inp, is_first_microbatch=None, **ignored):
    normed = _norm(
        self.normalization, inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
    )
    out = _parallel(self, normed)
    return (out, normed) if self.return_layernorm_output else out


def _grouped_linear(self, inp, m_splits, is_first_microbatch=None, **ignored):
    """A product for each group of rows, with the group's own weight."""
    sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
    biases = [_used(getattr(self, f"bias{i}", None)) for i in range(self.num_gemms)]
    added = [None] * self.num_gemms if self.return_bias else biases
    parts = inp.reshape(-1, inp.shape[-1]).split(sizes)
    out = torch.cat([F.linear(part, getattr(self, f"weight{i}"), added[i]) for i, part in enumerate(parts)])
    return (out, biases) if self.return_bias else out


def _general_gemm(A, B, out_dtype=None, *ignored, layout="TN", bias=None, grad=False, **also_ignored):
    """[product, and three that nobody reads]. The letters of the layout say which of A and B is transposed."""
    left, right = (B.T if layout[1] == "T" else B), (A.T if layout[0] == "T" else A)
    product = left.to(out_dtype) @ right.to(out_dtype)
    return [product if bias is None or grad else product + bias, None, None, None]


def _used(bias):
    """Without bias the layers have an empty one."""
    return bias if bias is not None and bias.numel() else None


def _rms_norm(self, x):
    return _norm("RMSNorm", x, self.weight, None, self.eps, False)


def _layer_norm(self, x):
    return _norm("LayerNorm", x, self.weight, self.bias, self.eps, False)


@contextlib.contextmanager
def te_modules_on_cpu():
    """Inside, TE's modules run on CPU, where `testing.te_cuda_stand_ins()` holds too."""
    import transformer_engine.pytorch as te

    substitutes = [
        (te.Linear, "forward", _linear),
        (te.LayerNormLinear, "forward", _layernorm_linear),
        (te.RMSNorm, "forward", _rms_norm),
        (te.LayerNorm, "forward", _layer_norm),
    ]
    with _substituted(substitutes):
        yield


def experts_on_cpu():
    """Inside, Transformer Engine's layers of experts run on CPU. A patch of their forward is in conflict with it."""
    import transformer_engine.pytorch as te

    return _substituted([(te.GroupedLinear, "forward", _grouped_linear)])


def products_on_cpu():
    """Inside, megatron-core's routers compute the matrix products that they ask of Transformer Engine on CPU."""
    from transformer_engine.pytorch import cpp_extensions

    return _substituted([(cpp_extensions, "general_gemm", _general_gemm)])


def te_modules_built():
    """Inside, TE's modules can be built, which they refuse to be without CUDA."""
    return _substituted([(torch.cuda, "is_available", lambda: True)])


def routers_on_cpu():
    """Inside, a router takes the way that it has where Transformer Engine's matrix product is missing."""
    from megatron.core.transformer.moe import moe_utils

    return _substituted([(moe_utils, "te_general_gemm", None)])


@contextlib.contextmanager
def _substituted(substitutes):
    with contextlib.ExitStack() as undo:
        for owner, name, substitute in substitutes:
            own = name in vars(owner)
            undo.callback(*((setattr, owner, name, vars(owner)[name]) if own else (delattr, owner, name)))
            setattr(owner, name, substitute)
        yield
