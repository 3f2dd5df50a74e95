"""Cases in forked processes: what they share, what they do not, and how each end of one is told."""

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import fork_server
import pytest

from shim.testing.patience import patience

pytestmark = pytest.mark.skipif(not fork_server.CAN_FORK, reason="processes are not forked here")

STARTED_WITH = "import sys; loaded = set(sys.modules)\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Writes a module of a site-packages directory on sys.path."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))

    def write(name, source=""):
        file = directory / f"{name}.py"
        file.write_text(textwrap.dedent(source))
        return file

    return write


@pytest.fixture(autouse=True)
def no_server_left():
    yield
    fork_server._close_all()


def run(code, never=("fixed",), **kwargs):
    return fork_server.run(code, never=never, **kwargs)


def started_with(names, code="", **kwargs):
    """Which of `names` a case finds loaded when it starts."""
    done = run(f"{STARTED_WITH}print(*sorted({set(names)!r} & loaded))\n{code}", **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_first_case_starts_bare_and_the_others_with_what_it_had_loaded(installed):
    for name in ("library", "later", "fixed"):
        installed(name)
    names = ["library", "later", "fixed", "shim", "pytest"]
    assert started_with(names, "import library, fixed, shim") == []
    assert started_with(names, "import later") == ["library"]
    assert started_with(names) == ["library"]


def test_what_this_process_has_loaded_may_be_shared_from_the_first_case_on(installed):
    installed("library")
    installed("fixed")
    importlib.import_module("library")
    importlib.import_module("fixed")
    names = ["library", "fixed", "shim"]
    try:
        assert started_with(names, share_loaded=True) == ["library"]
    finally:
        del sys.modules["library"], sys.modules["fixed"]


def test_a_module_that_is_not_installed_is_not_shared(tmp_path, monkeypatch):
    """Tests, helpers and source trees on PYTHONPATH are the caller's, and may change between two cases."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper.py").write_text("")
    assert started_with(["helper"], "import helper") == []
    assert started_with(["helper"], "import helper") == []


def test_a_case_that_failed_does_not_say_what_to_share(installed):
    installed("library")
    assert run("import library; raise ValueError").returncode == 1
    assert started_with(["library"], "import library") == []
    assert started_with(["library"]) == ["library"]


def test_nothing_that_a_case_does_reaches_another(installed):
    installed("library", "state = 0")
    changes = "import library, os; library.state += 1; print(library.state); os.environ['LEFT_BEHIND'] = 'yes'"
    asks = f"{changes}\nprint(os.environ.get('LEFT_BEHIND_BEFORE'))"
    assert [run(asks).stdout.split() for _ in range(3)] == [["1", "None"]] * 3


@pytest.mark.parametrize("how", ["import fixed", "importlib.util.find_spec('fixed').name"])
def test_what_asks_for_a_package_that_is_not_shared_is_not_shared_itself(installed, how):
    """It would remember in every case that the package is not there."""
    installed("fixed")
    installed("library")
    asks = f"import importlib.util\nthere = True\ntry:\n    {how}\nexcept ImportError:\n    there = False\n"
    installed("asks", asks)
    installed("asks_through_another", "import asks")
    names = ["library", "asks", "asks_through_another", "fixed"]
    loads = "import library, asks_through_another, asks; assert asks.there"
    assert started_with(names, loads) == []
    assert started_with(names, loads) == ["library"]
    assert started_with(names, loads) == ["library"]


def test_stand_ins_that_a_case_has_made_are_not_shared_and_neither_is_what_uses_them(installed):
    installed("uses", "import made_by_hand")
    installed("may_use", "try:\n    import made_by_hand\nexcept ImportError:\n    raise SystemExit('no stand-in')")
    makes = "import sys, types; sys.modules['made_by_hand'] = types.ModuleType('made_by_hand'); import uses, may_use"
    names = ["made_by_hand", "uses", "may_use"]
    assert started_with(names, makes) == []
    assert started_with(names, makes) == []


def test_a_module_that_does_not_load_in_the_server_is_left_out(installed):
    installed("library")
    installed("needs_argument", "import sys\nassert sys.modules['__main__'].argument")
    loads = "argument = True; import needs_argument, library"
    assert started_with(["library", "needs_argument"], loads) == []
    assert started_with(["library", "needs_argument"], loads) == ["library"]


def test_nothing_is_shared_when_a_module_starts_a_thread(installed):
    """A lock that the thread holds at the fork would stay locked in the case."""
    installed(
        "threaded", "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    installed("library")
    for _ in range(3):
        assert started_with(["library", "threaded"], "import library, threaded") == []


@pytest.mark.parametrize("shared", [False, True])
def test_a_case_has_the_callers_environment_path_directory_and_input(tmp_path, monkeypatch, shared):
    asks = (
        "import json, os, sys; "
        "print(json.dumps([os.environ.get('MEGATRON_SHIM_ONLY'), os.environ.get('PYTEST_CURRENT_TEST'), sys.path,"
        " os.getcwd(), sys.argv, sys.stdin.read(), __name__, sys.modules['__main__'].__dict__ is globals()]))"
    )
    if shared:
        run("")
    for value in ("one", "two"):
        monkeypatch.setenv("MEGATRON_SHIM_ONLY", value)
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test {value}")
        expected = [
            value,
            f"test {value}",
            [e or "." for e in sys.path],
            os.getcwd(),
            ["-c"],
            "input",
            "__main__",
            True,
        ]
        assert json.loads(run(asks, stdin="input").stdout) == expected
    monkeypatch.delenv("MEGATRON_SHIM_ONLY")
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(asks).stdout)
    assert (found[0], found[3]) == (None, str(tmp_path))


def test_modules_are_loaded_in_the_environment_of_their_cases(installed, monkeypatch):
    """Another environment, path or directory is another server; which test runs, and what shim is told, is not."""
    installed("library", "import os\nsetting = os.environ.get('SETTING')")
    asks = "import library, os; print(library.setting, os.getppid())"

    def answers():
        return run(asks).stdout.split()

    (first, server), again = answers(), answers()
    assert [first, server] == again and first == "None"
    monkeypatch.setenv("MEGATRON_SHIM_ONLY", "p")
    assert answers() == again
    monkeypatch.setenv("SETTING", "given")
    assert [answers()[0], answers()[0]] == ["given", "given"]


@pytest.mark.parametrize("cases_before", [0, 2])
def test_the_end_of_a_case_is_told_like_that_of_a_process(cases_before):
    for _ in range(cases_before):
        assert run("import yaml").returncode == 0
    crash = run("import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (crash.returncode, crash.stdout) == (-signal.SIGSEGV, "said\n")
    raised = run("import sys; print('said'); print('in error', file=sys.stderr); raise ValueError('why')")
    assert (raised.returncode, raised.stdout) == (1, "said\n")
    assert raised.stderr.startswith("in error\n") and raised.stderr.endswith("ValueError: why\n")
    assert [run(f"raise SystemExit({code})").returncode for code in ("", "0", "3", "-1")] == [0, 0, 3, 255]
    message = run("raise SystemExit('why')")
    assert (message.returncode, message.stderr) == (1, "why\n")
    assert run("def f(:").returncode == 1
    assert run("import os; print('half', end='', flush=True); os._exit(7)").returncode == 7
    thread = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
    assert run(thread).stdout == "late\n"


def test_a_case_that_hangs_is_killed_and_told_with_what_it_said():
    says = "import os, sys, time; print(os.getpid(), flush=True); print('why', file=sys.stderr, flush=True)"
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run(f"{says}; time.sleep(600)", timeout=5)
    assert time.monotonic() - started < patience()
    assert caught.value.stderr == "why\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(caught.value.stdout), 0)
    assert run("print('next')").stdout == "next\n"


def test_a_server_that_dies_is_told_and_another_begins():
    run("import yaml")
    with pytest.raises(RuntimeError, match="the server of forked cases has died"):
        run("import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)")
    assert run("print('next')").stdout == "next\n"


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and init has not asked for its status yet


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_server_and_its_case_end_with_the_test_process(tmp_path, how):
    """When it exits between two cases, and when it is killed in the middle of one."""
    pids = tmp_path / "pids"
    case = f"import os, time; open({str(pids)!r}, 'w').write(f'{{os.getppid()}} {{os.getpid()}}\\n')"
    if how == "kill":
        case += "; time.sleep(3600)"
    asks = f"import sys; sys.path[:] = {sys.path!r}\nimport fork_server\n"
    asker = subprocess.Popen([sys.executable, "-c", f"{asks}fork_server.run({case!r})"])
    deadline = time.monotonic() + patience()
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how == "kill":
        asker.kill()
    asker.wait(patience())
    while any(is_running(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_fork_each_case_is_started_anew(installed, monkeypatch):
    monkeypatch.setattr(fork_server, "CAN_FORK", False)
    installed("library")
    for _ in range(3):
        assert started_with(["library"], "import library") == []
    assert run("import sys; print(sys.stdin.read())", stdin="input").stdout == "input\n"
    assert run("raise SystemExit(3)").returncode == 3
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(60)", timeout=1)
