"""`shim run`: every Python process below it applies shim before it imports megatron, and is otherwise as it was."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from fake_world import World
from unit_helpers import REPOSITORY, write_file

import shim
from shim._errors import NotMetError
from shim._matrix.load import load_matrix
from shim._planning.options import resolve
from shim._workers.environment import refuse_to_be_ignored
from shim.testing.patience import patience

RUN = str(REPOSITORY / "shim" / "_workers" / "run")
ALLOWED = f"{RUN}/packages=fake_patches"
USE = "from megatron.core.ops import double; print(double(2))"
STOCK, PATCHED = "4\n", "('count', 4)\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A fake megatron-core with a patch `count` on a function that doubles, and a fake transformer_engine."""
    world = World(tmp_path_factory.mktemp("tree"))
    world.patch("count", ["megatron.core.ops:double"])
    world.patch("other", ["megatron.core.other:other"])
    write_file(
        world.root / "transformer_engine" / "__init__.py",
        """
        import sys
        engine = sys.modules.get("shim._engine.engine")
        APPLIED = engine is not None and engine.ENGINE.plan is not None
        """,
    )
    return world


def environment(tree, *directories, base=(), **options):
    """run_environment over a plain environment in which the fake tree, shim and `directories` are importable."""
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("MEGATRON_SHIM_", "PYTHON"))}
    plain["PYTHONPATH"] = os.pathsep.join(map(str, (*directories, tree.root, REPOSITORY)))
    plain["MEGATRON_SHIM_MATRIX"] = str(tree.matrix)
    return shim.run_environment({**plain, **dict(base)}, packages="fake_patches", **options)


def said(done):
    """Standard error without the warning that the matrix is another one, and without the three lines of the job."""
    ours = ("patches are chosen by ", f"shim {shim.__version__} ", "shim at the end: ", "shim: functions of ")
    return [line for line in done.stderr.splitlines() if not line.startswith(ours)]


def without_shim(env):
    """The same, as `shim run` found it."""
    kept = [entry for entry in env["PYTHONPATH"].split(os.pathsep) if not entry.startswith(RUN)]
    return {**env, "PYTHONPATH": os.pathsep.join(kept)}


def run(command, env, **arguments):
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=env, timeout=patience(), **arguments
    )


def python(code, env, *flags, executable=sys.executable):
    return run([executable, *flags, "-c", dedent(code)], env)


