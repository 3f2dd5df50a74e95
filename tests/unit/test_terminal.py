"""Text on a terminal: wrapped, coloured, and in 80 columns in a pipe. The screens of the commands stand in screens/."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
from unit_helpers import BROKEN, MATRIX, PATCH, SOURCES, write_file

from shim._proving.report import Heading, as_text
from shim._proving.results import Outcome, Result
from shim._tools import commands
from shim._tools.cli import main
from shim._tools.terminal import BOLD, GREEN, PLAIN, RED, coloured, for_stream, wrapped

SCREENS = Path(__file__).parent / "screens"
DESCRIBED = (
    "    symptom: silent\n    without: a roll takes the first token of the next sequence for the last one of its own\n"
    "    concerns: [packed+tp]"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


LINE = "  roll-fix  values    rolls stay inside their sequence, also with padding between two of them"


def test_a_line_hangs_below_its_last_column():
    assert wrapped(LINE, 60).split("\n") == [
        "  roll-fix  values    rolls stay inside their sequence, also",
        "                      with padding between two of them",
    ]


def test_columns_that_are_too_wide_stand_above_their_text():
    lines = wrapped(f"  {'x' * 40}  values    {'word ' * 12}".rstrip(), 60).split("\n")
    assert lines[0] == f"  {'x' * 40}  values" and lines[1].startswith("      word")


def test_no_line_is_longer_than_the_terminal_but_for_a_word():
    long = f"{LINE}\n      Remedy: {'reinstall ' * 20}\n- {'note ' * 30}\n{'z' * 90}"
    assert [len(line) > 70 for line in wrapped(long, 70).split("\n")].count(True) == 1


def test_a_name_that_no_line_can_hold_is_broken_behind_a_mark():
    name, path = f"package.{'m' * 20}:{'C' * 20}.{'f' * 20}", f"/{'d' * 30}/{'e' * 20}:/{'d' * 30}/short"
    assert wrapped(f"      binds {name}", 60).split("\n") == [
        f"      binds package.{'m' * 20}:",
        f"        {'C' * 20}.{'f' * 20}",
    ]
    assert wrapped(f"- {path}", 50).split("\n") == [
        f"- /{'d' * 30}/",
        f"  {'e' * 20}:",
        f"  /{'d' * 30}/short",
    ]


@pytest.mark.parametrize(
    "text", [f"| {'cell | ' * 20}", f"```\n{'code ' * 30}\n```", f"      -{'old ' * 30}", f"        {'deep ' * 30}"]
)
def test_tables_code_and_diffs_stay_as_they_are(text):
    assert wrapped(text, 60) == text


def test_a_paragraph_is_filled_anew_and_lines_of_facts_are_not():
    prose = "What is wrong from here on fills a line up to some hundred columns, and goes on\nin the next one. It ends."
    facts = "Goes wrong: silent\nkind: correctness"
    assert wrapped(prose, 200) == prose.replace("\n", " ") and wrapped(facts, 200) == facts


@pytest.mark.parametrize(
    "environ, terminal, changed",
    [
        ({}, False, "80"),
        ({"COLUMNS": "60"}, False, "60"),
        ({"COLUMNS": "200"}, False, ""),
        ({"COLUMNS": "60", "NO_COLOR": "1"}, True, "60"),
        ({"COLUMNS": "200"}, True, "coloured"),
        ({"COLUMNS": "200", "NO_COLOR": "1"}, True, ""),
        ({"COLUMNS": "200", "TERM": "dumb"}, True, ""),
        ({"COLUMNS": "3", "NO_COLOR": "1"}, True, ""),
        ({"COLUMNS": "wide", "NO_COLOR": "1"}, True, ""),
    ],
)
def test_a_pipe_gets_80_columns_without_colour(environ, terminal, changed):
    text = f"Problems:\n{LINE}"
    wanted = {"": text, "60": wrapped(text, 60), "80": wrapped(text, 80), "coloured": coloured(text)}[changed]
    assert for_stream(text, Terminal() if terminal else io.StringIO(), environ) == wanted


@pytest.mark.parametrize(
    "line, paint",
    [
        ("Problems:", RED + BOLD),
        ("To apply:", BOLD),
        ("Fixed: hangs", BOLD),
        ("2 patches apply; 1 problem", RED),
        ("  drifted  roll-fix", RED),
    ],
)
def test_what_is_wrong_and_headings_stand_out(line, paint):
    assert paint in coloured(line) and coloured(line).count(PLAIN) == 1


def test_what_is_fine_has_no_alarm():
    assert coloured("2 patches apply; 0 problems") == "2 patches apply; 0 problems"
    assert GREEN in coloured("roll-fix: fixed, 1.2 s") and RED in coloured("roll-fix: not fixed, 1.2 s")


# Manners


def test_ctrl_c_is_one_line_and_130(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "do_plan", interrupt)
    code, said = main(["plan"]), capsys.readouterr()
    assert (
        (code, said.out) == (130, "") and said.err.startswith("shim plan: interrupted.") and said.err.count("\n") == 1
    )


def test_a_misspelt_command_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["pln"])
    assert "there is no command 'pln'; did you mean 'plan'" in capsys.readouterr().err


RESULTS = [
    Result(
        "",
        "",
        "roll-fix/rolls",
        "",
        "",
        "cpu",
        "fixed",
        "",
        stock=Outcome("wrong", "losses off by 1.4e-02"),
        patched=Outcome("right", "losses off by 7.6e-08"),
    ),
    Result(
        "",
        "",
        "faster-forward",
        "",
        "",
        "cpu",
        "not fixed",
        "it is as wrong as stock",
        stock=Outcome("wrong", "x" * 65),
        patched=Outcome("wrong", "y" * 65),
    ),
]


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_of_prove_is_as_it_was_looked_at(width):
    said = as_text(Heading({"megatron-core": "0.16.1"}, "CPU", None), RESULTS, width=width)
    said = for_stream(said, Terminal(), {"COLUMNS": str(width), "NO_COLOR": "1"})
    file = SCREENS / f"prove-{width}.txt"
    if os.environ.get("SHIM_WRITE_SCREENS"):
        file.write_text(said, "utf-8")
    assert said == file.read_text("utf-8")


# Screens of the commands, at two widths. SHIM_WRITE_SCREENS=1 writes them anew: look at the diff.

COMMANDS = {
    "plan": ["plan"],
    "plan-for": ["plan", "--for", "packed,tp"],
    "plan-verbose": ["plan", "-v"],
    "list": ["list"],
    "explain": ["explain", "roll-fix"],
    "explain-verbose": ["explain", "roll-fix", "-v"],
    "matrix": ["matrix"],
    "audit": ["audit", "~/site"],
    "problems": ["plan"],
    "doctor": ["doctor"],
    "status": ["status"],
    "pin": ["pin", "--lock", "~/shim.lock"],
    "diff": ["diff", "~/old.lock"],
    "bisect": ["bisect", "--package", "trainer_patches", "--dir", "~/runs", "--", "true"],
}


@pytest.fixture
def home(world, monkeypatch):
    """The fake world in a home directory, which is masked, so that lines are as long wherever the test runs."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    (world.site / "megatron" / "core").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(world.root))
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.pin(MATRIX.replace("    changes: values", f"    changes: values\n{DESCRIBED}"))
    world.install(BROKEN)
    (world.site / "megatron/core/__init__.py").write_text("")
    return world


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_screen_is_as_it_was_looked_at(name, width, home, capsys, monkeypatch):
    if name == "problems":
        home.install(BROKEN.replace("return helper(x)", "return helper(x) + 1"))
    if name == "diff":  # of a lock of the release before
        main(["pin", "--lock", str(home.root / "old.lock")])
        home.install(SOURCES["0.17.0"], "0.17.0")
        (home.site / "megatron/core/__init__.py").write_text("")
        capsys.readouterr()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    main([argument.replace("~", str(home.root)) for argument in COMMANDS[name]])
    read = capsys.readouterr()
    said = re.sub(r"\b[0-9a-f]{16}\b", "0" * 16, read.out or read.err)
    said = re.sub(r"after [0-9.]+ s", "after 0 s", said.replace(str(home.root), "~"))
    if name == "doctor":  # what follows is about this machine
        said = said[: said.index("\nWhere:")] + re.search(r"\nPatches:(\n[- ] .*)*", said)[0]
    file = SCREENS / f"{name}-{width}.txt"
    if os.environ.get("SHIM_WRITE_SCREENS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(said, "utf-8")
    assert said == file.read_text("utf-8")
    assert all(len(line) <= width or line.startswith("|") for line in said.splitlines() if " " in line.strip())
