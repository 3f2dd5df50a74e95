"""examples/github-workflow.yml as a trainer copies it: its steps, installations included, in an environment of its own.

The package index is what the cache holds, and torch is the one of this environment.
"""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest
import yaml
from thorough import in_full
from unit_helpers import REPOSITORY, write_file

from shim.testing.releases import cache_dir, fetch

RELEASE = "0.19.2"
JOBS = yaml.safe_load((REPOSITORY / "examples" / "github-workflow.yml").read_text("utf-8"))
BASH = shutil.which("bash")
TEST = """
import shim

def test_a_trainer():
    shim.apply(require=["loss-token-count"])
    import megatron.core.pipeline_parallel.schedules
    assert shim.status()["loss-token-count"].state == "applied"
    assert "site-packages" in shim.__file__
"""

# tests/unit/test_ci_cells.py runs the steps of the jobs in `make test`, without installations.
pytestmark = [in_full, pytest.mark.skipif(BASH is None, reason="the steps of a workflow are scripts for bash")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What `make dist` puts into dist/, of a copy, because a build writes into its tree."""
    tree, dist = tmp_path_factory.mktemp("tree") / "tree", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "docs", "tests")
    shutil.copytree(REPOSITORY, tree, ignore=ignored)
    how = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *how, "."], cwd=tree, check=True)
    [found] = dist.glob("megatron_shim-*.whl")
    return found


@pytest.fixture
def runner(wheel, tmp_path):
    """Runs the steps of a job in order, each as a runner does, until one fails; returns its code and the summary."""
    fetch(RELEASE)
    workspace, python = tmp_path / "workspace", tmp_path / "python"
    (workspace / "ci").mkdir(parents=True)
    shutil.copy(wheel, workspace / "ci")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python)], check=True)
    [site] = python.glob("lib/python*/site-packages")
    # torch, pip and what else the environment of the tests has; not its shim, for which a finder stands there.
    write_file(site / "base.pth", sysconfig.get_paths()["purelib"] + "\n")
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRON_SHIM_", "PYTHON"))}
    environ |= JOBS["env"] | {
        "PATH": os.pathsep.join([str(python / "bin"), os.environ["PATH"]]),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(cache_dir() / "megatron-core" / "wheels"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "MEGATRON_SHIM_CACHE": str(cache_dir()),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(output),
    }

    def run(job, but=(), **variables):
        summary.write_text("")
        output.write_text("")
        for step in JOBS["jobs"][job]["steps"]:
            if "run" not in step or step["name"] in but:
                continue
            assert "${{" not in step["run"], "expressions belong into env, where no shell reads them"
            env = environ | step.get("env", {}) | variables
            done = subprocess.run(
                [BASH, "-e", "-c", step["run"]], cwd=workspace, env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, (step["name"], done.stdout + done.stderr)
        return summary.read_text(), output.read_text()

    run.workspace = workspace
    return run


def test_the_cells_and_the_tests_of_a_trainer(runner):
    _, output = runner("cells")
    assert output.startswith('matrix={"include": [{"megatron-core": "0.16')
    write_file(runner.workspace / "tests" / "test_trainer.py", TEST)
    runner("test", MEGATRON_CORE=RELEASE)


def test_the_daily_jobs(runner):
    """Of the proofs one, because all take minutes; `pin --prove` has tests of its own."""
    shutil.copytree(fetch(RELEASE) / "megatron", runner.workspace / "Megatron-LM" / "megatron")
    summary, _ = runner("audit")
    assert summary.startswith(f"### shim audit: megatron-core {RELEASE}")
    summary, _ = runner("prove", ["Let the proofs decide about changed functions"], PATCHES="lr-param-groups")
    assert "lr-param-groups" in summary and "fixed" in summary
    runner("newest-torch", ["Prove with the newest torch"])
