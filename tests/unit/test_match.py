"""Step 2: versions name a candidate, fingerprints decide."""

import re
from dataclasses import replace

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, REWORKED, write_file

from shim._errors import MatrixError, NotMetError
from shim._matrix.load import load_matrix, lock_path
from shim._planning.bodies import Bodies
from shim._planning.match import match
from shim._planning.requirements import enforce
from shim._releases.detect import Environment, Installed, detect
from shim._releases.sources import Sources

EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")
EDITED_READ = BROKEN.replace("return x\n", "return -x\n", 1)
OTHER_SIGNATURE = BROKEN.replace("shift=-1", "shift=-1, dims=None")


def roll(world, **arguments):
    return world.plan(**arguments)["roll-fix"]


@pytest.mark.parametrize(
    ("text", "version", "variant"), [(BROKEN, "0.16.0", "old"), (REWORKED, "0.17.0", "new"), (BROKEN, "0.16.1", "old")]
)
def test_a_known_body_under_its_version_is_applied(world, text, version, variant):
    """The plain case; a release that is not pinned itself but has pinned bodies is as good."""
    found = roll(world.install(text, version))
    assert (found.action, found.variant) == ("apply", variant)


@pytest.mark.parametrize("version", ["0.17.0rc0", "0.17.0.dev0", "0.17.9"])
def test_pre_releases_belong_to_their_release(world, version):
    """0.17.0rc0 has the rules of 0.17."""
    found = roll(world.install(REWORKED, version))
    assert (found.action, found.variant) == ("apply", "new")
    assert "its version does not matter" not in found.reason


@pytest.mark.parametrize("version", ["0.20.0.dev0", "0.20.0", "0.12.0", "0.17.0", "0.18.0", None])
@pytest.mark.parametrize(("text", "variant"), [(BROKEN, "old"), (REWORKED, "new")])
def test_a_known_body_decides_under_any_version(world, version, text, variant):
    """Nightlies, commits and vendor forks: an unknown version, none at all, and even a wrong one."""
    found = roll(world.install(text, version))
    assert (found.action, found.variant) == ("apply", variant)


def test_a_known_body_decides_under_a_vendor_string(world):
    """A version that is not PEP 440 decides nothing."""
    environment = Environment({"megatron-core": Installed("megatron-core", "megatron.core", "", "nv-24.05")}, Sources())
    world.install(BROKEN)
    matrix = load_matrix(world.matrix)
    found = match(matrix.patches["roll-fix"], environment, matrix)
    assert (found.state, found.variant) == ("apply", "old")


def test_what_a_rule_has_to_say_is_in_the_reason(world):
    """For instance what a backport gains there."""
    rule = "variant: old}"
    assert rule in world.matrix.read_text()
    world.matrix.write_text(world.matrix.read_text().replace(rule, "variant: old, note: half of it}"))
    assert "megatron-core 0.16.0 needs it (half of it); all" in roll(world.install(BROKEN, "0.16.0")).reason
    assert "half" not in roll(world.install(REWORKED, "0.17.0")).reason
    assert "are those of 0.18.0 (fixed in 0.18)" in roll(world.install(FIXED, "0.18.0")).reason


@pytest.mark.parametrize("version", ["0.20.0.dev0", "0.16.0", "0.18.0", None])
def test_the_bodies_of_a_release_that_has_the_fix_mean_upstream(world, version):
    """Whatever the version says: a backport to an older vendor release is recognised."""
    found = roll(world.install(FIXED, version))
    assert found.action == "upstream"
    assert "0.18.0" in found.reason


@pytest.mark.parametrize("text", [FIXED.replace("else x", "else -x"), EDITED, EDITED_READ])
def test_a_version_alone_never_says_that_a_release_is_right(world, text):
    """One unknown body among those that the patch binds or relies on, and nobody knows whether the patch is needed."""
    found = roll(world.install(text, "0.18.3"))
    assert found.action == "drifted"
    assert "it is not known whether megatron-core 0.18.3 needs this patch" in found.reason
    assert "one of those fixed (fixed in 0.18)" in found.reason and "shim pin --prove" in found.remedy
    with pytest.raises(NotMetError, match="required, but roll-fix is drifted"):
        enforce(world.plan(require=["roll-fix"]))
    forced = roll(world, on_drift="apply")
    assert forced.action == "drifted" and "nothing shows that the patch is needed" in forced.reason


