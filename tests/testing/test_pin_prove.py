"""The command `shim pin --prove` on a real release that was edited: the proofs decide, and the lock says so."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recording import NO_SOURCES
from thorough import in_full

from shim._tools.cli import main
from shim.testing import environment, fetch
from shim.testing.patience import patience
from shim.testing.releases import FetchError

REPOSITORY = Path(__file__).resolve().parents[2]
RELEASE = "0.16.1"
# Each edit, with the patch whose body it changes, and what the proofs have to say.
EDITS = {
    "cp-comm-type-list": (  # the same defect, in other words
        "transformer/transformer_layer.py",
        'attention_optional_kwargs["cp_comm_type"] = config.cp_comm_type[self.layer_number]',
        "kinds = config.cp_comm_type\n"
        '                attention_optional_kwargs["cp_comm_type"] = kinds[self.layer_number]',
        "fixed",
    ),
    "main-param-names": (  # a fix, in other words than upstream's
        "optimizer/distrib_optimizer.py",
        "matched_keys = [k for k in names_in_state_dict if name in k]",
        "matched_keys = [k for k in names_in_state_dict if k == name or k[-len(name) - 1 :] == '.' + name]",
        "right on stock",
    ),
    "uniform-recompute-end": (  # the defect, past the function that the patch wraps
        "transformer/transformer_block.py",
        "for index in range(start, end):\n                    layer = self._get_layer(index)",
        "for index in range(start, end):\n                    layer = self.layers[index]",
        "not fixed",
    ),
    "expert-bias-padding": (  # another defect in the caller, which the patch neither binds nor reads
        "transformer/moe/router.py",
        "self._apply_expert_bias(routing_map, padding_mask=padding_mask)",
        "self._apply_expert_bias(routing_map, padding_mask=None if padding_mask is None else padding_mask.roll(1))",
        "not fixed",
    ),
}
IDS = ",".join(EDITS)
ELSEWHERE = "expert-bias-padding"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the release with the edits."""
    try:
        release = fetch(RELEASE)
    except FetchError as error:
        pytest.skip(f"{NO_SOURCES}megatron-core {RELEASE}: {error}")
    place = tmp_path_factory.mktemp("tree")
    shutil.copytree(release / "megatron", place / "megatron")
    for name, old, new, _ in EDITS.values():
        file = place / "megatron/core" / name
        text = file.read_text()
        assert text.count(old) == 1, name
        file.write_text(text.replace(old, new))
    return place


