"""patch.yaml: what a patch says of itself lies in its folder, and the matrix says which release gets which variant."""

import re

import pytest
import yaml
from unit_helpers import REPOSITORY, write_file

from shim._errors import MatrixError
from shim._matrix.load import load_matrix
from shim._matrix.model import NOT_NEEDED, UPSTREAM

MATRIX = """\
supported:
  megatron-core: ["0.16.0", "0.17.0", "0.18.0", "0.19.0"]
patches:
  roll-fix:
    module: trainer_patches.roll_fix
    v0_16: {megatron-core: ">=0.16,<0.17", note: the first}
    v0_17: ">=0.17,<0.18"
    upstream: ">=0.18,<0.19"
    not_needed:
      - {megatron-core: ">=0.19,<0.20", note: it has no rolls}
"""
DESCRIBED = """\
summary: Fixes rolls
kind: correctness
changes: values
distribution: megatron-core
symptom: silent
concerns: [mtp+packed, cp]
variants:
  v0_16:
    targets: {.roll: [Layer.forward, {target: roll, reached_by: [Layer.forward, ".other:call"], without: a word}]}
    reads: {megatron.core.other: [call], .: [VERSION]}
  v0_17:
    targets: [.roll:roll]
references: [Pull request 1]
"""


@pytest.fixture
def described(tmp_path, on_path):
    """Writes the two files and reads the patch; `changed` is (old, new) for either."""
    on_path(tmp_path)

    def read(*changed):
        texts = {tmp_path / "matrix.yaml": MATRIX, tmp_path / "trainer_patches/roll_fix/patch.yaml": DESCRIBED}
        write_file(tmp_path / "trainer_patches/roll_fix/__init__.py", "")
        for file, text in texts.items():
            for old, new in changed:
                text = text.replace(old, new)
            file.write_text(text)
        return load_matrix(tmp_path / "matrix.yaml").patches["roll-fix"]

    return read


def test_the_rules_are_of_the_matrix_and_all_else_is_of_the_patch(described):
    """A range alone is over the distribution that the patch is of."""
    entry = described()
    assert [(rule.gives, dict(rule.ranges)) for rule in entry.rules] == [
        ("v0_16", {"megatron-core": ">=0.16.dev0,<0.17.dev0"}),
        ("v0_17", {"megatron-core": ">=0.17.dev0,<0.18.dev0"}),
        (UPSTREAM, {"megatron-core": ">=0.18.dev0,<0.19.dev0"}),
        (NOT_NEEDED, {"megatron-core": ">=0.19.dev0,<0.20.dev0"}),
    ]
    assert (entry.summary, entry.module) == ("Fixes rolls", "trainer_patches.roll_fix")
    assert (entry.symptom, entry.concerns) == ("silent", (("mtp", "packed"), ("cp",)))


def test_targets_can_be_given_by_module_and_modules_by_their_package(described):
    """A dot in front stands for the package of the distribution, and a name alone for one of the same module."""
    first, second = described().variants.values()
    assert first.targets == ("megatron.core.roll:Layer.forward", "megatron.core.roll:roll")
    assert first.depends_on == ("megatron.core.other:call", "megatron.core:VERSION")
    assert first.reached_by == {
        "megatron.core.roll:roll": ("megatron.core.roll:Layer.forward", "megatron.core.other:call")
    }
    assert second.targets == ("megatron.core.roll:roll",)


@pytest.mark.parametrize(
    ("old", "new", "file", "message"),
    [
        ("kind: correctness", "kind: odd", "patch.yaml:2", "it must be one of"),
        ("mtp+packed", "mtp+packd", "patch.yaml:6", "there is no word 'packd'"),
        ("distribution: megatron-core\n", "", "patch.yaml:1", "lacks 'distribution'"),
        ("references:", "applies: []\nreferences:", "patch.yaml:13", "unknown key 'applies'"),
        ("    targets: [.roll:roll]", '    applies: {megatron-core: ">=1"}\n    targets: [".roll:roll"]',
         "patch.yaml:12", "unknown key 'applies' in variant v0_17"),
        ('v0_17: ">=0.17,<0.18"', 'v0_18: ">=0.17,<0.18"', "matrix.yaml:7", "there is no variant 'v0_18'"),
        ('v0_17: ">=0.17,<0.18"', "v0_17: 0.17", "matrix.yaml:7", "must be a quoted version string"),
        ("    module: trainer_patches.roll_fix\n", "", "matrix.yaml:5", "a patch outside of shim needs module:"),
        ("trainer_patches.roll_fix", "trainer_patches", "matrix.yaml:5", "nor a patch.yaml in the folder of"),
        ('">=0.18,<0.19"', '">=0.18.1,<0.19"', "matrix.yaml:5", "leave a gap"),
    ],
)  # fmt: skip
def test_a_complaint_names_the_file_that_is_wrong(described, old, new, file, message):
    with pytest.raises(MatrixError) as caught:
        described((old, new))
    assert re.search(rf"{re.escape(file)}\b.*{re.escape(message)}", str(caught.value), re.S), caught.value


