"""Transformer Engine's real Python layer without its compiled part: import it, and run its contexts without a GPU.

All of TE's Python sources are real, from the TE release on the path: fp8_autocast, the recipes, checkpoint, CPU
offloading, signatures and places of names. The compiled part is missing: kernels, GEMMs and with them the forward of
every TE module, and all FP8 numerics. shim.testing.fp8_layer has a layer whose GEMM is torch's.

    from shim import testing

    testing.transformer_engine_on_cpu()  # before megatron or transformer_engine is imported
    import transformer_engine.pytorch as te

    with testing.te_cuda_stand_ins(), testing.record_fp8_events() as events:
        with te.fp8_autocast(enabled=True):
            assert testing.fp8_state().enabled
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from shim._torch_names import find

from . import cpu
from .cpu import NoEvent, Substitution
from .fp8 import state_manager

__all__ = [
    "CompiledOpError",
    "compiled_ops",
    "te_cuda_stand_ins",
    "transformer_engine_on_cpu",
]

_TE = "transformer_engine"
_EXTENSION = "transformer_engine_torch"
_PASSES_ON = "cpp_extensions"  # the TE package that does `from transformer_engine_torch import *`


class CompiledOpError(RuntimeError):
    """An operation of TE's compiled extension was called, but only the stand-in is there."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{_EXTENSION}.{name} was called, but here is only a stand-in for TE's compiled extension: run this on a "
            "machine that has the extension, without transformer_engine_on_cpu()"
        )


# Functions that TE's Python code calls during its import, or to choose between paths of Python code.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "get_cudnn_version": lambda *args: 91300,  # attention backends are listed by it; 9.13.0 has all of them
    "get_cublasLt_version": lambda *args: 130000,  # asked on compute capability 8.9, and by grouped GEMMs
    "get_num_cublas_streams": lambda *args: 4,  # a constant of the library; sizes a list at import
}


# Members in the order of the compiled library. By their values modules find their quantizers in lists.
_ORDERS: dict[str, tuple[str, ...]] = {
    "FP8FwdTensors": tuple(f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": tuple(f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT")),
}


_computed: dict[str, Callable[..., Any]] = {}  # operations that something computes at this moment, by name


# ---- importing TE


def transformer_engine_on_cpu() -> None:
    """Make `import transformer_engine` work without its compiled part, from now on and for the whole process.

    Call it before anything imports transformer_engine, as megatron.core does. It uses the TE release (2.1 to 2.20.2)
    on sys.path and writes nothing there. `transformer_engine_torch` becomes a stand-in with the names that the Python
    sources of that release use. Its operations raise CompiledOpError. Its enumerations have distinct members, but not
    the values of the compiled library, except for those by which modules find their quantizers. A second call does
    nothing.

    If TE still cannot be imported, its import raises RuntimeError. TE and megatron would take an ImportError to mean
    that TE is not installed, and a test would go on without TE.

    Raises RuntimeError if transformer_engine has already been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted({_TE, _EXTENSION} & set(sys.modules))
    if early:
        raise RuntimeError(
            f"{' and '.join(early)} was imported before transformer_engine_on_cpu(): call it first, in a new process "
            "(in pytest: at the top of conftest.py, before anything imports megatron)"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the stand-in extension, and runs two modules of TE in contexts that replace their loading of libraries."""

    def __init__(self) -> None:
        self._within: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            f"{_TE}.common": _no_libraries,
            f"{_TE}.pytorch": _stand_in_loaded,
        }
        self._looking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _EXTENSION:
            return _extension_spec()
        if name not in self._within or getattr(self._looking, "now", False):
            return None
        self._looking.now = True  # another hook may ask all finders, including this one
        try:
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in sys.meta_path)), None)
        finally:
            self._looking.now = False
        if spec is not None and spec.loader is not None:
            _run_within(spec.loader, self._within[name])
        return spec


