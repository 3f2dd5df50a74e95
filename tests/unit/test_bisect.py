"""`shim bisect`: what it runs, what it names, how it goes on after an interrupt, and what it refuses.

The commands are shell scripts that look at MEGATRON_SHIM_EXCLUDE, so that no run starts a Python.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_world import World
from unit_helpers import REPOSITORY

from shim._tools.bisect_runs import Outcome, differs, number_in, same_number
from shim._tools.cli import main
from shim.testing.patience import patience

IDS = ["a", "b", "c", "d", "e"]
HAS = 'has() { case ",$MEGATRON_SHIM_EXCLUDE," in *",$1,"*) return 1;; esac; }; '


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A fake megatron-core with five patches."""
    world = World(tmp_path_factory.mktemp("tree"))
    for id in IDS:
        world.patch(id, ["megatron.core.ops:double"])
    return world


@pytest.fixture
def bisect(tree, tmp_path, monkeypatch, capfd):
    """Run `shim bisect` on a shell script in an empty directory; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(tree.matrix))
    monkeypatch.syspath_prepend(str(tree.root))

    def run(script, *options):
        code = main(["bisect", "--package", "fake_patches", *options, "--", "sh", "-c", HAS + script])
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


STATE, LOG, RAN = Path("shim-bisect/state.json"), Path("shim-bisect/run-01.log"), Path("ran")


def runs():
    return json.loads(STATE.read_text())["runs"]


def stays(pid):
    """Whether a process still runs after five seconds. One that nobody waits for has also ended."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("cause", IDS)
def test_the_patch_that_changes_the_exit_status_is_named(bisect, cause):
    """With what it is, how to leave it out, and each run said before it begins."""
    code, out, err = bisect(f"echo hello; has {cause} && exit 3; exit 0")
    assert code == 0 and out.startswith(f"{cause} changes the result (found in ")
    assert "\n  without patches     exit 0\n  with it alone       exit 3\n" in out
    assert "\n  with all but it     exit 0\n  with all patches    exit 3\n" in out
    assert f"\n{cause} (correctness, changes nothing): the fake patch {cause}\n" in out
    assert f"MEGATRON_SHIM_EXCLUDE={cause}\n" in out and f"shim explain {cause}" in out
    assert "run 1: all 5 patches, then a run with none" in err and "\n  exit 3 after 0" in err
    assert "\nrun 4: 3 of 5 patches, the first half; at most 7 left if one does it alone\n" in err
    assert LOG.read_text() == "hello\n"


def test_a_pair_that_only_together_changes_a_number_is_named(bisect):
    """As JSON as well."""
    script = "echo loss: 2.5; has b && has e && echo loss: 2.75; exit 0"
    code, out, err = bisect(script, "--metric", "loss: (.*)", "--json")
    found = json.loads(out)
    assert code == 0 and sorted(found["patches"]) == ["b", "e"] and not found["rest_changes"]
    assert [found["runs"][name]["number"] for name in ("none", "all", "b,e", "a,c,d")] == [2.5, 2.75, 2.75, 2.5]
    assert "beside those that are needed; at most" in err and "differs from the run without patches" in err
    assert bisect(script, "--metric", "loss: (.*)")[1].startswith("b and e change the result, only together (found in")


def test_of_several_causes_one_is_named_and_the_way_to_the_next(bisect):
    script = "x=1; has a && x=2; has d && x=4; echo $x"
    code, out, _ = bisect(script, "--metric", "^")
    assert code == 0 and out.startswith("a changes the result")
    assert "other patches change the result as well" in out and "--exclude a --dir shim-bisect-next" in out
    code, out, _ = bisect(script, "--metric", "^", "--exclude", "a", "--dir", "shim-bisect-next")
    assert code == 0 and out.startswith("d changes the result")


def test_what_does_not_differ_is_said(bisect):
    """After two runs, with both results, and what may be missing."""
    code, out, err = bisect("echo loss 3")
    assert (code, out) == (1, "") and len(runs()) == 2
    assert "patches change nothing here: with all 5 of them the command gave exit 0, and with none exit 0." in err
    assert "add --metric" in err and "shim-bisect/run-01.log has a line of shim's" in err
    code, _, err = bisect("echo loss 3", "--metric", "grad", "--refresh")
    assert code == 1 and "No number stands where --metric 'grad' looks for one, so the runs cannot be told apart" in err
    code, _, err = bisect(
        "has a && echo loss 3.0001 || echo loss 3", "--metric", "loss", "--tolerance", "1e-3", "--refresh"
    )
    assert code == 1 and "gave exit 0, 3.0001, and with none exit 0, 3.0" in err