def output(code, env, *flags, **arguments):
    done = python(code, env, *flags, **arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The environment


def test_the_environment_puts_one_directory_in_front_and_keeps_the_order():
    """The rest of PYTHONPATH stays as it is, empty entries (the working directory) included; a second time changes
    nothing."""
    join = os.pathsep.join
    for before, after in (
        ({}, [RUN]),
        ({"PYTHONPATH": ""}, [RUN]),
        ({"PYTHONPATH": join(["b", "", "a"])}, [RUN, "b", "", "a"]),
        ({"PYTHONPATH": join(["a", RUN, "b"])}, [RUN, "a", "b"]),
    ):
        found = shim.run_environment(before)
        assert found == {"PYTHONPATH": join(after)}
        assert shim.run_environment(found) == found
    assert shim.run_environment()["PATH"] == os.environ["PATH"]


def test_arguments_travel_as_variables(tmp_path, monkeypatch):
    """Those of apply() become the variables that say the same; files are named absolutely."""
    monkeypatch.chdir(tmp_path)
    found = shim.run_environment(
        {"MEGATRON_SHIM_EXCLUDE": "x", "MEGATRON_SHIM_STRICT": "1"},
        only=["a", "b"],
        exclude="c",
        require=["a"],
        kinds="compat, feature",
        on_drift="error",
        options={"a": {"size": 4, "flag": True, "name": "é", "none": None}},
        matrix="m.yaml",
        lock=Path("l.json"),
    )
    del found["PYTHONPATH"]
    assert json.loads(found.pop("MEGATRON_SHIM_OPTIONS")) == {"a": {"size": 4, "flag": True, "name": "é", "none": None}}
    assert found == {
        "MEGATRON_SHIM_ONLY": "a,b",
        "MEGATRON_SHIM_EXCLUDE": "x,c",
        "MEGATRON_SHIM_REQUIRE": "a",
        "MEGATRON_SHIM_KINDS": "compat,feature",
        "MEGATRON_SHIM_ON_DRIFT": "error",
        "MEGATRON_SHIM_MATRIX": str(tmp_path / "m.yaml"),
        "MEGATRON_SHIM_LOCK": str(tmp_path / "l.json"),
        "MEGATRON_SHIM_STRICT": "1",
    }


GIVEN = [
    ("only", None, "roll-fix"),
    ("only", [], "roll-fix"),
    ("only", ["faster-forward"], "roll-fix"),
    ("require", (), "roll-fix"),
    ("kinds", None, "compat"),
    ("kinds", [], "compat"),
    ("kinds", ["performance"], "compat"),
    ("strict", False, "1"),
    ("strict", True, "0"),
    ("on_drift", "skip", "error"),
    ("options", None, '{"faster-forward": {"pages": 8}}'),
    ("options", {"faster-forward": {"pages": 2}}, '{"faster-forward": {"pages": 8}}'),
    ("lock", None, "some.lock"),
    ("lock", "/my.lock", "some.lock"),
]


@pytest.mark.parametrize("travel", ["run", "ray"])
@pytest.mark.parametrize(("name", "value", "variable"), GIVEN)
def test_what_is_given_means_the_same_there_as_here(world, monkeypatch, travel, name, value, variable):
    """Also where it is the default, which outranks a variable that is there already, and an empty list."""
    matrix = load_matrix(world.matrix)
    here = resolve(matrix, **{name: value})
    there = {f"MEGATRON_SHIM_{name.upper()}": variable}
    if travel == "run":
        found = shim.run_environment(there, **{name: value})
    else:
        monkeypatch.setenv(*there.popitem())
        found = shim.ray_runtime_env(**{name: value})["env_vars"]
    for variable, text in found.items():
        if variable.startswith("MEGATRON_SHIM_"):
            monkeypatch.setenv(variable, text)
    assert resolve(matrix) == here


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strict": "false"}, "strict is 'false'; it must be True or False"),
        ({"kinds": "compatt"}, "did you mean 'compat'"),
        ({"on_drift": "raise"}, "it must be one of skip, error, apply"),
        ({"options": {"a": 4}}, "options of a is 4"),
        ({"options": {"a": {"b": object()}}}, "options cannot travel"),
        ({"options": {"a": {"b": float("nan")}}}, "options cannot travel"),
        ({"only": 7}, "only is 7; it must be a list of names"),
        ({"lock": 7}, "lock is 7; it must be a path"),
        ({"packages": "a-b"}, "packages names 'a-b'"),
    ],
)
def test_what_cannot_be_right_anywhere_is_said_before_anything_starts(arguments, message):
    """Not in a hundred workers."""
    for travel in (shim.run_environment, shim.ray_runtime_env):
        with pytest.raises(shim.OptionError, match=message):
            travel({}, **arguments)


def test_what_the_operator_has_set_always_wins(monkeypatch):
    """Excluded by the driver, by an argument, and by the runtime environment: all of it stays excluded."""
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "a")
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "yes")
    given = {"env_vars": {"MEGATRON_SHIM_EXCLUDE": "c", "MEGATRON_SHIM_DISABLE": "0", "MINE": "1"}}
    found = shim.ray_runtime_env(given, exclude=["b"])["env_vars"]
    assert found == {"MEGATRON_SHIM_EXCLUDE": "a,b,c", "MEGATRON_SHIM_DISABLE": "1", "MINE": "1"}
    assert given["env_vars"]["MEGATRON_SHIM_EXCLUDE"] == "c"


def test_packages_travel_where_no_variable_of_shim_says_so():
    """In an entry of PYTHONPATH, since who may set that can have any code run; a nested `shim run` keeps them."""
    found = shim.run_environment({"PYTHONPATH": "b"}, packages=["one", "two.three"])
    assert found == {"PYTHONPATH": os.pathsep.join([RUN, f"{RUN}/packages=one,two.three", "b"])}
    assert shim.run_environment(found) == found
    more = shim.run_environment(found, packages="four")
    assert more == {"PYTHONPATH": os.pathsep.join([RUN, f"{RUN}/packages=one,two.three,four", "b"])}
    assert shim.ray_runtime_env(packages="one")["env_vars"] == {"MEGATRON_SHIM_RAY_PACKAGES": "one"}