def _run_within(loader: Loader, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Let this loader run its module inside `context`, once. The loader object stays the same."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        with context():
            run(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_libraries() -> Iterator[None]:
    """Set the switch of TE's setup.py with which transformer_engine.common loads no shared library."""
    wanted = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _NoDriver:
    """Triton's driver of a GPU that is not there, for a Triton that asks it for a clock where a kernel is defined."""

    def get_benchmarker(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no GPU for this Triton kernel (driver.active.{name})")


def _let_kernels_be_defined() -> None:
    """Without a GPU, Triton before 3.3 lets no module be imported in which kernels are tuned."""
    if find_spec("triton") is None or Version(version("triton")) >= Version("3.3"):
        return
    driver = find("triton.runtime.driver:driver")
    if driver is not None and not torch.cuda.is_available():
        driver.set_active(_NoDriver())


@contextlib.contextmanager
def _stand_in_loaded() -> Iterator[None]:
    """During the import of transformer_engine.pytorch, its loader of the extension finds the stand-in."""
    _let_kernels_be_defined()
    common = import_module(f"{_TE}.common")
    substitutes: dict[str, Any] = {
        "load_framework_extension": lambda framework: import_module(f"{_TE}_{framework}"),  # from 2.4
        "get_te_path": _PretendDirectory,  # up to 2.3: a directory with a file of the right name ...
        "is_package_installed": lambda package: False,  # ... and without a question to pip about other packages
    }
    originals = {name: vars(common)[name] for name in substitutes if name in vars(common)}
    with contextlib.ExitStack() as undo:
        for name, original in originals.items():
            setattr(common, name, substitutes[name])
            undo.callback(_put_back, name, substitutes[name], original)
        if "get_te_path" in originals:
            undo.enter_context(_file_is_stand_in())
        try:
            yield
        except ImportError as error:
            raise RuntimeError(
                f"this Transformer Engine does not import with shim.testing's stand-in for its extension: {error}. "
                "Its Python dependencies must be there: pydantic, einops, onnxscript"
            ) from error


def _put_back(name: str, substitute: Any, original: Any) -> None:
    for module in (sys.modules.get(f"{_TE}.common"), sys.modules.get(f"{_TE}.pytorch")):
        if module is not None and vars(module).get(name) is substitute:
            setattr(module, name, original)


class _PretendDirectory:
    """Where TE up to 2.3 looks for its extension."""

    def __truediv__(self, name: str) -> _PretendDirectory:
        return self

    def glob(self, pattern: str) -> Iterator[str]:
        return iter([_EXTENSION])


@contextlib.contextmanager
def _file_is_stand_in() -> Iterator[None]:
    """TE up to 2.3 makes the module from the file itself. Answer one such call, then restore importlib."""
    original = importlib.util.spec_from_file_location

    def spec_from_file_location(name: str, *args: Any, **kwargs: Any) -> ModuleSpec | None:
        if name != _EXTENSION:
            return original(name, *args, **kwargs)
        importlib.util.spec_from_file_location = original
        return _extension_spec()

    importlib.util.spec_from_file_location = spec_from_file_location
    try:
        yield
    finally:
        importlib.util.spec_from_file_location = original


# ---- the stand-in extension


def _extension_spec() -> ModuleSpec | None:
    te = importlib.util.find_spec(_TE)
    if te is None or not te.submodule_search_locations:
        return None
    sources = Path(next(iter(te.submodule_search_locations)))
    return ModuleSpec(_EXTENSION, _ExtensionLoader(sources), origin=f"stand-in by {__name__}")


class _ExtensionLoader(Loader):
    def __init__(self, sources: Path) -> None:
        self._sources = sources

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Stand-in for TE's compiled extension, with the names that {self._sources} uses."
        for name, members in _names_used(self._sources).items():
            setattr(module, name, _ANSWERS.get(name) or _stand_in(name, members))


class _CompiledEnum(enum.Enum):
    """Like pybind's enumerations: convertible to int, but not one."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


def _stand_in(name: str, members: set[str]) -> Any:
    if members:
        order = _ORDERS.get(name) or sorted(members)
        return _CompiledEnum(name, order, module=_EXTENSION, start=0)  # type: ignore[call-arg]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        computed = _computed.get(name)
        if computed is not None:
            return computed(*args, **kwargs)
        raise CompiledOpError(name)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__ = _EXTENSION
    # Annotations and isinstance() name classes. Making an instance is an operation.
    return type(name, (), {"__new__": refuse, "__module__": _EXTENSION}) if name[0].isupper() else refuse


@contextlib.contextmanager
def compiled_ops(operations: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let these operations of the stand-in extension compute, by name, also if they were imported before.

    Those of a context further in win. Process-wide.
    """
    before = dict(_computed)
    _computed.update(operations)
    try:
        yield
    finally:
        _computed.clear()
        _computed.update(before)


def _names_used(package: Path) -> dict[str, set[str]]:
    """Names of the compiled extension in TE's Python sources, with the used members of each."""
    used: dict[str, set[str]] = {}
    passed_on: set[str] = set()
    defined: set[str] = set()
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] == "jax":
            continue
        source = file.read_text(encoding="utf-8")
        if _EXTENSION in source or _PASSES_ON in source:
            _scan(ast.parse(source), used, passed_on)
        if file.parent.name == _PASSES_ON:
            defined |= {getattr(node, "name", "") for node in ast.parse(source).body}
    for name in passed_on - defined:
        used.setdefault(name, set())
    return used


def _scan(tree: ast.Module, used: dict[str, set[str]], passed_on: set[str]) -> None:
    """Add one file's names to `used`, and names that may be Python functions of cpp_extensions to `passed_on`."""
    modules: dict[str, bool] = {}  # local name of a module -> whether it is the extension itself
    names: dict[str, str] = {}  # local name -> name in the extension
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.rpartition(".")[2] in (_EXTENSION, _PASSES_ON):
                    modules[alias.asname or alias.name] = alias.name == _EXTENSION
        elif isinstance(node, ast.ImportFrom):
            source = (node.module or "").rpartition(".")[2]
            for alias in node.names:
                if source == _EXTENSION and alias.name != "*":
                    names[alias.asname or alias.name] = alias.name
                elif source == _PASSES_ON:
                    passed_on.add(alias.name)
                elif alias.name == _PASSES_ON:
                    modules.setdefault(alias.asname or alias.name, False)

    def named(node: ast.expr) -> str | None:
        """The name in the extension that an expression means."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and modules.get(node.value.id):
            return node.attr
        return None

    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = named(node.value)
            if name is not None:
                names[node.targets[0].id] = name
    for name in names.values():
        used.setdefault(name, set())
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and modules.get(node.value.id) is False:
            passed_on.add(node.attr)
        name, owner = named(node), named(node.value)
        if name is not None:
            used.setdefault(name, set())
        elif owner is not None and owner[0].isupper() and not node.attr.startswith("_"):
            used.setdefault(owner, set()).add(node.attr)


# ---- CUDA entry points


class _CpuGenerator:
    """torch's CPU generator instead of every device's CUDA generator. States are snapshots of it."""

    def get_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(self, state: torch.Tensor) -> _CpuGenerator:
        torch.set_rng_state(state)
        return self

    clone_state = graphsafe_get_state = get_state
    graphsafe_set_state = set_state


class _AnyDevice:
    """Indexed by a device number or, because current_device() is substituted, by a device."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __getitem__(self, device: Any) -> Any:
        return self._item

    def __len__(self) -> int:
        return 1


def _at_once(function: Callable[[], Any], **kwargs: Any) -> None:
    function()


def _stand_ins(capability: tuple[int, int]) -> tuple[Substitution, ...]:
    major, minor = capability
    properties = SimpleNamespace(
        name="stand-in", major=major, minor=minor, multi_processor_count=1, total_memory=2**30, warp_size=32
    )
    distributed = f"{_TE}.pytorch.distributed"
    return (
        # The rows of megatron_on_cpu, so that either context works alone or inside the other.
        *(row for row in cpu.SUBSTITUTIONS if row.owner.startswith("torch.cuda")),
        Substitution("torch.cuda", "Event", lambda _: NoEvent, "CPU offloading"),
        Substitution(
            "torch.cuda", "get_device_properties", lambda _: lambda device=None: properties, "which recipes there are"
        ),
        Substitution(
            "torch.cuda", "get_device_capability", lambda _: lambda device=None: capability, "which recipes there are"
        ),
        Substitution("torch.version", "cuda", lambda _: "12.9", "FP8 block scaling asks for 12.9"),
        Substitution("torch.cuda", "is_current_stream_capturing", lambda _: lambda: False, "modules ask at each call"),
        *(
            Substitution("torch.cuda.nvtx", name, lambda _: cpu._no_context, "modules mark their calls for a profiler")
            for name in ("range", "range_push", "range_pop")
        ),
        Substitution("torch.cuda", "default_generators", lambda _: _AnyDevice(_CpuGenerator()), "RNG in checkpoint"),
        Substitution(distributed, "_lazy_init", lambda _: cpu._nothing, "RNG in checkpoint: CUDA is not initialised"),
        Substitution(distributed, "_lazy_call", lambda _: _at_once, "RNG in checkpoint: or it would wait for CUDA"),
        *(_WITH_MEGATRON if _has_megatron() else ()),
    )


def _torch_norm(original: Any) -> Any:
    return import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm


_WITH_MEGATRON = (
    Substitution(
        "megatron.core.transformer.transformer_block",
        "LayerNormImpl",
        _torch_norm,
        "with TE installed a block's final norm is TE's kernel, whatever its layers are",
    ),
)


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def te_cuda_stand_ins(capability: tuple[int, int] = (10, 0)) -> Iterator[None]:
    """Let TE's contexts and checkpoint run without a GPU. Everything is undone on exit.

    `capability` is the compute capability that TE sees. Under (10, 0) every recipe is available, except for FP8 block
    scaling in TE 2.3 to 2.8, which needs (9, 0). Under (9, 0) MXFP8 and NVFP4 are not available, under (8, 0) no
    recipe is. torch's CPU generator replaces the CUDA generators, so that a recompute draws the same dropout. A
    megatron-core model of local layers gets the torch norm at its end instead of TE's, as without TE.

    Nests with `megatron_on_cpu` in either order. Like it, this context is process-wide, except for the torch function
    mode, which belongs to the thread.

    Raises ImportError if transformer_engine cannot be imported.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(_forget_capability)
        for owner_name, name, build, _reason in _stand_ins(capability):
            owner = cpu._resolve(owner_name)
            original = vars(owner)[name]
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, build(original))
        _forget_capability()
        undo.enter_context(cpu._CudaMeansCpu())
        yield


def _forget_capability() -> None:
    """Clear TE's memory of the device: class attributes, module globals from 2.15, and lru_caches."""
    manager = state_manager()
    module = import_module(manager.__module__)
    for name in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        for owner, attribute in ((manager, f"{name}_available"), (module, f"_{name.upper()}_SUPPORT")):
            if attribute in vars(owner):
                setattr(owner, attribute, None)
        _clear_cache(getattr(module, f"check_{name}_support", None))
    utils = import_module(f"{_TE}.pytorch.utils")
    for name in ("_get_device_compute_capability", "is_non_tn_fp8_gemm_supported", "get_sm_count"):
        _clear_cache(getattr(utils, name, None))


def _clear_cache(function: Any) -> None:
    clear = getattr(function, "cache_clear", None)
    if clear is not None:
        clear()
