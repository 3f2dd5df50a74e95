"""Real Ray: actors and tasks find shim applied before they import anything, on nodes that inherit nothing too."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("ray", reason="ray is not installed; `make integration` does so")

from fake_world import World

from shim.testing.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = """
    import os, sys
    import ray, shim

    def facts():
        "What a worker sees: its process, whether shim was there first, and a function of the target."
        import sys, os
        engine = sys.modules.get("shim._engine.engine")
        first = engine is not None and engine.ENGINE.plan is not None and "megatron.core" not in sys.modules
        from megatron.core.ops import double
        from megatron.core.other import other
        return {"pid": os.getpid(), "first": first, "double": double(2), "other": other(1),
                "next": os.environ.get("NEXT_RAN"), "mine": os.environ.get("MINE"),
                "node": ray.get_runtime_context().get_node_id()}

    @ray.remote(num_cpus=1)
    class Actor:
        def __init__(self):
            self.found = facts()
        def get(self):
            return self.found

    task = ray.remote(num_cpus=1)(facts)
    """


@pytest.fixture
def tree(tmp_path):
    world = World(tmp_path / "tree")
    world.patch("count", ["megatron.core.ops:double"])
    world.patch("more", ["megatron.core.other:other"])
    (world.root / "next_hook.py").write_text("import os\n\n\ndef go():\n    os.environ['NEXT_RAN'] = 'yes'\n")
    return world


def run(code, tree, **variables):
    """A driver in a process of its own, so that no Ray is left in this one."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("MEGATRON_SHIM_", "RAY_", "PYTHON"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, (tree.root, REPOSITORY))),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **variables,
    }
    command = [sys.executable, "-c", dedent(HEAD) + dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=patience())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_actors_and_tasks_are_patched_before_they_import_the_target(tree):
    """Options travel, env_vars and the hook of the caller's stay; what is set in the driver's environment counts."""
    out = run(
        f"""
        env = shim.ray_runtime_env(
            {{"env_vars": {{"MINE": "1"}}, "worker_process_setup_hook": "next_hook.go"}},
            exclude=["more"], matrix={str(tree.matrix)!r}, packages="fake_patches",
        )
        ray.init("local", num_cpus=2, include_dashboard=False, runtime_env=env, log_to_driver=False)
        for found in (ray.get(Actor.remote().get.remote()), ray.get(task.remote())):
            assert found["first"] and found["pid"] != os.getpid(), found
            assert found["double"] == ("count", 4) and found["other"] == 1, found
            assert found["next"] == "yes" and found["mine"] == "1", found
        assert "megatron.core" not in sys.modules
        ray.shutdown()
        os.environ["MEGATRON_SHIM_MATRIX"] = {str(tree.matrix)!r}
        os.environ["MEGATRON_SHIM_ONLY"] = "more"
        env = shim.ray_runtime_env(packages="fake_patches")
        ray.init("local", num_cpus=1, include_dashboard=False, runtime_env=env, log_to_driver=False)
        found = ray.get(task.remote())
        assert found["double"] == 4 and found["other"] == ("more", 1) and found["next"] is None, found
        print("fine")
        """,
        tree,
    )
    assert out.endswith("fine\n")


def test_a_worker_where_shim_cannot_be_applied_does_not_start(tree):
    """The task fails, and says why; it does not run unpatched."""
    out = run(
        f"""
        mine = dict(matrix={str(tree.matrix)!r}, packages="fake_patches")
        env = shim.ray_runtime_env(require=["count"], lock="/no/such/lock", **mine)
        ray.init("local", num_cpus=1, include_dashboard=False, runtime_env=env, log_to_driver=False)
        try:
            print(ray.get(ray.remote(max_retries=0)(facts).remote(), timeout={patience()}))
        except ray.exceptions.RayError as error:
            print(type(error).__name__)
        """,
        tree,
    )
    assert out.splitlines()[-1] == "WorkerCrashedError"
    assert "there is no lock" in out  # said by the raylet, for the driver


def test_workers_on_a_node_that_inherits_nothing(tree):
    """Two raylets: the second is started from an environment without any variable of shim; its workers are patched."""
    out = run(
        f"""
        from ray.cluster_utils import Cluster
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
        assert not [name for name in os.environ if name.startswith("MEGATRON_SHIM_")]
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        os.environ["MEGATRON_SHIM_MATRIX"] = {str(tree.matrix)!r}
        env = shim.ray_runtime_env(exclude="more", packages="fake_patches")
        ray.init(address=cluster.address, runtime_env=env, log_to_driver=False)
        nodes = [node["NodeID"] for node in ray.nodes()]
        assert len(nodes) == 2
        for node in nodes:
            for remote in (task, Actor):
                there = remote.options(scheduling_strategy=On(node, soft=False)).remote()
                found = ray.get(there.get.remote() if remote is Actor else there)
                assert found["node"] == node and found["first"], found
                assert found["double"] == ("count", 4) and found["other"] == 1, found
        ray.shutdown()
        cluster.shutdown()
        print("fine")
        """,
        tree,
    )
    assert out.endswith("fine\n")
