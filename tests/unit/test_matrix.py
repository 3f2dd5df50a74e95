"""version_matrix.yaml is read strictly: every complaint carries file and line, and no input breaks the reader."""

import json
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from thorough import times
from unit_helpers import BROKEN, MATRIX, output_of, write_file

from shim._errors import MatrixError
from shim._matrix import compiled
from shim._matrix.load import compile_matrix, load_matrix, lock_path, matrix_path, patches_path, shipped_files
from shim._planning.texts import explanation
from shim._releases.files import read_bounded


@pytest.fixture
def complaint(tmp_path, on_path):
    """Line and message of the MatrixError that a matrix text causes."""
    write_file(tmp_path / "trainer_patches/roll_fix.py", "")
    on_path(tmp_path)

    def read(text):
        file = tmp_path / "matrix.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(MatrixError) as caught:
            load_matrix(file)
        found = re.fullmatch(rf"{re.escape(str(file))}:(\d+): (.+)", str(caught.value), re.S)
        assert found, str(caught.value)
        return int(found[1]), found[2]

    return read


def changed(old, new, text=MATRIX, count=1):
    """MATRIX with `old` replaced, and the line where that happened."""
    assert old in text
    return text.replace(old, new, count), text[: text.index(old)].count("\n") + 1


def test_a_text_with_a_colon_is_told_with_the_remedy(complaint):
    """A summary is a sentence, and YAML takes its colon for the end of a key."""
    text, line = changed("    changes: values", "    without: rolls wrong: silently\n    changes: values")
    place, said = complaint(text)
    assert place == line and said.endswith("; Remedy: quote the text, which has a colon")


def test_the_matrix_of_these_tests_is_valid(world):
    """Else the errors below would prove nothing."""
    matrix = load_matrix(world.matrix)
    assert list(matrix.patches) == ["roll-fix", "faster-forward"]
    assert matrix.patches["faster-forward"].options == {"pages": 4}
    assert list(matrix.pins["megatron-core"]) == ["0.16.0", "0.17.0", "0.18.0"]
    assert all(set(pins) == set(matrix.patches) for pins in matrix.pins["megatron-core"].values())


def test_a_patch_with_several_effects_says_each(world):
    """In the whole plan and the explanation, so that somebody who compares bits knows what to leave out."""
    effects = "    effects: {rounding: every loss, values: tokens without a target}"
    text, _ = changed("    changes: values", f"    changes: values\n{effects}")
    world.matrix.write_text(text)
    plan = world.install(BROKEN).plan()
    assert plan.matrix.patches["roll-fix"].effects == {"rounding": "every loss", "values": "tokens without a target"}
    assert not plan.matrix.patches["faster-forward"].effects
    said = ("changes rounding: every loss", "changes values: tokens without a target")
    lines = [line.strip() for line in plan.text(verbose=True).splitlines()]
    assert [line for line in lines if line.startswith("changes")] == list(said)
    assert all(line.removeprefix("changes ") in explanation(plan, "roll-fix") for line in said)


def test_who_met_a_defect_is_read(world):
    """A list of texts; nobody needs to be known."""
    text, _ = changed("    changes: values", "    changes: values\n    met_by: [verl issue 1, a fork]")
    world.matrix.write_text(text)
    patches = load_matrix(world.matrix).patches
    assert patches["roll-fix"].met_by == ("verl issue 1", "a fork") and patches["faster-forward"].met_by == ()


def test_modules_that_a_patch_acts_before_are_read(world):
    """A patch may have none."""
    text, _ = changed("    changes: values", "    changes: values\n    before: [a.b, c]")
    world.matrix.write_text(text)
    patches = load_matrix(world.matrix).patches
    assert patches["roll-fix"].before == ("a.b", "c")
    assert patches["faster-forward"].before == ()


def test_the_shipped_matrix_is_valid():
    """Gaps and overlaps included, which plan time does not look for."""
    assert load_matrix(check_ranges=True).patches