def test_a_body_that_the_right_release_lacks_must_be_missing_too(world):
    """A release that lacks the feature was right for want of it. One more body, and that says nothing."""
    lacking = "def helper(x):\n    return x\nclass Layer:\n    def forward(self, x):\n        return x\n"
    write_file(world.root / "releases/0.18.0/megatron/core/roll.py", lacking)
    world.pin(MATRIX.replace("    upstream:", "    not_needed:"))
    found = roll(world.install(lacking, "0.18.5"))
    assert (found.action, "its bodies are those of 0.18.0" in found.reason) == ("not-needed", True)
    found = roll(world.install(lacking + "def roll(x):\n    return x\n", "0.18.5"))
    assert found.action == "drifted" and "not known whether" in found.reason


def test_a_version_without_the_feature_is_not_needed_where_no_target_is_there(world):
    """The version and the sources agree. Either alone is not enough: at 0.16 the targets have moved, or are lost."""
    world.pin(MATRIX.replace("    upstream:", "    not_needed:"))
    found = roll(world.install("def helper(x):\n    return -x\n", "0.18.5"))
    assert (found.action, found.variant) == ("not-needed", None)
    assert "it has none of the patch's targets (fixed in 0.18)" in found.reason
    assert roll(world.install("def helper(x):\n    return -x\n", "0.16.5")).action == "drifted"


def test_an_edited_target_is_drifted(world):
    """A known version with an unknown body: the reason names target and release."""
    found = roll(world.install(EDITED))
    assert (found.action, found.variant) == ("drifted", "old")
    assert "megatron-core 0.16.0 differs at megatron.core.roll:roll:" in found.reason
    assert found.remedy.endswith("or reinstall megatron-core 0.16.0, whose code this is not")


def test_an_edited_body_that_the_patch_relies_on_is_drifted(world):
    """What a patch reads counts like what it binds."""
    found = roll(world.install(EDITED_READ))
    assert found.action == "drifted"
    assert "megatron.core.roll:helper, which the patch relies on" in found.reason


def test_one_unknown_body_makes_the_whole_patch_drift(world):
    """Never half a patch."""
    found = roll(world.install(BROKEN.replace("return roll(x)", "return roll(x, 1)")))
    assert found.action == "drifted"
    assert "Layer.forward" in found.reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no module"),
        ("def f(:", "cannot be parsed"),
        ("x = 1", "has no roll"),
        ("\0", "cannot be parsed"),
    ],
)
def test_unreadable_sources_are_drifted_with_the_reason(world, text, why):
    """Gone, broken, or without the definition."""
    found = roll(world.install(text, "0.16.0"))
    assert found.action == "drifted"
    assert why in found.reason and "and 2 more" in found.reason
    assert "on_drift" not in found.remedy


def test_bodies_of_different_releases_of_one_variant_may_mix(world):
    """Each body is known for this variant; a vendor may carry one file of a later release."""
    world.pin(
        MATRIX.replace(
            '>=0.16.0.dev0,<0.17.0.dev0", variant: old', '>=0.16.0.dev0,<0.16.1.dev0", variant: old'
        ).replace('>=0.17.0.dev0,<0.18.0.dev0", variant: new', '>=0.16.1.dev0,<0.18.0.dev0", variant: new')
    )
    assert roll(world.install(REWORKED, "0.16.5")).variant == "new"


@pytest.mark.parametrize("text", [EDITED, EDITED_READ])
def test_on_drift_apply_applies_where_the_signature_still_fits(world, text):
    """It was asked for, and the reason says what was unknown."""
    found = roll(world.install(text), on_drift="apply")
    assert (found.action, found.variant, found.remedy) == ("apply", "old", "")
    assert "not known, as asked for" in found.reason and "differs at" in found.reason


@pytest.mark.parametrize("text", [OTHER_SIGNATURE, "x = 1", None])
def test_on_drift_apply_does_not_apply_where_the_signature_changed(world, text):
    """Nor where a target is gone: the patch would call it wrongly."""
    found = roll(world.install(text), on_drift="apply")
    assert found.action == "drifted"
    assert "signature of a target has also changed" in found.reason


def test_on_drift_error_raises_and_names_everything(world):
    """Patch, target, release and remedy."""
    with pytest.raises(NotMetError) as caught:
        enforce(world.install(EDITED).plan(on_drift="error"))
    for part in ("on_drift='error'", "roll-fix", "megatron.core.roll:roll", "megatron-core 0.16.0", "Remedy:"):
        assert part in str(caught.value)
    enforce(world.install(BROKEN).plan(on_drift="error"))


