"""README's table and the pages of docs/ that are generated from the matrix are current."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from thorough import in_full
from unit_helpers import REPOSITORY

from shim._engine.report import STATES
from shim._matrix import reader, rules
from shim._matrix.load import load_matrix
from shim._planning.texts import explanation, patch_docstring
from shim.maintenance import docs as _docs
from shim.maintenance import (
    docs_concerned,
    docs_gpu,
    docs_sample,
    docs_startup,
    docs_steps,
    docs_trainers_run,
    docs_training,
)
from shim.maintenance.docs_links import linked
from shim.maintenance.docs_patches import patch_page, patches_page
from shim.maintenance.docs_reference import KEYS, MEANINGS, TABLES


def test_generated_documents_are_current(capsys):
    """After a change of the matrix or of a patch's header: run `make docs`."""
    assert _docs.main(["--check"]) == 0, capsys.readouterr().out


def test_a_new_patch_makes_no_document_stale_but_adds_its_page(monkeypatch):
    """So that two of them do not conflict. What all patches make together is written for a release."""
    id, like, matrix = "new-patch", "masked-microbatch", load_matrix()
    more = {"patches": {**matrix.patches, id: replace(matrix.patches[like], id=id)}}
    more["pinned"] = {**matrix.pinned, id: matrix.pinned[like]}
    before, all_before = _docs.generated(REPOSITORY), _docs.everything(REPOSITORY)
    monkeypatch.setattr(_docs, "load_matrix", lambda: replace(matrix, **more))
    page = REPOSITORY / "docs" / "patches" / f"{id}.md"
    assert {path for path, _ in _docs.generated(REPOSITORY).items() - before.items()} == {page}
    changed = {path.name for path, _ in _docs.everything(REPOSITORY).items() - all_before.items()}
    assert changed >= {"README.md", "patches.md", "releases.md", "per-model.md", "defects.md", "explore.html"}


