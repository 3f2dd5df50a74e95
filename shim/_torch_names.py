"""The private and undocumented names of torch and triton that shim uses. They are looked up here and nowhere else.

`NAMES` says of each name since and until when torch or triton has it, and what happens without it. A test resolves all
of them with each torch of docs/environments.md. Nothing here imports torch before it is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "ATTRIBUTES",
    "COMPILED_BY",
    "IN_C",
    "NAMES",
    "TRACE_RULES",
    "MissingNameError",
    "PrivateName",
    "find",
    "missing",
    "outside_graph",
    "required",
]

Function = TypeVar("Function", bound=Callable[..., Any])
_NOTHING = object()
COMPILED_BY = "torch._functorch"  # begins the module of the functions that torch.compile makes
TRACE_RULES = "torch._dynamo.trace_rules"  # the module that keeps which functions are torch's, once it is loaded
IN_C = "torch._C"  # the module of functions in C++, of which the pretended device replaces some


class MissingNameError(ImportError):
    """This torch or triton lacks a private name, and what needs it cannot run."""


class PrivateName(NamedTuple):
    """without: what happens without the name. since: the first release that has it; "" if torch 2.6 has it.

    until: the last one; "" if the newest that was tried has it. Names of triton have releases of triton.
    """

    without: str
    since: str = ""
    until: str = ""


_STASH = "PagedStash leaves the group alone and says why: its memory is not saved"
_TRACING = "torch.compiler.is_compiling() is asked, which does not know a trace by make_fx"
_PROOF = "the proof cannot run"
_DEVICE = "the pretended device cannot run"
_INTERPRETER = "kernels are not interpreted: the proofs that need it cannot run"

NAMES = {
    # Autograd
    "torch:_C._autograd._get_sequence_nr": PrivateName(_STASH),
    "torch:_C._current_graph_task_id": PrivateName(
        f"{_STASH}; scales of FP8 are kept for a second backward until the next forward; "
        "recomputed layers of a packed row share nothing"
    ),
    "torch:_C._autograd._get_current_graph_task_keep_graph": PrivateName(
        "scales of FP8 are kept for a second backward until the next forward; logprob writes over no logits that "
        "nobody reads: one copy more"
    ),
    "torch:_C._functorch.peek_interpreter_stack": PrivateName(
        f"{_STASH}; packed rows are rotated with up to two dozen launches more for each layer"
    ),
    "torch.autograd.forward_ad:_current_level": PrivateName(_STASH),
    "torch:_C._storage_Use_Count": PrivateName("logprob never writes over a result: one more copy of logits"),
    "torch:_C._TorchDispatchModeKey.__members__": PrivateName(_TRACING),
    "torch:_C._get_dispatch_mode": PrivateName(_TRACING),
    # Compiler
    "torch:_disable_dynamo": PrivateName("torch.compiler.disable does it, which imports the compiler at once"),
    "torch._inductor.async_compile:AsyncCompile.pool": PrivateName("a forked rank may wait for threads that compile"),
    "torch._functorch:__name__": PrivateName("PagedStash does not recognise compiled functions"),
    "torch.utils.cpp_extension:_get_build_directory": PrivateName("a stale lock is not seen, and torch waits for it"),
    "torch.utils.cpp_extension:FileBaton": PrivateName(
        "the system ends the lock of a process with it, so that a lock of the compiler is never stale", until="2.13"
    ),
    # Tensors of Transformer Engine
    "torch:_C.DisableTorchFunctionSubclass": PrivateName("te-requires-grad cannot be bound"),
    # Checks
    "torch:_assert_async": PrivateName("wrong arguments on a GPU are not told"),
    # Extension points without a stable interface
    "torch.utils._python_dispatch:TorchDispatchMode": PrivateName("Footprint and the proofs that count cannot run"),
    "torch.utils._pytree:tree_iter": PrivateName("Footprint cannot run"),
    "torch.utils._pytree:tree_map": PrivateName("fused-linear-logprob cannot hand out logits"),
    # Distributed
    "torch.distributed.distributed_c10d:ProcessGroupGloo": PrivateName("each group of a layout has a device: slower"),
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options": PrivateName("the same"),
    "torch.distributed.distributed_c10d:ProcessGroupGloo.create_device": PrivateName("the same"),
    "torch.distributed.distributed_c10d:ProcessGroupGloo.create_default_device": PrivateName("the same"),
    # For the pretended device
    "torch.utils._python_dispatch:_disable_current_modes": PrivateName(_DEVICE),
    "torch.overrides:_get_current_function_mode_stack": PrivateName(_DEVICE),
    "torch:_C._only_lift_cpu_tensors": PrivateName(_DEVICE),
    "torch:_C._set_only_lift_cpu_tensors": PrivateName(_DEVICE),
    "torch:_C._disabled_torch_function_impl": PrivateName(_DEVICE),
    "torch:_C._is_multithreading_enabled": PrivateName(_DEVICE),
    "torch:_C._nn._parse_to": PrivateName(_DEVICE),
    "torch:Tensor._make_wrapper_subclass": PrivateName(_DEVICE),
    # For proofs
    "torch:_C.TensorBase.is_cuda": PrivateName(_PROOF),
    "torch:_C.DisableTorchFunction": PrivateName(_PROOF),
    "torch._subclasses.schema_check_mode:__name__": PrivateName("proofs of checkpoints import it each: slower"),
    "triton:compile": PrivateName(_PROOF),
    "triton:CompilationError": PrivateName(_PROOF),
    "triton:constexpr_function": PrivateName(_PROOF, since="3.5"),
    "triton.compiler:ASTSource": PrivateName(_PROOF),
    "triton.backends.compiler:GPUTarget": PrivateName(_PROOF),
    "triton.runtime.interpreter:InterpretedFunction": PrivateName(_INTERPRETER),
    "triton.runtime.driver:driver": PrivateName("Transformer Engine cannot be imported on a CPU with Triton 3.2"),
    "triton.runtime.jit:JITFunction": PrivateName(_INTERPRETER),
    "triton.experimental.gluon.language:__name__": PrivateName("nothing imports it late", since="3.4"),
}

# Attributes of torch's objects, by what has them. They are read where they are needed.
ATTRIBUTES = {
    ("a tensor", "_base"): PrivateName("AttributeError: logits cannot be written over in place"),
    ("a tensor", "_is_view"): PrivateName("AttributeError: logits cannot be written over in place"),
    ("a tensor", "_use_count"): PrivateName("logprob writes over no logits that nobody reads: one copy more"),
    ("a tensor", "_version"): PrivateName("AttributeError: logits that change before backward are not seen"),
    ("a storage", "_cdata"): PrivateName("AttributeError: PagedStash and Footprint cannot tell memory apart"),
    ("a node", "_raw_saved_result"): PrivateName("PagedStash finds nothing to stash"),
    ("a node", "_saved_result"): PrivateName("PagedStash finds nothing to stash"),
    ("a node", "_input_metadata"): PrivateName("AttributeError in PagedStash"),
    ("a node of a custom function", "_raw_saved_tensors"): PrivateName("PagedStash finds nothing to stash"),
    ("a node of a custom function", "_forward_cls"): PrivateName("PagedStash does not recognise compiled functions"),
    ("a saved tensor", "unpack_hook"): PrivateName("PagedStash reads what a checkpoint has, which computes it", "2.12"),
}


def find(path: str) -> Any | None:
    """What torch or triton has at "module:attribute.attribute", which is one of `NAMES`; None if it lacks that."""
    found = _find(path)
    return None if found is _NOTHING else found


def required(path: str) -> Any:
    """The same; MissingNameError, with what cannot run, if torch or triton lacks it."""
    found = _find(path)
    if found is _NOTHING:
        package = path.partition(":")[0].partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "(not installed)")
        raise MissingNameError(
            f"{package} {version} has no {path.replace(':', '.')}: {NAMES[path].without}", name=package
        )
    return found


def missing(paths: Iterable[str]) -> str:
    """The first of these names that is missing, or ""."""
    return next((path.replace(":", ".") for path in paths if _find(path) is _NOTHING), "")


def _find(path: str) -> Any:
    NAMES[path]  # no other name is used
    module, _, attributes = path.partition(":")
    try:
        found: Any = sys.modules.get(module) or import_module(module)
    except ModuleNotFoundError:
        return _NOTHING
    for name in attributes.split("."):
        found = getattr(found, name, _NOTHING)
        if found is _NOTHING:
            return _NOTHING
    return found


def outside_graph(function: Function) -> Function:
    """`function`, which torch.compile does not enter. Does not import the compiler."""
    disable: Any = find("torch:_disable_dynamo")
    if disable is None:
        import torch

        disable = torch.compiler.disable
    disabled: Function = disable(function)
    return disabled