def test_a_target_without_aliases_is_no_alias_of_another_patchs_target():
    """The patch with aliases would take the name of the other one, and whichever module is imported first decides."""
    matrix = load_matrix()
    for release, pins in (item for of_release in matrix.pins.values() for item in of_release.items()):
        chosen = [(id, matrix.patches[id].variants[pin.variant]) for id, pin in pins.items() if pin.variant]
        alone = {(id, target) for id, variant in chosen for target in variant.no_aliases}
        for id, variant in chosen:
            for target in variant.targets:
                name, where = target.partition(":")[2], f"{release}: {id} binds {target}, and aliases of it"
                found = [other for other, its in alone if its.endswith(f":{name}") and its != target and other != id]
                # Constants have no identity, so nothing is an alias of one.
                assert (id, target) in alone or name.isupper() or not found, f"{where}, which {found} bind alone"


def test_the_shipped_matrix_names_only_patches_of_shim(tmp_path, monkeypatch, complaint):
    """A trainer's own matrix may name its own modules; the shipped one may not."""
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: tmp_path / "matrix.yaml")
    text, line = changed("module: trainer_patches.roll_fix", "module: trainer_patches.roll_fix")
    assert complaint(text)[0] == line
    assert "there is no module trainer_patches.roll_fix" in complaint(text)[1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # versions and ranges are quoted, because YAML reads 0.20 as 0.2
        ('"0.16.0", ', "0.16, ", "quoted version string, not 0.16"),
        ('{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0"', "{megatron-core: 0.16", "quoted version string, not 0.16"),
        ('"0.16.0", ', '"0.16.x", ', "not a PEP 440 version"),
        ('">=0.16.0.dev0,<0.17.0.dev0"', '">=0.16.x"', "megatron-core: "),
        ('">=0.16.0.dev0,<0.17.0.dev0"', '"0.16.0"', "megatron-core: "),
        ('">=0.16.0.dev0,<0.17.0.dev0"', '"===custom"', "megatron-core: "),
        ('">=0.16.0.dev0,<0.17.0.dev0"', '"==' + "9" * 5000 + '"', "megatron-core: "),
        # keys
        ("    changes: values", "    kind: compat", "duplicate key 'kind'"),
        ("    changes: values", "    changes: values\n    colour: red", "unknown key 'colour'"),
        ("    changes: values\n", "", "lacks 'changes'"),
        ("    changes: values", "    <<: {changes: values}", "without <<"),
        ("    changes: values", "    [a]: b\n    changes: values", "a key of patch roll-fix must be text"),
        ("  faster-forward:", "  roll-fix:", "duplicate key 'roll-fix'"),
        ("  faster-forward:", "  faster forward:", "is not a patch id"),
        ("        reads: [", "        needs: [", "unknown key 'needs'"),
        ("variant: old}", "variant: old, when: now}", "unknown key 'when'"),
        ("variant: old}", 'variant: old, torch: "<3"}', "unknown key 'torch'"),
        # values
        ("kind: correctness", "kind: correct", "one of correctness, compat, performance, feature"),
        ("    changes: values", "    changes: values\n    symptom: bad", "one of silent, crash, hang, memory, missing"),
        ("changes: values", "changes: much", "one of nothing, rounding, values"),
        ("    changes: values", "    changes: values\n    effects: {much: all}", "'much'; it must be one of rounding"),
        (
            "    changes: values",
            "    changes: values\n    effects: {rounding: all}",
            "the strongest of effects is not values",
        ),
        ("    changes: values", "    changes: values\n    effects: {}", "the strongest of effects is not values"),
        ("distribution: megatron-core", "distribution: megatron", "one of megatron-core"),
        ("summary: rolls stay inside their sequence", "summary: 3", "summary must be text"),
        ("summary: rolls stay inside their sequence", 'summary: " "', "summary is empty"),
        ("summary: rolls stay inside their sequence", "summary: [a]", "summary must be text"),
        ("options: {pages: 4}", "options: {pages: [4]}", "single value"),
        ("options: {pages: 4}", "options: {pages: 2020-13-45}", "pages"),
        ("options: {pages: 4}", "options: {pages: 2020-12-24}", "pages must be"),
        ("options: {pages: 4}", "options: 4", "must be a mapping"),
        ("options: {pages: 4}", "options: {pages: {default: true, switch: true}}", "a switch is false by default"),
        ("options: {pages: 4}", "options: {pages: {default: false, switch: 1}}", "switch of pages must be true"),
        # stand-ins
        ("    changes: values", "    changes: values\n    before: a.b", "must be a list"),
        ("    changes: values", "    changes: values\n    before: [3]", "a module must be text"),
        ("    changes: values", "    changes: values\n    before: ['a..b']", "'a..b' is not the name of"),
        ("    changes: values", "    changes: values\n    before: ['a:b']", "'a:b' is not the name of"),
        ("    changes: values", "    changes: values\n    before: [a, a]", "a stands twice in before"),
        # modules, targets, variants
        ("module: trainer_patches.roll_fix", "module: trainer_patches.gone", "there is no module"),
        ("module: trainer_patches.roll_fix", "module: shim.patches.gone", "there is no module"),
        ("module: trainer_patches.roll_fix", "module: shim.patches...setup", "there is no module"),
        ("module: trainer_patches.roll_fix", "module: ../roll_fix", "there is no module"),
        ("module: trainer_patches.roll_fix", "module: shim.patches." + "a" * 300, "there is no module"),
        ('["megatron.core.roll:roll"]', '["megatron.core.roll"]', "not of the form"),
        ('["megatron.core.roll:roll"]', '["a:b", "a:b"]', "stands twice"),
        ('["megatron.core.roll:roll"]', '[{target: "a:b", optional: 1}]', "optional must be true or false"),
        ('["megatron.core.roll:roll"]', "[]", "has no target"),
        ('["megatron.core.roll:roll"]', '[{inherits: "a:b"}]', "lacks 'target'"),
        ('["megatron.core.roll:roll"]', '[{target: "a:b", without: all}]', "can do without each of its targets"),
        ('["megatron.core.roll:roll"]', '[{target: "a:b", reached_by: ["c"]}]', "not of the form"),
        ("variant: new}", "variant: newest}", "there is no variant 'newest'"),
        ("variant: new}", "note: what for}", "lacks 'variant'"),
        ('{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", variant: old}', "{variant: old}", "needs a range"),
        # syntax
        ("    kind: correctness", "    kind: [correctness", ""),
        ("    kind: correctness", "\tkind: correctness", ""),
    ],
)
def test_what_is_wrong_is_said_with_its_line(complaint, old, new, message):
    """The line is that of the mistake, or of what lacks something."""
    text, line = changed(old, new)
    found, said = complaint(text)
    assert message in said
    assert abs(found - line) <= 3
    if not new.startswith(("    <<", "    kind: [", "\t")) and "lacks" not in message:
        assert found in (line, line + 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<0.17.0.dev0", "<0.17.0rc1", "overlap: megatron-core 0.17.0.dev0 lies in this rule and in that of line 19"),
        ("<0.17.0.dev0", "<0.18.0.dev0", "overlap"),
        ("<0.17.0.dev0", "<0.16.1", "leave a gap"),
        ("<0.17.0.dev0", "<0.17.0.dev0,!=0.16.2", "leave a gap: no rule covers megatron-core 0.16.2"),
        (">=0.17.0.dev0", ">=0.17.0rc1", "leave a gap: no rule covers megatron-core 0.17.0.dev0"),
        (">=0.16.0.dev0", ">=0.16.1.dev0", "leave a gap: no rule covers megatron-core 0.16.0"),
        (">=0.18.0.dev0,<0.19.0.dev0, note", ">=0.18.1.dev0, note", "leave a gap"),
    ],
)
def test_gaps_and_overlaps_of_ranges_are_errors(complaint, old, new, message):
    """Every release from the first to the last has one rule, pre-releases included."""
    text = MATRIX.replace(old.replace(", note", '", note'), new.replace(", note", '", note'), 1)
    assert text != MATRIX
    assert message in complaint(text)[1]


