"""Commits in a matrix: read strictly, pinned beside the releases, and spoken of by what they are."""

import json
import shutil
from pathlib import Path

import pytest
from unit_helpers import BROKEN, FIXED, MATRIX, REWORKED, megatron

from shim._errors import MatrixError, NotMetError
from shim._matrix.compiled import read_compiled, render_compiled
from shim._matrix.declared import UPSTREAM
from shim._matrix.load import load_matrix, lock_path
from shim._matrix.pins import read_pins
from shim._planning.evidence import FIXED as IS_FIXED
from shim._planning.evidence import RIGHT
from shim._tools.listing import listed
from shim._tools.support import stale, support
from shim.maintenance.pin import measure
from shim.maintenance.pin_all import measure_all, write_all
from shim.maintenance.tables import recorded_pins, render_pins, support_table

MAIN = "1234567890" + "a" * 30  # of digits alone, its name is a version to packaging
DEV = "5e00000000" + "b" * 30
EDITED = REWORKED.replace("return helper(x)", "return helper(x) + 1")
assert EDITED != REWORKED


def commit(hash, version="0.18.0.dev0", date="2026-08-22", of="main"):
    lines = [f'    "{hash[:10]}":', f'      commit: "{hash}"', f'      version: "{version}"', f'      date: "{date}"']
    return "\n".join([*lines, f"      of: {of}"]) + "\n"


def with_commits(*texts):
    return MATRIX.replace("\n\npatches:", "\ncommits:\n  megatron-core:\n" + "".join(texts) + "\npatches:", 1)


@pytest.fixture
def proofs(monkeypatch):
    """Stands in for known_trees.json: `proofs(commit, roll_fix="new")`; UPSTREAM if stock is right."""
    patches = {}
    found = {"trees": {}, "patches": patches, "files": {}}
    monkeypatch.setattr("shim._planning.evidence.known_trees", lambda: found)

    def shown(hash, **gives):
        found["trees"][hash[:10]] = {"date": "2026-11-25"}
        for id, variant in gives.items():
            verdict = {"verdict": IS_FIXED, "variant": variant}
            if variant == UPSTREAM:
                verdict = {"verdict": RIGHT, "variant": None}
            said = {"bodies": {"": hash[:10]}, **verdict, "shown": "", "dropped": []}
            patches.setdefault(id.replace("_", "-"), []).append(said)

    return shown


@pytest.fixture
def pinned(world, proofs):
    """Pins the matrix with commits, whose sources are given by the first ten digits."""

    def pin(sources, *texts):
        for name, text in sources.items():
            megatron(world.root / "releases" / name, "0.18.0", {"roll.py": text})
        world.pin(with_commits(*texts))
        return load_matrix(world.matrix)

    return pin


def fetch_in(world, without=()):
    def fetch(distribution, name):
        if name in without:
            raise NotMetError(f"no git has {name}")
        return world.root / "releases" / name

    return fetch


def test_a_commit_is_pinned_beside_the_releases(pinned):
    """By the rules for its version; the lock file names it as it names a release."""
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN))
    pins = matrix.pins["megatron-core"]
    assert list(pins) == ["0.16.0", "0.17.0", "0.18.0", MAIN[:10]]
    assert pins[MAIN[:10]]["roll-fix"] == pins["0.18.0"]["roll-fix"] and stale(matrix) == []
    found = json.loads(lock_path(Path(matrix.path)).read_text())["roll-fix"]["upstream"]["megatron.core.roll:roll"]
    assert list(found.values()) == [["0.18.0", MAIN[:10]]]


def test_a_body_that_only_a_commit_has_is_known(pinned, proofs, world):
    """Whoever runs the commit gets the patch, whatever version it has there."""
    text = EDITED
    proofs(MAIN, roll_fix="new", faster_forward="only")
    pinned({MAIN[:10]: text}, commit(MAIN))
    world.install(text, "0.99.0")
    decision = world.plan()["roll-fix"]
    assert (decision.action, decision.variant) == ("apply", "new")


def test_a_commit_that_proofs_have_shown_to_be_right_tells_so(pinned, proofs, world):
    """Its bodies are those of no release, and the version says that the patch is needed."""
    backport = FIXED.replace("dims is None", "not dims")
    proofs(DEV, roll_fix=UPSTREAM)
    pinned({DEV[:10]: backport}, commit(DEV, "0.17.0.dev0", of="dev"))
    world.install(backport, "0.17.0.dev5")
    decision = world.plan()["roll-fix"]
    assert decision.action == "upstream"
    assert "its bodies are those of commit 5e00000000 (dev of 2026-08-22)" in decision.reason


def gives(matrix, hash=MAIN):
    return support(matrix)["megatron-core"][hash[:10]]["roll-fix"]


def test_bodies_of_another_variant_than_the_version_says_decide(pinned):
    """Pinned as the version says, the wrong variant would be known for these bodies."""
    matrix = pinned({MAIN[:10]: BROKEN}, commit(MAIN, "0.17.0.dev0"))
    assert gives(matrix) == "old" and stale(matrix) == []


