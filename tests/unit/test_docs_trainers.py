"""docs/trainers.yaml says nothing of a trainer that the matrix, shim's functions or the tests contradict."""

import ast
import json
import re

import pytest
from unit_helpers import BROKEN, REPOSITORY

from shim._errors import MatrixError
from shim._matrix.load import load_matrix
from shim.maintenance import docs_trainers as _trainers
from shim.maintenance import trainer_pins
from shim.maintenance.docs_trainers import problems, read_trainers, trainers_page

DATA = REPOSITORY / "docs" / "trainers.yaml"

NAMES = {"mcore-bridge", "ms-swift", "verl", "SkyRL", "slime", "NeMo-RL", "Megatron-Bridge"}
NAMES |= {"ROLL", "AReaL", "miles", "RLinf", "MindSpeed-LLM"}

ITEM = """
      - at: patcher.py:3-9
        name: patch
        does: Patches.
        verdict: unnecessary
        releases: {megatron-core: ">=0.16,<0.18"}
        patches: [roll-fix]
"""
FILE = """
trainers:
  small-trainer:
    version: "1.0"
    folder: small/
    supports: all of it
    items:ITEM
    edits:
      - {at: "patcher.py:3-9"}
      - {at: "patcher.py:12", add: "import shim\\n\\n"}
      - {at: "patcher.py:11"}
    own:
      questions for a version: [a.py:1, a.py:7-8, b.py:2]
"""


def written(tmp_path, item=ITEM, old="", new=""):
    path = tmp_path / "trainers.yaml"
    path.write_text(FILE.replace("ITEM", item).replace(old, new) if old else FILE.replace("ITEM", item))
    return path


def items():
    return [(trainer, item) for trainer in read_trainers(DATA) for item in trainer.items]


def test_every_trainer_is_there():
    names = {trainer.name for trainer in read_trainers(DATA)}
    assert names == NAMES


def test_the_data_agree_with_the_matrix():
    """Every patch exists. In every release of an unnecessary item, a patch that makes it so is bound."""
    assert list(problems(read_trainers(DATA), load_matrix())) == []


def test_what_is_to_be_called_instead_is_public():
    for trainer, item in items():
        if item.instead:
            module, _, name = item.instead.rpartition(".")
            assert name in public_names_of(module), (trainer.name, item.at)


def public_names_of(module):
    """`__all__` as the text has it: importing shim.ops would import torch, without which other tests must pass."""
    place = REPOSITORY / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no __all__")


def test_every_test_that_is_named_exists():
    """As file::function. A test that has been renamed no longer shows what the row says."""
    for trainer, item in items():
        for test in item.seen:
            file, _, function = test.partition("::")
            tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert function.partition("[")[0] in functions, (trainer.name, item.at, test)


def test_no_place_is_counted_twice():
    """Neither as two items, nor as an item and as the trainer's own."""
    for trainer in read_trainers(DATA):
        places = [item.at for item in trainer.items] + [place for own in trainer.own.values() for place in own]
        assert sorted(places) == sorted(set(places)), trainer.name


def test_the_page_has_a_row_for_every_item(tmp_path, world):
    page = trainers_page(written(tmp_path), load_matrix(world.matrix))
    row = "| `patcher.py:3-9` patch | Patches. | 0.16.0 to 0.17.0 | **unnecessary**: [roll-fix](patches/roll-fix.md). |"
    assert row in page.splitlines()
    assert "| [small-trainer](#small-trainer) | 1.0 | 4 | 1 | 0 | 0 | 3 |" in page.splitlines()
    assert "| all | | 4 | 1 | 0 | 0 | 3 |" in page.splitlines()
    assert "- questions for a version: `a.py` 1, 7-8; `b.py` 2." in page.splitlines()


def test_the_counts_at_a_pin_are_those_of_the_audit(tmp_path, world):
    """By what trainer_pins has recorded. Patches that came after it are not counted, and another pin is an error."""
    path = written(tmp_path, old="supports: all of it", new="supports: all of it\n    pin: abc")
    matrix = load_matrix(world.matrix)
    assert "Its pin is abc. Nobody has audited it." in trainers_page(path, matrix)
    record = {"pin": "abc", "verdicts": {"apply": ["roll-fix"], "drifted": []}}
    (tmp_path / _trainers.PINS).write_text(json.dumps({"small-trainer": record}))
    said = trainers_page(path, matrix)
    assert "says of 1 patches: 1 apply, none are drifted and do nothing.\n" in said and "faster-forward" not in said
    record["verdicts"] = {"drifted": ["roll-fix", "faster-forward"]}
    (tmp_path / _trainers.PINS).write_text(json.dumps({"small-trainer": record}))
    assert "2 are drifted and do nothing: [roll-fix](patches/roll-fix.md), " in trainers_page(path, matrix)
    (tmp_path / _trainers.PINS).write_text(json.dumps({"small-trainer": {**record, "pin": "of before"}}))
    with pytest.raises(MatrixError, match=r"at 'of before': run python -m shim\.maintenance\.trainer_pins"):
        trainers_page(path, matrix)


