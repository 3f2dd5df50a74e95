"""Threads, many cycles, read-only trees and python -O: each in a process of its own, with a time limit."""

import os
import sys
from textwrap import dedent

import pytest
from own_process import run
from thorough import times

import shim


def test_threads_that_apply_revert_plan_and_import_at_once(tree):
    """No deadlock, no error, and the last revert gives back the very objects; what is imported while a plan is in
    force for good is patched."""
    run(
        f"SECONDS = {times(2, 4)}\n"
        + dedent("""
        import random
        NAMES = [CORE + n for n in ("ops", "layers", "users", "other")]
        errors, stop = [], time.monotonic() + SECONDS
        sys.setswitchinterval(1e-5)

        def worker(seed, *actions):
            choose = random.Random(seed).choice
            try:
                while time.monotonic() < stop:
                    try:
                        choose(actions)()
                    except shim.OptionError as error:  # while another thread is within patched()
                        expect("another thread or task is within shim.patched()" in str(error), error)
            except BaseException as error:
                import traceback
                errors.append(traceback.format_exc())

        def fetch():
            for name in NAMES:
                try:
                    importlib.import_module(name)
                except KeyError:  # importlib's own, where another thread has dropped the module meanwhile
                    pass

        def drop():
            name = random.choice(NAMES[2:])
            sys.modules.pop(name, None)

        def reload():
            try:
                importlib.reload(importlib.import_module(CORE + "users"))
            except (ImportError, KeyError):  # as above
                pass

        def within():
            with shim.patched(only=["more"]):
                shim.status()

        work = [
            (shim.apply, lambda: shim.apply(exclude=["count"])),
            (shim.revert, shim.status),
            (shim.plan, shim.status, shim.apply),
            (within, shim.apply, lambda: shim.explain("count")),
            (fetch, drop),
            (fetch, reload),
        ]
        threads = [threading.Thread(target=worker, args=(n, *w), daemon=True) for n, w in enumerate(work)]
        [t.start() for t in threads]
        [t.join(patience()) for t in threads]
        expect(not any(t.is_alive() for t in threads), "a thread hangs")
        expect(not errors, errors[:1])
        fetch()
        shim.revert()
        before = snapshot()
        expect(not finders(), "finders")
        for key, value in before.items():
            value = getattr(value, "__func__", value)
            expect(getattr(getattr(value, "__code__", None), "co_name", "") != "wrapper", key, value)
        expect(sys.modules[CORE + "ops"].double(2) == 4, "double")
        shim.apply()
        expect(shim.status().applied == ("count", "more"), str(shim.status()))
        shim.revert()
        expect(same(before, snapshot()) == [], same(before, snapshot()))
        """),
        tree,
    )


def test_threads_that_plan_leave_the_filters_of_warnings_alone(tree):
    """Sources are parsed without warnings; the filters for that are the process's own, and are put back."""
    run(
        f"TURNS = {times(40, 150)}\n"
        + dedent("""
        import warnings
        before = list(warnings.filters)
        sys.setswitchinterval(1e-6)
        def work():
            for _ in range(TURNS):
                shim.plan()
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]
        [t.join(patience()) for t in threads]
        expect(warnings.filters == before, warnings.filters[:2])
        """),
        tree,
    )


def test_what_is_imported_while_threads_apply_is_patched_or_not_but_never_half(tree):
    """Fresh processes' worth of imports: apply() in one thread, the first import of the targets in others."""
    run(
        f"TURNS = {times(20, 60)}\n"
        + dedent("""
        sys.setswitchinterval(1e-6)
        for turn in range(TURNS):
            for name in [n for n in sys.modules if n.startswith("megatron")]:
                del sys.modules[name]
            start, errors = threading.Barrier(4), []
            def go(action):
                start.wait()
                try:
                    action()
                except BaseException as error:
                    errors.append(repr(error))
            names = ("ops", "layers", "users")
            actions = [shim.apply, *(lambda n=n: load(CORE + n) for n in names)]
            threads = [threading.Thread(target=go, args=(a,), daemon=True) for a in actions]
            [t.start() for t in threads]
            [t.join(patience()) for t in threads]
            expect(not any(t.is_alive() for t in threads), "a thread hangs")
            expect(not errors, turn, errors)
            report = shim.status()
            expect(report.applied == ("count", "more"), turn, str(report))
            expect(sys.modules[CORE + "users"].twice(2) == ("more", ("count", 4)), turn, "patched")
            shim.revert()
            expect(sys.modules[CORE + "users"].twice(2) == 4, turn, "reverted")
        """),
        tree,
    )