def test_what_is_not_repeatable_is_said(bisect):
    """After three runs: halves would name any patch."""
    code, _, err = bisect("touch n; has a && echo x >> n; has a && wc -l < n || echo 0", "--metric", "^")
    assert code == 1 and len(runs()) == 3
    assert "not repeatable: with all patches it gave exit 0, 1.0, and then exit 0, 2.0" in err and "--tolerance" in err


def test_a_run_that_ends_in_a_third_way_tells_nothing(bisect):
    """Here b needs a: without it the command crashes, with or without the cause, which is d."""
    code, out, err = bisect("has b && ! has a && exit 7; has d && exit 1; exit 0")
    assert code == 0 and out.startswith("d changes the result")
    code, out, err = bisect("has d && ! has a && exit 7; has d && exit 1; exit 0", "--dir", "other")
    assert code == 0 and out.startswith("a and d change the result, only together")
    assert "tells nothing" in err


def test_a_hang_counts_as_an_end(bisect):
    code, out, _ = bisect("has c && sleep 60; exit 0", "--timeout", "2")
    assert code == 0 and out.startswith("c changes the result")
    assert "with it alone       did not end in time" in out


def test_what_a_command_leaves_running_does_not_disturb_the_next_run(bisect):
    code, _, _ = bisect("sleep 60 & echo $! >> pids; has a && exit 1; exit 0")
    assert code == 0
    assert not any(map(stays, Path("pids").read_text().split()))


def test_what_the_operator_excludes_stays_excluded(bisect, monkeypatch):
    """And is no part of the search."""
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "b")
    code, _, err = bisect("echo $MEGATRON_SHIM_EXCLUDE >> seen; has a && exit 1; exit 0", "--exclude", "c")
    assert code == 0 and "all 3 patches" in err
    seen = [set(line.strip().split(",")) for line in Path("seen").read_text().splitlines()]
    assert seen[0] == {"b", "c"} and seen[1] == set(IDS) and all({"b", "c"} <= line for line in seen)


def test_the_same_command_goes_on_behind_the_runs_that_are_known(bisect):
    """A search that has ended runs nothing; --refresh forgets, and another search in the same directory is refused."""
    script = "echo x >> ran; has d && exit 1; exit 0"
    _, first, _ = bisect(script)
    number = len(RAN.read_text().split())
    state = json.loads(STATE.read_text())
    state["runs"] = dict(list(state["runs"].items())[:4])
    STATE.write_text(json.dumps(state))
    code, out, err = bisect(script)
    assert (code, out) == (0, first) and "4 runs are known from shim-bisect/state.json; --refresh forgets them" in err
    assert len(RAN.read_text().split()) == 2 * number - 4
    bisect(script)
    assert len(RAN.read_text().split()) == 2 * number - 4
    for options, what in ((("--metric", "x"), "metric"), (("--exclude", "a"), "patches")):
        code, _, err = bisect(script, *options)
        assert code == 2 and "is of another search, which differs in: " in err and what in err and "--refresh" in err
    bisect(script, "--refresh")
    assert len(RAN.read_text().split()) == 3 * number - 4


@pytest.mark.parametrize("text", ["", "[]", '{"runs": {"all": 3}, "about": {}}', '{"runs": {}}'])
def test_a_damaged_file_of_runs_is_refused(bisect, text):
    STATE.parent.mkdir()
    STATE.write_text(text)
    code, _, err = bisect("exit 0")
    assert code == 2 and "state.json" in err and "Remedy: name another directory by --dir" in err