def test_a_variant_without_a_rule_is_an_error(complaint):
    """It could never be chosen."""
    text = MATRIX.replace("      new:\n", '      spare:\n        targets: ["a:b"]\n      new:\n', 1)
    line, message = complaint(text)
    assert "no rule of roll-fix leads to the variant 'spare'" in message
    assert line == 12


def test_a_variant_that_no_release_has_is_an_error(world, complaint):
    """Once there are pins: a target that no supported release has cannot have been tried."""
    pins = json.loads(lock_path(world.matrix).read_text())
    del pins["roll-fix"]["new"]
    lock_path(world.matrix).write_text(json.dumps(pins))
    text = world.matrix.read_text()
    assert "no release of the supported list has the targets of variant new" in complaint(text)[1]


def test_several_distributions_span_a_plane(complaint):
    """Ranges over two distributions overlap only where both do."""
    rules = (
        '      - {megatron-core: ">=0.16.0.dev0,<0.19.0.dev0", transformer-engine: "<2.9.dev0", variant: old}\n'
        '      - {megatron-core: ">=0.16.0.dev0,<0.19.0.dev0", transformer-engine: ">=2.9.dev0", variant: new}\n'
    )
    start, end = MATRIX.index("      - {megatron"), MATRIX.index("    delete_when: megatron-core 0.17")
    text = MATRIX[:start] + rules + MATRIX[end:]
    assert "overlap" in complaint(text.replace('"<2.9.dev0"', '"<2.9.1"'))[1]
    assert "gap" in complaint(text.replace('">=2.9.dev0"', '">2.9.1"'))[1]
    # The plane itself is in order: what is complained of is the other patch.
    assert "faster-forward" in complaint(text.replace('<0.19.0.dev0", variant: only', '<0.17", variant: only'))[1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# nothing\n",
        b"---\n...\n",
        b"null\n",
        b"[]\n",
        b"text\n",
        b"supported: {}\n",
        b"supported: {}\npatches: []\n",
        b"\xff\xfe\x00",
        b"a: \x00",
        b"a: 'unclosed",
        b"a: b\n--- \na: b\n",
        b"a: *nowhere\n",
        b"a: &a [*a]\n",
        b"&a {supported: *a, patches: *a}\n",
        b"%YAML 9.9\n---\na: b\n",
        b'a: "\\UFFFFFFFF"\n',
        b"!!python/object/apply:os.system ['true']\n",
        b"supported: !!python/name:os.system {}\npatches: {}\n",
        b"? [a, b]\n: c\n",
        b"[" * 3000,
        b"{a: " * 3000,
        b"- " * 5000,
        b"a: " + b"x" * 3_000_000,
        b"# a\n" + b"- a\n" * 100_000,
        b"supported: !!python/object/new:os._exit [77]\npatches: {}\n",
        MATRIX.replace("options: {pages: 4}", "options: &o {pages: *o}"),
        MATRIX.replace("patches:\n", "patches: &p\n", 1).replace("options: {pages: 4}", "options: *p"),
    ],
)
def test_hostile_input_is_a_matrix_error(complaint, content):
    """Whatever the file holds, the error is a MatrixError with file and line."""
    complaint(content)


