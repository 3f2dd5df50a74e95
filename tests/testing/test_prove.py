"""The command `shim prove` on real releases: verdicts, formats, time limits, exit codes, another tree, a wheel."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from recording import NO_SOURCES
from thorough import in_full

from shim._proving import worker
from shim._proving.processes import Process
from shim._proving.worker import SideTask, Work
from shim._tools.cli import main
from shim.testing import environment, fetch
from shim.testing.patience import patience
from shim.testing.releases import FetchError

REPOSITORY = Path(__file__).resolve().parents[2]
RELEASE = "0.16.1"


@pytest.fixture(scope="module")
def releases():
    """The directory of a release, downloaded if need be."""

    def directory(release, distribution="megatron-core"):
        try:
            return fetch(release, distribution)
        except FetchError as error:
            pytest.skip(f"{NO_SOURCES}{distribution} {release}: {error}")

    return directory


def prove(*arguments, directories, cwd=None, more=None):
    """The command in a process of its own: (exit code, standard output, standard error)."""
    limit = [] if "--timeout" in arguments else ["--timeout", f"{patience():.0f}"]
    done = subprocess.run(
        [sys.executable, "-m", "shim", "prove", *arguments, *limit],
        capture_output=True,
        text=True,
        env={**environment([*directories, REPOSITORY]), **(more or {})},
        cwd=cwd,
        timeout=patience(),
    )
    return done.returncode, done.stdout, done.stderr


def proved(*arguments, **how):
    code, out, err = prove(*arguments, "--json", **how)
    assert out, err
    return code, json.loads(out), err


def test_a_defect_is_shown_on_stock_and_gone_with_the_patch(releases, tmp_path):
    """The numbers by JSON, and the page, in one run; below `shim run`, whose variables must not reach stock."""
    from shim._workers.environment import run_environment

    page = tmp_path / "page.html"
    more = run_environment(environment([releases(RELEASE), REPOSITORY]))
    code, found, err = proved("label-smoothing", "--html", str(page), directories=[], more=more)
    proof = found["proofs"]["label-smoothing"]
    assert code == 0 and found["failed"] == [] and found["where"]["releases"]["megatron-core"] == RELEASE, err
    assert found["summary"] == "1 fixed, 0 not fixed"
    assert proof["verdict"] == "fixed" and proof["variant"] == "v0_12"
    assert proof["stock"]["value"] > 1e-3 > proof["bound"] >= proof["with_shim"]["value"]
    assert "of 2 sides" in err  # progress, which is no part of the result
    assert "<svg" in page.read_text("utf-8") and "Smoothed cross entropy is wrong" in page.read_text("utf-8")


@in_full
def test_a_patch_that_applies_in_part_is_judged(releases, tmp_path):
    """On a tree in which a body has changed that the patch can do without: as shim.apply() would apply it."""
    shutil.copytree(releases(RELEASE) / "megatron", tmp_path / "megatron")
    file = tmp_path / "megatron/core/models/mamba/mamba_model.py"
    text = file.read_text()
    assert text.count("if labels is None:") == 1
    file.write_text(text.replace("if labels is None:", "if labels is None or labels is False:"))
    code, found, err = proved("sp-unscattered-embeddings", directories=[tmp_path])
    assert code == 0 and found["summary"] == "2 fixed, 0 not fixed", err
    for proof in found["proofs"].values():
        assert proof["reason"] == "in part: without MambaModel.forward, of which the body is not known"


@pytest.mark.parametrize("owner, begins", [(worker, "run_side"), (worker.os, "setsid")], ids=["runs", "begins"])
def test_a_side_that_does_not_end_is_given_up(owner, begins, monkeypatch):
    """Also before it has a group of processes of its own, as on a machine with much else to do."""
    answers = io.StringIO()
    monkeypatch.setattr(owner, begins, lambda *_: time.sleep(600))
    work = Work((SideTask("hangs", "", "", None), SideTask("too", "", "", None)), preload=True, timeout=0.05)
    worker._Pool(work, answers).run()
    found = {answer["key"]: answer for answer in map(json.loads, answers.getvalue().splitlines())}
    assert sorted(found) == ["hangs", "too"]
    assert {(answer["state"], answer["text"]) for answer in found.values()} == {("hung", "no end within 0.05 s")}


@in_full
def test_a_proof_of_which_a_side_does_not_end_is_broken(releases):
    arguments = ["label-smoothing", "--timeout", "0.05", "--ranks", "4"]
    code, found, _ = proved(*arguments, directories=[releases(RELEASE)])
    proof = found["proofs"]["label-smoothing"]
    assert code == 1 and proof["verdict"] == "broken" and "no end within 0.05 s" in proof["reason"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the steps of a workflow are scripts for bash")
@in_full
def test_the_job_of_the_example_proves_another_tree_beside_what_an_audit_says_of_it(releases, tmp_path):
    """It posts Markdown, and fails where a proof does: with a time limit that nothing keeps."""
    jobs = yaml.safe_load((REPOSITORY / "examples" / "github-workflow.yml").read_text("utf-8"))["jobs"]
    [step] = [step for step in jobs["prove"]["steps"] if "shim prove" in step.get("run", "")]
    (tmp_path / "Megatron-LM").symlink_to(releases("0.17.1"))
    summary = tmp_path / "summary.md"
    more = {"GITHUB_STEP_SUMMARY": str(summary), "PATCHES": "label-smoothing"}
    assert list(step["env"]) == ["PATCHES"]
    script = step["run"].replace("shim prove", f"{sys.executable} -m shim prove")
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        capture_output=True,
        text=True,
        env={**environment([releases(RELEASE), REPOSITORY]), **more},
        cwd=tmp_path,
        timeout=patience(),
    )
    text = summary.read_text("utf-8")
    assert done.returncode == 0, done.stderr
    assert text.startswith("### shim prove: megatron-core 0.17.1, torch ") and "1 fixed, 0 not fixed" in text
    row = next(line for line in text.splitlines() if line.startswith("| label-smoothing |"))
    assert "fixed (shim audit: applies as it is" in row


MODEL = """
import types

