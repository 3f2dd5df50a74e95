"""A matrix names code to import and variables to set: what of that is believed, and what has to be said for it.

The fixture `world` trusts its own matrix, so that other tests need not say it; here that is taken back.
"""

import logging

import pytest
from unit_helpers import BROKEN, PATCH, run_python, write_file

import shim
from shim import _api
from shim._errors import MatrixError, OptionError
from shim._matrix import load as _matrix
from shim._tools import doctor as _doctor
from shim._tools.cli import main


@pytest.fixture
def foreign(world, monkeypatch):
    """A world whose matrix names patches outside of shim."""
    monkeypatch.undo()
    world.on_path(world.own)
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    write_file(world.own / "trainer_patches" / "__init__.py", "")
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.install(BROKEN)
    (world.site / "megatron/core/__init__.py").write_text("")
    assert _matrix.TRUSTED == ("shim.patches",)
    yield world
    shim.revert()


REFUSED = r"matrix\.yaml:5: roll-fix: the module trainer_patches\.roll_fix lies outside shim\.patches.* Remedy: "


@pytest.mark.parametrize("call", [shim.apply, shim.plan, lambda **given: shim.patched(**given).__enter__()])
def test_patches_outside_of_shim_take_an_argument(foreign, call):
    """It is not enough to write a matrix, or to set a variable; neither is a name that just begins the same."""
    for given in ({}, {"packages": "trainer_patch"}, {"packages": ["roll_fix"]}, {"matrix": foreign.matrix}):
        with pytest.raises(MatrixError, match=REFUSED + r".* shim\.apply\(packages=\['trainer_patches'\]\)") as caught:
            call(**given)
        assert "--package trainer_patches" in str(caught.value) or "packages" in given
    for packages in ("trainer_patches", ["other", "trainer_patches.roll_fix"], ("trainer_patches, other",)):
        call(packages=packages)
        shim.revert()


@pytest.mark.parametrize("name", ["PACKAGES", "PACKAGE", "RAY_PACKAGES", "TRUSTED"])
def test_no_variable_says_so(foreign, monkeypatch, name):
    """Whoever can set one could name any code."""
    monkeypatch.setenv("MEGATRON_SHIM_" + name, "trainer_patches")
    with pytest.raises(MatrixError, match=REFUSED):
        shim.apply()


def test_refused_code_is_not_imported(foreign):
    """Neither by apply(), which raises, nor by what only tells of the matrix."""
    evil = write_file(foreign.own / "trainer_patches" / "roll_fix.py", "raise SystemExit('it was run')\n")
    code = f"""
        import os, sys
        os.environ["MEGATRON_SHIM_MATRIX"] = {str(foreign.matrix)!r}
        import megatron.core.roll
        import shim
        shim.status(), shim.explain("roll-fix")
        try:
            shim.apply()
        except shim.MatrixError as error:
            print(error)
        import importlib
        importlib.reload(megatron.core.roll)
        print("trainer_patches" in sys.modules)
    """
    done = run_python(code, foreign.site, foreign.own)
    assert done.returncode == 0 and done.stdout.endswith("False\n") and evil.name not in done.stderr, done.stderr


@pytest.mark.parametrize("packages", [7, [7], b"x", "a-b", "a..b", "../x", [""], "."])
def test_what_is_no_package_is_an_error(foreign, packages):
    """An empty text in a list names none, and allows none."""
    with pytest.raises((OptionError, MatrixError), match=r"packages|lies outside shim\.patches"):
        shim.apply(packages=packages)


def test_another_matrix_is_warned_about_once_and_doctor_tells_of_it(foreign, caplog, monkeypatch):
    """With the hash by which its content can be recognised; the shipped one is not worth a word."""
    monkeypatch.setattr(shim._engine.engine.ENGINE.deferred, "logged", set())
    for _ in range(2):
        shim.apply(packages="trainer_patches")
    content = _matrix.load_matrix(foreign.matrix).content
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [
        f"patches are chosen by {foreign.matrix} (content {content}), not by the matrix that ships with shim"
    ]
    found = _doctor.examine()
    assert found["shim"]["matrix_content"] == content and len(content) == 16
    assert found["plan"]["roll-fix"]["action"] == "apply"
    assert f"matrix `{foreign.matrix}` (not the one that ships; content {content})" in _doctor.as_text(found)
    monkeypatch.delenv("MEGATRON_SHIM_MATRIX")
    caplog.clear()
    shim.apply()
    assert not [record for record in caplog.records if "patches are chosen by" in record.message]
    assert _doctor.examine()["shim"]["matrix_content"] == ""
    assert "not the one that ships" not in _doctor.as_text(_doctor.examine())


def test_an_argument_can_say_the_shipped_matrix(foreign):
    """None is what stands in the signature, and outranks the variable."""
    assert "mtp-recompute" in shim.plan(matrix=None).decisions
    assert list(shim.plan(packages="trainer_patches").decisions) == ["roll-fix", "faster-forward"]


def test_the_command_line_takes_packages(foreign, capsys):
    assert main(["plan", "--only", "roll-fix"]) == 2
    assert "lies outside shim.patches" in capsys.readouterr().err
    assert main(["plan", "--only", "roll-fix", "--package", "trainer_patches"]) == 0


def test_a_matrix_sets_no_variables(world):
    """Some have code loaded (LD_PRELOAD), or turn off what the operator turned on. A patch does so by its code."""
    text = world.matrix.read_text()
    place = "    options: {pages: 4}\n"
    world.matrix.write_text(text.replace(place, place + "    variables: {LD_PRELOAD: x}\n"))
    with pytest.raises(MatrixError, match="variables"):
        _matrix.load_matrix(world.matrix)


def test_where_everything_is_off_no_matrix_stands_in_the_way(foreign, monkeypatch):
    """Whoever runs the job gets past any mistake of it: in the matrix, its trust, and the arguments."""
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    monkeypatch.setenv("MEGATRON_SHIM_ONLY", "none-such")
    assert {patch.state for patch in shim.apply(require=["gone"], lock="/gone").patches.values()} == {"excluded"}
    foreign.matrix.write_text("broken")
    assert {patch.state for patch in shim.apply().patches.values()} == {"excluded"}
    assert _api.default_plan().options.disabled