def test_the_record_of_a_pin_is_an_audit_of_its_tree(tmp_path, world):
    world.install(BROKEN)
    [trainer] = read_trainers(written(tmp_path, old="supports: all of it", new="supports: all of it\n    pin: abc"))
    found = trainer_pins.audited(trainer, str(world.site), load_matrix(world.matrix))
    assert found == {"pin": "abc", "verdicts": {"apply": ["roll-fix", "faster-forward"]}}


@pytest.mark.parametrize("arguments", [[], ["nobody=tree"], ["slime"], ["ms-swift=tree"]])
def test_only_trees_of_trainers_with_a_pin_are_recorded(arguments, capsys):
    assert trainer_pins.main(arguments) == 2
    assert "give NAME=TREE, of SkyRL, slime, " in capsys.readouterr().err


def test_every_pin_is_recorded():
    """As it stands in the data: else run python -m shim.maintenance.trainer_pins, and `make docs`."""
    records = json.loads((DATA.parent / _trainers.PINS).read_text("utf-8"))
    pins = {trainer.name: trainer.pin for trainer in read_trainers(DATA) if trainer.pin}
    assert {name: record["pin"] for name, record in records.items()} == pins


def test_edits_are_made_by_the_lines_of_the_file_as_it_was(tmp_path):
    """Whatever their order: a deletion moves no line of the next edit."""
    [trainer] = read_trainers(written(tmp_path))
    before = "".join(f"{number}\n" for number in range(1, 15))
    assert _trainers.edited(before, trainer.edits).split() == ["1", "2", "10", "import", "shim", "12", "13", "14"]
    with pytest.raises(ValueError, match="no line 12"):
        _trainers.edited("1\n" * 11, trainer.edits)


def test_edits_are_a_diff_without_the_trainers_lines(tmp_path, world):
    page = trainers_page(written(tmp_path), load_matrix(world.matrix))
    assert page.partition("```diff\n")[2].partition("```")[0].splitlines() == [
        "--- a/small/patcher.py",
        "+++ b/small/patcher.py",
        "@@ -3,7 +2,0 @@",
        "- (lines 3 to 9)",
        "@@ -11,1 +3,0 @@",
        "- (line 11)",
        "@@ -11,0 +4,2 @@",
        "+import shim",
        "+",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[roll-fix]", "[roll-fixed]", "no patch is called 'roll-fixed'"),
        ("<0.18", "<0.19", "roll-fix changes nothing in megatron-core 0.18.0"),  # upstream there
        (">=0.16,<0.18", ">=0.10,<0.11", "names no supported release of megatron-core"),
        ("{megatron-core:", "{megatron:", "no distribution is called 'megatron'"),
    ],
)
def test_what_the_matrix_contradicts_is_an_error(tmp_path, world, old, new, said):
    with pytest.raises(MatrixError, match=re.escape(said)):
        trainers_page(written(tmp_path, old=old, new=new), load_matrix(world.matrix))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("verdict: unnecessary", "verdict: needless", "must be one of unnecessary, composes, conflicts"),
        ("        patches: [roll-fix]\n", "", "lacks 'patches' or 'instead'"),
        ("verdict: unnecessary", "verdict: composes", "lacks 'order'"),
        ("verdict: unnecessary", "verdict: conflicts", "lacks 'note'"),
        ("patcher.py:3-9", "patcher.py", "is not file:line"),
        ("patcher.py:3-9", "patcher.py:9-3", "is not file:line"),
        ("does: Patches.", "dose: Patches.", "unknown key 'dose'"),
    ],
)
def test_a_slip_in_the_data_is_named_with_its_line(tmp_path, old, new, said):
    with pytest.raises(MatrixError, match=r"trainers\.yaml:\d+: .*" + re.escape(said)):
        read_trainers(written(tmp_path, old=old, new=new))


def test_every_verdict_is_explained():
    page = trainers_page(DATA, load_matrix())
    assert all(f"| {verdict} | {meaning} |" in page for verdict, meaning in _trainers.VERDICTS.items())
