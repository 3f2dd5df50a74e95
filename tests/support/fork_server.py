"""Processes that need not load third-party modules again: forked from a server that has them.

Most of the CPU seconds of `python -c "import megatron.core..."` go into torch and its imports. The server is a
separate process. It has nothing of the caller's, so each case can start without the packages it is about. The
first case starts as bare as `python -c`. Those after it start with the installed modules that the first one had loaded
at its end.

This file is also the program of the server, which must not have shim loaded. So it imports the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

__all__ = ["CAN_FORK", "PATCHED", "run"]

PATCHED = ("shim", "megatron", "transformer_engine", "transformer_engine_torch")

# On macOS, frameworks of the system do not survive a fork.
CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"
_BOOT = "import sys; exec(compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec'))"
# They differ from case to case, and nothing reads them that is shared. megatron-core sets those of Transformer Engine.
_OF_A_CASE = ("PYTEST_", "MEGATRON_SHIM_", "NVTE_")
_GRACE = 10  # further seconds for the server to answer


def run(
    code: str,
    *,
    stdin: str = "",
    timeout: float | None = None,
    never: Collection[str] = PATCHED,
    share_loaded: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -c code` with this process's sys.path, environment and directory, as far as possible by a fork.

    never: top-level packages that are not shared, and neither is a package that asks for one of them. Modules that are
    not installed, such as tests and source trees on PYTHONPATH, are not shared either.
    share_loaded: share the modules of this process, from the first case on.

    A case that was forked ends without exit handlers and destructors. With its third-party modules it shares what those
    took over when they were loaded, such as the seed of hashes. The server lives as long as this process, or until
    the interpreter's path, environment or directory is another.

    Raises subprocess.TimeoutExpired, with the output so far, when the case has not ended after `timeout` seconds,
    by default ten minutes, more on a machine with much else to do.
    RuntimeError says that the server has died. Where processes cannot be forked, each is started anew.
    """
    if timeout is None:
        from shim.testing.patience import patience  # here, because the server runs this file as a script

        timeout = patience()
    if not CAN_FORK:
        path = f"import sys; sys.path[:] = {_search_path()!r}\n"
        command = [sys.executable, "-c", path + code]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
    with _LOCK, tempfile.TemporaryDirectory(prefix="shim-case-") as name:
        files = {stream: Path(name, stream) for stream in ("stdin", "stdout", "stderr", "loaded")}
        for stream in ("stdin", "stdout", "stderr"):
            files[stream].write_text(stdin if stream == "stdin" else "", encoding="utf-8")
        request = {
            "code": code,
            "files": {stream: str(file) for stream, file in files.items()},
            "path": _search_path(),
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "timeout": timeout,
        }
        status = _shared(never, share_loaded).run(request)
        stdout, stderr = (
            files[stream].read_text(encoding="utf-8", errors="replace") for stream in ("stdout", "stderr")
        )
    if status is None:
        raise subprocess.TimeoutExpired([sys.executable, "-c", code], timeout, stdout, stderr)
    return subprocess.CompletedProcess([sys.executable, "-c", code], status, stdout, stderr)


# ---- in the process that asks

_LOCK = threading.RLock()
_SERVERS: dict[str, _Shared] = {}  # at most one, because each holds hundreds of megabytes


class _Shared:
    """One server after another with the same path and environment, and what its cases may share."""

    def __init__(self, never: Collection[str], share_loaded: bool) -> None:
        self.never = sorted(never)
        self.modules: list[str] | None = None  # those to share; None until a case has said which it loads
        if share_loaded:
            self._take(_loaded(never))
        self.process: subprocess.Popen[bytes] | None = None
        self.said: Any = None

    def run(self, request: dict[str, Any]) -> int | None:
        """The exit status of a case; None if it took too long."""
        try:
            while True:
                reply = self._ask({**request, "modules": self.modules or [], "never": self.never})
                if "refused" not in reply:
                    break
                # The effects of a module's import cannot be undone. So another server begins without it.
                self.close()
                tops = set(reply["refused"])
                self.modules = [name for name in self.modules or () if tops and name.partition(".")[0] not in tops]
        except BaseException:
            self.close()
            raise
        loaded = Path(request["files"]["loaded"])
        if self.modules is None and loaded.exists():
            self._take(json.loads(loaded.read_text("utf-8")))
        return reply["status"]

    def _take(self, found: dict[str, list[str]]) -> None:
        self.modules, self.never = found["installed"], sorted({*self.never, *found["stand_ins"]})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.process is None:
            self.said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        # Modules are loaded before the time of a case begins.
        deadline = time.monotonic() + 2 * request["timeout"] + _GRACE
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not part:
                self.said.seek(0)
                what = "has died" if ready else "does not answer"
                raise RuntimeError(
                    f"the server of forked cases {what}:\n{self.said.read()[-2000:].decode(errors='replace')}"
                )
            answer += part
        return json.loads(answer)

    def close(self) -> None:
        """End the server, and the case that still runs."""
        if self.process is None:
            return
        process, self.process = self.process, None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.said.close()


