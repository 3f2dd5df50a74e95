"""As `python -m shim.testing.cells`, but each cell is a fork of a process that has loaded torch and pytest.

Loading them is three of the four CPU seconds before the first test of a cell. The process that is forked has neither
shim nor a release loaded. Coverage, which begins with an interpreter, needs `python -m shim.testing.cells` itself.
"""

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import SimpleNamespace

# What megatron-core and Transformer Engine import, with all that these import in turn.
LOADED = """
    pytest torch torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.tensor torch._inductor.codecache
    torch._dynamo torch._functorch.aot_autograd torch.onnx torch.ao.quantization triton onnxscript pydantic einops
    setuptools
"""


def serve(listener):
    """Fork a process for each request, and answer with its exit status, until the parent ends."""
    parent = os.getppid()
    for name in LOADED.split():
        import_module(name)
    gc.freeze()
    running = {}
    while os.getppid() == parent:
        if select.select([listener], [], [], 0.1)[0]:
            connection, _ = listener.accept()
            with connection.makefile() as lines:
                request = json.loads(lines.readline())
            pid = os.fork()
            if not pid:
                return request
            running[pid] = connection
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with running.pop(pid) as connection:
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    return None


def become(request):
    """`python -m pytest` with the environment and output of the request; the exit status."""
    for descriptor, file, mode in ((0, os.devnull, os.O_RDONLY), (1, request["log"], os.O_WRONLY), (2, None, None)):
        os.dup2(1 if file is None else os.open(file, mode), descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:1] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    invalidate_caches()
    sys.argv[:] = request["arguments"]
    import pytest

    code = pytest.main(sys.argv[1:])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def main():
    if sys.platform == "darwin":  # whose frameworks do not survive a fork
        from shim.testing import cells

        return cells.main()
    place = tempfile.mkdtemp(prefix="shim-cells-")
    address = str(Path(place, "socket"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = os.fork()
        if not server:
            request = serve(listener)
            # Without destructors, which would copy the memory of the server.
            os._exit(0 if request is None else become(request))

    def run(command, env, stdout, **_):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(address)
            request = {"arguments": command[2:], "environment": env, "log": stdout.name}
            asking.sendall(json.dumps(request).encode() + b"\n")
            answer = asking.makefile().read()
        return SimpleNamespace(returncode=int(answer or "-1"))

    from shim.testing import cells

    cells.subprocess = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    try:
        return cells.main()
    finally:
        os.kill(server, signal.SIGTERM)
        os.waitpid(server, 0)
        shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