def test_a_commit_with_all_bodies_of_a_right_release_is_right(pinned):
    """The version says that it needs the patch."""
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN, "0.17.0.dev0"))
    assert gives(matrix) == "upstream" and stale(matrix) == []


def test_an_unknown_body_is_not_pinned_by_the_version(pinned, proofs):
    text = EDITED
    assert gives(pinned({MAIN[:10]: text}, commit(MAIN, "0.17.0.dev0"))) == "-"
    proofs(MAIN, roll_fix="new")
    assert gives(pinned({}, commit(MAIN, "0.17.0.dev0"))) == "new"


def test_a_commit_that_lacks_a_target_has_no_pin(pinned):
    assert gives(pinned({MAIN[:10]: "x = 1\n"}, commit(MAIN, "0.17.0.dev0"))) == "-"


def test_the_matrix_of_the_releases_knows_no_commit(pinned, proofs):
    """The proofs of a commit's patches run again, although the commit is pinned."""
    text = EDITED
    proofs(MAIN, roll_fix="new")
    matrix = pinned({MAIN[:10]: text}, commit(MAIN))
    released = matrix.released
    assert set(released.names("megatron-core")) == {"0.16.0", "0.17.0", "0.18.0"}
    assert len(matrix.known_bodies("roll-fix", "new")["megatron.core.roll:roll"]) == 2
    assert len(released.known_bodies("roll-fix", "new")["megatron.core.roll:roll"]) == 1
    for release in released.supported["megatron-core"]:
        assert released.pins["megatron-core"][release] == matrix.pins["megatron-core"][release]


def test_a_commit_comes_before_the_release_and_after_older_ones(pinned):
    """Versions order releases and commits; of one version, days do."""
    matrix = pinned(
        {MAIN[:10]: FIXED, DEV[:10]: FIXED}, commit(DEV, date="2026-08-21", of="dev"), commit(MAIN, "0.18.0.dev0")
    )
    names = matrix.names("megatron-core")
    assert names == ("0.16.0", "0.17.0", "0.18.0", DEV[:10], MAIN[:10])
    assert matrix.in_order("megatron-core", reversed(names)) == ["0.16.0", "0.17.0", DEV[:10], MAIN[:10], "0.18.0"]
    assert matrix.shown("megatron-core", DEV[:10]) == "commit 5e00000000 (dev of 2026-08-21)"
    assert matrix.shown("megatron-core", "0.18.0") == "0.18.0"


def test_the_fast_form_has_the_commits(pinned, tmp_path, monkeypatch):
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN, of="main, pinned by a trainer"))
    monkeypatch.setattr("shim._matrix.compiled.FILE", tmp_path / "fast.json")
    lock = lock_path(Path(matrix.path)).read_bytes()
    (tmp_path / "fast.json").write_text(render_compiled(matrix, "digest", "described", lock))
    fast = read_compiled(Path(matrix.path), "digest", None, lock)
    assert fast.commits == matrix.commits and fast.pins == matrix.pins
    assert fast.commits["megatron-core"][MAIN[:10]].branch == "main"


def test_lists_of_releases_stay_lists_of_releases(pinned):
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN))
    assert listed(matrix)["faster-forward"]["releases"] == "0.16.0 to 0.18.0"
    releases, commits = support_table(matrix).split("\n\n")
    assert MAIN[:10] not in releases
    assert commits.startswith("| megatron-core at commit | 1234567890: main, 2026-08-22 |\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f'"{MAIN}"', MAIN, "must be a quoted version string"),
        (f'"{MAIN}"', f'"{MAIN[:39]}"', "is not a commit: 40 hexadecimal digits"),
        (f'"{MAIN}"', f'"{MAIN.upper()}"', "is not a commit: 40 hexadecimal digits"),
        (f'"{MAIN}"', f'"{DEV}"', "is named by its first 10 digits: 5e00000000, not 1234567890"),
        ('version: "0.18.0.dev0"', "version: 0.18", "must be a quoted version string"),
        ('version: "0.18.0.dev0"', 'version: "main"', "is not a PEP 440 version"),
        ("2026-08-22", "2026-02-30", "write it as 2026-08-22"),
        ("2026-08-22", "20260822", "write it as 2026-08-22"),
        ("of: main", "off: main", "unknown key 'off' in commit 1234567890; known are commit, version, date, of"),
        ("      of: main\n", "", "commit 1234567890 lacks 'of'"),
        ("of: main", "of: ''", "is empty"),
        ("commits:\n  megatron-core:", "commits:\n  torch:", "unknown key 'torch' in commits"),
        ('["0.16.0", ', f'["{MAIN[:10]}", "0.16.0", ', "is both a release and a commit"),
    ],
)  # fmt: skip
def test_a_commit_is_read_strictly(world, old, new, message):
    text = with_commits(commit(MAIN))
    assert text.count(old) >= 1
    world.matrix.write_text(text.replace(old, new))
    with pytest.raises(MatrixError, match=r"matrix.yaml:\d+: ") as caught:
        load_matrix(world.matrix, pins=False)
    assert message in str(caught.value)