def test_options_are_heeded(tree):
    """What `shim run` is asked for is what its processes do; what is required and cannot be is an error there."""
    assert output(USE, environment(tree, exclude=["count"])) == STOCK
    assert output(USE, environment(tree, only="count")) == PATCHED
    assert output(USE, environment(tree, base={"MEGATRON_SHIM_DISABLE": "1"})) == STOCK
    done = python(USE, environment(tree, require=["count"], exclude=["count"]))
    assert done.returncode == 0 and done.stdout == STOCK  # exclude in the environment is the operator's last word


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["python", "-I", "x.py"], "-I"),
        (["/usr/bin/python3.11", "-u", "-E", "x.py"], "-E"),
        (["python3", "-bIS", "-c", "pass"], "-bIS"),
        (["python3", "-W", "x", "-S"], "-S"),
        (["python3", "-Wx", "-X", "importtime", "-IS"], "-IS"),
        (["python3", "-uBEm", "json"], "-uBEm"),
        (["python"], ""),
        (["python", "-"], ""),
        (["python", "x.py", "-I"], ""),
        (["python", "-s", "-u", "-P", "x.py"], ""),
        (["python", "-m", "I", "-S"], ""),
        (["python", "-um", "torch.distributed.run", "-E"], ""),
        (["python", "-cI"], ""),
        (["python", "-c", "pass", "-I"], ""),
        (["python", "-W", "-I", "x.py"], ""),
        (["python", "-Wignore::ImportWarning", "x.py"], ""),
        (["python", "-uXSomething", "x.py"], ""),
        (["python", "-W"], ""),
        (["torchrun", "-I"], ""),
        (["bash", "-Ec", "python x.py"], ""),
    ],
)
def test_a_python_that_would_not_listen_is_found_by_its_flags(command, flag):
    if not flag:
        refuse_to_be_ignored(command)
        return
    with pytest.raises(NotMetError, match=f"with {flag} Python ignores .* Remedy: leave {flag} out"):
        refuse_to_be_ignored(command)


# The command


def shim_run(tree, *arguments, **more):
    env = without_shim(environment(tree))
    return run([sys.executable, "-m", "shim", "run", "--package", "fake_patches", *arguments], {**env, **more})


def test_a_job_says_one_line(tree):
    """In the first of its processes that needs shim, and not in those that this one starts. `shim run` is a new job."""
    line = f"shim {shim.__version__} applies 1 patch to megatron-core 9.9.0"
    child = f"import subprocess, sys; {USE}; subprocess.run([sys.executable, '-c', {USE!r}])"
    done = shim_run(tree, "--only", "count", "--", sys.executable, "-c", child)
    assert done.stdout == PATCHED * 2 and done.stderr.count(line) == 1
    env = {**environment(tree, only="count"), "MEGATRON_SHIM_SAID": "1"}
    done = run([sys.executable, "-m", "shim", "run", "--", sys.executable, "-c", USE], env)
    assert done.stdout == PATCHED and done.stderr.count(line) == 1
    assert "applies" not in python(USE, {**env, "RANK": "0"}).stderr


def test_shim_run_becomes_the_command(tree):
    """Exit code, output and arguments are those of the command, which runs in the same process."""
    code = f"import sys; {USE}; sys.exit(sys.argv[1])"
    done = shim_run(tree, "--only", "count", "--", sys.executable, "-c", code, "5")
    assert (done.stdout, said(done), done.returncode) == (PATCHED, ["5"], 1)
    code = f"import os; print(os.environ['PYTHONPATH'].split(os.pathsep).count({RUN!r})); {USE}"
    nested = shim_run(tree, sys.executable, "-m", "shim", "run", "--exclude", "other", "--", sys.executable, "-c", code)
    assert nested.stdout == "1\n" + PATCHED, nested.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["no-such-command-here"], 127),
        (["/no/such/place/python"], 127),
        ([str(REPOSITORY / "README.md") + "/x"], 127),
        ([str(REPOSITORY / "README.md")], 126),
        ([str(REPOSITORY)], 126),
        ([], 2),
    ],
)
def test_a_command_that_cannot_be_run_exits_as_it_does_in_a_shell(tree, command, code):
    """127 where there is none, 126 where it is none, and 2 where none is given."""
    done = shim_run(tree, "--", *command)
    assert done.returncode == code and "Traceback" not in done.stderr and done.stderr.startswith("shim: ")
    assert "b'" not in done.stderr  # no place at which the command was looked for last


