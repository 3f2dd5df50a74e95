"""One line for each job, in its first process: version, number of patches, releases, and how to do without."""

import logging
import os
import sys
import types

import pytest

import shim
from shim import _api
from shim._engine import engine, log
from shim._engine.log import RANKS, is_first_of_job
from shim._planning import digest
from shim._planning.options import SAID

RUN = os.pathsep.join(["/x/shim/_workers/run", "/other"])
OUTSIDE = (*RANKS, SAID, "PYTHONPATH", "RAY_RAYLET_PID")


@pytest.fixture
def job(patched_world, monkeypatch):
    """A job of one process, without torch.distributed, in which nobody has configured logging."""
    for name in OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(logging.getLogger("shim"), "hasHandlers", lambda: False)
    yield monkeypatch
    os.environ.pop(SAID, None)
    shim.revert()


def line():
    report = shim.status()
    releases = ", ".join(f"{name} {version}" for name, version in report.releases.items())
    assert releases.startswith("megatron-core 9.9.0")
    return (
        f"shim {shim.__version__} applies 1 patch to {releases}; without it: "
        "MEGATRON_SHIM_DISABLE=1, without a patch: MEGATRON_SHIM_EXCLUDE=ID"
    )


@pytest.fixture
def configured(job, caplog):

    job.setattr(logging.getLogger("shim"), "hasHandlers", lambda: True)
    caplog.set_level(logging.INFO, "shim")
    return job, lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_apply_logs_one_line_in_its_process(configured):
    """However often it is called; nothing goes to standard error, and no variable is set."""
    _, said = configured
    shim.apply()
    shim.apply(exclude="count")
    shim.revert()
    shim.apply()
    assert said() == [line()] and SAID not in os.environ


def test_the_line_reads_no_file_of_shims(configured):
    """A digest would: it took a third of an apply() below `shim run`."""
    job, said = configured
    job.setattr(digest, "identity_of", lambda *_: pytest.fail("computed"))
    shim.apply()
    assert len(said()) == 1


def test_without_anybody_who_reads_it_nothing_is_computed(job, capsys):
    job.setattr(log, "line_for", lambda plan: pytest.fail("computed"))
    shim.apply()
    assert capsys.readouterr().err == "" and not engine.ENGINE.announced


def test_below_shim_run_it_goes_to_standard_error_once(job, capsys):
    """And processes that this one starts know that it has been said."""
    job.setenv("PYTHONPATH", RUN)
    job.delenv("COLUMNS")
    shim.apply()
    said = capsys.readouterr().err
    assert said.replace("\n", " ").rstrip() == line() and os.environ[SAID] == "1"
    assert max(map(len, said.splitlines())) <= 80
    shim.apply(exclude="count")
    assert "shim 0" not in capsys.readouterr().err


def test_below_shim_run_a_long_warning_is_wrapped(job, capsys):
    """Where logging is configured it stays one line, which a search of a log finds whole."""
    said = []
    job.setattr(logging.getLogger("shim"), "log", lambda level, form, text: said.append(text))
    job.delenv("COLUMNS")
    words = " ".join(["word"] * 100)
    for path in ("", RUN):
        job.setenv("PYTHONPATH", path)
        engine.ENGINE.deferred.warn(words)
        engine.ENGINE.deferred.flush()
    assert said[0] == words == said[1].replace("\n", " ") and max(map(len, said[1].splitlines())) <= 80


def test_below_shim_run_a_configured_logger_gets_it(configured, capsys):
    job, said = configured
    job.setenv("PYTHONPATH", RUN)
    shim.apply()
    assert said() == [line()] and capsys.readouterr().err == "" and os.environ[SAID] == "1"


def test_a_logger_that_takes_no_info_gets_none(configured, capsys, caplog):
    """Somebody has decided that."""
    job, said = configured
    caplog.set_level(logging.WARNING, "shim")
    job.setenv("PYTHONPATH", RUN)
    shim.apply()
    assert said() == [] and capsys.readouterr().err == ""


def test_it_says_that_shim_is_off(job, capsys):
    job.setenv("PYTHONPATH", RUN)
    job.setenv("MEGATRON_SHIM_DISABLE", "1")
    shim.apply()
    assert capsys.readouterr().err == f"shim {shim.__version__} is off, because MEGATRON_SHIM_DISABLE is set\n"


