"""Plans as text: grouped by what goes wrong without the patches, and what concerns a run first."""

import json

from unit_helpers import BROKEN, MATRIX

from shim._configs.trainer_config import run_of_configs
from shim._matrix.concerns import Run, run_named
from shim._matrix.model import SYMPTOMS
from shim._printing import overview

DESCRIBED = "    symptom: silent\n    without: rolls cross sequences\n    concerns: [packed+tp]"


def test_patches_are_grouped_by_what_goes_wrong_without_them(world):
    """The silent ones first, and the totals in the headline."""
    text = MATRIX.replace("    changes: values", "    changes: values\n    symptom: silent")
    world.pin(text.replace("    changes: nothing", "    changes: nothing\n    symptom: memory"))
    out = str(world.install(BROKEN).plan())
    assert out.startswith("2 patches apply: 1 fixes a silent error, 1 use of memory; 0 not needed here, 0 problems\n")
    silent, memory = out.index("Fixed: silently wrong results\n"), out.index("Fixed: more memory than")
    assert silent < out.index("  roll-fix: ") < memory < out.index("  faster-forward: ")


def described(world):
    world.pin(MATRIX.replace("    changes: values", f"    changes: values\n{DESCRIBED}"))
    return world.install(BROKEN).plan(only="roll-fix")


def test_what_concerns_a_run_comes_first_with_what_would_go_wrong(world):
    out = described(world).text(run=run_named("packed,tp", False))
    assert "\n1 of them concerns a run with packed, tp (1 silent)\n" in out and "roll-fix: rolls cross sequences" in out


def test_a_run_is_told_which_word_more_would_add_patches(world):
    """If words name it: whoever says "packed" and means "tp" as well sees that one more patch is of concern."""
    assert "\n  also relevant if you use tp (1)\n" in described(world).text(run=run_named("packed", False))
    assert "also relevant" not in described(world).text(run=run_named("packed,tp", False))
    assert "also relevant" not in described(world).text(run=Run({"tp": True, "packed": False}, "it"))


def test_the_rest_takes_one_line(world):
    out = described(world).text(run=run_named("moe", False))
    assert "\n0 of them concern a run with moe\n" in out and "\n1 other applies (-v)" in out
    assert "irrelevant to a run with moe:\n  roll-fix" in described(world).text(True, run_named("moe", False))


def test_what_is_not_known_is_said_with_what_would_decide(world, tmp_path):
    (tmp_path / "run.yaml").write_text("tensor_model_parallel_size: 2")
    out = described(world).text(run=run_of_configs([str(tmp_path / "run.yaml")], False))
    assert "0 of them concern a run with tp; 1 more may\n" in out and "rolls cross sequences [silent: packed]" in out


def test_data_says_it_of_each_patch(world):
    found = json.loads(json.dumps(described(world).to_dict(Run({"packed": False}, ""))))["patches"]
    assert (found["roll-fix"]["concerns"], found["faster-forward"]["concerns"]) == ("no", "unknown")
    assert "concerns" not in world.plan().to_dict()["patches"]["roll-fix"]


def test_every_symptom_has_its_words_in_its_order():
    assert tuple(overview._WHAT) == SYMPTOMS


def rows_of(count, **given):
    row = {"state": "apply", "summary": "it", "reason": "why", "remedy": "", "variant": None, "targets": {}}
    row |= {"group": "applied", "symptom": "silent", **given}
    return [overview.Row(id=f"{row['group']}-{number}", **row) for number in range(count)]


def test_a_section_that_is_long_names_some_and_counts_the_rest_but_for_problems():
    rows = [*rows_of(9), *rows_of(6, group="problem"), *rows_of(4, group="features")]
    lines = list(overview.grouped(rows, "to apply", False, most=4))
    assert [sum(f" {kind}-" in line for line in lines) for kind in ("applied", "problem", "features")] == [4, 6, 1]
    assert [line for line in lines if line.endswith(overview.MORE)] == ["  and 5 more (-v)"]
    assert lines[-1].endswith("until you use them: features-0, features-1, features-2, features-3")  # all in a line
    assert not any(line.endswith(overview.MORE) for line in overview.grouped(rows, "to apply", False))


def test_what_concerns_a_run_is_counted_among_all_that_applies():
    rows = [*rows_of(3, concern="yes"), *rows_of(2, group="features", concern="yes", symptom=""), *rows_of(4)]
    assert overview.headline(rows, "to apply").startswith("9 patches apply: 7 fix silent errors, 2 features; ")
    assert overview.concern_line(rows, "it") == "5 of them concern it (3 silent, 2 features)"
    said = overview.concern_line(rows, "it", named=True)
    assert said.startswith("5 of those applied concern it: silent: applied-0,") and said.endswith(
        "features-0, features-1"
    )


def test_what_concerns_none_of_the_words_is_one_count():
    rows = rows_of(30, group="not-concerned")
    lines = list(filter(None, overview.grouped(rows, "to apply", False)))
    assert lines == ["Of no concern to this run: 30 patches (-v)."]
    assert "not-concerned-7" in "\n".join(overview.grouped(rows, "to apply", True))


def test_what_one_switch_leaves_out_is_counted_if_it_is_much():
    """MEGATRON_SHIM_DISABLE leaves out all patches. With -v they are named."""
    rows = rows_of(9, group="excluded", state="excluded", reason="a switch is set")
    assert list(overview.grouped(rows, "to apply", False)) == ["", "Left out: a switch is set (9 patches)."]
    assert (
        "(excluded-0, excluded-1, excluded-2, excluded-3, excluded-4, excluded-5, excluded-6, excluded-7)"
        in list(overview.grouped(rows[:8], "to apply", False))[1]
    )
    assert "excluded-7, excluded-8)" in list(overview.grouped(rows, "to apply", True))[1]