import shim
from shim import testing

shim.apply()  # as a trainer does that has shim already


def build(**overrides):
    model = testing.build_gpt(mtp_num_layers=1, **overrides)
    layer = model.mtp.layers[0]
    theirs = layer._proj_and_transformer_layer

    def mine(self, *args, **kwargs):  # an override of the trainer's own, which calls what it hides
        return theirs(*args, **kwargs)

    layer._proj_and_transformer_layer = types.MethodType(mine, layer)
    return model
"""


def test_the_model_of_a_user_is_proved_with_the_trainer_s_own_patches(releases, tmp_path):
    """The module lies in the working directory. On stock its own shim.apply() does nothing."""
    (tmp_path / "my_module.py").write_text(MODEL)
    arguments = ["packed-equals-alone", "--model", "my_module:build"]
    code, found, err = proved(*arguments, directories=[releases(RELEASE)], cwd=tmp_path)
    assert code == 0 and list(found["proofs"]) == ["packed-equals-alone"], err
    assert found["proofs"]["packed-equals-alone"]["verdict"] == "fixed"
    assert found["where"]["model"] == "my_module:build"
    [override] = found["overrides"]
    assert override["patch"] == "mtp-recompute" and override["state"] == "applied"
    assert "my_module.py" in override["reason"]


@in_full
def test_an_interrupt_leaves_no_process_behind(releases):
    directories = [releases(RELEASE), REPOSITORY]
    marker = f"SHIM_TEST_{os.getpid()}_{time.monotonic_ns()}"
    running = subprocess.Popen(
        [sys.executable, "-m", "shim", "prove", "label-smoothing", "--jobs", "1"],
        env={**environment(directories), marker: "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell lets what it runs in the background ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + patience()
    while len(_with(marker)) < 3 and time.monotonic() < deadline:  # the command, the worker, one side
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(patience()) != 0
    while _with(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _with(marker)


def _with(marker):
    """The processes that have this variable."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (["nonsense"], 2, "no patch is called nonsense"),
        (["--ranks", "0"], 2, "--ranks 0 is no number of ranks"),
        (["--timeout", "0"], 2, "--timeout 0 leaves no time"),
        (["--jobs", "0"], 2, "--jobs 0 runs nothing"),
        (["--model", "nothing"], 2, "write my_module:build"),
        (["--model", "json"], 2, "write my_module:build"),
        (["--model", "json:loads", "--against", "x"], 2, "leave out --against"),
        (
            ["--model", "json:loads", "label-smoothing"],
            2,
            "no generic proof is called label-smoothing; there are packed-",
        ),
        (["--against", "/nonsense"], 2, "there is nothing to audit"),
        (["--device", "cuda"], 1, "torch sees no GPU here"),
        (["label-smoothing", "--ranks", "1"], 1, "it needs 2 ranks, and --ranks 1 allows 1"),
    ],
)
def test_what_cannot_be_done_says_why(arguments, code, says, releases, monkeypatch, capsys):
    """No process is started for any of these."""
    monkeypatch.syspath_prepend(str(releases(RELEASE)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["prove", *arguments]) == code
    said = capsys.readouterr()
    assert says in said.out + said.err


@pytest.mark.parametrize(
    "model, says",
    [
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("json:nothing", "json has no function nothing"),
    ],
)
def test_a_function_that_is_not_there_is_wrong_usage(model, says, releases, monkeypatch, capsys):
    """Found by the first of the processes, because this one does not import what belongs to the user."""
    monkeypatch.syspath_prepend(str(releases(RELEASE)))
    assert main(["prove", "--model", model]) == 2
    assert says in capsys.readouterr().err


def test_an_excluded_patch_is_not_proved(releases, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(releases(RELEASE)))
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "label-smoothing")
    assert main(["prove", "label-smoothing"]) == 1
    assert "the patch is excluded here" in capsys.readouterr().out