def test_nesting_that_would_overrun_the_stack_is_refused():
    """libyaml's loader recurses in C; in a process of its own, because the wrong answer is a crash."""
    code = """
        import pathlib, sys, tempfile
        from shim._errors import MatrixError
        from shim._matrix.load import load_matrix
        n = 300_000
        blocks = "".join("  " * i + "- " * 20 + chr(10) for i in range(2000))
        for text in ("[" * n, "{a: " * n, "- " * n, "? " * n, "[\\n" * n, blocks):
            file = pathlib.Path(tempfile.mkdtemp(), "m.yaml")
            file.write_text(text)
            try:
                load_matrix(file)
            except MatrixError as error:
                print(str(error).count("m.yaml:1: "))
    """
    assert len(output_of(code).split()) == 6


def test_an_alias_bomb_is_not_expanded(complaint):
    """Aliases are one node each; nothing multiplies them."""
    bomb = 'a0: &a0 "x"\n' + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    complaint(bomb + MATRIX)
    text = MATRIX.replace("kind: correctness", "kind: &a0 [x, x]\n    references: [&a1 [*a0, *a0], *a1]", 1)
    complaint(text)


def test_a_missing_file_or_directory_is_a_matrix_error(tmp_path):
    """MEGATRON_SHIM_MATRIX may name anything."""
    for path in (tmp_path / "gone.yaml", tmp_path):
        with pytest.raises(MatrixError, match="cannot be read"):
            load_matrix(path)


REAL = matrix_path().read_text("utf-8")
PIECES = ["", "\n", " ", ":", "- ", "[", "]", "{", "}", '"', "'", "*a", "&a ", "<<: ", "!!x ", "\t", "0.2", "null", "?"]
PIECES += ["\x00", "\ud800", "\u2028", "'0.1'", "upstream", "#", "|", ">", "%", "@", "--- \n", "~", "=", "9" * 5000]