def _shared(never: Collection[str], share_loaded: bool) -> _Shared:
    # A forked process has its parent's servers in memory, and their pipes, but must not talk to them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_CASE)}
    parts = [os.getpid(), sys.executable, _search_path(), environment, os.getcwd(), sorted(never), share_loaded]
    key = json.dumps(parts, sort_keys=True)
    if key not in _SERVERS:
        _close_all()
        _SERVERS[key] = _Shared(never, share_loaded)
    return _SERVERS[key]


def _search_path() -> list[str]:
    return [str(entry) or "." for entry in sys.path]


@atexit.register
def _close_all() -> None:
    for key, server in _SERVERS.items():
        if json.loads(key)[0] == os.getpid():
            server.close()
    _SERVERS.clear()


# ---- in the server


def _serve() -> dict[str, Any] | None:
    """Answer requests. In a forked process returns the one that it is for, in the server None at the end."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # modules may print when they are imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks handles Ctrl-C
    for line in requests:
        request = json.loads(line)
        sys.path[:] = request["path"]
        reply = _load(request["modules"], request["never"])
        if not reply:
            pid = os.fork()
            if not pid:
                requests.close()
                replies.close()
                return request
            reply = {"status": _wait(pid, request["timeout"], requests)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
    return None


def _load(modules: list[str], never: Collection[str]) -> dict[str, Any]:
    """Import the shared modules. The reply is empty, unless processes forked now would not start as they should."""
    guard = _Guard(never)
    sys.meta_path.insert(0, guard)
    try:
        for name in modules:
            if name not in sys.modules:
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
    finally:
        sys.meta_path.remove(guard)
    if guard.asked:
        return {"refused": sorted(guard.by)}
    # A lock that another thread holds at the fork stays locked in the case.
    return {"refused": []} if len(sys._current_frames()) > 1 else {}


class _Guard:
    """Keeps packages out of the server, and notes the modules that asked for one: they may differ without it."""

    def __init__(self, never: Collection[str]) -> None:
        self.never = frozenset(never)
        self.asked = False
        self.by: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] not in self.never:
            return
        self.asked = True
        for frame in _frames():
            self.by.add(str(frame.f_globals.get("__name__")).partition(".")[0])
        self.by -= {"__main__", *sys.stdlib_module_names}
        raise ModuleNotFoundError(f"{name} is not shared", name=name)


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _wait(pid: int, timeout: float, requests: Any) -> int | None:
    """The exit status of a case, negative for a signal as in subprocess; None after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # Nothing is asked while a case runs. So the pipe is ready only when the process at its other end is gone.
        orphaned = bool(select.select([requests], [], [], pause)[0])
        if orphaned or time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if orphaned:
                os._exit(1)
            return None
        pause = min(2 * pause, 0.02)


# ---- in a forked process


def _become(request: dict[str, Any]) -> int:
    """Run the case as `python -c` would, except for its end. Returns the exit status."""
    for stream, descriptor, mode in (("stdin", 0, os.O_RDONLY), ("stdout", 1, os.O_WRONLY), ("stderr", 2, os.O_WRONLY)):
        file = os.open(request["files"][stream], mode | (os.O_APPEND if descriptor else 0))
        os.dup2(file, descriptor)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    importlib.invalidate_caches()  # the server may have seen a directory before the caller wrote into it
    sys.argv[:] = ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    Path(request["files"]["loaded"]).write_text(json.dumps(_loaded(request["never"])), "utf-8")
    return 0


def _loaded(never: Collection[str]) -> dict[str, list[str]]:
    """The names of loaded modules that are installed, in the order of their import, and the packages made by hand."""
    installed, stand_ins = [], []
    for name, module in sys.modules.items():
        top = name.partition(".")[0]
        if top not in never and top not in ("__main__", "__mp_main__"):
            if _is_installed(name, module):
                installed.append(name)
            elif name == top and not _has_file(module):
                stand_ins.append(name)
    return {"installed": installed, "stand_ins": stand_ins}


def _has_file(module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    # A package without an __init__ has directories only.
    files = [origin] if origin else list(getattr(spec, "submodule_search_locations", None) or ())
    return bool(files) and all(os.path.exists(file) for file in files)


def _is_installed(name: str, module: Any) -> bool:
    """Whether the same import finds it in the server: of the standard library, or in a site-packages directory."""
    if getattr(getattr(module, "__spec__", None), "name", None) != name or not _has_file(module):
        return False
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    origin = module.__spec__.origin or next(iter(module.__spec__.submodule_search_locations))
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(origin).parts)


def _end(status: int) -> None:
    """Leave without destructors: they would copy the memory of the server, which takes longer than most cases."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _case = _serve()
    _end(0 if _case is None else _become(_case))