def test_without_a_release_there_is_nothing_to_prove(capsys):
    assert main(["prove"]) == 1
    assert "shim prove runs real releases" in capsys.readouterr().err


def test_an_archive_cannot_be_run(releases, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(releases(RELEASE)))
    [wheel] = (releases(RELEASE).parent / "wheels").glob(f"megatron_core-{RELEASE}-*.whl")
    assert main(["prove", "--against", str(wheel)]) == 2
    assert "it has to be a directory; unpack it" in capsys.readouterr().err


def test_what_forked_processes_share_is_no_garbage_of_theirs():
    """A collection in a forked process looks at nothing that it shares, and finds what it makes itself."""
    code = (
        "import gc, os, weakref\n"
        "from shim._proving.worker import shared_by_forks\n"
        "class Ring:\n    def __init__(self): self.me = self\n"
        "with shared_by_forks():\n    assert not gc.isenabled()\n    shared = weakref.ref(Ring())\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 1000 and len(gc.get_objects()) < 1000\n"
        "own = weakref.ref(Ring())\n"
        "gc.collect()\n"
        "assert shared() is not None and own() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment([REPOSITORY]), timeout=patience())


def test_what_is_loaded_for_all_sides_leaves_megatron_core_as_it_is(releases):
    """The engine and the patches are loaded before stock is forked: nothing is applied, and no import is watched."""
    code = (
        "import sys\n"
        "from shim._proving import worker\n"
        "worker._import_torch()\n"
        "worker._preload(False, 'cpu')\n"
        "finders = list(sys.meta_path)\n"
        "held = {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith('megatron')}\n"
        "import shim\n"
        "sources = [entry.module for entry in shim.plan().matrix.patches.values()]\n"
        "worker._preload_own([worker.SideTask('', source, '', None) for source in sources])\n"
        "assert sum(name.startswith('shim.patches.') for name in sys.modules) > len(sources)\n"
        "from shim._engine.engine import ENGINE\n"
        "assert ENGINE.plan is None and sys.meta_path == finders\n"
        "for name, module in held.items():\n"
        "    now = vars(sys.modules[name])\n"
        "    assert all(now[key] is value for key, value in module.items()), name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment([releases(RELEASE), REPOSITORY]),
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "told, ran", [("", "no"), ("WORK", "no"), ("WORKgo\n", "yes")], ids=["no work", "work", "work and go"]
)
def test_a_worker_runs_nothing_before_it_is_told_and_ends_if_nobody_does(told, ran):
    """It may wait for its turn while another worker runs, and its command may be interrupted meanwhile."""
    code = (
        "import os\n"
        "from shim._proving import worker\n"
        "worker._import_torch = lambda: None\n"
        "class Pool:\n"
        "    def __init__(self, work, answers): self.answers = answers\n"
        "    def run(self): self.answers.write('yes')\n"
        "worker._Pool = Pool\n"
        "worker.main()\n"
    )
    work = Work((SideTask("a side", "", "", None),), preload=False).to_json() + "\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=told.replace("WORK", work),
        env=environment([REPOSITORY]),
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert (done.returncode, done.stdout or "no") == (0, ran), done.stderr


def test_a_process_that_is_not_used_ends_at_once():
    with Process("cpu") as process:
        assert process._process.poll() is None
    assert process._process.returncode == -signal.SIGKILL