@pytest.mark.no_cover
@settings(max_examples=times(20, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutations_of_the_real_matrix_load_or_fail_as_matrix_errors(tmp_path, data):
    """Fuzz: cut, insert and swap at random places of the shipped text."""
    text = REAL if data.draw(st.booleans()) else MATRIX
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.sampled_from([0, 0, 1, 2, 5, 20, 200])))
        piece = data.draw(st.one_of(st.sampled_from(PIECES), st.text(max_size=5), st.just(text[end : end + 30])))
        text = text[:start] + piece + text[end:]
    file = tmp_path / "mutated.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_matrix(file, check_ranges=data.draw(st.booleans()))
    except MatrixError as error:
        assert re.match(rf"{re.escape(str(file))}:\d+: ", str(error))


LOCK = lock_path(matrix_path()).read_text("utf-8")


@settings(max_examples=times(10, 80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutations_of_the_real_pins_load_or_fail_as_matrix_errors(tmp_path, data):
    """Fuzz, beside the rules that they belong to."""
    text = LOCK
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.sampled_from([0, 0, 1, 2, 5, 20, 200])))
        piece = data.draw(st.one_of(st.sampled_from(PIECES), st.text(max_size=5), st.just(text[end : end + 30])))
        text = text[:start] + piece + text[end:]
    file = tmp_path / "rules.yaml"
    file.write_text(REAL, "utf-8")
    lock_path(file).write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_matrix(file, check_ranges=False)
    except MatrixError as error:
        assert re.match(rf"{re.escape(str(tmp_path))}/rules\.(lock\.json|yaml):\d+: ", str(error))


# Ranges that stand beside the targets of a variant


def beside(ranges, text=MATRIX):
    """MATRIX with the ranges of the second patch, which has one variant, beside its targets."""
    rules = '    applies:\n      - {megatron-core: ">=0.16.0.dev0,<0.19.0.dev0", variant: only}\n'
    assert rules in text
    return text.replace(rules, "").replace("      only:\n", f"      only:\n        applies: {ranges}\n", 1)


def test_ranges_may_stand_beside_the_targets(world):
    """One mapping or a list of them, and pre-releases belong to their release."""
    for ranges in (
        '{megatron-core: ">=0.16,<0.19"}',
        '[{megatron-core: ">=0.16,<0.17"}, {megatron-core: ">=0.17,<0.19"}]',
    ):
        world.matrix.write_text(beside(ranges))
        entry = load_matrix(world.matrix).patches["faster-forward"]
        assert {rule.variant for rule in entry.rules} == {"only"}
        for release, there in (("0.16.0rc1", True), ("0.16.0.dev0", True), ("0.18.2", True), ("0.19.0rc0", False)):
            assert (entry.rule_for({"megatron-core": Version(release)}) is not None) == there, release


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("{}", "needs a range"),
        ("3", "applies of only must be a mapping"),
        ('{megatron-core: ">=0.16,<0.19", variant: only}', "unknown key 'variant'"),
        ('{megatron-core: ">=0.17,<0.19"}', "leave a gap"),
        ('[{megatron-core: ">=0.16,<0.18"}, {megatron-core: ">=0.17,<0.19"}]', "overlap"),
    ],
)
def test_ranges_beside_targets_are_checked_like_others(complaint, ranges, message):
    """With the line at which they stand."""
    line, found = complaint(beside(ranges))
    assert message in found
    assert line >= MATRIX[: MATRIX.index("faster-forward")].count("\n")


def test_no_variant_is_called_upstream(complaint):
    """Pins of releases that are right stand under that name."""
    assert "no variant can be called upstream" in complaint(MATRIX.replace("only", "upstream"))[1]


# The fast form of the matrix that ships


def test_the_fast_form_is_what_is_read_from_rules_and_pins():
    """Everything but the lines, which only errors need, comes from both alike. After a change: `make docs`."""
    read = load_matrix(check_ranges=True)
    fast = load_matrix()
    assert fast == read
    assert compiled.FILE.read_text("utf-8") == compile_matrix()[1]


