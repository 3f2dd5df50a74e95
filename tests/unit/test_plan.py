"""Step 3: one decision with one reason per patch, from environment, matrix and options alone."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, output_of, write_file

from shim._errors import NotMetError
from shim._matrix.load import load_matrix, lock_path
from shim._planning.options import resolve
from shim._planning.plan import make_plan
from shim._planning.requirements import enforce
from shim._releases.detect import detect

CODE = """
    import sys
    from shim._releases.detect import detect
    from shim._matrix.load import load_matrix
    from shim._planning.options import resolve
    from shim._planning.plan import make_plan
    matrix = load_matrix({path!r})
    print(make_plan(detect(), matrix, resolve(matrix)).digest)
"""


def test_the_plan_is_a_function_of_its_arguments(world):
    """The same thrice; nothing of the process goes in, and nothing is changed."""
    world.install(BROKEN)
    matrix, environment = load_matrix(world.matrix), detect()
    first = make_plan(environment, matrix, resolve(matrix))
    world.on_path()
    assert make_plan(environment, matrix, resolve(matrix)).to_dict() == first.to_dict()
    assert list(first) == ["roll-fix", "faster-forward"] and len(first) == 2


def test_the_digest_is_the_same_in_every_process(world):
    """Ranks compare it: hash seeds and optimisation do not matter."""
    world.install(BROKEN)
    code = CODE.format(path=str(world.matrix))
    ways = (("0", ()), ("1", ("-O",)), ("4711", ("-OO",)))
    said = {
        output_of(code, world.site, world.own, flags=flags, env={"PYTHONHASHSEED": seed}).strip()
        for seed, flags in ways
    }
    assert len(said) == 1 and len(said.pop()) == 16


def test_the_digest_does_not_depend_on_the_order_of_patches(world):
    """Neither that of the matrix, nor that of fingerprints."""
    plan = world.install(BROKEN).plan()
    turned = {
        id: replace(decision, fingerprints=dict(reversed(decision.fingerprints.items())))
        for id, decision in reversed(plan.decisions.items())
    }
    assert replace(plan, decisions=turned).digest == plan.digest


def test_the_digest_covers_ids_variants_and_fingerprints(world):
    """And nothing that may differ between ranks that do the same, such as reasons."""
    plan = world.install(BROKEN).plan()
    one = plan["roll-fix"]

    def with_roll(**changes):
        return replace(plan, decisions={**plan.decisions, "roll-fix": replace(one, **changes)}).digest

    assert with_roll(reason="other") == plan.digest
    assert with_roll(wiring=replace(one.wiring, name="new")) != plan.digest
    assert with_roll(id="other") != plan.digest
    assert with_roll(fingerprints={}) != plan.digest
    assert with_roll(action="drifted") != plan.digest
    assert world.plan(exclude="roll-fix").digest != plan.digest
    assert world.plan(options={"faster-forward": {"pages": 8}}).digest != plan.digest
    assert world.plan(options={"faster-forward": {"pages": 4}}).digest == plan.digest


def test_the_digest_covers_releases(world):
    """Of what is installed, also where the bodies are the same; and shim's own."""
    digest = world.install(BROKEN).plan().digest
    assert world.install(BROKEN, "0.16.1").plan().digest != digest
    assert world.install(BROKEN).plan().digest == digest


def test_the_digest_covers_the_code_of_patches(world):
    """That of a patch in force, and all files of the package that the caller names for it; no other."""
    package = world.own / "trainer_patches"
    write_file(package / "roll_fix.py", "from trainer_patches import one\n")
    write_file(package / "one.py", "")
    digest = world.install(BROKEN).plan(packages="trainer_patches").digest
    for name in ("roll_fix", "one"):
        before = (package / f"{name}.py").read_text()
        (package / f"{name}.py").write_text(before + "# changed\n")
        assert world.plan(packages="trainer_patches").digest != digest, name
        (package / f"{name}.py").write_text(before)
    nothing = world.plan(packages="trainer_patches", only=[]).digest
    (package / "roll_fix.py").write_text("# changed\n")
    assert world.plan(packages="trainer_patches", only=[]).digest == nothing