def start(*arguments, path, cwd):
    """An interrupt ends it, also where the tests run in the background of a shell, which lets it be ignored."""
    limit = [] if "--prove" not in arguments or "--timeout" in arguments else ["--timeout", f"{patience():.0f}"]
    return subprocess.Popen(
        [sys.executable, "-m", "shim", *arguments, *limit],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment([*path, REPOSITORY]),
        cwd=cwd,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run(*arguments, path, cwd):
    process = start(*arguments, path=path, cwd=cwd)
    out, err = process.communicate(timeout=patience())
    return process.returncode, out, err


@pytest.fixture(scope="module")
def locked(tree, tmp_path_factory):
    """The directory of a lock that the proofs of these patches have decided about, and what the command printed."""
    place = tmp_path_factory.mktemp("lock")
    code, out, err = run("pin", "--prove", "--lock", "shim.lock", "--only", IDS, path=[tree], cwd=place)
    assert code == 0, err
    return place, out


def test_the_proofs_decide(locked):
    """Accepted, not needed, left out: with the numbers, and with a small model beside all that is accepted."""
    place, out = locked
    proved = json.loads((place / "shim.lock").read_text())["proved"]
    assert {id: said["verdict"] for id, said in proved["patches"].items()} == {id: e[-1] for id, e in EDITS.items()}
    counts = "1 accepted, 1 right on stock, 0 without the feature, 2 left out, 0 cannot run"
    assert f"4 patches judged by their proofs: {counts}" in out
    assert "IndexError: list index out of range" in proved["patches"]["cp-comm-type-list"]["shown"]
    assert proved["generic"]["recompute-equals-none"] == {"stock": "bit-equal", "with_shim": "bit-equal"}
    assert [file.name for file in place.iterdir()] == ["shim.lock"]  # nothing is left of the run


def test_without_the_lock_all_three_have_drifted_or_are_taken_for_upstreams(tree, locked):
    code, out, _ = run("plan", "--json", "--only", IDS, path=[tree], cwd=locked[0])
    patches = json.loads(out)["patches"]
    assert patches.pop(ELSEWHERE)["action"] == "apply"  # its bodies are those of a release
    assert {patches[id]["action"] for id in EDITS if id != ELSEWHERE} == {"drifted"}
    assert all("shim pin --prove --lock FILE" in patches[id]["remedy"] for id in EDITS if id != ELSEWHERE)
    assert code == 0


def test_a_job_under_the_lock_gets_what_was_proved(tree, locked):
    place, _ = locked
    code, out, _ = run("plan", "--json", "--only", IDS, "--lock", "shim.lock", path=[tree], cwd=place)
    patches = json.loads(out)["patches"]
    actions = {"fixed": "apply", "right on stock": "upstream", "not fixed": "drifted"}
    assert code == 0 and {id: patches[id]["action"] for id in EDITS} == {id: actions[e[-1]] for id, e in EDITS.items()}
    assert patches["cp-comm-type-list"]["reason"].startswith("proved on this tree (")


def test_the_lock_does_not_fit_another_tree(tree, locked, tmp_path):
    """A body that was accepted has changed again."""
    shutil.copytree(tree / "megatron", tmp_path / "megatron")
    file = tmp_path / "megatron/core/transformer/transformer_layer.py"
    file.write_text(file.read_text().replace("kinds[self.layer_number]", "kinds[self.layer_number + 1]"))
    code, _, err = run("plan", "--only", IDS, "--lock", "shim.lock", path=[tmp_path], cwd=locked[0])
    assert code == 1 and "cp-comm-type-list: applied (variant" in err and "not applied here" in err


@in_full
def test_the_proofs_can_be_run_again(tree, locked):
    """--check says whether they still say what the lock says."""
    place, _ = locked
    check = ("pin", "--check", "--lock", "shim.lock", "--only", "uniform-recompute-end")
    code, out, err = run(*check, path=[tree], cwd=place)
    assert code == 0 and "shim.lock holds" in out, err
    content = json.loads((place / "shim.lock").read_text())
    content["proved"]["patches"]["uniform-recompute-end"]["verdict"] = "fixed"
    (place / "edited.lock").write_text(json.dumps(content))
    code, _, err = run(*check[:3], "edited.lock", *check[4:], path=[tree], cwd=place)
    assert code == 1 and "uniform-recompute-end: fixed" in err and "in the lock, not fixed" in err


@in_full
def test_an_interrupted_run_goes_on(tree, tmp_path):
    """What it has measured is kept beside the lock, and the next run says so."""
    some = "uniform-recompute-end,cp-comm-type-list"  # one is accepted, and then runs again with a small model
    command = ("pin", "--prove", "--lock", "shim.lock", "--only", some, "--jobs", "1")
    process = start(*command, path=[tree], cwd=tmp_path)
    kept = tmp_path / ".shim.lock.proving"
    deadline = time.monotonic() + patience()
    while not kept.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patience())
    assert process.returncode == 130 and "the same command continues from there" in err, err
    assert not (tmp_path / "shim.lock").exists()
    code, _, err = run(*command, path=[tree], cwd=tmp_path)
    assert code == 0 and "going on with" in err and (tmp_path / "shim.lock").exists() and not kept.exists()


@in_full
def test_a_tree_is_proved_in_place_of_what_is_installed(tree, tmp_path):
    """--against, beside the tree that the lock holds already; as Markdown for a pull request."""
    command = ("pin", "--prove", "--lock", "shim.lock", "--only", "main-param-names")
    release = fetch(RELEASE)
    code, out, err = run(*command, path=[release], cwd=tmp_path)
    assert code == 0 and "0 patches judged by their proofs" in out, err
    code, out, err = run(*command, "--against", str(tree), "--append", "--markdown", path=[release], cwd=tmp_path)
    assert code == 0 and "| main-param-names | right on stock |" in out, err
    for path in ([release], [tree]):
        code, _, err = run("plan", "--lock", "shim.lock", "--only", "main-param-names", path=path, cwd=tmp_path)
        assert code == 0, err


def test_a_tree_that_cannot_be_imported_gets_no_lock(tree, tmp_path):
    """Else every patch would be one whose proofs cannot run."""
    shutil.copytree(tree / "megatron", tmp_path / "tree/megatron")
    file = tmp_path / "tree/megatron/core/models/gpt/gpt_model.py"
    file.write_text("import a_package_that_is_missing\n" + file.read_text())
    command = ("pin", "--prove", "--lock", "shim.lock", "--only", "uniform-recompute-end")
    code, _, err = run(*command, path=[tmp_path / "tree"], cwd=tmp_path)
    assert code == 1 and "no proof can run here" in err and "a_package_that_is_missing" in err, err
    assert not (tmp_path / "shim.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prove",), "belong"),
        (("--lock", "shim.lock", "--append"), "belong"),
        (("--against", "."), "belong"),
        (("--lock", "l", "--markdown"), "belong"),
        (("--prove", "--lock", "shim.lock", "--jobs", "0"), "runs nothing"),
        (("--prove", "--lock", "shim.lock", "--timeout", "0"), "leaves no time"),
    ],
)
def test_what_is_no_use_is_wrong_usage(arguments, says, tmp_path, monkeypatch, capsys):
    """Options that need others, and numbers with which nothing runs, as of shim prove: said before a process starts."""
    monkeypatch.chdir(tmp_path)
    assert main(["pin", *arguments]) == 2
    assert says in capsys.readouterr().err
