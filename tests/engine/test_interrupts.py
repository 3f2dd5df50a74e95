"""A transaction is one thing: an interrupt, a factory that calls shim and a fork see all of it or nothing."""

import asyncio
import gc
import importlib
import os
import sys
import threading
from textwrap import dedent

import pytest
from fake_world import same
from own_process import run
from thorough import times

import shim
from shim.testing.patience import patience

INTERRUPTED = """
    import linecache, os
    search_less()
    TARGETS = {
        "count": [CORE + "ops:double", CORE + "layers:Layer.forward"],
        "more": [CORE + "ops:halve", CORE + "layers:Layer.make", CORE + "ops:double"],
    }
    NAMES = (
        "engine", "reports", "factories", "conflicts", "modules", "transactions", "chains", "contexts", "names", "log",
        "import_hook",
    )
    PARTS = ("_api", *(f"_engine/{name}" for name in NAMES))
    FILES = {os.path.join(os.path.dirname(shim.__file__), f"{part}.py") for part in PARTS}
    for name in ("ops", "layers", "users", "other"):
        importlib.import_module(CORE + name)
    ORIGINALS = snapshot()


    class Interrupt:
        "Raises at the n-th event within shim's engine, as Ctrl-C does."
        def __init__(self, at):
            self.left = at
        def trace(self, frame, event, argument):
            if frame.f_code.co_filename not in FILES:
                return None
            # CPython loses the end of a with-block to an interrupt just before it (bpo-29988), and a lock with it.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if event in EVENTS and not line.startswith("with "):
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return self.trace


    def bound(value):
        seen = []
        while value is not None:
            value = getattr(value, "__func__", value)
            if "wrapper" in getattr(getattr(value, "__code__", None), "co_name", ""):
                seen.append(value.__globals__["ID"])
            value = getattr(value, "__wrapped__", None)
        return seen


    def whole(when):
        "Every patch is bound on all of its targets or on none of them, and status() says which."
        on = {}
        for id, targets in TARGETS.items():
            found = {id in bound(World.get(None, t.removeprefix(CORE))) for t in targets}
            expect(len(found) == 1, when, id, "is half applied")
            on[id] = found.pop()
        users = World.get(None, "users:twice")
        expect(bound(users) == bound(World.get(None, "ops:double")), when, "an alias is left behind")
        late = vars(sys.modules.get(CORE + "late", sys.modules[CORE + "ops"]))["double"]
        expect(bound(late) == bound(users), when, "an alias in a late module is left behind")
        return on


    def back(when):
        shim.revert()
        expect(same(ORIGINALS, snapshot()) == [], when, same(ORIGINALS, snapshot()))
        if CORE + "late" in sys.modules:
            expect(sys.modules[CORE + "late"].double is sys.modules[CORE + "ops"].double, when, "in a late module")
        expect(not finders(), when, "a finder is left")


    def sweep(name, before, action, stride):
        at, hits = 1, 0
        while True:
            before()
            one = Interrupt(at)
            sys.settrace(one.trace)
            try:
                action()
                done = True
            except KeyboardInterrupt:
                done = False
            finally:
                sys.settrace(None)
            when = (name, at)
            on = whole(when)
            report = shim.status()
            said = {id: report[id].state for id in TARGETS}
            for id, state in said.items():
                expect((state == "applied") == on[id], when, said, on)
            back(when)
            if one.left > 0:
                expect(done, when)
                break
            hits += 1
            at += stride
        shim.apply()
        expect(all(whole(name).values()), name, "cannot be applied any more")
        back(name)
        print(name, hits, "interrupts")
    """