def test_the_digest_covers_the_matrix(world):
    """Another module in it is other code; a matrix that is not the shipped one counts with all it says."""
    digest = world.install(BROKEN).plan().digest
    text = world.matrix.read_text()
    write_file(world.own / "trainer_patches" / "evil.py", '"""What is wrong: rolls."""\n')
    world.matrix.write_text(text.replace("trainer_patches.roll_fix", "trainer_patches.evil", 1))
    assert world.plan().digest != digest
    world.matrix.write_text(text + "# a comment\n")
    assert world.plan().digest != digest
    world.matrix.write_text(text)
    assert world.plan().digest == digest


IMPORTED = """
    import importlib, sys
    for name in {modules!r}:
        importlib.import_module(name)
    import shim
    report = shim.apply()
    print(report.digest)
"""


def test_the_digest_of_the_shipped_matrix_does_not_depend_on_what_is_imported(world):
    """Patches and operations among it, which are read from their files."""
    ours = ("shim.patches", "shim.patches._arguments", *(("shim.ops",) if find_spec("torch") else ()))
    world.install(BROKEN)
    (world.site / "megatron/core/__init__.py").write_text("")
    write_file(world.site / "megatron/core/tensor_parallel/random.py", "")
    sets = ((), ours, ("megatron.core", "megatron.core.roll"))
    assert len({output_of(IMPORTED.format(modules=modules), world.site) for modules in sets}) == 1


@pytest.mark.parametrize("arguments", [{"require": "roll-fix"}, {"strict": True}])
@pytest.mark.parametrize("text", [BROKEN, FIXED])
def test_a_clean_plan_meets_requirements(world, arguments, text):
    """Applied, or not needed because upstream has it."""
    enforce(world.install(text).plan(**arguments))


EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")


@pytest.mark.parametrize(
    ("text", "version", "arguments", "action", "remedy"),
    [
        (
            EDITED,
            "0.16.0",
            {},
            "drifted",
            "let the proofs decide, in some minutes: shim pin --prove --lock FILE; or reinstall megatron-core 0.16.0",
        ),
        ("x = 1", "0.11.0", {}, "out-of-range", "install megatron-core 0.16.0 to 0.18.0"),
        (BROKEN, "0.16.0", {"exclude": "roll-fix"}, "excluded", "drop what excludes it"),
        (BROKEN, "0.16.0", {"kinds": "feature"}, "excluded", "drop what excludes it"),
    ],
)
def test_a_requirement_that_is_not_met_names_everything(world, text, version, arguments, action, remedy):
    """Patch, target, release and remedy."""
    plan = world.install(text, version).plan(require="roll-fix", **arguments)
    with pytest.raises(NotMetError) as caught:
        enforce(plan)
    for part in (f"roll-fix is {action}", "megatron.core.roll:roll", f"megatron-core {version}", f"Remedy: {remedy}"):
        assert part in str(caught.value)


def test_a_patch_without_pins_asks_for_pins(world):
    """The release is whole; the author of the patch has not measured it yet."""
    pins = json.loads(lock_path(world.matrix).read_text())
    del pins["roll-fix"]
    lock_path(world.matrix).write_text(json.dumps(pins))
    plan = world.install(BROKEN).plan()
    assert plan["faster-forward"].action == "apply"
    assert plan["roll-fix"].action == "drifted"
    assert plan["roll-fix"].remedy == f"run shim pin --releases --matrix {world.matrix}"


def test_a_supported_release_without_pins_asks_for_pins(world):
    """It was added to the supported list, and nobody has measured it yet."""
    world.matrix.write_text(world.matrix.read_text().replace('"0.16.0", ', '"0.16.0", "0.16.1", ', 1))
    found = world.install(EDITED, "0.16.1").plan()["roll-fix"]
    assert (found.action, found.remedy) == ("drifted", f"run shim pin --releases --matrix {world.matrix}")
    found = world.install(EDITED, "0.16.0").plan()["roll-fix"]
    decide = "let the proofs decide, in some minutes: shim pin --prove --lock FILE"
    assert (found.action, found.remedy) == (
        "drifted",
        f"{decide}; or reinstall megatron-core 0.16.0, whose code this is not",
    )