@in_full
def test_check_says_what_is_stale_and_writes_nothing(tmp_path, monkeypatch, capsys):
    """And without --check it is written, after which it is current."""
    monkeypatch.setattr("shim._matrix.load.PACKAGE", tmp_path / "shim")
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: REPOSITORY / "version_matrix.yaml")
    monkeypatch.setattr("shim._matrix.load.patches_path", lambda: REPOSITORY / "patches")
    (tmp_path / "docs").mkdir()
    places = [(docs_sample.BEGIN, docs_sample.END), docs_training.HITS, docs_training.CHANGES]
    sample = "".join(f"{begin}\nold\n{end}\n" for begin, end in places)
    markers = (docs_startup.STARTUP, docs_steps.STEPS, docs_gpu.MEASURED, _docs.COSTS)
    measured = "".join("{}\n{}\n".format(*pair) for pair in markers)
    pages = {"docs/benchmarks.md": measured, "docs/cli.md": ""}
    for name, more in {"README.md": sample, **pages}.items():
        (tmp_path / name).write_text(f"before\n{_docs.BEGIN}\nold\n{_docs.END}\n{more}after\n")
    (tmp_path / "docs" / "trust.md").write_text("{}\n{}\n".format(*docs_concerned.CONCERNED))
    (tmp_path / "docs" / "per-model.md").write_text(f"{_docs.BEGIN_ALL}\nold\n{_docs.END}\n")
    (tmp_path / "docs" / "where-to-call.md").write_text("{}\n{}\n".format(*docs_trainers_run.CALLS))
    data = ("trainers.yaml", "trainers_run.yaml", "device.json", "startup.json", "steps.json")
    for name in ("CHANGELOG.md", *(f"docs/{each}" for each in data)):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    assert _docs.main(["--check"]) == 1
    said = capsys.readouterr().out.split("\n")
    assert said[:3] == ["README.md is stale", *(f"{page} is stale" for page in pages)]
    assert _docs.main([]) == _docs.main(["--check"]) == 0 and _docs.main(["--check", "--all"]) == 1
    assert not (tmp_path / "docs" / "patches.md").exists()
    assert _docs.main(["--all"]) == _docs.main(["--check", "--all"]) == _docs.main(["--check"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text


def test_the_samples_are_what_the_commands_print():
    """Of pins and recorded results, by the functions that print them."""
    results = {"stock": "off by 1.0e+00", "with_shim": "bit-equal", "verdict": "fixed"}
    label = f"{docs_sample.PROOF}/a-padded-row-trains-like-its-sequences-alone"
    proved = {docs_sample.RELEASE: {"transformer-engine": "2.12.0", "proofs": {label: results}}}
    lines = docs_sample.samples(load_matrix(), proved).splitlines()
    assert lines[0] == lines[-1] == "```" and lines[1] == f"$ shim plan --for {docs_sample.WORDS}"
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert re.search(rf" concern a run with {docs_sample.WORDS.replace(',', ', ')} \([^()]*features\) Fixed: ", text)
    assert lines[lines.index(f"$ shim prove {docs_sample.PROOF}") + 1 : -1] == [
        f"megatron-core {docs_sample.RELEASE}, transformer-engine 2.12.0, CPU (2 gloo ranks where needed)",
        "",
        f"{label}: fixed",
        "    stock: off by 1.0e+00",
        "    with shim: bit-equal",
        "  ...",
    ]


def test_a_patch_that_no_release_needs_has_its_commits_in_the_table():
    """mtp-without-te is for commits after the newest release."""
    rows = {line.split("]")[0].removeprefix("| ["): line for line in patches_page(load_matrix()).splitlines()}
    wheres = {id: row.split(" | ")[-1].removesuffix(" |").strip() for id, row in rows.items() if row.startswith("| [")}
    assert not [id for id, where in wheres.items() if where in ("megatron-core", "transformer-engine")]
    assert wheres["mtp-without-te"].startswith("megatron-core at commit ")


@pytest.mark.parametrize("text", ["", _docs.BEGIN, _docs.END, f"{_docs.END} {_docs.BEGIN}"])
def test_missing_markers_are_an_error(text):
    """Else the table would be lost in silence."""
    with pytest.raises(ValueError, match="markers"):
        _docs.replace_between(text, "new")


def test_the_page_of_a_patch_says_what_a_reader_needs():
    """Id, header of the patch file, code, targets, references, and when to delete it."""
    matrix = load_matrix()
    for id, entry in matrix.patches.items():
        text = patch_page(matrix, {}, entry)
        assert text.startswith(f"# {id}\n")
        assert "Delete when: " in text
        assert all(linked(reference) in text for reference in entry.references)
        assert all(target.partition(":")[2] in text for target in entry.targets)
        header = patch_docstring(entry)
        assert header and header in text
        assert "cannot be read" not in header


def test_the_index_of_patches_has_each_once_with_what_it_changes():
    matrix = load_matrix()
    text = patches_page(matrix)
    for id, entry in matrix.patches.items():
        assert text.count(f"| [{id}](patches/{id}.md) | {entry.summary} | {entry.changes} | ") == 1
    assert len(text) < 40_000


def test_a_page_of_a_patch_that_is_gone_is_deleted(tmp_path, monkeypatch, capsys):
    """And --check says so."""
    (tmp_path / "docs" / "patches").mkdir(parents=True)
    gone, kept = (tmp_path / "docs" / "patches" / f"{id}.md" for id in ("gone", "kept"))
    gone.write_text("# gone\n")
    kept.write_text("# kept\n")
    monkeypatch.setattr("shim._matrix.load.PACKAGE", tmp_path / "shim")
    monkeypatch.setattr(_docs, "generated", lambda top: {kept: "# kept\n"})
    assert _docs.main(["--check"]) == 1 and gone.exists()
    assert _docs.main([]) == 0 and not gone.exists() and kept.exists()
    assert capsys.readouterr().out == "docs/patches/gone.md is of no patch\ndocs/patches/gone.md is deleted\n"
    assert _docs.main(["--check"]) == 0


def test_readme_can_be_read_in_a_minute():
    """It is short, begins with code, and has what is trained, with a page behind each defect that it shows."""
    matrix = load_matrix()
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert len(readme.encode()) < 7_000 and len(readme[: readme.index("```python")].split()) < 60
    assert _docs.support_table(matrix) not in readme
    assert _docs.support_table(matrix) in _docs.releases_page(matrix)
    assert len(re.findall(r"\(docs/patches/[a-z0-9-]+\.md\)", readme)) >= 9


def test_what_is_trained_has_each_fix_once():
    rows = re.findall(r"\| ([^|]*) \|$", docs_training.training_table(load_matrix()), re.MULTILINE)
    counted = sum(int(number) for row in rows[1:] for number in re.findall(r"\d+", row))
    fixes = [entry for entry in load_matrix().patches.values() if entry.kind != "feature"]
    others = [entry for entry in fixes if docs_training.row_of(entry) == docs_training.OTHERS]
    assert counted == len(fixes) - len(others)


def test_modules_that_a_patch_acts_before_are_named(world):
    """On its page and by `shim explain`."""
    text = world.matrix.read_text()
    keys = "before: [megatron.core.roll, megatron.core.sort]\n    delete_when: upstream does so"
    world.matrix.write_text(text.replace("delete_when: upstream does so", keys))
    line = "- Acts before the code of `megatron.core.roll`, `megatron.core.sort` runs\n"
    matrix = load_matrix(world.matrix)
    assert line in patch_page(matrix, {}, matrix.patches["faster-forward"])
    line = "\nActs before the code of megatron.core.roll, megatron.core.sort runs\n"
    assert line in explanation(world.plan(), "faster-forward")


def test_the_table_of_support_merges_neighbours(world):
    """Releases that say the same share a column."""
    matrix = load_matrix(world.matrix)
    assert _docs.support(matrix)["megatron-core"]["0.18.0"] == {"roll-fix": "upstream", "faster-forward": "only"}
    assert _docs.support_table(matrix).splitlines() == [
        "| megatron-core | 0.16.0 | 0.17.0 | 0.18.0 |",
        "|---|---|---|---|",
        "| roll-fix | old | new | upstream |",
        "| faster-forward | only | only | only |",
    ]


def test_every_command_is_documented():
    """docs/cli.md names all commands of the parser."""
    from shim._tools.arguments import command_line

    text = (REPOSITORY / "docs" / "cli.md").read_text("utf-8")
    actions = next(action for action in command_line()._actions if action.choices and "plan" in action.choices)
    for command in actions.choices:
        assert f"| `shim {command}" in text


def test_every_state_is_documented():
    assert list(MEANINGS) == list(STATES)
    text = (REPOSITORY / "docs" / "states.md").read_text("utf-8")
    assert all(f"| {state} | {meaning} |" in text for state, (meaning, _) in MEANINGS.items())


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_the_matrix_is_documented(name):
    """And no key that the matrix does not have."""
    assert list(KEYS[name]) == list(TABLES[name])
    text = (REPOSITORY / "docs" / "matrix.md").read_text("utf-8")
    assert all(f"| `{key}` |" in text for key in TABLES[name])


def test_every_table_of_keys_is_documented():
    tables = [name for module in (rules, reader) for name in vars(module) if name == "KEYS" or name.endswith("_KEYS")]
    assert len(tables) == len(TABLES)


PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text("utf-8")
    for path in (
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / ".github").rglob("*.md"),
    )
}


