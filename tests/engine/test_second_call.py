"""Two callers in one process: the last call of apply() counts, and says what it takes from the one before."""

import logging
import threading

import pytest

import shim

CORE = "megatron.core."


@pytest.fixture
def two(world):
    """Two patches, `first` with an option, of different kinds."""
    world.patch(
        "first",
        [CORE + "ops:double"],
        options={"factor": 1},
    )
    world.patch("second", [CORE + "ops:halve"], kind="performance")
    world.get("ops:double")
    return world


@pytest.fixture
def said(caplog):
    """What shim has warned of since it was last asked."""

    def since():
        found = [record.getMessage() for record in caplog.records if record.name == "shim"]
        assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == "shim")
        caplog.clear()
        return found

    return since


def test_a_later_call_says_which_patch_comes_back_and_who_had_excluded_it(two, said):
    """A library excludes a patch, and the script that uses it knows nothing of it."""
    library = compile("import shim\nshim.apply(exclude=['first'])", "/site/lib.py", "exec")
    script = compile("import shim\n\nshim.apply()", "/home/train.py", "exec")
    exec(library)
    assert shim.status()["first"].state == "excluded" and said() == []
    exec(script)
    assert shim.status()["first"].state == "applied"
    (line,) = said()
    assert line.startswith("shim.apply() at /home/train.py:3 changes the request of shim.apply() at /site/lib.py:2: ")
    assert "applied now, and not before: first." in line and "second" not in line and "\n" not in line
    assert "MEGATRON_SHIM_EXCLUDE=first" in line


CHANGES = [
    ({}, {"exclude": "second"}, "no longer applied: second."),
    ({"only": "first"}, {}, "applied now, and not before: second."),
    ({"only": "first"}, {"only": "second"}, "applied now, and not before: second; no longer applied: first."),
    ({"kinds": "correctness"}, {}, "applied now, and not before: second."),
    ({"options": {"first": {"factor": 2}}}, {}, "factor of first is 1, and was 2."),
    ({"require": "first, second"}, {"require": "second"}, "no longer required: first."),
    ({"strict": True}, {}, "no longer strict."),
    ({"on_drift": "error"}, {}, "on_drift is 'skip', and was 'error'."),
]


@pytest.mark.parametrize(("before", "after", "text"), CHANGES)
def test_a_later_call_says_what_it_takes_of_each_argument(two, said, before, after, text):
    shim.apply(**before)
    shim.apply(**after)
    (line,) = said()
    assert text in line and line.count(__file__) == 2
    if "exclude" not in before:
        assert "MEGATRON_SHIM_EXCLUDE" not in line


def test_a_lock_that_no_longer_counts_is_named(two, said, tmp_path):
    from shim._planning.lock import write_lock

    file = tmp_path / "lock.json"
    write_lock(file, shim.plan())
    shim.apply(lock=file)
    shim.apply(lock=file)
    assert said() == []
    shim.apply()
    (line,) = said()
    assert f"the lock {file} no longer counts." in line


@pytest.mark.parametrize(
    "argument", [{}, {"exclude": ["first"]}, {"options": {"first": {"factor": 2}}}, {"strict": True}]
)
def test_the_same_arguments_say_nothing(two, said, argument):
    for _ in range(3):
        shim.apply(**argument)
    assert said() == []


def test_the_same_in_other_words_says_nothing(two, said):
    """What counts is what is asked for, and not how: a text for a list, an option with its default."""
    shim.apply(exclude="second", require=["first"])
    shim.apply(exclude=["second"], require="first", options={"first": {"factor": 1}}, on_drift="skip")
    assert said() == []


@pytest.mark.parametrize("more", [{"require": "first"}, {"strict": True}, {"on_drift": "error"}])
def test_a_call_that_only_demands_more_says_nothing(two, said, more):
    shim.apply()
    shim.apply(**more)
    assert said() == []


def test_an_exclude_of_the_environment_wins_over_every_call(two, said, monkeypatch):
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "second")
    shim.apply(exclude="first")
    shim.apply()
    (line,) = said()
    assert "applied now, and not before: first." in line
    assert shim.apply(only="second")["second"].state == "excluded"


def test_after_a_revert_nothing_is_taken(two, said):
    shim.apply(exclude="first")
    shim.revert()
    shim.apply()
    assert said() == []


def test_a_call_that_fails_has_taken_nothing(two, said):
    """What the earlier call asked for is in force, and the next call is compared with that one."""
    shim.apply(exclude="first", require="second")
    with pytest.raises(shim.NotMetError):
        shim.apply(exclude="second", require="second")
    assert not any("changes the request of" in line for line in said())
    assert shim.status()["first"].state == "excluded"
    shim.apply(exclude="first", require="second")
    assert said() == []


def test_a_block_is_silent_and_gives_back_what_the_call_before_asked_for(two, said):
    shim.apply(exclude="first")
    with shim.patched(), shim.patched(only="first"):
        assert shim.status()["first"].state == "applied"
    assert shim.status()["first"].state == "excluded" and said() == []
    shim.apply()
    (line,) = said()
    assert "shim.apply() at" in line and "shim.patched()" not in line


def test_a_call_within_a_block_is_compared_with_the_block(two, said):
    with shim.patched(exclude="first"):
        shim.apply()
        (line,) = said()
        assert "the request of shim.patched() at " in line and f"{__file__}:" in line
    assert shim.status()["first"].state == "excluded" and said() == []


def test_threads_with_the_same_arguments_say_nothing_and_one_with_others_says_what(two, said):
    threads = [threading.Thread(target=shim.apply, kwargs={"exclude": "first"}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said() == []
    other = threading.Thread(target=shim.apply)
    other.start()
    other.join()
    (line,) = said()
    assert "applied now, and not before: first." in line


def test_another_rank_says_it_in_short(two, said, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    shim.apply(exclude="first")
    shim.apply()
    (line,) = said()
    assert line.startswith("shim.apply() at") and len(line) <= 160


def test_the_same_change_is_told_once(two, said):
    """A loop that goes to and fro fills no log."""
    for _ in range(3):
        for excluded in ("first", ()):
            shim.apply(exclude=excluded)
    assert len(said()) == 2
