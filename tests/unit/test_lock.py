"""A lock holds a process to what was locked: each difference is an error with both sides, and nothing is applied."""

import json
import os
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit_helpers import BROKEN, FIXED, PATCH, REWORKED, megatron, metadata, write_file

import shim
from shim._errors import NotMetError, OptionError
from shim._matrix.load import load_matrix
from shim._planning.lock import FORMAT, KEYS, MAX_BYTES, PATCH_KEYS, differences, locked, read_lock, write_lock
from shim._tools.cli import main

HELPER = "megatron.core.roll:helper"


@pytest.fixture
def held(world, monkeypatch):
    """A world in which shim can apply, and the path of a lock of it."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.install(BROKEN)
    (world.site / "megatron/core/__init__.py").write_text("")
    world.lock = world.root / "shim.lock"
    write_lock(world.lock, world.plan())
    yield world
    for name in [name for name in os.environ if name.startswith("MEGATRON_SHIM_") and not name.endswith("MATRIX")]:
        del os.environ[name]  # by itself: monkeypatch would put back what it has removed
    shim.revert()


def active(report):
    """What is applied, or will be as soon as its target is imported."""
    return tuple(id for id, patch in report.patches.items() if patch.state in ("applied", "pending"))


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_lock_holds_releases_variants_bodies_and_options(held):
    """As JSON that a review can read, in a stable order."""
    found = json.loads(held.lock.read_text())
    assert list(found) == sorted(KEYS) and found["format"] == FORMAT
    assert set(found["patches"]["roll-fix"]) == set(PATCH_KEYS)
    assert {"_engine", "ops", "patches"} <= set(found["code"])
    assert found["kinds"] == ["correctness", "compat", "performance", "feature"]
    assert found["matrix"] == load_matrix(held.matrix).content
    assert found["patches"]["roll-fix"]["module"] == "trainer_patches.roll_fix"
    assert found["releases"] == {"megatron-core": "0.16.0", "megatron-shim": shim.__version__}
    assert found["digest"] == held.plan().digest
    assert found["patches"]["faster-forward"]["options"] == {"pages": 4}
    assert found["patches"]["roll-fix"]["variant"] == "old"
    assert set(found["patches"]["roll-fix"]["fingerprints"]) >= {HELPER}
    before = held.lock.read_text()
    write_lock(held.lock, held.plan())
    assert held.lock.read_text() == before and before.endswith("}\n")


def test_what_was_locked_applies(held):
    """By argument, by variable, and by a relative path."""
    assert active(shim.apply(lock=held.lock)) == ("roll-fix", "faster-forward")
    assert active(shim.apply(lock=os.path.relpath(held.lock))) == ("roll-fix", "faster-forward")
    os.environ["MEGATRON_SHIM_LOCK"] = str(held.lock)
    assert active(shim.apply()) == ("roll-fix", "faster-forward")


def version(world):
    world.install(BROKEN, "0.16.1")


def body(world):
    world.install(BROKEN.replace("return x\n", "return x * 2\n", 1))


def variant(world):
    world.install(REWORKED)


def upstream(world):
    world.install(FIXED)


def added(world):
    edit(world.lock, lambda lock: lock["patches"].pop("faster-forward"))


def removed(world):
    edit(world.lock, lambda lock: lock["patches"].update(gone=dict(lock["patches"]["roll-fix"])))


def option(world):
    edit(world.lock, lambda lock: lock["patches"]["faster-forward"]["options"].update(pages=8))


def missing_option(world):
    edit(world.lock, lambda lock: lock["patches"]["faster-forward"]["options"].clear())


def other_distribution(world):
    metadata(world.site, "2.9.0", "transformer-engine")
    write_file(world.site / "transformer_engine/__init__.py", "raise RuntimeError\n")


def kinds(world):
    edit(world.lock, lambda lock: lock.update(kinds=["correctness"]))


def code(world):
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH + "    # changed\n")


def module(world):
    edit(world.lock, lambda lock: lock["patches"]["roll-fix"].update(module="trainer_patches.other"))


def matrix(world):
    world.matrix.write_text(world.matrix.read_text() + "# changed\n")


def digest(world):
    edit(world.lock, lambda lock: lock.update(digest="0" * 16))


@pytest.mark.parametrize(
    ("change", "both_sides"),
    [
        (version, "megatron-core: 0.16.0 in the lock, 0.16.1 here"),
        (body, "roll-fix: applied (variant old) in the lock, not applied here"),
        (variant, "roll-fix: variant: old in the lock, new here"),
        (variant, r"re:roll-fix: body of megatron\.core\.roll:roll: [0-9a-f.]{25} in the lock, [0-9a-f.]{25} here"),
        (variant, r"re:roll-fix: body of megatron\.core\.roll:Layer\.forward: [0-9a-f.]{25} in the lock, none here"),
        (upstream, "roll-fix: applied (variant old) in the lock, not applied here"),
        (added, "faster-forward: not applied in the lock, applied (variant only) here"),
        (removed, "gone: applied (variant old) in the lock, not applied here"),
        (option, "faster-forward: option pages: 8 in the lock, 4 here"),
        (missing_option, "faster-forward: option pages: none in the lock, 4 here"),
        (other_distribution, "transformer-engine: not installed in the lock, 2.9.0 here"),
        (kinds, "kinds: correctness in the lock, correctness, compat, performance, feature here"),
        (code, r"re:roll-fix: code: [0-9a-f]{16} in the lock, [0-9a-f]{16} here"),
        (module, "roll-fix: module: trainer_patches.other in the lock, trainer_patches.roll_fix here"),
        (matrix, r"re:matrix: [0-9a-f]{16} in the lock, [0-9a-f]{16} here"),
        (digest, "digest: 0000000000000000 in the lock, "),
    ],
)
def test_every_difference_shows_both_sides_and_nothing_is_applied(held, change, both_sides):
    """By apply(), by plan on the command line, and without a trace in the process."""
    change(held)
    before, modules = list(sys.meta_path), set(sys.modules)
    with pytest.raises(NotMetError) as caught:
        shim.apply(lock=held.lock)
    said = str(caught.value)
    assert re.search(both_sides[3:], said) if both_sides.startswith("re:") else both_sides in said
    assert str(held.lock) in said and "Nothing was applied." in said and "Remedy: " in said
    assert sys.meta_path == before and active(shim.status()) == ()
    assert not [name for name in set(sys.modules) - modules if name.startswith(("megatron", "trainer_patches"))]


def test_the_first_differences_are_named_at_once(held):
    """Nobody wants to find them one after the other; the error is read in a few lines, and names who has the rest."""
    option(held)
    version(held)
    added(held)
    edit(held.lock, lambda lock: lock["patches"].update(gone=lock["patches"]["roll-fix"]))
    with pytest.raises(NotMetError) as caught:
        shim.apply(lock=held.lock)
    assert len(str(caught.value).split("; ")) == 3
    patch = read_lock(held.lock)["patches"]["gone"]
    edit(held.lock, lambda lock: lock["patches"].update({f"gone-{number}": patch for number in range(90)}))
    edit(held.lock, lambda lock: lock.update(drifted=[f"gone-{number}" for number in range(90)]))
    with pytest.raises(NotMetError) as caught:
        shim.apply(lock=held.lock)
    said = str(caught.value).replace(str(held.lock), "FILE")
    assert "megatron-core: 0.16.0 in the lock, 0.16.1 here" in said and re.search(r"; and 9\d more\. Nothing", said)
    assert len(said) < 900 and "`shim diff FILE`" in said


def test_bodies_that_come_with_another_release_are_counted(held):
    """Their fingerprints would bury what differs: the release, and the variants it brings."""
    held.install(REWORKED, "0.17.0")
    with pytest.raises(NotMetError) as caught:
        shim.apply(lock=held.lock)
    said = str(caught.value)
    assert "megatron-core: 0.16.0 in the lock, 0.17.0 here" in said
    assert "roll-fix: variant: old in the lock, new here" in said
    assert "; bodies: 3 in the lock, others here. Nothing" in said and "body of" not in said


def test_code_that_comes_with_another_shim_is_counted(held):
    """Each patch differs in it after an update, which says nothing about any of them."""
    edit(held.lock, lambda lock: lock["releases"].update({"megatron-shim": "0.0.1"}))
    edit(held.lock, lambda lock: lock["patches"]["roll-fix"].update(code="0" * 16))
    edit(held.lock, lambda lock: lock["patches"]["faster-forward"].update(code="0" * 16))
    with pytest.raises(NotMetError) as caught:
        shim.apply(lock=held.lock)
    assert f"megatron-shim: 0.0.1 in the lock, {shim.__version__} here" in str(caught.value)
    assert "; code of patches: 2 in the lock, others here. Nothing" in str(caught.value)


def test_options_of_the_caller_count(held):
    """They change what is applied, so the lock says what they are, and what differs where they do not agree."""
    for value in (4, 8):
        asked = {"faster-forward": {"pages": value}}
        write_lock(held.lock, held.plan(options=asked))
        assert active(shim.apply(options=asked, lock=held.lock)) == ("roll-fix", "faster-forward")
    with pytest.raises(NotMetError, match=r"option pages: 8 in the lock, 4 here"):
        shim.apply(lock=held.lock)
    with pytest.raises(NotMetError, match=r"option pages: 8 in the lock, 9 here"):
        shim.apply(options={"faster-forward": {"pages": 9}}, lock=held.lock)


def test_kinds_of_the_caller_count(held):
    """A lock that was written for some kinds holds a process to those."""
    write_lock(held.lock, held.plan(kinds="correctness"))
    assert active(shim.apply(kinds="correctness", lock=held.lock)) == ("roll-fix",)
    with pytest.raises(NotMetError, match=r"kinds: correctness in the lock, correctness, compat, performance, feature"):
        shim.apply(lock=held.lock)


def test_options_and_kinds_come_from_the_command_line(held, capsys):
    """`shim pin --lock` writes them down, and `shim plan --lock` takes them."""
    chosen = ["--options", '{"faster-forward": {"pages": 8}}', "--kinds", "performance"]
    assert main(["pin", "--lock", str(held.lock), *chosen]) == 0
    assert main(["plan", "--lock", str(held.lock), *chosen]) == 0
    assert main(["plan", "--lock", str(held.lock)]) == 1
    assert "kinds: performance in the lock" in capsys.readouterr().err
    assert main(["plan", "--options", "{pages: 8}"]) == 2
    assert "--options is not JSON of the form" in capsys.readouterr().err
    options = {"faster-forward": {"pages": 8}}
    assert active(shim.apply(options=options, kinds=["performance"], lock=held.lock)) == ("faster-forward",)


def test_selection_counts(held):
    """A patch that is left out is a difference, whoever left it out."""
    for arguments in ({"exclude": "roll-fix"}, {"only": "faster-forward"}, {"kinds": "performance"}):
        with pytest.raises(NotMetError, match=r"roll-fix: applied \(variant old\) in the lock, not applied here"):
            shim.apply(lock=held.lock, **arguments)
    os.environ["MEGATRON_SHIM_EXCLUDE"] = "roll-fix"
    with pytest.raises(NotMetError, match=r"not applied here.* Remedy: take roll-fix out of MEGATRON_SHIM_EXCLUDE"):
        shim.apply(lock=held.lock)


def test_disable_wins(held):
    """Whoever runs the job can turn everything off; the lock of what is not applied is not even read."""
    held.lock.write_text("broken")
    os.environ["MEGATRON_SHIM_DISABLE"] = "1"
    assert active(shim.apply(lock=held.lock)) == ()


def test_the_argument_beats_the_variable(held):
    """A trainer that names a lock means that one."""
    os.environ["MEGATRON_SHIM_LOCK"] = "/gone.lock"
    assert active(shim.apply(lock=held.lock))
    with pytest.raises(OptionError, match=r"there is no lock /gone\.lock"):
        shim.apply()
    os.environ["MEGATRON_SHIM_LOCK"] = ""
    assert active(shim.apply())  # as if unset


def test_a_second_apply_that_differs_leaves_the_first_in_force(held):
    """An error changes nothing."""
    import importlib

    shim.apply()
    roll = importlib.import_module("megatron.core.roll")
    bound = roll.roll
    option(held)
    with pytest.raises(NotMetError):
        shim.apply(lock=held.lock)
    assert active(shim.status()) == ("roll-fix", "faster-forward") and roll.roll is bound


def test_patched_and_plan_take_a_lock(held):
    """plan() only says; patched() is held to it as apply() is."""
    added(held)
    assert shim.plan(lock=held.lock)["faster-forward"].action == "apply"
    with pytest.raises(NotMetError), shim.patched(lock=held.lock):
        pass
    assert active(shim.status()) == ()


# Files that are no locks


def valid(world, **changes):
    return json.dumps({**locked(world.plan()), **changes})


def objects(value, path=()):
    """Every object in plain data, with the way to it."""
    if isinstance(value, dict):
        yield path, value
        for key in value:
            yield from objects(value[key], (*path, key))


def with_more(value, path, more):
    """JSON in which the object that `path` leads to begins with a further entry, in a line of its own."""
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {with_more(item, path[1:], more) if path[:1] == (key,) else json.dumps(item)}"
                 for key, item in value.items()]  # fmt: skip
        return "{\n" + ",\n".join([*([] if path else [more]), *inner]) + "\n}"
    return json.dumps(value)


def test_a_key_that_stands_twice_is_refused_wherever_it_stands(held):
    """A reviewer may read the one that does not count. File, key and remedy are named."""
    content, found = json.loads(held.lock.read_text()), 0
    for path, inside in objects(content):
        for key in inside:
            held.lock.write_text(with_more(content, path, f'"\\u{ord(key[0]):04x}{key[1:]}": "other"'))
            with pytest.raises(OptionError) as caught:
                shim.apply(lock=held.lock)
            said, found = str(caught.value), found + 1
            assert f"the lock {held.lock} cannot be read: duplicate key {key!r}. Remedy: " in said
    assert found > 20 and active(shim.status()) == ()


def test_a_key_that_means_nothing_is_refused_or_a_difference(held):
    """At each depth. What a reviewer may read as a demand is one."""
    content, refused = json.loads(held.lock.read_text()), 0
    for path, _ in objects(content):
        held.lock.write_text(with_more(content, path, '"extra": {}'))
        with pytest.raises((OptionError, NotMetError), match="extra") as caught:
            shim.apply(lock=held.lock)
        assert "Remedy: " in str(caught.value) and str(held.lock) in str(caught.value)
        if caught.type is OptionError and len(path) != 1:  # below `patches` it is a patch that is none
            refused += 1
            assert f"unknown key 'extra' in {'.'.join(path) or 'it'}; known are " in str(caught.value)
    assert refused == 3  # the top, and two patches


def test_what_python_takes_for_equal_is_not_equal_to_a_reader(held):
    """1 and true, 4 and 4.0, and a list of one kind that is called by two."""
    for change in (
        lambda lock: lock["patches"]["faster-forward"]["options"].update(pages=4.0),
        lambda lock: lock.update(kinds=["correctness, compat", "performance", "feature"]),
        lambda lock: lock["patches"]["faster-forward"]["options"].update(pages="4"),
    ):
        write_lock(held.lock, held.plan())
        edit(held.lock, change)
        with pytest.raises(NotMetError, match=r"option pages: .* in the lock, 4 here|kinds: "):
            shim.apply(lock=held.lock)


def test_a_patch_that_the_release_does_not_need_is_held_to_that(held):
    """Nothing is applied of it. If somebody edits the release it drifts, and the lock says so."""
    held.install(FIXED, "0.18.0")
    (held.site / "megatron/core/__init__.py").write_text("")
    write_lock(held.lock, held.plan())
    assert held.plan()["roll-fix"].action == "upstream"
    shim.apply(lock=held.lock)
    held.install(FIXED.replace("if dims is None else x", "if dims is None else x + 1"), "0.18.0")
    (held.site / "megatron/core/__init__.py").write_text("")
    assert held.plan()["roll-fix"].action == "drifted"
    with pytest.raises(NotMetError, match="drifted: none in the lock, roll-fix here"):
        shim.apply(lock=held.lock)


def test_a_difference_in_own_code_is_named_with_both_versions(held):
    """Of the same version, as in a checkout, and of another."""
    for version in (shim.__version__, "0.0.1"):
        write_lock(held.lock, held.plan())
        edit(held.lock, lambda lock: lock["code"].update(_engine="0" * 16))
        edit(held.lock, lambda lock, version=version: lock["releases"].update({"megatron-shim": version}))
        with pytest.raises(NotMetError) as caught:
            shim.apply(lock=held.lock)
        assert (
            f"shim's own code differs (_engine): that of megatron-shim {version} in the lock, other code of "
            f"megatron-shim {shim.__version__} here"
        ) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("\0", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read|is not a lock"),
        ("[" * 200_000, "cannot be read"),
        ('{"a":' * 200_000, "cannot be read"),
        ("9" * 10_000, "cannot be read|is not a lock"),
        (b" " * (MAX_BYTES + 1), "is larger than"),
        ("null", f"is not a lock of format {FORMAT}: it is no mapping"),
        ("[]", "is not a lock"),
        ('"text"', "is not a lock"),
        ("{}", "is not a lock"),
        ("supported: {}\npatches: {}\n", "cannot be read"),
        ({"format": FORMAT - 1}, f"is a lock of format {FORMAT - 1}, and megatron-shim .* reads format {FORMAT}"),
        ({"also": [{"format": 3}]}, f"is not a lock of format {FORMAT}: also.0 lacks 'code'"),
        ({"format": True}, "'format' of it is no number"),
        ({"format": None}, "is not a lock"),
        ({"digest": 1}, "is not a lock of .*: 'digest' of it is no text"),
        ({"releases": []}, "is not a lock"),
        ({"patches": []}, "is not a lock"),
        ({"patches": {"roll-fix": []}}, "is not a lock"),
        ({"patches": {"roll-fix": {"fingerprints": {}}}}, "is not a lock"),
        ({"patches": {"roll-fix": {"options": {}, "fingerprints": "all"}}}, "is not a lock"),
    ],
)
def test_what_is_no_lock_is_an_error_with_the_remedy(held, content, message, capsys):
    """Corrupted, huge, or of something else: OptionError, and exit 2 on the command line."""
    if isinstance(content, dict):
        content = valid(held, **content)
    held.lock.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=message) as caught:
        shim.apply(lock=held.lock)
    assert str(held.lock) in str(caught.value) and "`shim pin --lock FILE`" in str(caught.value)
    assert active(shim.status()) == ()
    assert main(["plan", "--json", "--lock", str(held.lock)]) == 2
    assert "Remedy: write a new lock" in capsys.readouterr().err


def test_places_that_are_no_files_are_errors(held, tmp_path):
    """A directory, a pipe nobody writes to, a device, a loop of links."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for place in ("gone", ".", "pipe", "loop", "/dev/zero", "a\0b", "x" * 5000):
        with pytest.raises(OptionError, match=r"there is no lock|cannot be read"):
            shim.apply(lock=tmp_path / place if place != "." else tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_content_is_a_lock_or_an_error(held, data):
    """Fuzz: other values at random places, cut and spliced text; never an exception of another kind.

    Where no difference is found, there is none.
    """
    if not hasattr(held, "here"):
        held.here = locked(held.plan())
    here, content = held.here, json.loads(json.dumps(held.here))
    place = content
    while isinstance(place, dict) and place and data.draw(st.booleans()):
        parent, key = place, data.draw(st.sampled_from(sorted(place)))
        place = parent[key]
        if not isinstance(place, dict) or data.draw(st.booleans()):
            parent[key] = data.draw(JSON)
            break
    text = json.dumps(content)
    if data.draw(st.booleans()):
        start, end = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(st.text(max_size=5)) + text[end:]
    held.lock.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = differences(read_lock(held.lock), here)
    except OptionError as error:
        assert str(held.lock) in str(error)
        return
    assert all(" in the lock, " in line and line.endswith(" here") for line in found)
    assert found or json.dumps(read_lock(held.lock), sort_keys=True) == json.dumps(here, sort_keys=True)


# Writing


def test_a_lock_is_written_whole_or_not_at_all(held, monkeypatch):
    """What was there before stays, and no scratch file does."""
    before = held.lock.read_text()

    def fail(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("shim._planning.lock.os.replace", fail)
    with pytest.raises(OptionError, match="cannot be written: no space left"):
        write_lock(held.lock, held.plan(exclude="roll-fix"))
    assert held.lock.read_text() == before
    assert [path.name for path in held.root.iterdir() if "shim.lock" in path.name] == ["shim.lock"]


@pytest.mark.parametrize("place", ["gone/shim.lock", ".", "", "x" * 300])
def test_a_place_that_cannot_be_written_is_an_error(held, place, monkeypatch):
    """Exit 2 on the command line, not a traceback."""
    monkeypatch.chdir(held.root)
    with pytest.raises(OptionError, match="cannot be written") as error:
        write_lock(place, held.plan())
    assert ".shim.lock." not in str(error.value)  # the scratch file, which nobody has named
    assert not [path.name for path in held.root.iterdir() if path.name.startswith(".")]


def test_the_command_writes_what_apply_is_held_to(held, capsys):
    """`shim pin --lock` downloads nothing and leaves the matrix alone."""
    text = held.matrix.read_text()
    held.lock.unlink()
    assert main(["pin", "--lock", str(held.lock)]) == 0
    assert capsys.readouterr().out == f"wrote {held.lock}: digest {held.plan().digest}\n"
    assert main(["pin", "--json", "--lock", str(held.lock)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(held.lock.read_text())
    assert held.matrix.read_text() == text
    assert active(shim.apply(lock=held.lock))
    assert main(["plan", "--lock", str(held.lock)]) == 0
    capsys.readouterr()
    version(held)
    assert main(["plan", "--json", "--lock", str(held.lock)]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["patches"] and "0.16.0 in the lock, 0.16.1 here" in said.err


def test_a_release_without_a_version_is_locked_as_such(held):
    """A bare source tree; its bodies are what counts."""
    megatron(held.site, None)
    (held.site / "megatron/core/package_info.py").unlink()
    (held.site / "megatron/core/__init__.py").write_text("")
    write_lock(held.lock, held.plan())
    assert read_lock(held.lock)["releases"]["megatron-core"] is None
    assert active(shim.apply(lock=held.lock))


def test_nothing_is_locked_while_everything_is_switched_off(held, monkeypatch):
    """An empty lock would hold the next process to nothing."""
    before = held.lock.read_text()
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    with pytest.raises(OptionError, match="MEGATRON_SHIM_DISABLE is set"):
        write_lock(held.lock, held.plan())
    assert held.lock.read_text() == before


# Who may write it


@pytest.mark.parametrize(("mode", "who"), [(0o646, "everybody"), (0o664, "its group"), (0o666, "everybody")])
def test_a_lock_that_others_may_write_is_refused_with_the_remedy(held, mode, who):
    """They could have it say whatever they like."""
    held.lock.chmod(mode)
    with pytest.raises(
        OptionError, match=rf"may be written by {who} \(mode {mode:04o}\).*Remedy: chmod go-w {held.lock}"
    ):
        shim.apply(lock=held.lock)
    held.lock.chmod(0o644)
    assert active(shim.apply(lock=held.lock))


def test_a_lock_is_written_so_that_it_is_accepted(held):
    """Also under the umask 002 of systems where every user has a group."""
    before = os.umask(0o002)
    try:
        held.lock.unlink()
        write_lock(held.lock, held.plan())
    finally:
        os.umask(before)
    assert active(shim.apply(lock=held.lock))


def test_what_is_no_file_is_not_replaced_by_a_lock(held):
    """`shim pin --lock /dev/null`, by root, must not put a file there."""
    pipe = held.root / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OptionError, match=r"cannot be written: .* not a regular file"):
        write_lock(pipe, held.plan())
    assert pipe.is_fifo()