def test_the_fast_form_needs_no_yaml():
    """Which takes longer to read than all the rest of a plan."""
    code = "import sys; from shim._matrix.load import load_matrix; load_matrix(); print('yaml' in sys.modules)"
    assert output_of(code).strip() == "False"


@pytest.mark.parametrize("name", ["version_matrix.yaml", "version_matrix.lock.json"])
def test_the_fast_form_of_other_rules_or_pins_is_not_read(tmp_path, monkeypatch, name):
    """One byte is enough; the matrix is then read as any other."""
    for file in (matrix_path(), lock_path(matrix_path())):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: tmp_path / "version_matrix.yaml")
    monkeypatch.setattr("shim._matrix.rules.read_matrix", lambda *args, **kwargs: "read")
    assert load_matrix() != "read"
    with open(tmp_path / name, "a") as file:
        file.write("\n")
    assert load_matrix() == "read"


def test_an_edited_description_is_noticed_by_its_time_and_an_untouched_one_is_not_opened(tmp_path, monkeypatch):
    """In a checkout. A new time alone, as that of a fresh clone, means that the contents are compared."""
    for file in shipped_files(patches_path()):
        copy = tmp_path / file.relative_to(patches_path())
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        os.utime(copy, (0, 0))
    monkeypatch.setattr("shim._matrix.load.patches_path", lambda: tmp_path)
    monkeypatch.setattr("shim._matrix.rules.read_matrix", lambda *args, **kwargs: "read")
    opened = []
    monkeypatch.setattr(
        "shim._matrix.load.read_bounded", lambda file, *a, **k: opened.append(file) or read_bounded(file, *a, **k)
    )
    assert load_matrix() != "read" and not [file for file in opened if file.name == "patch.yaml"]
    os.utime(copy)
    assert load_matrix() != "read" and copy in opened
    copy.write_text(copy.read_text("utf-8") + "# a word\n", "utf-8")
    assert load_matrix() == "read"


@pytest.mark.no_cover
@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"digest": 3}'])
def test_a_damaged_fast_form_is_not_read(tmp_path, monkeypatch, text):
    """It holds nothing that is not elsewhere."""
    monkeypatch.setattr(compiled, "FILE", tmp_path / "matrix.json")
    before = load_matrix()
    (tmp_path / "matrix.json").write_text(text)
    assert load_matrix() == before


# Files


def test_what_is_no_file_is_a_matrix_error_at_once(tmp_path):
    """MEGATRON_SHIM_MATRIX may name a device without end, or a pipe that nobody writes to; in a process of its own,
    because the wrong answer is to wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    code = f"""
        import resource
        from shim._errors import MatrixError
        from shim._matrix.load import load_matrix
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        for path in ("/dev/zero", "/dev/null", {str(tmp_path / "pipe")!r}, {str(tmp_path / "loop")!r}, "a" + chr(0)):
            try:
                load_matrix(path)
            except MatrixError as error:
                print(str(error).count("cannot be read: "))
    """
    assert output_of(code).split() == ["1"] * 5


def test_a_file_without_end_is_not_read_to_its_end(tmp_path):
    """A sparse file of a terabyte takes no memory; what it holds is no matrix."""
    with (tmp_path / "matrix.yaml").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MatrixError, match="too large"):
        load_matrix(tmp_path / "matrix.yaml")


@pytest.mark.parametrize(("mode", "who"), [(0o602, "everybody"), (0o620, "its group"), (0o777, "everybody")])
def test_a_matrix_that_others_may_write_is_refused_with_the_remedy(world, mode, who):
    """It names code to import; only who may write the file, or shim itself, decides about that."""
    world.matrix.chmod(mode)
    with pytest.raises(MatrixError, match=rf":1: may be written by {who} \(mode {mode:04o}\).*Remedy: chmod go-w"):
        load_matrix(world.matrix)
    world.matrix.chmod(0o644)
    assert load_matrix(world.matrix).patches


def test_the_shipped_matrix_is_as_safe_as_the_code_beside_it(tmp_path, monkeypatch):
    """An installer under umask 002 leaves it writable for the group, and so the code."""
    copy = tmp_path / "version_matrix.yaml"
    copy.write_text(REAL)
    copy.chmod(0o664)
    with pytest.raises(MatrixError, match="its group"):
        load_matrix(copy)
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: copy)
    assert load_matrix(copy).shipped
