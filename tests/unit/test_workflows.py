"""The workflows of this repository: they run what `make test` runs, with fixed actions and no right but to read.

And the targets that pages name: the Makefile has them.
"""

import re

import pytest
import yaml
from everything import STEPS
from unit_helpers import REPOSITORY

GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (REPOSITORY / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def jobs_of(file):
    return yaml.safe_load(file.read_text("utf-8"))["jobs"]


def made(text):
    """The targets that a command or a recipe makes."""
    return {
        word for _, words in re.findall(r"(make|\$\(MAKE\)) (.*)", text) for word in words.split() if word.islower()
    }


CI = "\n".join(
    str(step["run"])
    for job in jobs_of(GITHUB / "workflows" / "ci.yml").values()
    for step in job["steps"]
    if "run" in step
)


def test_ci_runs_what_make_test_runs():
    """The other Pythons have a job each, and run all that needs no torch. Archives and the site come on top."""
    assert "python tests/support/everything.py" in MAKEFILE.partition("\ntest: ")[2].partition("\n\n")[0]
    targets = {target for step in STEPS for target in step}
    assert {"lint", "unit-pythons", "unit", "cells", "pairs"} <= targets
    assert (targets | {"fresh", "docs-site"}) - {"unit-pythons"} <= made(CI)
    assert made(CI) <= TARGETS


def test_pages_name_targets_that_there_are():
    """In the code of a page, inline or indented, with what a comment there says."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("changes/*.md")]
    named = {}
    for page in pages:
        for line in re.findall(r"`[^`\n]+`|^    .+$", page.read_text("utf-8"), flags=re.MULTILINE):
            named |= dict.fromkeys(re.findall(r"\bmake ([a-z][a-z-]*)", line), page.name)
    assert len(named) > 10
    assert {target: page for target, page in named.items() if target not in TARGETS} == {}


def test_ci_has_every_python_that_the_package_names():
    project = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    named = re.findall(r"Python :: (3\.\d+)", project)
    jobs = jobs_of(GITHUB / "workflows" / "ci.yml")
    assert jobs["unit"]["strategy"]["matrix"]["python"] == named
    (versions,) = [
        step["with"]["python-version"] for step in jobs["dist"]["steps"] if "setup-python" in step.get("uses", "")
    ]
    assert set(versions.split()) == set(named)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_may_only_read(file):
    text = file.read_text("utf-8")
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert not [job for job in jobs_of(file).values() if "permissions" in job]
    assert "secrets" not in text and "pull_request_target" not in text


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_is_the_same_tomorrow(file):
    """Actions have a whole version, which Dependabot moves, and machines a name; a job ends."""
    for name, job in jobs_of(file).items():
        assert job["timeout-minutes"] <= 120 and job["runs-on"] == "ubuntu-24.04", name
        for step in job["steps"]:
            used = step.get("uses", "actions/none@v1.0.0").removeprefix("docker://rhysd/")
            assert re.fullmatch(r"actions/[a-z-]+@v\d+\.\d+\.\d+|actionlint:\d+\.\d+\.\d+", used), used


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_no_text_of_an_event_is_part_of_a_command(file):
    """Expressions reach a command by a variable. A checkout leaves no token behind."""
    for job in jobs_of(file).values():
        for step in job["steps"]:
            assert "${{" not in str(step.get("run", ""))
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_owners_and_updates_are_of_places_that_exist():
    lines = (GITHUB / "CODEOWNERS").read_text("utf-8").splitlines()
    places = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert places[0] == "*" and all((REPOSITORY / place.strip("/")).exists() for place in places[1:])
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text("utf-8"))["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}
    for update in updates:
        for folder in update.get("directories", []):
            assert list((REPOSITORY / folder.strip("/")).glob("requirements.txt")) or folder == "/", folder


def test_the_citation_is_one():
    """With the keys that Citation File Format 1.2.0 requires, and the project's address."""
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software" and all(cited["authors"])
    assert f'Repository = "{cited["repository-code"]}"' in (REPOSITORY / "pyproject.toml").read_text("utf-8")