def test_nobody_reads_standard_error(job):
    job.setenv("PYTHONPATH", RUN)
    for stream in (None, types.SimpleNamespace(write=lambda text: 1 / 0)):
        job.setattr(sys, "stderr", stream)
        if stream is not None:
            job.setattr(stream, "write", lambda text: (_ for _ in ()).throw(BrokenPipeError()))
        shim.apply()
        assert not engine.ENGINE.announced and SAID not in os.environ


def ended(job, capsys):
    """What the process says at its end, if it ended now."""
    capsys.readouterr()
    _api._say_how_it_ends(os.getpid())
    return " ".join(capsys.readouterr().err.split())


def test_below_shim_run_the_end_says_what_is_applied_and_concerns_the_run(job, capsys):
    registered = []
    job.setattr(_api.atexit, "register", lambda *given: registered.append(given))
    shim.apply()
    assert registered == []  # not below shim run
    job.setenv("PYTHONPATH", RUN)
    shim.apply()
    assert registered == [(_api._say_how_it_ends, os.getpid())]
    report = shim.status()
    assert ended(job, capsys) == (
        f"shim at the end: {report.counted}; which of them concern this run is not known: "
        "name what it trains (shim run --concerns mtp,packed,lora)"
    )
    shim.apply(concerns="mtp,cp")
    assert ended(job, capsys).endswith("; all concern a run with mtp,cp, or may")


def test_who_has_not_been_told_the_line_is_told_at_the_end(configured):
    """As below pytest, which takes the log while tests run."""
    job, _ = configured
    registered = []
    job.setattr(_api.atexit, "register", lambda *given: registered.append(given))
    job.setattr(logging.getLogger("shim"), "isEnabledFor", lambda level: False)
    job.setenv("PYTHONPATH", RUN)
    shim.apply()
    shim.apply()
    assert not engine.ENGINE.announced and registered == [(_api._say_how_it_ends, os.getpid())] * 2
    job.setenv("RANK", "1")
    shim.apply()
    assert len(registered) == 2


def test_the_end_of_another_process_and_of_a_run_without_shim_is_silent(job, capsys):
    job.setenv("PYTHONPATH", RUN)
    shim.apply()
    capsys.readouterr()
    _api._say_how_it_ends(os.getpid() + 1)  # it was forked, and has inherited what is registered
    assert capsys.readouterr().err == ""
    shim.revert()
    assert ended(job, capsys) == ""
    job.setenv("MEGATRON_SHIM_DISABLE", "1")
    shim.apply()
    assert ended(job, capsys) == ""


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"RANK": "8", "SLURM_PROCID": "0"}, False),
        ({"RANK": "0", "SLURM_PROCID": "1"}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"OMPI_COMM_WORLD_RANK": "2"}, False),
        ({"RAY_RAYLET_PID": "7"}, False),
        ({"RAY_RAYLET_PID": "7", "RANK": "0"}, True),
        ({SAID: "1", "RANK": "0"}, False),
    ],
)
def test_the_first_process_of_a_job(job, variables, first):
    """By the launcher's rank. Without one, a worker that another process has started does not speak."""
    for name, value in variables.items():
        job.setenv(name, value)
    assert is_first_of_job() is first


@pytest.mark.parametrize("inheriting", [True, False])
def test_a_process_of_multiprocessing_is_not_the_first(job, inheriting):
    """Nor one that is about to learn of its parent, while it imports the modules of the program."""
    current = types.SimpleNamespace(_inheriting=inheriting)
    process = types.SimpleNamespace(parent_process=lambda: None if inheriting else 1, current_process=lambda: current)
    job.setitem(sys.modules, "multiprocessing.process", process)
    assert not is_first_of_job()
    job.setenv("RANK", "0")  # which it has inherited
    assert not is_first_of_job()


def test_ranks_of_torch_distributed_count_first(job):
    torch = types.ModuleType("torch")
    torch.distributed = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3
    )
    job.setitem(sys.modules, "torch", torch)
    job.setenv("RANK", "0")
    assert not is_first_of_job()
