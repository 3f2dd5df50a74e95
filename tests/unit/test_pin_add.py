"""`shim pin --add`: a release or a commit more, in one command, or nothing at all."""

import os
import re
import shutil
import subprocess

import pytest
from edited_trees import proved, verdict
from unit_helpers import FIXED, MATRIX, REWORKED, SOURCES, megatron, write_file

from shim._errors import OptionError
from shim._matrix.load import load_matrix, lock_path
from shim._planning.evidence import FIXED as IS_FIXED
from shim._planning.evidence import RIGHT
from shim._planning.lock import write_lock
from shim._tools.cli import main
from shim._tools.support import stale
from shim.maintenance import pin_add
from shim.maintenance.pin_add import New, parse_new

# As people write ranges.
RANGED = (
    MATRIX.replace(".0.dev0", "")
    .replace(
        '      - {megatron-core: ">=0.17,<0.18", variant: new}\n    upstream:\n'
        '      - {megatron-core: ">=0.18,<0.19", note: fixed in 0.18}\n',
        '      - {megatron-core: ">=0.17,<0.18", variant: new}\n',
    )
    .replace('["0.16.0", "0.17.0", "0.18.0"]', '["0.16.0", "0.17.0"]')
    .replace('">=0.16,<0.19"', '">=0.16,<0.18"')
)
# The ranges reach to the next release.
WIDER = RANGED.replace('">=0.17,<0.18", variant: new', '">=0.17,<0.19", variant: new').replace('<0.18"', '<0.19"')
CHANGED = REWORKED.replace("dims=None", "axes=None")


@pytest.fixture
def fetched(world, monkeypatch):
    """Releases lie in the fake world; nothing is downloaded."""
    monkeypatch.setattr("shim.testing.releases.fetch", lambda release, *_: world.root / "releases" / release)
    monkeypatch.delenv("SHIM_MEGATRON_GIT", raising=False)
    monkeypatch.setenv("MEGATRON_SHIM_CACHE", str(world.root / "cache"))
    world.pin(RANGED)
    return world