def test_a_description_that_others_may_write_is_refused(described, tmp_path):
    """It names code to bind, as the matrix does."""
    described()
    (tmp_path / "trainer_patches/roll_fix/patch.yaml").chmod(0o666)
    with pytest.raises(MatrixError, match=r"patch\.yaml:1: may be written by"):
        load_matrix(tmp_path / "matrix.yaml")


def test_an_edit_of_the_description_is_another_matrix(described, tmp_path):
    """The digest of a plan tells them apart."""
    described()
    first = load_matrix(tmp_path / "matrix.yaml").content
    described(("Fixes rolls", "Fixes all rolls"))
    assert load_matrix(tmp_path / "matrix.yaml").content != first


def test_each_folder_of_a_patch_has_an_entry_and_a_description():
    """One without an entry would be a patch that no release gets."""
    folders = {file.parent for file in (REPOSITORY / "patches").glob("*/*/*") if file.name != "__pycache__"}
    modules = {f"shim.patches.{folder.parent.name}.{folder.name}" for folder in folders if folder.name != "__pycache__"}
    assert modules == {entry.module for entry in load_matrix().patches.values()}
    assert all((folder / "patch.yaml").is_file() for folder in folders if folder.name != "__pycache__")


OF_PATCH = """\
targets: {.roll: [Layer.forward, {target: roll, optional: true, reached_by: [Layer.forward], without: a word}]}
reads: {.other: [{read: call, reached_by: [.roll:roll]}]}
variants:"""


def test_variants_inherit_what_the_patch_says_of_targets_and_reads(described):
    """A key that is missing as a whole; and of a name alone what is said of it. A mapping stands for itself."""
    before = DESCRIBED.partition("variants:\n")[0]
    after = DESCRIBED.partition("references:")[2]
    named = "    targets: [.roll:Layer.forward, .roll:roll]\n    reads: [.roll:VERSION, .other:call]\n"
    bare = "    targets: [{target: .roll:roll}]\n    reads: []\n"

    def variants_with(own):
        return described((DESCRIBED, f"{before}{OF_PATCH}\n  v0_16: {{}}\n  v0_17:\n{own}references:{after}")).variants

    found = variants_with(named)
    package = "megatron.core"
    roll, forward, call = f"{package}.roll:roll", f"{package}.roll:Layer.forward", f"{package}.other:call"
    ways = {roll: (forward,), call: (roll,)}
    assert found["v0_16"].targets == found["v0_17"].targets == (forward, roll)
    assert found["v0_16"].depends_on == (call,) and found["v0_17"].depends_on == (f"{package}.roll:VERSION", call)
    for name in ("v0_16", "v0_17"):
        assert (found[name].reached_by, found[name].skippable, found[name].optional) == (ways, {roll: "a word"}, {roll})
    found = variants_with(bare)["v0_17"]
    assert (found.targets, found.depends_on, found.reached_by, found.skippable) == ((roll,), (), {}, {})


def test_a_variant_without_targets_of_its_own_or_of_the_patch_is_an_error(described):
    with pytest.raises(MatrixError, match="variant v0_17 has no target"):
        described(("    targets: [.roll:roll]\n", "    reads: [.roll:roll]\n"))


def test_no_variant_repeats_what_the_patch_can_say_once():
    """The same whole list of targets or reads in all variants stands at the level of the patch."""
    repeated = []
    for file in (REPOSITORY / "patches").rglob("patch.yaml"):
        variants = yaml.safe_load(file.read_text("utf-8"))["variants"].values()
        for key in ("targets", "reads"):
            said = [str(variant[key]) for variant in variants if key in variant]
            repeated += [(file.parent.name, key)] if len(said) == len(variants) > 1 and len(set(said)) == 1 else []
        repeated += [(file.parent.name, "an alias")] if re.search(r": [&*]\w", file.read_text("utf-8")) else []
    assert repeated == []
