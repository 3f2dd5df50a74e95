"""`shim run` puts this file in front of PYTHONPATH, so that every Python process of a job applies shim if it needs to.

It runs at the start of each process, and most processes never import megatron. So it imports only modules that every
Python has loaded, and leaves a finder that compares one string for each import. It runs a sitecustomize that it hides.
"""

import _thread
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TRIGGERS = ("megatron.core", "transformer_engine")
ALLOWED = os.path.join(HERE, "packages=")  # start of an entry of PYTHONPATH that names packages for apply()
PACKAGES = [entry[len(ALLOWED) :] for entry in sys.path if entry.startswith(ALLOWED)]


class _ApplyOnImport:
    """A finder that applies shim before the first import of one of TRIGGERS, and then removes itself."""

    is_shim_finder = True

    def __init__(self):  # type: ignore[no-untyped-def]
        self.lock = _thread.RLock()  # a second thread that imports a trigger waits until shim is applied

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in TRIGGERS or self not in sys.meta_path or not self._search(name, path, target, False):
            return None
        with self.lock:
            if self in sys.meta_path:
                # A new list: another thread may be going through the old one, and would skip a finder.
                sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
                try:
                    _apply()
                except BaseException:
                    sys.meta_path.insert(0, self)  # so that the next import also fails
                    raise
        return self._search(name, path, target, True)  # again, because shim has a finder by now

    def _search(self, name, path, target, with_shim):  # type: ignore[no-untyped-def]
        for finder in list(sys.meta_path):
            look = getattr(finder, "find_spec", None)
            if finder is self or look is None or (not with_shim and getattr(finder, "is_shim_finder", False)):
                continue
            spec = look(name, path, target)
            if spec is not None:
                return spec
        return None


def _apply() -> None:
    engine = sys.modules.get("shim._engine.engine")
    if engine is not None and engine.ENGINE.switches:
        return  # the program has called shim itself, and its arguments count
    home = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    try:
        if not _is_found():  # this Python has no shim. Take the copy of `shim run`, which needs packaging and PyYAML.
            sys.path.append(home)
            try:
                import shim
            finally:
                sys.path.remove(home)
        import shim

        shim.apply(packages=PACKAGES)
    except ImportError as error:
        # Not an ImportError, because trainers guard their imports of megatron with `except ImportError`.
        raise RuntimeError(
            f"shim run: {sys.executable} cannot import shim ({error}). Remedy: install megatron-shim there."
        ) from error


def _is_found() -> bool:
    """Whether `import shim` gives megatron-shim. RuntimeError if it would give another package of that name."""
    from importlib.util import find_spec

    try:
        spec = find_spec("shim")
    except ValueError:  # the loaded module was made by hand, and has no spec
        spec = None
    loaded = sys.modules.get("shim")
    places = list(getattr(loaded, "__path__", None) or getattr(spec, "submodule_search_locations", None) or ())
    if any(os.path.isfile(os.path.join(place, "_workers", "run", "sitecustomize.py")) for place in places):
        return True
    # A directory without __init__.py yields to a package further along sys.path.
    if loaded is None and (spec is None or spec.origin is None):
        return False
    what = getattr(loaded, "__file__", None) or getattr(spec, "origin", None) or repr(loaded)
    raise RuntimeError(
        f"shim run: {what} has the name shim, and hides megatron-shim in this process. Remedy: rename it, "
        "or take its directory off sys.path (a script's own directory is on it)."
    )


def _run_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    # Not from importlib.machinery, which most processes have not imported yet.
    from _frozen_importlib_external import PathFinder

    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    import importlib.util

    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if not entry.startswith(ALLOWED)]
sys.meta_path.insert(0, _ApplyOnImport())
_run_hidden()