def test_it_has_no_json_to_print(tree):
    done = shim_run(tree, "--json", "--", sys.executable, "-c", "pass")
    assert done.returncode == 2 and "--json" in done.stderr


@pytest.mark.parametrize("flags", [["-I"], ["-W", "x", "-ES"]])
def test_a_deaf_python_is_reported_not_served(tree, flags):
    done = shim_run(tree, "--", sys.executable, *flags, "-c", "pass")
    assert done.returncode == 1
    assert flags[-1] in done.stderr and "Remedy" in done.stderr


STRAYS = {
    "shim.py": "raise SystemExit('it was run')\n",
    "shim/__init__.py": "VERSION = 1\n",
}


@pytest.mark.parametrize("name", STRAYS)
def test_another_module_of_that_name_beside_the_trainer_is_named(tree, tmp_path, name):
    """Not a bare AttributeError, nor an ImportError, which trainers catch; and what it is is not found out by running
    it. Where the trainer has imported it before, it is the same."""
    stray = write_file(tmp_path / name, STRAYS[name])
    script = write_file(tmp_path / "train.py", GUARDED)
    for before in ("", "import sys, types; sys.modules['shim'] = types.ModuleType('shim')\n"):
        script.write_text(before + dedent(GUARDED))
        done = run([sys.executable, script], environment(tree))
        assert done.returncode == 0, done.stderr
        first, second, third = done.stdout.splitlines()
        assert first == second and first.startswith("RuntimeError shim run: ") and third == "RuntimeError"
        assert (str(stray) if not before else "module 'shim'") in first
        assert "hides megatron-shim in this process. Remedy: rename it" in first


def test_a_mere_directory_of_that_name_hides_nothing(tree, tmp_path):
    """Such as a checkout beside the trainer, which is no package."""
    (tmp_path / "shim").mkdir()
    script = write_file(tmp_path / "train.py", USE)
    done = run([sys.executable, script], environment(tree))
    assert done.stdout == PATCHED, done.stderr


# What runs below it


def test_a_process_that_never_imports_megatron_imports_nothing_of_shim(tree):
    """What it has more than a plain one is sitecustomize alone."""
    code = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    env = environment(tree)
    plain = without_shim(env)
    more = set(ast.literal_eval(output(code, env))) - set(ast.literal_eval(output(code, plain)))
    assert more == {"sitecustomize"}
    look = "import importlib.util as u, sys; print(u.find_spec('shim.nothing'), u.find_spec('json') is not None)"
    assert output(look + "; print('shim._api' in sys.modules)", env) == "None True\nFalse\n"


def test_asking_for_what_is_not_installed_applies_nothing(tree):
    """Libraries ask whether Transformer Engine is there; where it is not, a requirement that cannot be met there is no
    reason to fail."""
    env = environment(tree, require=["count"])
    env["PYTHONPATH"] = os.pathsep.join([RUN, str(REPOSITORY)])
    code = """
        import importlib.util, sys
        print(importlib.util.find_spec("transformer_engine"))
        try:
            import megatron.core
        except ModuleNotFoundError as error:
            print(error.name, "shim._api" in sys.modules)
    """
    assert output(code, env) == "None\nmegatron False\n"


def test_the_finder_is_gone_after_it_has_applied(tree):
    code = """
        import sys
        ours = lambda: [type(f).__name__ for f in sys.meta_path if getattr(f, "is_shim_finder", False)]
        print(ours())
        import megatron
        print(ours())
        import megatron.core
        print(ours())
        from megatron.core.ops import double
        import shim
        print(double(2), shim.status().applied)
        import importlib
        importlib.reload(megatron.core)
        shim.revert()
        print(double is megatron.core.ops.double, megatron.core.ops.double(2), ours())
    """
    lines = output(code, environment(tree)).splitlines()
    assert lines[:3] == ["['_ApplyOnImport']", "['_ApplyOnImport']", "['ImportHook']"]
    assert lines[3:] == ["('count', 4) ('count',)", "True 4 []"]


@pytest.mark.parametrize("first", ["import transformer_engine", "from megatron import core", "import shim"])
def test_whatever_is_imported_first(tree, first):
    code = f"{first}\nimport transformer_engine\nprint(transformer_engine.APPLIED)\n{USE}"
    assert output(code, environment(tree)) == "True\n" + PATCHED