def test_a_requirement_with_nothing_installed_says_what_to_install(world):
    """Nothing has no release."""
    world.on_path(world.own)
    with pytest.raises(
        NotMetError, match=r"not-installed.*Installed: nothing.*Remedy: install megatron-core"
    ) as caught:
        enforce(world.plan(require="roll-fix"))
    assert "Its targets: megatron.core.roll. " in str(caught.value)  # of all variants, so only the modules


def test_strict_minds_correctness_only(world):
    """A performance patch that has drifted makes nothing wrong."""
    with pytest.raises(NotMetError, match="strict, and roll-fix is drifted"):
        enforce(world.install(EDITED).plan(strict=True))
    enforce(world.install(BROKEN.replace("return roll(x)", "return roll(-x)")).plan(strict=True, only="faster-forward"))
    world.on_path(world.own)
    enforce(world.plan(strict=True))


@pytest.mark.parametrize(("kind", "raises"), [("correctness", True), ("performance", False)])
def test_strict_minds_conflicts(world, kind, raises):
    """Someone else's object on a target is known before anything is bound."""
    plan = world.install(BROKEN).plan(strict=True)
    held = replace(plan["roll-fix"], kind=kind, action="conflict", reason="megatron.core.roll:roll holds another's")
    plan = replace(plan, decisions={**plan.decisions, "roll-fix": held})
    if raises:
        with pytest.raises(NotMetError, match="strict, and roll-fix is conflict"):
            enforce(plan)
    else:
        enforce(plan)


def test_disabled_meets_everything(world, monkeypatch):
    """Whoever turns shim off for one run does not want it to stop the run."""
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    plan = world.install(EDITED).plan(require="roll-fix", strict=True, on_drift="error")
    enforce(plan)
    assert {decision.action for decision in plan.decisions.values()} == {"excluded"}


def test_an_operator_gets_past_a_required_patch(world, monkeypatch):
    """MEGATRON_SHIM_EXCLUDE takes a requirement back."""
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "roll-fix")
    enforce(world.install(EDITED).plan(require="roll-fix", strict=True))


PLAN_KEYS = {"digest", "environment", "patches", "wrong_pairs", "pair_is_known", "lost_features"}
DECISION_KEYS = {
    "id",
    "kind",
    "action",
    "reason",
    "variant",
    "targets",
    "fingerprints",
    "options",
    "remedy",
    "left",
    "dropped",
}
INSTALLED_KEYS = {"version", "public", "origin", "location", "problems"}


def test_to_dict_has_the_documented_keys(world):
    """docs/cli.md promises them, and that they are JSON."""
    found = json.loads(json.dumps(world.install(BROKEN).plan().to_dict()))
    assert set(found) == PLAN_KEYS
    assert set(found["environment"]) == {"python", "installed"}
    assert set(found["environment"]["installed"]["megatron-core"]) == INSTALLED_KEYS
    assert set(found["patches"]["roll-fix"]) == {*DECISION_KEYS, "summary", "symptom", "changes"}


def test_the_text_has_one_line_per_patch_and_says_what_is_wrong(world):
    """For people: headline, releases, problems, patches, remedies, digest."""
    world.install(EDITED)
    world.on_path(world.site, world.root / "releases" / "0.18.0", world.own)
    plan = world.plan()
    lines = str(plan).splitlines()
    assert lines[0] == "1 patch applies; 0 not needed here, 2 problems"  # the patch, and the copy
    assert any("megatron-core 0.16.0 (version file" in line for line in lines)
    assert any("! megatron-core: another copy" in line for line in lines)
    named = [line.split()[0] for line in lines if line.startswith(("  roll-fix", "  faster-forward"))]
    assert named == [f"{id}:" for id in plan]
    assert any(
        line.strip().startswith("Remedy: let the proofs decide, in some minutes: shim pin --prove --lock FILE; or")
        for line in lines
    )
    assert f"  plan {plan.digest}: {plan.numbers}" in lines


def test_patches_that_are_alike_in_all_but_their_id_differ_in_the_digest(world):
    """Two matrices that apply different patches to the same bodies are not the same."""
    world.install(BROKEN)
    before = world.plan(only="faster-forward").digest
    world.pin(MATRIX.replace("faster-forward", "faster-backward"))
    assert world.install(BROKEN).plan(only="faster-backward").digest != before
