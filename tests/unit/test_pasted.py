"""What a command prints can be pasted: no secret, no home directory, no escape sequence, no line of somebody else's.

The commands are taken from the parser, so a new one is tested without being named here. If arguments of its own let it
go further than an error, ARGUMENTS has them.
"""

import argparse
import io
import json
import re
import sys

import pytest
from unit_helpers import BROKEN, PATCH, metadata, run_python, write_file

from shim import _api
from shim._tools.arguments import command_line
from shim._tools.cli import main

PLANTED = "pl4nted"  # part of each secret
HEADING = "### forged"
HOSTILE = f"\x1b[31m\u202e\u200b\x9b2J\udcff\n{HEADING}\r{HEADING}\x85{HEADING}\u2028{HEADING} `<b>|[x](y) é"
SECRETS = {
    "VERL_API_KEY": f"{PLANTED}-1",
    "PRIMUS_PASSWORD": f"two words {PLANTED}",
    "NCCL_AUTH_SECRET": f"line\n{PLANTED}",
    "VERL_SESSION_COOKIE": PLANTED,
    "MINDSPEED_PASSPHRASE": PLANTED,
    "NVTE_HUB": f"hf_{PLANTED}abcdefgh",
    "VERL_STORE": f"s3://user:{PLANTED}@host/bucket?x=1&X-Amz-Signature={PLANTED}",
    "TORCH_NCCL_LOG": f"https://host/log?sig={PLANTED}&b=2",
    "MEGATRON_LM_PATH": f"user:{PLANTED}@host:/tree",
    "NVTE_HOSTILE": f"1{HOSTILE}",
}
[COMMANDS] = [action.choices for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)]
URL = f"https://user:{PLANTED}@host/x?token={PLANTED}{HOSTILE}"
SELECTION = [
    [],
    ["--require", URL],
    ["--only", URL],
    ["--options", f'{{"roll-fix": {{"api_key": "{PLANTED}"}}}}'],
    ["--options", URL],
    ["--matrix", URL],
    ["--kinds", URL],
    ["--package", URL],
]
# Further argument lists of each command. HERE is the place of a tree, FILE a file that can be written.
ARGUMENTS = {
    "plan": [*SELECTION, ["-v"], ["--lock", URL], ["--lock", "HERE/plan.lock"], ["--strict", "--on-drift", "error"]],
    "status": [*SELECTION, ["-v"]],
    "explain": [["roll-fix"], ["faster-forward"]],
    "audit": [["HERE"], ["HERE/gone"], ["==0.16.0"], ["HERE", "--with", URL], ["HERE", "--ref", URL]],
    "pin": [*SELECTION, ["--lock", "FILE"], ["--lock", URL], ["--check"], ["--add", URL], ["--add", "0.20.0", URL]],
    "matrix": [[], ["--cells"], ["--github", "--range", URL], ["--matrix", URL]],
    "prove": [[], ["--model", URL], ["--against", "HERE"], ["--html", "FILE"]],
    "run": [["--", URL], ["--", "python", "-I"], ["--lock", URL, "--", "x"]],
    "new-patch": [["x", "--target", URL, "--dry-run"]],
}


def argument_lists(name):
    """Each argument list of the command, in each of its formats; and one that no parser takes."""
    parser = COMMANDS[name]
    given = [a for a in parser._actions if a.required and not isinstance(a, argparse._HelpAction)]
    required = [text for a in given for text in ([a.option_strings[0], URL] if a.option_strings else [URL])]
    flags = [option for action in parser._actions for option in action.option_strings]
    formats = [[option] for option in flags if option in ("--json", "--markdown")]
    for arguments in [required, ["--no-such", URL], *ARGUMENTS.get(name, [[]])]:
        for flag in [[], *formats]:
            behind = arguments.index("--") if "--" in arguments else len(arguments)
            yield [name, *arguments[:behind], *flag, *arguments[behind:]]


@pytest.fixture
def planted(world, tmp_path, monkeypatch):
    """The fake world below a home directory whose name is not ASCII, and hostile text in all that is read."""
    home = tmp_path / "home" / "zoë"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(_api, "_of_another_matrix", lambda matrix: [f"the matrix is {world.matrix}, of {URL}"])
    text = world.matrix.read_text("utf-8")
    summary = json.dumps(f"rolls {URL}".replace("\udcff", ""))
    text = text.replace("summary: rolls stay inside their sequence", f"summary: {summary}")
    text = text.replace("note: fixed in 0.18", f"note: {summary}").replace("when: upstream does so", f"when: {summary}")
    world.pin(text)
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    world.install(BROKEN, "0.16.0")
    (world.site / "megatron/core/__init__.py").write_text("")
    metadata(world.site, "0.16.0").joinpath("METADATA").write_bytes(
        f"Name: megatron-core\nVersion: 0.16.0{HOSTILE.partition(chr(10))[0]}\n".encode("utf-8", "surrogateescape")
    )
    write_file(world.site / "verl/__init__.py", "import megatron.core.roll as m\nm.roll = None\n")
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{home}:https://user:{PLANTED}@host/packages:/home/alice/lib")
    return world


def said_by(arguments, monkeypatch, encoding="ascii"):
    """Exit code, standard output and standard error of a command on streams that take nothing but `encoding`."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, errors="strict", newline="") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    try:
        code = main(arguments)
    except SystemExit as left:
        code = left.code
    finally:
        monkeypatch.undo()
    for stream in (out, err):
        stream.flush()
    return code, *(stream.buffer.getvalue().decode(encoding) for stream in (out, err))


def amiss(text, home):
    """What is wrong with printed text."""
    plain = [each for each in text if each != "\n" and not each.isprintable()]
    found = [f"prints {sorted(set(plain))!a}"] if plain else []
    found += [word for word in (PLANTED, str(home), "/home/alice") if word in text]
    found += [line for line in text.splitlines() if re.match(rf"\W*{HEADING}", line)]
    return [ascii(each) for each in found]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_a_secret_or_a_line_of_others(planted, tmp_path, monkeypatch, command):
    """In any of its formats, on its error paths too, and on streams that hold ASCII alone."""
    places = {"HERE": str(planted.site), "FILE": str(tmp_path / "file")}
    wrong = []
    for arguments in argument_lists(command):
        given = [re.sub("^(HERE|FILE)", lambda found: places[found[0]], argument) for argument in arguments]
        with monkeypatch.context() as streams:
            code, out, err = said_by(given, streams)
        found = [*amiss(out, tmp_path), *amiss(err, tmp_path)]
        found += [f"exit code {code}"] if code not in (0, 1, 2, 126, 127) else []
        found += ["prints nothing"] if not out and not err else []
        if "--json" in arguments and out:
            json.loads(out)
        wrong += [f"{ascii(' '.join(arguments)).replace(ascii(URL)[1:-1], 'URL')}: {found}"] if found else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("arguments", [["plan"], ["explain", "no-such-patch"]])
def test_a_stream_that_nobody_reads_changes_no_exit_code(planted, tmp_path, stream, arguments):
    """Nor prints a traceback into the other one."""
    code = f"""
        import os, sys
        from shim._tools.cli import main
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, sys.{stream}.fileno())
        sys.exit(main({arguments!r}))
    """
    env = {"MEGATRON_SHIM_MATRIX": "", "PYTHONIOENCODING": "ascii", "HOME": str(tmp_path)}
    done = run_python(code, planted.site, env=env)
    assert done.returncode == (0 if arguments == ["plan"] else 2)
    assert "Traceback" not in done.stdout + done.stderr