@pytest.mark.parametrize(("events", "stride"), [(("call", "return"), times(31, 3)), (("line",), times(97, 7))])
def test_an_interrupt_anywhere_leaves_nothing_half_applied(tree, events, stride):
    """KeyboardInterrupt at every third call or return, or seventh line, of the engine in turn (`make test`: at some),
    within apply, revert and a change of the plan: every patch is on all its targets or on none, status() is right, and
    revert() gives everything back."""
    out = run(
        f"EVENTS = {events!r}\n"
        + dedent(INTERRUPTED)
        + dedent(f"""
        nothing = lambda: None
        sweep("apply", nothing, shim.apply, {stride})
        sweep("revert", shim.apply, shim.revert, {stride})
        sweep("change", lambda: shim.apply(only=["count"]), lambda: shim.apply(only=["more"]), {stride})
        """),
        tree,
    )
    counts = [int(line.split()[1]) for line in out.splitlines()]
    assert len(counts) == 3 and min(counts) > times(3, 40), out


def test_an_interrupted_import_is_no_import(tree):
    """KeyboardInterrupt while a target is bound within its import: the next import binds it as a whole."""
    out = run(
        f"EVENTS, STRIDE = ('call', 'return'), {times(19, 2)}\n"
        + dedent(INTERRUPTED)
        + dedent("""
        at, hits = 1, 0
        while True:
            for name in [n for n in sys.modules if n.startswith(CORE)]:
                del sys.modules[name]
            shim.apply()
            one = Interrupt(at)
            sys.settrace(one.trace)
            try:
                importlib.import_module(CORE + "users")
            except KeyboardInterrupt:
                hits += 1
            finally:
                sys.settrace(None)
            for name in ("users", "layers", "other"):
                importlib.import_module(CORE + name)
            expect(all(whole(at).values()), at)
            expect(sys.modules[CORE + "users"].twice(2) == ("more", ("count", 4)), at)
            shim.revert()
            expect(not any(whole(at).values()), at)
            if one.left > 0:
                break
            at += STRIDE
        print(hits)
        """),
        tree,
    )
    assert int(out) > times(3, 40)


FORKS = """
    import os, signal
    for name in ("ops", "layers", "users", "other"):
        importlib.import_module(CORE + name)
    search_less()
    ORIGINALS = snapshot()
    over = threading.Event()


    DIED = []


    def busy():
        try:
            go()
        except BaseException as error:
            import traceback
            DIED.append(traceback.format_exc())


    def go():
        while not over.is_set():
            with shim.patched():
                pass
            shim.plan()
            shim.apply()
            sys.modules.pop(CORE + "late", None)
            load(CORE + "late")
            shim.status()
            shim.revert()


    def child():
        "Everything ends, and nothing is half applied: each patch on all of its targets or on none."
        signal.alarm(int(patience()))
        report = shim.status()
        bound = {"count": ["ops:double", "layers:Layer.forward"], "more": ["ops:halve", "ops:double"]}
        for id, targets in bound.items():
            on = {id in calls(World.get(None, target)) for target in targets}
            expect(len(on) == 1, id, on)
            expect((report[id].state == "applied") == on.pop(), id, report[id])
        shim.plan()
        shim.apply()
        expect(shim.status().applied == ("count", "more"))
        with shim.patched(only=["more"]):
            expect(shim.status().applied == ("more",))
        expect(load(CORE + "layers").Layer().forward(1) == ("count", 2))
        shim.revert()
        expect(same(ORIGINALS, snapshot()) == [], same(ORIGINALS, snapshot()))


    def calls(value):
        found = []
        while value is not None:
            if "wrapper" in getattr(getattr(value, "__code__", None), "co_name", ""):
                found.append(value.__globals__["ID"])
            value = getattr(value, "__wrapped__", None)
        return found


    sys.setswitchinterval(1e-5)  # else a thread is left to go on where it waits for a file, and that is not here
    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    within = 0
    try:
        for turn in range(TURNS):
            time.sleep(0.0007 * (turn % 13))
            for _ in range(2000):  # wait for a moment at which the other thread is within a transaction
                if not _engine.ENGINE.lock.acquire(blocking=False):
                    within += 1
                    break
                _engine.ENGINE.lock.release()
                time.sleep(0.0001)
            pid = os.fork()
            if pid == 0:
                try:
                    child()
                except BaseException as error:
                    sys.stderr.write(f"{type(error).__name__}: {error}\\n")
                    os._exit(1)
                os._exit(0)
            expect(os.waitpid(pid, 0)[1] == 0, turn)
    finally:
        over.set()
    thread.join()
    print(within)
    expect(not DIED, DIED)
    """


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_is_forked_while_another_thread_is_in_shim(tree):
    """As by DataLoader beside a thread in shim.patched(): nothing hangs, and a transaction is there or is not."""
    tree.module("late", "from megatron.core.ops import double\n")
    out = run(f"TURNS = {times(20, 600)}\n" + dedent(FORKS), tree)
    assert int(out) > times(1, 50), "the thread was hardly ever within a transaction"


