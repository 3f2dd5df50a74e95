"""`shim pin --patch`: the pins of one patch in seconds. What is wrong or missing is said before anything is written."""

import json
from dataclasses import replace

import pytest
from unit_helpers import MATRIX, PATCH, REPOSITORY, REWORKED, megatron, write_file

from shim._matrix.load import load_matrix, lock_path
from shim._tools.cli import main
from shim.maintenance.pin_some import left_to_do
from shim.testing.releases import FetchError

ROLL = "megatron.core.roll:roll"
EDITED = REWORKED.replace("return helper(x)", "return helper(x) + 1").replace("dims=0", "dims=1")
MAIN, DEV = "1234567890" + "a" * 30, "5e00000000" + "b" * 30


def with_commits(matrix=MATRIX):
    """A matrix with two commits."""
    lines = ["commits:", "  megatron-core:"]
    for hash, of in ((DEV, "dev"), (MAIN, "main")):
        lines += [f'    "{hash[:10]}":', f'      commit: "{hash}"', '      version: "0.17.1.dev0"']
        lines += ['      date: "2026-08-22"', f"      of: {of}"]
    return matrix.replace("\n\npatches:", "\n" + "\n".join(lines) + "\n\npatches:", 1)


@pytest.fixture
def shim(world, capsys, monkeypatch):
    """Run `shim pin` on the fake world. `shim.gone` are the releases and commits that cannot be fetched."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    gone, fetched = set(), []

    def fetch(release, *_):
        fetched.append(release)
        if release in gone:
            raise FetchError(f"could not get {release}")
        return world.root / "releases" / release

    monkeypatch.setattr("shim.testing.releases.fetch", fetch)
    monkeypatch.setattr("shim.maintenance.commands.at_hand", lambda release, _: release not in gone)

    def run(*arguments):
        code = main(["pin", *arguments, "--matrix", str(world.matrix)])
        said = capsys.readouterr()
        return code, said.out, said.err

    run.gone, run.fetched = gone, fetched
    return run


@pytest.fixture
def commits(world):
    """The world with two commits, both at hand and pinned."""
    for hash in (DEV, MAIN):
        megatron(world.root / "releases" / hash[:10], "0.18.0", {"roll.py": REWORKED})
    world.pin(with_commits())
    return world


def roll_bodies(world, name):
    return load_matrix(world.matrix).pins["megatron-core"][name]["roll-fix"].fingerprints


def test_one_patch_is_pinned_and_the_others_stay(shim, world):
    """Both are after all of them were measured what `--releases` writes."""
    before = load_matrix(world.matrix).pins["megatron-core"]["0.17.0"]
    write_file(world.root / "releases/0.17.0/megatron/core/roll.py", EDITED)
    code, out, _ = shim("--patch", "roll-fix", "--json")
    assert (code, json.loads(out)["changed"], json.loads(out)["left"]) == (0, True, [])
    after = load_matrix(world.matrix).pins["megatron-core"]["0.17.0"]
    assert after["roll-fix"] != before["roll-fix"] and after["faster-forward"] == before["faster-forward"]
    assert shim("--patch", "faster-forward", "--patch", "roll-fix")[0] == 0
    written = lock_path(world.matrix).read_bytes()
    assert shim("--check")[0] == 0
    assert shim("--patch", "roll-fix")[1] == f"pins were current beside {world.matrix}\n"
    assert lock_path(world.matrix).read_bytes() == written


def test_a_renamed_variant_can_be_pinned(shim, world):
    """No other command runs until then."""
    world.matrix.write_text(
        world.matrix.read_text().replace("      old:", "      v0_16:").replace("t: old", "t: v0_16")
    )
    assert main(["matrix", "--matrix", str(world.matrix)]) == 2
    assert shim("--patch", "roll-fix")[0] == 0
    assert load_matrix(world.matrix).pins["megatron-core"]["0.16.0"]["roll-fix"].variant == "v0_16"


def test_a_patch_that_is_not_there_is_wrong_usage(shim):
    code, out, err = shim("--patch", "roll-fux")
    assert (code, out) == (2, "") and "there is no patch 'roll-fux'" in err and "did you mean 'roll-fix'?" in err


@pytest.mark.parametrize("other", ["--releases", "--check"])
def test_it_is_one_or_the_other(shim, other):
    code, _, err = shim("--patch", "roll-fix", other)
    assert code == 2 and "leave out --check and --releases" in err


@pytest.mark.parametrize("how", [("--patch", "roll-fix"), ("--releases",)], ids=" ".join)
def test_a_release_that_cannot_be_told_from_one_that_is_right_is_an_error_before_pins_are_written(shim, world, how):
    """With what to do about it. Afterwards no command would read the matrix."""
    before = lock_path(world.matrix).read_bytes()
    write_file(world.root / "releases/0.18.0/megatron/core/roll.py", REWORKED)
    code, out, err = shim(*how)
    assert (code, out) == (2, "") and lock_path(world.matrix).read_bytes() == before
    assert (
        "0.18.0 is right without roll-fix, but its bodies are those of 0.17.0, which needs it; name what upstream"
        in err
    )


def test_commits_that_are_not_at_hand_keep_their_pins_and_are_named(shim, commits):
    """As long as the rules are those of the pins. Nothing is fetched for them."""
    before = roll_bodies(commits, DEV[:10])
    shim.gone.add(DEV[:10])
    code, out, err = shim("--patch", "roll-fix", "--json")
    assert code == 0 and json.loads(out)["not_at_hand"] == [DEV[:10]] and DEV[:10] not in shim.fetched
    assert "commit 5e00000000 (dev of 2026-08-22) is not at hand and keeps its pins" in err
    assert roll_bodies(commits, DEV[:10]) == before


def test_commits_whose_sources_are_needed_are_named_with_the_remedy(shim, commits):
    """What can be pinned is pinned. `--releases` pins all or nothing, and names all of them before it reads any."""
    commits.matrix.write_text(with_commits(MATRIX.replace('reads: ["megatron.core.roll:helper"]', "reads: []")))
    before = lock_path(commits.matrix).read_bytes()
    shim.gone.update((DEV[:10], MAIN[:10]))
    needed = (
        "roll-fix (new): not what was pinned on megatron-core commit 5e00000000 (dev of 2026-08-22), commit 1234567890 "
        "(main of 2026-08-22), whose sources are not at hand. Remedy: name a clone that has the commits in "
        "SHIM_MEGATRON_GIT"
    )
    code, out, err = shim("--releases")
    assert (code, out) == (2, "") and needed in err and lock_path(commits.matrix).read_bytes() == before
    code, _, err = shim("--patch", "roll-fix")
    assert code == 1 and needed in err
    pins = load_matrix(commits.matrix).pins["megatron-core"]
    assert set(pins["0.17.0"]["roll-fix"].fingerprints) == {ROLL}
    assert set(pins[DEV[:10]]) == set(pins[MAIN[:10]]) == {"faster-forward"}


@pytest.mark.parametrize("how", [("--patch", "roll-fix"), ("--releases",)], ids=" ".join)
def test_a_renamed_variant_needs_no_sources_of_a_commit(shim, commits, how):
    """It has the same targets and reads, whose bodies were measured."""
    before = roll_bodies(commits, DEV[:10])
    renamed = MATRIX.replace("      new:", "      v0_17:").replace("variant: new", "variant: v0_17")
    commits.matrix.write_text(with_commits(renamed))
    shim.gone.update((DEV[:10], MAIN[:10]))
    assert shim(*how)[0] == 0
    pin = load_matrix(commits.matrix).pins["megatron-core"][DEV[:10]]["roll-fix"]
    assert (pin.variant, pin.fingerprints) == ("v0_17", before)


def test_releases_that_cannot_be_fetched_are_all_named_before_any_is_read(shim, world, monkeypatch):
    monkeypatch.setattr("shim.maintenance.pin.measure_one", lambda *_: pytest.fail("something was measured"))
    shim.gone.update(("0.16.0", "0.18.0"))
    code, out, err = shim("--releases")
    assert (code, out) == (1, "")
    assert "megatron-core 0.16.0, megatron-core 0.18.0 cannot be fetched: could not get 0.16.0" in err


@pytest.fixture
def shipped(world, monkeypatch):
    """The matrix of the fake world is the one that ships, in a source tree with documents."""
    monkeypatch.setattr("shim._matrix.load.matrix_path", lambda: world.matrix)
    monkeypatch.setattr("shim._matrix.load._module_exists", lambda module, shipped: True)
    table = world.root / "known_files.json"
    monkeypatch.setattr("shim._releases.known_files.FILE", table)
    monkeypatch.setattr("shim._releases.known_files.known_files", lambda: json.loads(table.read_text()))
    monkeypatch.setattr("shim._matrix.compiled.FILE", world.root / "matrix.json")
    monkeypatch.setattr("shim.maintenance.pin_all.tables_of_names", lambda *_: {})
    monkeypatch.setattr("shim.maintenance.pin_all.MORE_TE", ())
    monkeypatch.setattr("shim.maintenance.commands.left_to_do", lambda top, matrix, id: [f"{id} is left"])
    table.write_text("{}")
    return table


def test_the_table_of_files_is_written_with_all_pins_alone(shim, world, shipped):
    """Else two patches that bind names of one file would conflict in it."""
    assert shim("--releases")[0] == 0
    text = world.matrix.read_text()
    world.matrix.write_text(text.replace('reads: ["megatron.core.roll:helper"]', "reads: []"))
    code, out, _ = shim("--patch", "roll-fix")
    assert code == 0 and out.endswith("\n\nLeft to do:\n  roll-fix is left\n")
    assert "helper" in shipped.read_text() and "Layer.forward" in shipped.read_text()
    assert shim("--check")[0] == 1 and shim("--releases")[0] == 0 and shim("--check")[0] == 0
    assert "helper" not in shipped.read_text() and "Layer.forward" in shipped.read_text()


def test_what_a_new_patch_lacks_is_named():
    """Each thing that a test would say many minutes later; a patch that is finished lacks nothing."""
    matrix = load_matrix()
    assert not [line for id in ("frozen-recompute", "te-fp8-state") for line in left_to_do(REPOSITORY, matrix, id)]
    unknown = "shim.patches.megatron_core.bias_of_tomorrow"
    entry = replace(matrix.patches["expert-bias-padding"], id="bias-of-tomorrow", module=unknown, per_model={})
    left = left_to_do(REPOSITORY, replace(matrix, patches={**matrix.patches, entry.id: entry}), entry.id)
    assert [line.partition(": ")[0] for line in left] == [
        "patch.yaml",
        "patch.yaml",
        "version_matrix.lock.json",
        "proved.json",
        "changes/bias-of-tomorrow.added.md",
    ]
    assert "bias-of-tomorrow is outside of expert-bias-padding on megatron.core.transformer.moe.router:" in left[0]
    assert "no pins of bias-of-tomorrow on commit 1dcf0dafa8 (dev of 2026-02-14), commit 71e418ea7d" in left[2]
    assert "shim.maintenance.prove_all --patches bias-of-tomorrow" in left[3]