def test_nothing_installed_is_not_installed(world):
    """And says what is missing."""
    world.on_path(world.own)
    found = roll(world)
    assert (found.action, found.reason) == ("not-installed", "megatron-core is not installed")


def test_a_release_before_all_ranges_with_unknown_bodies_is_out_of_range(world):
    """It is older than anything the matrix speaks of."""
    assert roll(world.install("def roll(): pass", "0.11.0")).action == "out-of-range"


def test_a_release_after_all_ranges_is_drifted_also_if_its_targets_are_gone(world):
    """Nobody knows what a newer release needs. Where all targets are gone, the code may have moved."""
    newer = "def roll(): pass"
    assert roll(world.install(newer, "0.20.0")).action == "drifted"
    assert roll(world.install("x = 1", "0.20.0")).action == "drifted"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"only": "faster-forward"}, "not among those asked for|only"),
        ({"exclude": "roll-fix"}, "excluded by argument"),
        ({"kinds": "performance"}, "its kind, correctness"),
    ],
)
def test_what_is_not_asked_for_is_excluded(world, arguments, why):
    """By id or by kind; the other patch is not touched by that."""
    plan = world.install(BROKEN).plan(**arguments)
    assert plan["roll-fix"].action == "excluded"
    assert plan["faster-forward"].action == "apply"
    assert re.search(why, plan["roll-fix"].reason)


@pytest.mark.parametrize(
    ("name", "value", "why"), [("DISABLE", "1", "DISABLE is set"), ("EXCLUDE", "roll-fix", "MEGATRON_SHIM_EXCLUDE")]
)
def test_the_environment_excludes_too(world, monkeypatch, name, value, why):
    """The reason names the variable, so that one finds where it was set."""
    monkeypatch.setenv("MEGATRON_SHIM_" + name, value)
    found = roll(world.install(BROKEN))
    assert found.action == "excluded"
    assert why in found.reason


TWO_AXES = MATRIX.replace(
    '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", variant: old}',
    '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", transformer-engine: "<3", variant: old}',
).replace(
    '{megatron-core: ">=0.18.0.dev0,<0.19.0.dev0", note: fixed in 0.18}',
    '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", transformer-engine: ">=3", note: TE 3 does it}\n'
    '      - {megatron-core: ">=0.18.0.dev0,<0.19.0.dev0"}',
)


def test_bodies_do_not_overrule_the_version_of_another_distribution(world):
    """A release of Transformer Engine makes the patch superfluous. The bodies of megatron-core cannot show that.

    It counts if it is a release that shim knows, and not a fork that carries such a number.
    """
    world.install(BROKEN)
    write_file(world.own / "transformer_engine/__init__.py", "")
    write_file(world.own / "build_tools/VERSION.txt", "3.0.0\n")
    world.matrix.write_text(TWO_AXES, "utf-8")
    world.install(BROKEN)
    matrix = load_matrix(world.matrix, check_ranges=False)
    found = match(matrix.patches["roll-fix"], detect(), matrix)
    assert (found.state, "TE 3 does it" in found.reason) == ("drifted", True)
    assert "nothing in its sources shows it" in found.reason
    known = replace(matrix, supported={**matrix.supported, "transformer-engine": ("3.0.0",)})
    found = match(matrix.patches["roll-fix"], detect(), known)
    assert (found.state, "TE 3 does it" in found.reason) == ("upstream", True)
    write_file(world.own / "build_tools/VERSION.txt", "2.9.0\n")
    assert match(matrix.patches["roll-fix"], detect(), matrix).state == "apply"


BESIDE = (
    MATRIX.replace(
        '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", variant: old}',
        '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", transformer-engine: ">=2.dev0", variant: old}',
    )
    .replace(
        '{megatron-core: ">=0.18.0.dev0,<0.19.0.dev0", note: fixed in 0.18}',
        '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", transformer-engine: "<2.dev0", note: TE 1 needs nothing}\n'
        '      - {megatron-core: ">=0.18.0.dev0,<0.19.0.dev0", transformer-engine: ">=0.dev0"}',
    )
    .replace('<0.18.0.dev0", variant: new}', '<0.18.0.dev0", transformer-engine: ">=0.dev0", variant: new}')
)


