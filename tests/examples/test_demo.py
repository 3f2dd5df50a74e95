"""The examples end with 0 and print what they promise, on the release that is on PYTHONPATH."""

from importlib.util import find_spec
from pathlib import Path

import fork_server
import pytest

CELLS = {"0.16.1": "all"}

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("torch") is None,
    reason="needs torch and a release of megatron-core on PYTHONPATH",
)


def run(script, *arguments, exit_status=0):
    """As `python script`, in a process that need not load torch again."""
    sets = f"import runpy, sys; sys.path[:0] = [{str(EXAMPLES)!r}]; sys.argv[:] = {[script, *arguments]!r}"
    code = f"{sets}; runpy.run_path({str(EXAMPLES / script)!r}, run_name='__main__')"
    done = fork_server.run(code, share_loaded=True)
    assert done.returncode == exit_status, done.stdout + done.stderr
    return done.stdout


def test_the_demo_shows_stock_and_shim_against_the_truth():
    lines = run("packed_mtp.py", "--steps", "2").splitlines()
    assert max(map(len, lines)) <= 110 or "/" in max(lines, key=len)  # only paths may be longer
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("row ")) + 1 :][:6]
    assert [line[:16].split() for line in table] == [
        *(["plain", "alone"], ["stock"], ["shim"]),
        *(["padded", "alone"], ["stock"], ["shim"]),
    ]
    losses = [line[16:38] for line in table]
    assert losses[2] == losses[0] and losses[5] == losses[3]
    assert "Each holds its original object: yes" in lines
    assert lines[-1]


def test_the_demo_fails_where_the_fix_is_missing(monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    lines = run("packed_mtp.py", "--steps", "1", exit_status=1).splitlines()
    unmet = [line for line in lines if line.startswith("NOT MET: ")]
    assert [line.split()[2] for line in unmet][-2:] == ["padded", "training:"]


def test_the_trainer_snippet_runs():
    out = run("trainer.py")
    assert (
        "\nFixed: silently wrong results\n" in out
        and "\n  mtp-packed-sequences " in out
        and " 0 problems\n" in out
        and "loss " in out
    )