FACTORY = """
    import functools, sys

    def bindings(variant, options):
        def factory(original):
            {body}
            @functools.wraps(original)
            def wrapper(*args, **kwargs):
                return ID, original(*args, **kwargs)
            return wrapper
        return dict.fromkeys(TARGETS, factory)
    """


@pytest.mark.parametrize("call", ["revert()", "apply()", "patched().__enter__()"])
def test_a_factory_that_calls_shim_is_refused(world, call):
    """Its patch fails as a whole, in words, and the others are applied when it is left out."""
    body = f"import shim; shim.{call}"
    world.patch("bad", ["megatron.core.ops:double", "megatron.core.ops:halve"], FACTORY.format(body=body))
    world.patch("good", ["megatron.core.layers:Layer.forward"])
    before = world.snapshot()
    with pytest.raises(shim.BindError, match=r"bad failed .* called within another call of shim"):
        shim.apply()
    assert same(before, world.snapshot()) == []
    assert shim.apply(exclude=["bad"]).applied == ("good",)
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_a_factory_that_asks_for_the_state_reads_what_was_before(world):
    body = "import shim; SEEN.append(shim.status()['p'].state)"
    world.patch("p", ["megatron.core.ops:double"], "SEEN = []\n" + dedent(FACTORY.format(body=body)))
    world.get("ops:double")
    assert shim.apply().applied == ("p",)
    assert sys.modules["fake_patches.p"].SEEN == ["excluded"]


def test_what_a_factory_imports_is_bound_after_it(world):
    """Another target, and a module that takes an alias of the first: both by the end of the call."""
    body = "import megatron.core.users, megatron.core.layers"
    world.patch("p", ["megatron.core.ops:double", "megatron.core.layers:Layer.forward"], FACTORY.format(body=body))
    double = world.get("ops:double")
    assert shim.apply().applied == ("p",)
    assert sys.modules["megatron.core.users"].twice(2) == ("p", 4)
    assert sys.modules["megatron.core.layers"].Layer().forward(1) == ("p", 2)
    shim.revert()
    assert sys.modules["megatron.core.users"].twice is double


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("place", ["shim._releases.sources:PARSING", "shim._config_override.recompute:_lock"])
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_process(place):
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    held, over = threading.Event(), threading.Event()

    def hold():
        with getattr(owner, name):
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if getattr(owner, name).acquire(timeout=patience()) else 1)
    status = os.waitpid(pid, 0)[1]
    over.set()
    thread.join()
    assert status == 0


def test_a_block_of_a_task_that_nobody_runs_any_more_is_over(patched_world):
    patched_world.get("ops:double")

    async def work():
        with shim.patched():
            await asyncio.sleep(1000)

    loop = asyncio.new_event_loop()
    task = loop.create_task(work())
    loop.call_later(0.05, loop.stop)
    loop.run_forever()
    assert patched_world.get("ops:double")(2) == ("count", 4)
    task._log_destroy_pending = False
    del task
    loop.close()
    gc.collect()
    shim.revert()
    assert patched_world.get("ops:double")(2) == 4