def test_a_program_that_calls_shim_itself_is_not_overruled(tree):
    """What it has asked for before it imports megatron stays, and so does that it has reverted."""
    assert (
        output(f"import shim; shim.apply(exclude=['count'], packages='fake_patches'); {USE}", environment(tree))
        == STOCK
    )
    assert output(f"import shim; shim.apply(packages='fake_patches'); shim.revert(); {USE}", environment(tree)) == STOCK
    assert output(f"import shim; shim.plan(packages='fake_patches'); {USE}", environment(tree)) == PATCHED


def test_processes_of_every_kind(tree, tmp_path):
    """Below a plain subprocess chain, and by each start method of multiprocessing, before the target is imported."""
    script = write_file(
        tmp_path / "chain.py",
        """
        import multiprocessing, subprocess, sys


        def work(queue):
            from megatron.core.ops import double
            queue.put(double(2))


        def main():
            for method in ("spawn", "fork", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=work, args=(queue,))
                process.start()
                print(method, queue.get())
                process.join()
            from megatron.core.ops import double
            context = multiprocessing.get_context("fork")
            process = context.Process(target=work, args=(queue := context.Queue(),))
            process.start()
            print("forked after the import", queue.get(), flush=True)
            process.join()
            code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
            use = "from megatron.core.ops import double; print(double(2))"
            subprocess.run(["sh", "-c", '"$0" "$@"', sys.executable, "-c", code, use], check=True)


        if __name__ == "__main__":
            main()
        """,
    )
    done = run([sys.executable, script], environment(tree))
    names = ["spawn ", "fork ", "forkserver ", "forked after the import ", ""]
    assert done.stdout == "".join(name + PATCHED for name in names), done.stderr


def test_threads_that_import_at_once(tree):
    """No thread gets an unpatched function, whichever import comes first."""
    code = """
        import sys, threading
        sys.setswitchinterval(1e-5)
        start, found = threading.Barrier(12), []

        def work(number):
            start.wait()
            if number % 3 == 0:
                import transformer_engine
                found.append(transformer_engine.APPLIED)
            from megatron.core.ops import double
            found.append(double(2) == ("count", 4))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(len(found), all(found))
    """
    for _ in range(3):
        assert output(code, environment(tree)) == "16 True\n"


# Failures are loud

GUARDED = """
    for _ in range(2):
        try:
            import megatron.core
        except ImportError:
            print("swallowed")
        except Exception as error:
            print(type(error).__name__, error)
    try:
        import transformer_engine
    except ImportError:
        print("swallowed")
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("options", "name"),
    [({"require": ["none-such"]}, "OptionError"), ({"lock": "/no/such/lock"}, "OptionError"), ({}, "MatrixError")],
)
def test_an_apply_that_fails_is_no_import_error(tree, tmp_path, options, name):
    """A trainer's `try: import megatron.core except ImportError` does not swallow it, and trying again fails again."""
    broken = {"MEGATRON_SHIM_MATRIX": str(write_file(tmp_path / "broken.yaml", "patches: 3\n"))} if not options else {}
    lines = output(GUARDED, {**environment(tree, **options), **broken}).splitlines()
    assert [line.split()[0] for line in lines] == [name] * 3


def test_a_requirement_that_is_not_met(tree, tmp_path):
    lock = tmp_path / "lock.json"
    env = environment(tree)
    assert run([sys.executable, "-m", "shim", "pin", "--lock", lock, "--package", "fake_patches"], env).returncode == 0
    assert output(USE, {**env, "MEGATRON_SHIM_LOCK": str(lock)}) == PATCHED
    found = output(GUARDED, {**env, "MEGATRON_SHIM_LOCK": str(lock), "MEGATRON_SHIM_EXCLUDE": "count"})
    assert found.startswith("NotMetError") and "swallowed" not in found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A virtual environment without packages."""
    home = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    return home / "bin" / "python"


def test_another_python_without_shim_uses_that_of_shim_run(tree, bare_python, tmp_path):
    """Where only packaging and PyYAML are there; nothing else of shim's environment becomes importable."""
    env = environment(tree)
    for package in ("packaging", "yaml"):
        (location,) = __import__(package).__path__
        (tmp_path / package).symlink_to(location)
    env["PYTHONPATH"] = os.pathsep.join([RUN, ALLOWED, str(tree.root), str(tmp_path)])
    code = f"{USE}\nimport sys; print({str(REPOSITORY)!r} in sys.path)"
    assert output(code, env, executable=bare_python) == PATCHED + "False\n"