@pytest.fixture
def shim(fetched, capsys):
    def run(*arguments):
        code = main([*arguments, "--matrix", str(fetched.matrix)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def release(world, name, text):
    shutil.rmtree(world.root / "releases" / name, ignore_errors=True)
    return megatron(world.root / "releases" / name, name, {"roll.py": text})


def test_a_release_with_known_bodies_leaves_nothing_to_decide(shim, fetched):
    """Its ranges are widened, it is pinned, and comments stay."""
    release(fetched, "0.18.0", REWORKED)
    fetched.matrix.write_text(RANGED.replace("patches:", "patches:  # all of them"))
    code, out, err = shim("pin", "--add", "0.18.0")
    assert code == 0 and "takes about" in err
    assert "  roll-fix: <0.18 became <0.19\n  faster-forward: <0.18 became <0.19" in out
    assert "by its proofs\n  none\n" in out and "complain:\n  nothing\n" in out
    matrix = load_matrix(fetched.matrix, check_ranges=True)
    pins = matrix.pins["megatron-core"]
    assert pins["0.18.0"] == pins["0.17.0"] and stale(matrix) == []
    assert "patches:  # all of them\n" in fetched.matrix.read_text()
    assert main(["pin", "--check", "--matrix", str(fetched.matrix)]) == 0


def test_an_unknown_body_is_left_to_a_person(shim, fetched):
    """The diff is shown, and all else is done. `shim matrix` names the gap until it is filled."""
    release(fetched, "0.18.0", CHANGED)
    code, out, _ = shim("pin", "--add", "0.18.0")
    assert code == 1
    assert "+def roll(x, shift=-1, *, axes=None):" in out
    _, _, decide = out.partition("To decide")
    assert "  roll-fix (drifted): let its proofs decide (shim pin --prove" in decide
    assert "faster-forward: <0.18 became <0.19" in out and "roll-fix: <0.18" not in out
    pins = load_matrix(fetched.matrix, check_ranges=False).pins["megatron-core"]
    assert list(pins["0.18.0"]) == ["faster-forward"]
    code, _, err = shim("matrix")
    assert code != 0 and "ranges of roll-fix leave a gap" in err


def test_a_release_inside_of_a_range_with_an_unknown_body_is_not_pinned(shim, fetched):
    """A patch release: the ranges have it already."""
    release(fetched, "0.17.1", CHANGED)
    code, out, _ = shim("pin", "--add", "0.17.1")
    assert code == 1 and "say so under `decided`, as new; if the release is right by itself" in out
    assert "roll-fix" not in load_matrix(fetched.matrix).pins["megatron-core"]["0.17.1"]
    code, _, err = shim("matrix")
    assert code == 1 and "megatron-core 0.17.1 lacks a pin of roll-fix, variant new" in err


def proofs_of(world, name, text, said, variant):
    """A lock with this verdict of proofs about roll-fix on the release, whose sources lie at `name`."""
    release(world, name, text)
    world.install(text, name)
    write_lock(world.root / "new.lock", world.plan(), proved(world, verdict(world, said, variant)))
    world.install(None)
    return "--proved", str(world.root / "new.lock")


def test_a_body_that_was_proved_is_pinned_and_shown(shim, fetched):
    """Ranges are widened for it as well."""
    proofs = proofs_of(fetched, "0.18.0", CHANGED, IS_FIXED, "new")
    code, out, err = shim("pin", "--add", "0.18.0", *proofs)
    assert code == 0, err
    assert "complain:\n  nothing\n" in out and "roll-fix: <0.18 became <0.19" in out
    assert "by its proofs\n  roll-fix: megatron.core.roll:roll\n" in out
    assert "+def roll(x, shift=-1, *, axes=None):" in out
    assert load_matrix(fetched.matrix).pins["megatron-core"]["0.18.0"]["roll-fix"].variant == "new"
    assert shim("pin", "--releases")[0] == 0  # what is pinned stays pinned


def test_proofs_about_other_bodies_say_nothing_of_a_release(shim, fetched):
    proofs = proofs_of(fetched, "0.18.0", CHANGED, IS_FIXED, "new")
    release(fetched, "0.18.0", CHANGED.replace("axes", "axis"))
    code, out, _ = shim("pin", "--add", "0.18.0", *proofs)
    assert code == 1 and "  roll-fix (drifted): let its proofs decide" in out


def test_a_release_that_was_proved_right_needs_a_range(shim, fetched):
    """A person gives the range. Then the proofs speak for the pin, which `--patch` writes."""
    proofs = proofs_of(fetched, "0.18.0", CHANGED, RIGHT, None)
    code, out, _ = shim("pin", "--add", "0.18.0", *proofs)
    assert code == 1 and "is right without it: proved on this tree" in out
    assert "Give upstream a range that has 0.18.0" in out
    rule = '{megatron-core: ">=0.17,<0.18", variant: new}\n'
    text = fetched.matrix.read_text()
    assert rule in text
    fetched.matrix.write_text(
        text.replace(rule, rule + '    upstream:\n      - {megatron-core: ">=0.18,<0.19", note: right}\n')
    )
    code, _, err = shim("pin", "--patch", "roll-fix")
    assert code and "nothing shows that it is right" in err
    assert shim("pin", "--patch", "roll-fix", *proofs)[0] == 0
    assert load_matrix(fetched.matrix).pins["megatron-core"]["0.18.0"]["roll-fix"].variant is None


def test_a_patch_for_which_the_ranges_alone_speak_does_not_hold_up_the_others(shim, fetched, monkeypatch):
    """As if the audit took it, and its pin is refused: a line under "To decide", and the release is added."""
    release(fetched, "0.17.1", CHANGED)
    monkeypatch.setattr(pin_add, "_with_rules", lambda text, *_: (text, {}, {}, []))
    code, out, _ = shim("pin", "--add", "0.17.1")
    assert code == 1 and "roll-fix: nobody has seen megatron.core.roll:roll of megatron-core 0.17.1" in out
    assert list(load_matrix(fetched.matrix).pins["megatron-core"]["0.17.1"]) == ["faster-forward"]


@pytest.mark.parametrize(
    "arguments", [("--proved", "x"), ("--check", "--releases", "--proved", "x"), ("--add", "ab" * 20, "--proved", "x")]
)
def test_proofs_without_a_release_to_pin_are_refused(shim, arguments):
    code, _, err = shim("pin", *arguments)
    assert code == 2 and "--proved belongs to" in err


def test_sources_that_are_named_are_not_fetched(shim, fetched, tmp_path):
    """SOURCE stands for what the index does not have."""
    source = megatron(tmp_path / "tree", "0.18.0", {"roll.py": REWORKED})
    assert shim("pin", "--add", "megatron-core==0.18.0", str(source))[0] == 0
    assert "0.18.0" in load_matrix(fetched.matrix).supported["megatron-core"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--add", "0.17.0"], "0.17.0 is supported already"),
        (["--add", "0.18"], "no such file|has no megatron-core|nothing to audit"),
        (["--add", "megatron==0.18"], "is not a release that can be added; write 0.20.0, megatron-core==X or"),
        (["--add", "main"], "neither a version nor the digits of a commit"),
        (["--add", "abcdef012"], "neither a version nor the digits of a commit"),
        (["--add", "abcdef0123"], "write all forty digits, or name a clone in SHIM_MEGATRON_GIT"),
        (["--add", "0.18.0", "/nowhere/at/all"], "is no directory; put a wheel into the cache"),
        (["--add", "0.18.0", "a", "b"], "at most one SOURCE"),
        (["--add", "0.18.0", "--check"], "leave out --check and --releases"),
        (["--add", "0.18.0", "--lock", "x"], "leave out --releases, --add and --patch"),
        (["--add", "0.18.0", "--note", "main"], "--note belongs to a commit"),
        (["--note", "main", "--releases"], "--note belongs to --add"),
    ],
)
def test_what_cannot_be_added_is_refused(shim, fetched, arguments, message):
    before = fetched.matrix.read_text(), lock_path(fetched.matrix).read_text()
    code, _, err = shim("pin", *arguments)
    assert code == 2 and re.search(message, err), err
    assert (fetched.matrix.read_text(), lock_path(fetched.matrix).read_text()) == before


def test_sources_of_another_release_are_refused(shim, fetched, tmp_path):
    source = megatron(tmp_path / "tree", "0.19.0", {"roll.py": REWORKED})
    code, _, err = shim("pin", "--add", "0.18.0", str(source))
    assert code == 2 and "says that it is megatron-core 0.19.0, and not 0.18.0" in err


@pytest.mark.parametrize("when", ["pins", "write"])
def test_an_error_leaves_every_file_as_it_was(shim, fetched, monkeypatch, when):
    """Also one while files are written."""
    release(fetched, "0.18.0", REWORKED)
    files = {file: file.read_bytes() for file in (fetched.matrix, lock_path(fetched.matrix))}
    written = []

    def fail(*arguments):
        raise OSError("the disk is full")

    real = pin_add.replace_file

    def replace_once(file, content):
        written.append(file)
        if len(written) == 2:
            fail()
        real(file, content)

    if when == "pins":
        monkeypatch.setattr(pin_add, "_pins", fail)
    else:
        monkeypatch.setattr(pin_add, "replace_file", replace_once)
    with pytest.raises(OSError, match="the disk is full"):
        shim("pin", "--add", "0.18.0")
    assert {file: file.read_bytes() for file in files} == files
    assert bool(written) == (when == "write")
    assert {path.name for path in fetched.root.iterdir() if path.is_file()} == {file.name for file in files}


# Commits


@pytest.fixture
def clone(fetched, tmp_path):
    """A repository that people work in: a commit of roll.py for each text."""
    path = megatron(tmp_path / "clone", "0.18.0")
    settings = {"GIT_COMMITTER_DATE": "2026-03-01T12:00:00Z", "GIT_AUTHOR_DATE": "2026-03-01T12:00:00Z"}

    def git(*arguments):
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false"]
        command = ["git", *who, *arguments]
        env = {**os.environ, **settings}
        return subprocess.run(command, cwd=path, env=env, capture_output=True, text=True, check=True).stdout.strip()

    def commit(text):
        write_file(path / "megatron" / "core" / "roll.py", text)
        git("add", ".")
        git("commit", "--quiet", "--allow-empty", "-m", "another")
        return git("rev-parse", "HEAD")

    git("init", "--quiet", "--initial-branch=main")
    commit.path = path
    return commit


def test_a_commit_is_added_from_a_clone(shim, fetched, clone):
    """By its first digits; the version is that of the sources, before the release; the day is that of the commit."""
    fetched.pin(WIDER)
    hash = clone(REWORKED)
    clone(FIXED)
    code, out, _ = shim("pin", "--add", hash[:12], str(clone.path), "--note", "main, pinned by a trainer")
    assert code == 0, out
    matrix = load_matrix(fetched.matrix, check_ranges=True)
    commit = matrix.commits["megatron-core"][hash[:10]]
    assert (commit.commit, commit.version, commit.date) == (hash, "0.18.0.dev0", "2026-03-01")
    assert commit.of == "main, pinned by a trainer"
    assert matrix.pins["megatron-core"][hash[:10]] == matrix.pins["megatron-core"]["0.17.0"] and stale(matrix) == []
    code, _, err = shim("pin", "--add", hash, str(clone.path))
    assert code == 2 and "(main of 2026-03-01) is in the matrix already" in err


def test_what_does_not_fit_a_commit_has_no_pin_there(shim, fetched, clone):
    """And nothing is said to be wrong with the matrix: the proofs can decide."""
    fetched.pin(WIDER)
    hash = clone(CHANGED)
    code, out, _ = shim("pin", "--add", hash, str(clone.path))
    assert code == 1 and "roll-fix (drifted): it has no pin there until its proofs have run" in out
    assert "shim pin --prove --against" in out
    matrix = load_matrix(fetched.matrix)
    assert list(matrix.pins["megatron-core"][hash[:10]]) == ["faster-forward"] and stale(matrix) == []
    assert shim("matrix")[0] == 0


@pytest.mark.parametrize(("text", "fits"), [(REWORKED, True), (CHANGED, False)], ids=["known", "unknown"])
def test_wider_ranges_reach_the_commits_before_the_release(shim, fetched, clone, text, fits):
    """Their pins change with the ranges. An unknown body is not pinned so."""
    hash = clone(text)
    shim("pin", "--add", hash, str(clone.path))
    release(fetched, "0.18.0", REWORKED)
    os.symlink(fetched.root / "cache" / "megatron-core" / hash[:10], fetched.root / "releases" / hash[:10])
    code, out, _ = shim("pin", "--add", "0.18.0")
    pins = load_matrix(fetched.matrix).pins["megatron-core"][hash[:10]]
    assert pins["faster-forward"].variant == "only" and ("roll-fix" in pins) == fits, out
    assert code == 0


def test_wider_ranges_do_not_give_a_commit_another_variant_than_its_bodies(shim, fetched, clone):
    """They are those of an older one."""
    hash = clone(SOURCES["0.16.0"])
    shim("pin", "--add", hash, str(clone.path))
    release(fetched, "0.18.0", REWORKED)
    os.symlink(fetched.root / "cache" / "megatron-core" / hash[:10], fetched.root / "releases" / hash[:10])
    assert shim("pin", "--add", "0.18.0")[0] == 0
    pins = load_matrix(fetched.matrix).pins["megatron-core"][hash[:10]]
    assert {id: pin.variant for id, pin in pins.items()} == {"roll-fix": "old", "faster-forward": "only"}


def test_names_of_what_can_be_added():
    assert parse_new("0.20.0") == New("megatron-core", "0.20.0", False)
    assert parse_new("transformer-engine==2.21.0.post1") == New("transformer-engine", "2.21.0.post1", False)
    assert parse_new("1234567890") == New("megatron-core", "1234567890", True)
    assert parse_new(f"transformer-engine=={'ab' * 20}") == New("transformer-engine", "ab" * 20, True)
    for odd in ("0.20.0+local", "", "x" * 50, "ab" * 21):
        with pytest.raises(OptionError):
            parse_new(odd)


# A pin of a release needs more than its version, also where nobody asked `pin --add`


def in_a_range(world, name, text, ranged=RANGED, **edits):
    """The matrix supports one release more, which lies in the ranges as they are."""
    release(world, name, text)
    rules = ranged.replace('"0.17.0"]', f'"0.17.0", "{name}"]')
    for old, new in edits.values():
        assert old in rules
        rules = rules.replace(old, new, 1)
    world.matrix.write_text(rules)


def test_pins_of_a_release_ask_for_a_decision_about_an_unknown_body(shim, fetched):
    """Else drifted patches would get the old variant, because `make pins` was the advice."""
    in_a_range(fetched, "0.17.1", CHANGED)
    before = lock_path(fetched.matrix).read_text()
    code, _, err = shim("pin", "--releases")
    assert code == 2 or code == 1
    assert "nobody has seen megatron.core.roll:roll of megatron-core 0.17.1, and the ranges alone" in err
    assert "under `decided`" in err
    assert lock_path(fetched.matrix).read_text() == before


def test_a_decision_counts_for_the_body_it_was_made_for(shim, fetched):
    """Whoever changes the body again is asked again. The message has the entry to write, but for the note."""
    in_a_range(fetched, "0.17.1", CHANGED)
    _, _, err = shim("pin", "--releases")
    entry = re.search(r'\{target: "megatron\.core\.roll:roll".*?note: \.\.\.\}', err)[0].replace("...", "read it")
    decided = ("    delete_when:", f"    decided:\n      - {entry}\n    delete_when:")
    in_a_range(fetched, "0.17.1", CHANGED, decided=decided)
    assert shim("pin", "--releases")[0] == 0
    assert load_matrix(fetched.matrix).pins["megatron-core"]["0.17.1"]["roll-fix"].variant == "new"
    in_a_range(fetched, "0.17.2", CHANGED.replace("axes", "axis"), decided=decided)
    code, _, err = shim("pin", "--releases")
    assert code and "nobody has seen megatron.core.roll:roll of megatron-core 0.17.2" in err


def test_pins_of_a_release_that_is_right_by_its_version_alone_ask_for_a_decision(shim, fetched):
    """A range under `upstream` that is open to the next patch release is no evidence about it."""
    world, right = fetched, FIXED.replace("else x", "else -x")
    world.matrix.write_text(MATRIX)
    world.pin(MATRIX)
    release(world, "0.18.1", right)
    rules = MATRIX.replace('"0.18.0"]', '"0.18.0", "0.18.1"]')
    world.matrix.write_text(rules)
    code, _, err = shim("pin", "--releases")
    assert code and "of megatron-core 0.18.1, and nothing shows that it is right" in err


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('{target: "megatron.core.roll:roll", body: "1", as: new, note: x}', "is not a fingerprint"),
        ('{target: "megatron.core.roll:none", body: "-", as: new, note: x}', "is no body of variant new"),
        ('{target: "megatron.core.roll:roll", body: "-", as: newest, note: x}', "must be one of"),
        ('{target: "megatron.core.roll:roll", body: "-", note: x}', "lacks 'as'"),
    ],
)
def test_a_decision_is_read_strictly(shim, fetched, entry, said):
    fetched.matrix.write_text(RANGED.replace("    delete_when:", f"    decided: [{entry}]\n    delete_when:", 1))
    code, _, err = shim("matrix")
    assert code and said in err