def test_what_every_rule_needs_beside_its_distribution_has_to_be_installed(world):
    """Pins are those of its own distribution, whatever is installed beside it."""
    world.pin(BESIDE)
    world.install(BROKEN)
    matrix = load_matrix(world.matrix, check_ranges=False)
    assert matrix.patches["roll-fix"].needs == ("megatron-core", "transformer-engine")
    found = match(matrix.patches["roll-fix"], detect(), matrix)
    assert (found.state, found.reason) == ("not-installed", "transformer-engine is not installed")
    for version, state in (("2.9.0", "apply"), ("1.9.0", "drifted")):
        write_file(world.own / "transformer_engine/__init__.py", "")
        write_file(world.own / "build_tools/VERSION.txt", version)
        assert match(matrix.patches["roll-fix"], detect(), matrix).state == state


def test_what_else_is_installed_does_not_choose_between_variants(world):
    """A release has one set of pins for each patch."""
    text = MATRIX.replace(
        '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", variant: old}',
        '{megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", transformer-engine: ">=2.dev0", variant: old}\n'
        '      - {megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", transformer-engine: "<2.dev0", variant: new}',
    )
    with pytest.raises(MatrixError, match="new, old are all variants of megatron-core"):
        world.pin(text)


INHERITED = MATRIX.replace(
    'targets: ["megatron.core.roll:roll"]',
    'targets: ["megatron.core.roll:roll", {target: "megatron.core.roll:Special.forward", '
    'inherits: "megatron.core.roll:Layer.forward"}]',
)
SPECIAL = REWORKED + "\n    class Special(Layer):\n        pass\n"


def test_an_inherited_target_drifts_with_the_class_it_inherits_from_and_when_overridden(world):
    """The defining class is fingerprinted; a subclass that comes to define the method itself is drift, too."""
    write_file(world.root / "releases/0.17.0/megatron/core/roll.py", SPECIAL)
    world.pin(INHERITED)
    assert roll(world.install(SPECIAL, "0.17.0")).action == "apply"
    changed = roll(world.install(SPECIAL.replace("dims=0", "dims=1"), "0.17.0"))
    assert changed.action == "drifted" and "Special.forward" in changed.reason
    overridden = SPECIAL.replace("        pass", "        def forward(self, x): return x")
    found = roll(world.install(overridden, "0.17.0"))
    assert found.action == "drifted" and "no longer inherits" in found.reason


def test_a_release_that_cannot_be_told_from_one_that_is_right_is_an_error_of_the_matrix(world):
    """If upstream fixed something the patch does not name, fingerprints cannot decide; the author must name it."""
    write_file(world.root / "releases/0.18.0/megatron/core/roll.py", REWORKED)
    world.pin(MATRIX)
    with pytest.raises(MatrixError, match=r"0.18.0 is right without roll-fix, but its bodies are those of 0.17.0"):
        load_matrix(world.matrix)


def test_sources_may_come_from_a_tree_that_is_not_installed(world):
    """As `shim pin` and release cells use it."""
    environment = Environment(
        {"megatron-core": Installed("megatron-core", "megatron.core", "", "0.17.0")},
        Sources([world.root / "releases" / "0.17.0"]),
    )
    matrix = load_matrix(world.matrix)
    assert match(matrix.patches["roll-fix"], environment, matrix).variant == "new"


@pytest.mark.parametrize("on_drift", ["skip", "apply"])
def test_a_matrix_without_pins_is_not_blamed_on_the_release(world, on_drift):
    """A matrix of one's own before `shim pin --releases`: nothing is known, and the remedy is to measure it."""
    lock_path(world.matrix).unlink()
    found = roll(world.install(BROKEN), on_drift=on_drift)
    assert found.action == "drifted"
    assert found.reason.startswith("no release is pinned, so no body of megatron-core 0.16.0 is known")
    assert found.remedy == f"run shim pin --releases --matrix {world.matrix}"
    assert "changed" not in found.reason


def test_the_variant_of_the_version_is_tried_first(world):
    """No release has its bodies if it was written for one to come, so the nearest bodies are those of another."""
    world.install(EDITED, "0.17.0")
    plan = world.plan()
    bodies = Bodies(plan.matrix.patches["roll-fix"], plan.environment, plan.matrix)
    assert bodies.likely()[0].name == "new"