def links(page):
    """Path below the repository and anchor of each relative link of a page, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", PAGES[page], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https:", "http:", "mailto:")):
            path, _, anchor = target.partition("#")
            there = (REPOSITORY / page).parent / path if path else REPOSITORY / page
            yield there.resolve().relative_to(REPOSITORY).as_posix(), anchor


def anchors(page):
    """What the headings of a page are called in links to them."""
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page):
    """Neither the file nor the heading it leads to."""
    built = "docs/explore.html"  # by `make docs-all`, and for the site
    dead = [f"{path}#{anchor}" for path, anchor in links(page) if path != built and not (REPOSITORY / path).exists()]
    dead += [f"{path}#{anchor}" for path, anchor in links(page) if anchor and anchor not in anchors(path)]
    assert dead == []


def test_the_index_leads_to_every_page():
    """Directly, and each with a word about it, but for patches, which have an index; README leads to the index."""
    found = {path for path, _ in links("docs/index.md")}
    of_patches = {f"docs/patches/{id}.md" for id in load_matrix().patches}
    assert {page for page in PAGES if page.startswith("docs/")} - found - of_patches == {"docs/index.md"}
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"} <= found
    assert "docs/index.md" in {path for path, _ in links("README.md")}


def test_the_commands_for_a_new_patch_run_that_patch_alone():
    """Without -k the file with the proofs runs those of all patches. Every file that a command names is there."""
    page = (REPOSITORY / "docs" / "writing-a-patch.md").read_text().replace("\\\n", "")
    commands = [line for line in page.splitlines() if line.startswith(".venv/bin/python ")]
    assert len(commands) >= 4
    for command in commands:
        assert "test_proofs.py" not in command or " -k " in command, command
        for folder, braced, name in re.findall(r"(tests/\w+/test_)(?:\{([\w,]+)\}|(\w+))\.py", command):
            missing = [f for f in (braced or name).split(",") if not (REPOSITORY / f"{folder}{f}.py").is_file()]
            assert not missing, command


def test_the_table_of_steps_says_what_grows_and_what_adds_nothing(tmp_path):
    """A release without the larger steps, or on which stock cannot take one, says nothing of growth."""
    step = {"calls": 10, "operations": 5, "messages": 0, "message_bytes": 0, "peak_bytes": 8}
    more = {**step, "calls": 16}
    stock = {"dense": step, "dense, 4 layers": more, "TP 2, SP": step, "TP 4, SP": more, "PP 2": "TypeError: no"}
    looks = {"dense": {"Python calls": 2}, "dense, 4 layers": {"Python calls": 4}, "TP 2, SP": {"operations": 3}}
    saves = {"dense": {"Python calls": -3}, "dense, 4 layers": {"Python calls": -6}}
    alone = {"stock": stock, "patches": {"all patches": saves, "looks": looks, "idle": {}}}
    pair = {"stock": {"dense": step}, "patches": {"all patches": {}, "looks": {"dense": {"Python calls": 7}}}}
    (tmp_path / "steps.json").write_text(json.dumps({"1.0": alone, "1.0+2.0": pair}))
    lines = docs_steps.steps_table(tmp_path).splitlines()
    assert lines[0] == "On 1.0 (2 patches), 1.0+2.0 (1 patches)."
    assert "| looks | +7 | +3 | 0 | 0 | 0 |" in lines and "| all patches | down to -6 | 0 | 0 | 0 | 0 |" in lines
    [nothing] = [line for line in lines if line.startswith("Not one call, operation")]
    assert nothing.endswith(": idle.")
    assert [line for line in lines if "and +" in line] == ["| looks | +2 and +4 Python calls |  |"]
    assert any("10 / 5 to 16 / 5" in line for line in lines)