@pytest.mark.parametrize(("number", "exit"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_run_at_hand_and_says_how_to_go_on(tree, tmp_path, number, exit):
    """In one line. Nothing of the command stays."""
    script = HAS + "has b || exit 0; sleep 60 & echo $! > pid; wait"
    environ = {
        **os.environ,
        "PYTHONPATH": f"{tree.root}{os.pathsep}{REPOSITORY}",
        "MEGATRON_SHIM_MATRIX": str(tree.matrix),
    }
    command = [sys.executable, "-m", "shim", "bisect", "--package", "fake_patches", "--", "sh", "-c", script]
    piped = {"cwd": tmp_path, "env": environ, "stderr": subprocess.PIPE, "text": True}
    # A shell that runs the tests in its background lets them ignore SIGINT, and so what they start.
    listens = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command, **piped, preexec_fn=listens) as process:
        for _ in range(2400):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                break
            time.sleep(0.05)
        process.send_signal(number)
        err = process.communicate(timeout=patience())[1].splitlines()
    assert process.returncode == exit
    assert err[-1] == (
        "shim: bisect stopped in run 1. 0 runs of shim-bisect count: the same command goes on behind them."
    )
    assert not any("Traceback" in line for line in err)
    assert not stays((tmp_path / "pid").read_text().strip())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metric", "("], "is not a regular expression"),
        (["--metric", "(a)(b)"], "has several groups"),
        (["--tolerance", "-1"], "it must be 0 or more"),
        (["--tolerance", "nan"], "it must be 0 or more"),
        (["--only", "aa"], "which is not a patch"),
        (["--dir", "/dev/null/x"], "cannot be written"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(bisect, options, message):
    code, _, err = bisect("touch ran", *options)
    assert code == 2 and message in err and not os.path.exists("ran")


def test_commands_that_cannot_work_are_refused(bisect, monkeypatch, capfd):
    assert main(["bisect"]) == 2 and "needs a command behind --" in capfd.readouterr().err
    assert main(["bisect", "--", "no-such-command"]) == 2 and "there is no such command" in capfd.readouterr().err
    assert main(["bisect", "--", sys.executable, "-I", "x.py"]) == 1 and "ignores shim's" in capfd.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert main(["bisect", "--", "sh"]) == 2 and "put it in front" in capfd.readouterr().err
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    assert bisect("exit 0")[0] == 2


def test_nothing_to_apply_is_nothing_to_search(bisect):
    code, _, err = bisect("exit 0", "--kinds", "compat")
    assert code == 1 and "no patch applies here" in err


def test_a_lock_does_not_stop_a_search_unless_the_command_names_one(bisect, monkeypatch):
    """Of whose error the search would name every patch."""
    monkeypatch.setenv("MEGATRON_SHIM_LOCK", "no-such.lock")
    code, out, _ = bisect('[ -z "$MEGATRON_SHIM_LOCK" ] || exit 9; has a && exit 1; exit 0')
    assert code == 0 and out.startswith("a changes")
    code, _, err = bisect("has a || echo shim: this process is held to the lock x; has a", "--refresh")
    assert code == 1 and "holds itself to a lock" in err


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("lm loss:", 1.5),  # behind the last match, in its line
        (r"lm loss: (\S+)", 1.5),
        ("norm", None),
        ("step=(.)", 2.0),
        ("bad", float("nan")),
        ("minus", -0.25),
        ("nothing", None),
    ],
)
def test_the_number_is_that_of_the_last_match(tmp_path, expression, number):
    log = tmp_path / "log"
    log.write_bytes(b"step=1 lm loss: 2.0 | x\nstep=2 lm loss: 1.5E+00 | norm\n9\nbad: NaN\nminus -.25e0\n\xff\n")
    found = number_in(log, re.compile(expression))
    assert found == number or (found != found and number != number)


def test_numbers_are_compared_relative_to_the_larger():
    nan, inf = float("nan"), float("inf")
    assert same_number(None, None, 0) and same_number(nan, nan, 0) and same_number(inf, inf, 0)
    assert not same_number(None, 1.0, 9) and not same_number(nan, 1.0, 9) and not same_number(inf, 1.0, 9)
    assert same_number(100.0, 101.0, 0.01) and not same_number(100.0, 101.1, 0.01) and not same_number(0.0, 1e-9, 0.1)


@pytest.mark.parametrize(
    ("run", "stock", "whole", "answer"),
    [
        ((1, None), (0, None), (1, None), True),
        ((0, None), (0, None), (1, None), False),
        ((2, None), (0, None), (1, None), None),
        ((None, None), (0, None), (None, None), True),
        ((0, 3.0), (0, 1.0), (0, 2.0), True),  # part of what all of them change
        ((0, 1.0), (0, 1.0), (0, 2.0), False),
        ((0, None), (0, 1.0), (0, 2.0), None),
        ((1, 2.0), (0, 1.0), (0, 2.0), None),
        ((0, None), (0, None), (0, 2.0), False),
        ((0, 2.0), (0, None), (0, 2.0), True),
    ],
)
def test_what_a_run_tells(run, stock, whole, answer):
    outcomes = (Outcome(*one, 1.0, "log") for one in (run, stock, whole))
    assert differs(*outcomes, 0.0) is answer
