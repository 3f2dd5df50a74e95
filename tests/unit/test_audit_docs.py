"""What the documentation says about `shim audit` is what the command takes; its step for CI runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from audit_cases import EDITED, commit, git
from unit_helpers import BROKEN, REPOSITORY, megatron, metadata, write_file

from shim._tools.arguments import command_line

PAGES = ["README.md", "SECURITY.md", *sorted(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("docs/*.md"))]
LINE = re.compile(r"^shim (audit .+)$|`shim (audit [^`]+)`", re.MULTILINE)


def lines_of(page):
    found = LINE.findall((REPOSITORY / page).read_text("utf-8"))
    return [line.rstrip("\\").strip() for pair in found for line in pair if line]


def test_every_command_line_in_the_documentation_is_one():
    """TARGET, options and their values as the parser has them."""
    lines = {line: page for page in PAGES for line in lines_of(page) if line != "audit TARGET"}
    assert len(lines) > 12
    for line, page in lines.items():
        try:
            arguments = command_line().parse_args(shlex.split(line))
        except SystemExit:
            pytest.fail(f"{page}: shim {line}")
        assert arguments.command == "audit"


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("bash") is None, reason="there is no git, or no bash")
@pytest.mark.parametrize(("text", "code"), [(BROKEN, 0), (EDITED, 1)])
def test_the_step_for_a_pinned_commit_runs(world, tmp_path, text, code):
    """As it stands in ci.md, with a repository here in the place of the public one."""
    page = (REPOSITORY / "docs/ci.md").read_text("utf-8")
    [step] = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "FETCH_HEAD" in block]
    origin = megatron(tmp_path / "origin", "0.16.3", {"roll.py": text})
    git(origin, "init", "-q")
    pinned = commit(origin)
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "true")
    url = "https://github.com/NVIDIA/Megatron-LM.git"
    assert url in step
    write_file(tmp_path / "cache/transformer-engine/2.16.0/transformer_engine/__init__.py", "")
    metadata(tmp_path / "cache/transformer-engine/2.16.0", "2.16.0", "transformer-engine")
    (tmp_path / "cache/transformer-engine/2.16.0/.complete").touch()
    shutil.copytree(world.root / "releases", tmp_path / "cache/megatron-core")
    for release in (tmp_path / "cache/megatron-core").iterdir():
        (release / ".complete").touch()
    (tmp_path / "work").mkdir()
    command = f'shim() {{ "{sys.executable}" -m shim "$@"; }}\n{step.replace(url, f"file://{origin}")}'
    environ = {
        **os.environ,
        "COMMIT": pinned,
        "TE": "2.16.0",
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, world.own))),
        "MEGATRON_SHIM_CACHE": str(tmp_path / "cache"),
        "MEGATRON_SHIM_MATRIX": str(world.matrix),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=tmp_path / "work", env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    assert done.stdout.startswith(f"### shim audit: megatron-core 0.16.3, commit {pinned[:10]}, beside transformer")
    assert ("+    return helper(x) + 1" in done.stdout) is bool(code)
