"""`shim run` refuses each command that starts a Python without its environment or without site, wherever the option is.

Compared with what Python itself does with the same arguments.
"""

import itertools
import subprocess
import sys

import pytest

from shim._errors import NotMetError
from shim._workers.deaf import deaf_part
from shim._workers.environment import run

SAYS = "import os, sys; print(int(sys.flags.ignore_environment or sys.flags.no_site))"
# Every option of Python's that lets a program run, with the value that it takes.
OPTIONS = ["-b", "-B", "-d", "-E", "-I", "-O", "-q", "-R", "-s", "-S", "-u", "-x"]
VALUES = [["-W", "ignore"], ["-Wignore"], ["-X", "dev"], ["-Xdev"], ["--check-hash-based-pycs", "always"], ["-bWI"]]
if sys.version_info >= (3, 11):
    OPTIONS.append("-P")


def is_deaf(arguments, tmp_path):
    script = tmp_path / "says.py"
    script.write_text("#\n" + SAYS)
    done = subprocess.run([sys.executable, *arguments, str(script)], capture_output=True, text=True)
    return done.stdout == "1\n"


@pytest.mark.parametrize("number", range(4))
def test_it_reads_options_as_python_does(tmp_path, number):
    """Alone, behind an option with a value, as that value, and combined."""
    cases = [[one] for one in OPTIONS] + VALUES
    cases += [[*value, one] for value in VALUES for one in ("-I", "-bE", "-qs")]
    cases += [["-W", "-I"], ["-X", "-E"], ["-WE"], ["-XI"], ["-bIs"], ["-sE"], ["-BSW", "ignore"], ["-WI", "-S"]]
    for arguments in itertools.islice(cases, number, None, 4):
        command = [sys.executable, *arguments, "train.py", "-I"]
        assert bool(deaf_part(command)) == is_deaf(arguments, tmp_path), arguments


@pytest.mark.parametrize(
    "ends", [["-c", "pass"], ["-m", "train"], ["-cpass"], ["-mtrain"], ["--"], ["-"], ["train.py"]]
)
def test_what_follows_the_program_is_the_programs(ends):
    assert deaf_part(["python", *ends, "-I", "-E"]) == ""
    assert deaf_part(["/usr/bin/python3.11", "-I", *ends]) == "-I"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("env python -I x.py", "-I"),
        ("env A=1 B=2 python3 -W x -ES x.py", "-ES"),
        ("/usr/bin/env -i python x.py", "env -i"),
        ("env -u PYTHONPATH python x.py", "env -u PYTHONPATH"),
        ("env --unset=PYTHONPATH python x.py", "env --unset=PYTHONPATH"),
        ("env PYTHONPATH=/mine python x.py", "env PYTHONPATH=/mine"),
        ("env -u HOME -C /tmp A=1 python x.py", ""),
        ("env A=1 torchrun -I", ""),
        ("timeout -s KILL 5 python -I x.py", "-I"),
        ("nohup nice -n 5 env A=1 python -b -S x.py", "-S"),
        ("nice python x.py -I", ""),
        ("torchrun --nproc-per-node 2 train.py -I", ""),
    ],
)
def test_wrappers_are_looked_through(command, said):
    assert deaf_part(command.split()) == said


@pytest.mark.parametrize(
    "split", [["-S", "python -I"], ["-Spython -I"], ["-vS", "python -I"], ["--split-string=python -I"]]
)
def test_env_splits_a_string(split):
    assert deaf_part(["env", *split, "x.py"]) == "-I"
    assert deaf_part(["env", split[0].replace("-I", "-B"), *(s.replace("-I", "-B") for s in split[1:]), "x.py"]) == ""


@pytest.mark.parametrize("line", ["#!{python} -Es", "#!/usr/bin/env -S python3 -b -I", "#! {python} -I"])
def test_the_first_line_of_a_script_counts(tmp_path, line):
    script = tmp_path / "train"
    script.write_text(line.format(python=sys.executable) + "\nprint(1)\n")
    script.chmod(0o755)
    assert deaf_part([str(script), "x"]) in ("-Es", "-I")
    with pytest.raises(NotMetError, match=r"Remedy: leave -\w+ out"):
        run([str(script)])
    script.write_text(f"#!{sys.executable}\nprint(1)\n")
    assert deaf_part([str(script), "-I"]) == ""


def test_a_refusal_names_what_to_leave_out():
    with pytest.raises(NotMetError, match="leave -I out"):
        run([sys.executable, "--check-hash-based-pycs", "always", "-I", "-c", "pass"])