def test_another_python_that_lacks_what_shim_needs_fails_loudly(tree, bare_python):
    """It lacks PyYAML: not an ImportError, and it says what to do."""
    env = environment(tree)
    env["PYTHONPATH"] = os.pathsep.join([RUN, str(tree.root)])
    lines = output(GUARDED, env, executable=bare_python).splitlines()
    assert lines[0].startswith("RuntimeError shim run: ") and "Remedy: install megatron-shim" in lines[0]
    assert [line.split()[0] for line in lines] == ["RuntimeError"] * 3


def test_where_shim_itself_is_gone(tree, bare_python, tmp_path):
    """As in a container that sees the directory of `shim run`, but not the package around it."""
    lone = write_file(tmp_path / "a" / "b" / "sitecustomize.py", (Path(RUN) / "sitecustomize.py").read_text("utf-8"))
    env = {**environment(tree), "PYTHONPATH": os.pathsep.join([str(lone.parent), str(tree.root)])}
    assert output(GUARDED, env, executable=bare_python).startswith("RuntimeError shim run: ")


# What was there before


def test_a_hidden_sitecustomize_runs(tree, tmp_path):
    """Once, under its own name and file, also where it imports megatron itself, and further ones stay hidden."""
    write_file(tmp_path / "one" / "sitecustomize.py", f"MARK = 'one'\nprint(__name__, __file__)\n{USE}\n")
    write_file(tmp_path / "two" / "sitecustomize.py", "print('two')\n")
    env = environment(tree, tmp_path / "one", tmp_path / "two")
    found = output("import sitecustomize; print(sitecustomize.MARK)", env)
    assert found == f"sitecustomize {tmp_path}/one/sitecustomize.py\n{PATCHED}one\n"


@pytest.mark.parametrize("error", ["ValueError('mine')", "ImportError('mine')", "SystemExit(3)"])
def test_a_hidden_sitecustomize_that_raises_does_what_it_does_without_shim(tree, tmp_path, error):
    """Python says so, and goes on or exits as it would; shim is applied all the same."""
    write_file(tmp_path / "sitecustomize.py", f"print('ran')\nraise {error}\n")
    env = environment(tree, tmp_path)
    plain = without_shim(env)
    ours, stock = python(USE, env), python("print(4)", plain)
    assert (ours.returncode, said(ours)[-1:]) == (stock.returncode, said(stock)[-1:])
    assert ours.stdout == stock.stdout.replace(STOCK, PATCHED)


def test_usercustomize_and_pth_files_still_run(tree, tmp_path):
    """They belong to site, which runs them as ever."""
    base = {"PYTHONUSERBASE": str(tmp_path / "user"), "HOME": str(tmp_path)}
    env = environment(tree, base=base)
    where = Path(output("import site; print(site.getusersitepackages())", env).strip())
    write_file(where / "usercustomize.py", "print('user')\n")
    write_file(where / "mine.pth", "import sys; print('pth')\n")
    plain = without_shim(env)
    # A virtual environment has no user site unless it says so; -s takes it away.
    executable = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    if not executable.exists():
        pytest.skip("the Python below this virtual environment is not there")
    for flags in ((), ("-s",)):
        found = output("print('ran')", env, *flags, executable=executable)
        assert found == output("print('ran')", plain, *flags, executable=executable)
        assert ("user" in found and "pth" in found) == (not flags)


@pytest.mark.parametrize("flags", [("-O",), ("-OO",), ("-s",), ("-W", "error"), ("-X", "importtime"), ("-B",)])
def test_other_flags_of_python(tree, flags):
    assert output(USE, environment(tree), *flags) == PATCHED


@pytest.mark.parametrize("flags", [("-I",), ("-E",), ("-S",)])
def test_what_is_out_of_reach(tree, flags):
    """-I and -E take no notice of PYTHONPATH, and -S of sitecustomize: as documented, shim is not applied there."""
    code = "import sys; print([f for f in sys.meta_path if getattr(f, 'is_shim_finder', False)])"
    assert output(code, environment(tree), *flags) == "[]\n"
