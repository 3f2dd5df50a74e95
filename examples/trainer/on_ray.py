"""train.py on Ray, a rank in each task: `python on_ray.py 2 --tp 2`."""

import os
import socket
import sys
from pathlib import Path

import ray

import shim


@ray.remote(num_cpus=1)
def rank(environment: dict[str, str], given: list[str]) -> None:
    os.environ |= environment
    from train import main

    main(given)


if __name__ == "__main__":
    world, *given = sys.argv[1:]
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}"
    # shim: in each worker before it imports megatron; train.py narrows it to what concerns the run.
    ray.init(runtime_env=shim.ray_runtime_env({"env_vars": {"PYTHONPATH": path}}), num_cpus=int(world))
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": world}
    ray.get([rank.remote({**meet, "RANK": str(number)}, given) for number in range(int(world))])
