"""Audits of fake releases, in every form."""

import os
import re
import subprocess
import zipfile

from unit_helpers import BROKEN, megatron

from shim._archives.trees import open_tree
from shim._matrix.load import load_matrix
from shim._tools.audit import audit
from shim.testing.releases import FetchError

GIT_ENVIRON = {
    "PATH": os.environ["PATH"],
    "HOME": "/nowhere",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@a",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@a",
}
EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")


def examiner(world):
    """Audit what lies at a place; known releases are the fake ones, and `fetched` lists which were asked for."""

    def run(target, fetch=None):
        def known(distribution, release):
            run.fetched.append(release)
            return world.root / "releases" / release

        return audit(load_matrix(world.matrix), open_tree(str(target), fetch or known), fetch or known)

    run.fetched = []
    return run


def verdicts_of(examine, tmp_path):
    """The findings about a source tree with this roll.py, by patch id."""

    def run(text, version="0.16.3"):
        megatron(tmp_path / "audited", version, {} if text is None else {"roll.py": text})
        run.audit = examine(tmp_path / "audited")
        return {finding.id: finding for finding in run.audit.findings}

    return run


def wheel_of(root, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(root).as_posix())
    return path


def git(directory, *arguments, check=True):
    """What git prints, in an environment without anybody's configuration."""
    command = ["git", "-C", str(directory), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=GIT_ENVIRON)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(directory, message="change"):
    """Commit all files; returns the hash."""
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", message)
    return git(directory, "rev-parse", "HEAD")


def refuse_as_fetch(distribution, release):
    raise FetchError(f"could not download {release}:\nno route")


def check_markdown(text):
    """Tables have as many cells in each row, fences and details are closed, and there is no HTML but ours."""
    fence, width, details, prose = "", 0, 0, []
    for line in text.split("\n"):
        if fence:
            fence = "" if line == fence else fence
            assert not line.lstrip(" ").startswith(fence) or not fence, line
            continue
        opened = re.match("`{3,}", line)
        if opened:
            fence = opened[0]
            continue
        cells = len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, line
        width = cells
        details += line.count("<details>") - line.count("</details>")
        prose.append(line)
    assert fence == "" and details == 0
    ours = re.sub(r"</?(details|summary|code)>", "", "\n".join(prose))
    assert not re.search(r"(?<!\\)<", ours), ours