@pytest.mark.growth
def test_cycles_leave_nothing_behind(tree):
    """Neither objects nor memory nor finders nor records grow; the objects are the same at the end."""
    out = run(
        f"CYCLES = {times(100, 1000)}\n"
        + dedent("""
        import tracemalloc
        search_less()
        before = snapshot()
        def cycle():
            shim.apply()
            shim.revert()
        for _ in range(20):
            cycle()
        def sizes():
            engine = _engine.ENGINE
            b = engine.binder
            return [len(x) for x in (b.chains, b.slots, b.replaced, b.executed, b.ours,
                                     engine.deferred.logged, engine.failed, engine.factories._made,
                                     sys.meta_path, sys.modules)]
        def measure():
            gc.collect()
            return len(gc.get_objects()), tracemalloc.get_traced_memory()[0], sizes()
        def grown(cycles):
            before = measure()
            for _ in range(cycles):
                cycle()
            after = measure()
            expect(after[2] == before[2], before[2], after[2])
            return after[0] - before[0], after[1] - before[1]
        objects, _ = grown(CYCLES)
        expect(objects < 100, objects, "objects")
        tracemalloc.start()
        cycle()
        # The least of three: Python's table of interned strings, say, may double in one of them, and that is 1 MB.
        memory = min(grown(40)[1] for _ in range(3))
        expect(memory < 40_000, memory, "bytes")
        print(objects, "objects,", memory, "bytes")
        expect(same(before, snapshot()) == [], same(before, snapshot()))
        """),
        tree,
    )
    print(out)


# Surroundings

USE = """
    from megatron.core.ops import double, halve
    shim.apply(require=["count"])
    from megatron.core.layers import Layer
    expect(double(2) == ("more", ("count", 4)), double(2))
    expect(Layer().forward(1) == ("count", 2))
    expect(shim.check().applied == ("count", "more"))
    expect(shim.explain("count"))
    shim.revert()
    expect(double(2) == 4 and not finders())
    with shim.patched():
        expect(halve(2) == ("more", 1))
    """


def test_nothing_is_written(tree):
    """In site-packages that cannot be written to, everything works: each attempt to write anywhere is refused."""
    refuse = """
        import os
        tried = []

        def refuse(event, arguments):
            writing = event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "os.link", "os.symlink")
            if event == "open":
                path, mode, flags = arguments
                writing = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writing:
                tried.append(str(arguments[0]))
                raise PermissionError(13, "read-only", str(arguments[0]))

        sys.addaudithook(refuse)
        """
    # What Python itself tries to write is its byte code.
    judge = 'expect(not [path for path in tried if "__pycache__" not in path], tried)'
    run(dedent(refuse) + dedent(USE) + judge, tree)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; test_nothing_is_written refuses it by a hook")
def test_a_read_only_tree(tree):
    """The same with permissions of the file system."""
    directories = [tree.root, *(path for path in tree.root.rglob("*") if path.is_dir())]
    for directory in directories:
        directory.chmod(0o555)
    try:
        run(USE, tree)
    finally:
        for directory in directories:
            directory.chmod(0o755)


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_an_optimised_python(tree, flag):
    """Without assertions and docstrings everything works, on fingerprints that were taken with them; doctor says so."""
    run(USE, tree, flag)
    out = run("from shim._tools.doctor import examine; print(*examine()['problems'], sep='\\n')", tree, flag)
    assert "python -O" in out


def test_a_revert_hides_no_finder_from_an_import_under_way(patched_world):
    """Python goes through sys.meta_path itself, while another thread takes the hook out: none may be skipped."""
    shim.apply()
    others = [finder for finder in sys.meta_path if not getattr(finder, "is_shim_finder", False)]
    seen = []
    for finder in sys.meta_path:
        seen.append(finder)
        shim.revert()
    assert [finder for finder in others if finder not in seen] == []
    assert sys.meta_path == others


@pytest.mark.parametrize("foreign", ["nothing", "another function", "a wrapper"])
def test_nothing_is_imported_under_the_engines_lock(tree, foreign):
    """The import hook waits for that lock while importlib holds its own, for which such an import would wait."""
    run(
        f"""
        imported = []

        class Asked:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if _engine.ENGINE.lock._is_owned():
                    imported.append(name)

        ops = load(CORE + "ops")
        def another(x, scale=2): return x * scale
        def around(x, scale=2, *, beneath=ops.double): return beneath(x, scale)
        ops.double = {{"another function": another, "a wrapper": around}}.get({foreign!r}, ops.double)
        sys.meta_path.insert(0, Asked)
        shim.plan()
        shim.apply()
        load(CORE + "layers")
        shim.status()
        shim.check()
        shim.revert()
        expect(not imported, imported)
        """,
        tree,
    )