def test_commits_stand_in_the_order_of_their_days(world):
    """So that the last one is the newest."""
    world.matrix.write_text(with_commits(commit(MAIN), commit(DEV, date="2026-08-21")))
    with pytest.raises(MatrixError, match="commit 5e00000000 is of 2026-08-21, but stands after one of 2026-08-22"):
        load_matrix(world.matrix, pins=False)


def test_pins_of_a_commit_that_is_not_in_the_matrix_are_refused(world):
    text = lock_path(world.matrix).read_text().replace('"0.18.0"', f'"{MAIN[:10]}"')
    lock_path(world.matrix).write_text(text)
    with pytest.raises(MatrixError, match=f"{MAIN[:10]} is pinned but not in the supported list, nor a commit"):
        load_matrix(world.matrix)


# Without the sources of a commit


def test_recorded_pins_are_what_was_written(pinned):
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN))
    file = lock_path(Path(matrix.path))
    assert recorded_pins(file.read_bytes(), matrix.patches) == matrix.pins
    for broken in (b"", b"[]", b'{"roll-fix": 3}', b'{"roll-fix": {"old": {"a": {"b": 4}}}}', b"[" * 100_000):
        assert recorded_pins(broken, matrix.patches) == {}
    assert recorded_pins(b'{"gone-fix": {"old": {"a:b": {"c": ["0.16.0"]}}}}', matrix.patches) == {}


def test_a_commit_that_cannot_be_fetched_keeps_its_pins(pinned, proofs, world):
    """Releases are measured as ever."""
    text = EDITED
    proofs(MAIN, roll_fix="new", faster_forward="only")
    matrix = pinned({MAIN[:10]: text}, commit(MAIN))
    before = lock_path(world.matrix).read_text()
    shutil.rmtree(world.root / "releases" / MAIN[:10])
    found = measure_all(matrix, fetch_in(world, {MAIN[:10]}), lambda text: None)
    assert found.pins == before and not found.stale() and list(found.missing) == [MAIN[:10]]
    (said,) = found.missing.values()
    assert "commit 1234567890 (main of 2026-08-22) is not at hand and keeps its pins: no git has" in said
    assert write_all(found) is False
    megatron(world.root / "releases/0.17.0", "0.17.0", {"roll.py": REWORKED.replace("dims=0", "dims=2")})
    found = measure_all(matrix, fetch_in(world, {MAIN[:10]}), lambda text: None)
    assert found.stale() and write_all(found) is True
    assert load_matrix(world.matrix).pins["megatron-core"][MAIN[:10]] == matrix.pins["megatron-core"][MAIN[:10]]


def test_a_release_that_cannot_be_fetched_is_an_error(pinned, world):
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN))
    with pytest.raises(NotMetError, match=r"no git has 0\.17\.0"):
        measure_all(matrix, fetch_in(world, {"0.17.0"}), lambda text: None)


def test_pins_of_other_targets_are_not_kept(pinned, proofs, world):
    """They would be wrong, and nobody could measure the right ones."""
    proofs(MAIN, roll_fix="new")
    pinned({MAIN[:10]: REWORKED}, commit(MAIN))
    text, old = world.matrix.read_text(), 'new:\n        targets: ["megatron.core.roll:roll"]'
    assert old in text
    world.matrix.write_text(text.replace(old, 'new:\n        targets: ["megatron.core.roll:Layer"]'))
    matrix = load_matrix(world.matrix, pins=False, check_ranges=False)
    with pytest.raises(MatrixError, match=r"sources are not at hand\. Remedy: .* clone .* in SHIM_MEGATRON_GIT"):
        measure_all(matrix, fetch_in(world, {MAIN[:10]}), lambda text: None)


def test_known_files_of_a_missing_commit_are_kept(pinned, proofs, world, monkeypatch):
    """Nobody can tell which of the other files it has, so all of them stay."""
    text = EDITED
    proofs(MAIN, roll_fix="new")
    matrix = pinned({MAIN[:10]: text}, commit(MAIN))
    table = world.root / "known_files.json"
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: world.matrix)
    monkeypatch.setattr("shim._releases.known_files.FILE", table)
    monkeypatch.setattr("shim.maintenance.pin_all.tables_of_names", lambda *_: {})
    first = measure_all(matrix, fetch_in(world), lambda text: None)
    table.write_text(first.tables[table])
    monkeypatch.setattr("shim._releases.known_files.known_files", lambda: json.loads(table.read_text()))
    again = measure_all(matrix, fetch_in(world, {MAIN[:10]}), lambda text: None)
    assert again.tables == first.tables
    assert len(json.loads(table.read_text())["megatron.core.roll"]) == 4


def test_measure_gives_commits_after_releases(pinned, world):
    matrix = pinned({MAIN[:10]: FIXED}, commit(MAIN))
    told = []
    pins = measure(matrix, fetch_in(world), lambda distribution, name: told.append(name))
    assert told == ["0.16.0", "0.17.0", "0.18.0", MAIN[:10]]
    names = {"megatron-core": matrix.names("megatron-core")}
    text = render_pins(pins).encode()
    assert read_pins(lock_path(world.matrix), text, matrix.patches, names) == matrix.pinned
