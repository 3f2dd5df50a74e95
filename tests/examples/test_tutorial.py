"""Each command of docs/tutorial.md, run in order, prints what the page says."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shim.testing.patience import patience

CELLS = {"0.16.1": "all"}

REPOSITORY = Path(__file__).parents[2]
RELEASE = "0.16.1"
END = "-- end of a command --"


def release():
    return __import__("megatron.core", fromlist=["core"]).__version__ if find_spec("megatron") else None


pytestmark = pytest.mark.skipif(
    find_spec("torch") is None or release() != RELEASE, reason=f"the tutorial is about megatron-core {RELEASE}"
)


def commands():
    """Each command of the page with the output that it promises."""
    page = (REPOSITORY / "docs" / "tutorial.md").read_text("utf-8")
    found = []
    for block in re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def pattern(output):
    """`...` stands for anything, also over the ends of lines."""
    return ".*".join(map(re.escape, output.split("...")))


def test_the_tutorial_tells_the_truth():
    page = commands()
    bin = str(Path(sys.executable).parent)
    script = f"\necho '{END}'\n".join(command.replace(".venv/bin", bin) for command, _ in page)
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, cwd=REPOSITORY, timeout=patience())
    printed = done.stdout.split(f"{END}\n")
    assert done.returncode == 0 and len(printed) == len(page), done.stdout + done.stderr
    for (command, promised), found in zip(page, printed):
        assert re.fullmatch(pattern(promised), found, flags=re.DOTALL), f"$ {command}\n{found}"
