"""Effect, not possession: somebody else's wrapper calls shim's function, whoever came first."""

import functools
import logging

import pytest
from fake_world import same

import shim

CORE = "megatron.core."
P = "p.py"


def by_closure(original):
    return lambda *args: ("foreign", original(*args))


def by_wraps(original):
    return functools.wraps(original)(lambda *args: ("foreign", original(*args)))


def by_default(original):
    def foreign(x, call=original):
        return ("foreign", call(x))

    return foreign


def by_nested_function(original):
    def foreign(x):
        def inside():
            return original(x)

        return ("foreign", inside())

    return foreign


def by_global(original):
    namespace = {"original": original, "__name__": "a_trainer"}
    exec("def foreign(x):\n    return ('foreign', original(x))", namespace)
    return namespace["foreign"]


def by_two_wrappers(original):
    beneath = by_wraps(original)
    return lambda x: beneath(x)


def by_method(original):
    class Wrapping:
        def __init__(self):
            self.call = original

        def foreign(self, x):
            return ("foreign", self.call(x))

    return Wrapping().foreign


WRITABLE = [by_closure, by_wraps, by_nested_function, by_two_wrappers]
SORTS = [*WRITABLE, by_default, by_global]


@pytest.fixture
def one_patch(world):
    world.patch("p", [CORE + "ops:double"])
    world.get("ops:double")
    return world


@pytest.mark.parametrize("sort", SORTS)
def test_a_wrapper_above_ours_calls_ours(one_patch, sort, caplog):
    """The patch is applied, the report names the wrapper, and nothing is amiss."""
    before = one_patch.snapshot()
    shim.apply()
    one_patch.set("ops:double", sort(one_patch.get("ops:double")))
    report = shim.check()
    assert (report["p"].state, report["p"].targets) == ("applied", {CORE + "ops:double": "called"}), report["p"].reason
    assert "test_reach.py" in report["p"].others[0] or sort is by_global
    assert report.lost == () and not [r for r in caplog.records if r.levelno > logging.INFO]
    assert one_patch.get("ops:double")(2) == ("foreign", ("p", 4))
    one_patch.set("ops:double", before["ops:megatron.core.ops", "double"])


@pytest.mark.parametrize("sort", WRITABLE)
def test_a_wrapper_that_was_there_first_calls_ours_too(one_patch, sort, caplog):
    """In either order the same functions nest in the same order, and the digest is the same. Revert undoes both."""
    upstream = one_patch.get("ops:double")
    digest = shim.apply().digest
    shim.revert()
    foreign = sort(upstream)
    one_patch.set("ops:double", foreign)
    report = shim.apply()
    assert report["p"].state == "applied" and report["p"].targets == {CORE + "ops:double": "called"}
    assert "test_reach.py" in report["p"].others[0] and report.digest == digest
    assert one_patch.get("ops:double") is foreign and foreign(2) == ("foreign", ("p", 4))
    shim.revert()
    assert one_patch.get("ops:double") is foreign and foreign(2) == ("foreign", 4)
    assert not shim.status().lost and not [r for r in caplog.records if r.levelno > logging.INFO]


def test_revert_takes_ours_out_of_a_wrapper_above(one_patch):
    upstream = one_patch.get("ops:double")
    shim.apply()
    foreign = by_closure(one_patch.get("ops:double"))
    one_patch.set("ops:double", foreign)
    report = shim.revert()
    assert one_patch.get("ops:double") is foreign and foreign(2) == ("foreign", 4) and not report.lost
    one_patch.set("ops:double", upstream)
    assert shim.apply()["p"].targets == {CORE + "ops:double": "bound"}


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_later_plan_changes_what_a_wrapper_calls(one_patch, ours_first):
    """Also where a wrapper stands on the name, a second patch nests, and an excluded one goes."""
    one_patch.patch("q", [CORE + "ops:double"])
    if ours_first:
        shim.apply(only=["p"])
    foreign = by_closure(one_patch.get("ops:double"))
    one_patch.set("ops:double", foreign)
    shim.apply(only=["p"])
    assert foreign(2) == ("foreign", ("p", 4))
    shim.apply()
    assert foreign(2) == ("foreign", ("q", ("p", 4)))
    shim.apply(only=["q"])
    assert foreign(2) == ("foreign", ("q", 4))
    shim.revert()
    assert foreign(2) == ("foreign", 4)


def test_the_trainer_may_put_upstreams_function_back(one_patch):
    """Then shim's stands on the name itself."""
    upstream = one_patch.get("ops:double")
    one_patch.set("ops:double", by_closure(upstream))
    shim.apply()
    one_patch.set("ops:double", upstream)
    assert shim.status()["p"].targets == {CORE + "ops:double": "bound"}
    assert one_patch.get("ops:double")(2) == ("p", 4)
    shim.revert()
    assert one_patch.get("ops:double") is upstream


def test_a_wrapper_that_took_upstreams_function_before_calls_ours_too(one_patch):
    """A trainer's module is imported, then shim is applied, then the trainer patches."""
    foreign = by_closure(one_patch.get("ops:double"))
    shim.apply()
    one_patch.set("ops:double", foreign)
    assert shim.status()["p"].state == "applied"
    assert foreign(2) == ("foreign", ("p", 4))
    shim.revert()
    assert foreign(2) == ("foreign", 4)


def test_naming_a_function_is_not_calling_it(one_patch):
    """functools.wraps alone leads to ours; so does a list of patched functions that the code never reads."""
    shim.apply()
    ours = one_patch.get("ops:double")
    one_patch.set("ops:double", functools.wraps(ours)(lambda x: "replaced"))
    assert shim.status()["p"].state == "conflict"


def test_a_table_of_functions_leaves_a_doubt(one_patch):
    """Code does not tell which entry is called. The state says so, and check() does not raise for it."""
    shim.apply(require=["p"])
    table = {"double": one_patch.get("ops:double"), "other": print}
    one_patch.set("ops:double", lambda x: table["double"](x))
    report = shim.check()
    assert report["p"].state == "unknown" and report["p"].reason.startswith("it cannot be told whether")
    assert report["p"].targets == {CORE + "ops:double": "unknown"} and report["p"].remedy
    for text, title in ((str(report), "In doubt, "), (report.text(pending_is_amiss=True), "Problems:\n  p: ")):
        assert title in text and report["p"].reason in text and f"Remedy: {report['p'].remedy}" in text
    assert str(report).startswith("0 patches applied; 1 in doubt, ") and "1 unknown" in report.summary


def test_no_call_is_watched(one_patch):
    """A call that reaches shim's function leaves the doubt as it was."""
    shim.apply()
    table = {"double": one_patch.get("ops:double")}
    one_patch.set("ops:double", lambda x: ("foreign", table["double"](x)))
    before = shim.status()["p"]
    assert one_patch.get("ops:double")(2) == ("foreign", ("p", 4))
    assert shim.status()["p"] == before and before.state == "unknown" and "test_reach.py" in before.reason


def test_a_subclass_in_the_place_of_the_class(world):
    """Upstream's class is patched, which the subclass calls; not the subclass."""
    world.patch("p", [CORE + "layers:Layer.forward"])
    upstream = world.get("layers:Layer")

    class Theirs(upstream):
        pass

    world.set("layers:Layer", Theirs)
    before = dict(vars(Theirs))
    assert shim.apply()["p"].state == "applied"
    assert Theirs().forward(2)[0] == "p" and dict(vars(Theirs)) == before
    shim.revert()
    assert not isinstance(Theirs().forward(2), tuple)


SPARED = "what is doubled stays wrong"


@pytest.fixture
def partly(world):
    """A patch that can do without one of its targets."""
    world.patch("p", [{"target": CORE + "ops:double", "without": SPARED}, CORE + "ops:halve"])
    world.get("ops:double")
    return world


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_replaced_target_costs_no_more_than_itself(partly, ours_first, caplog):
    """The rest of the patch is applied, and a warning says what stays wrong; the digest does not change."""
    digest = shim.apply().digest
    shim.revert()
    if ours_first:
        shim.apply()
    before = partly.get("ops:double")
    partly.set("ops:double", lambda x: "replaced")
    shim.apply()
    report = shim.check()
    assert (report["p"].state, report.digest) == ("applied", digest)
    assert partly.get("ops:halve")(2)[0] == "p" and partly.get("ops:double")(2) == "replaced"
    assert SPARED in report["p"].others[0] and "test_reach.py" in report["p"].others[0]
    assert SPARED in caplog.text
    partly.set("ops:double", before)
    assert shim.status()["p"].others == () and partly.get("ops:double")(2) == ("p", 4)


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_conflict_is_warned_of_once_and_in_full_on_one_rank(one_patch, rank, caplog, monkeypatch):
    """By apply(), and not again by check(), a second apply(), or a dozen of other ranks."""
    monkeypatch.setenv("RANK", rank)
    one_patch.set("ops:double", lambda x: "replaced")
    for _ in range(2):
        shim.apply()
        shim.check()
    (warning,) = [r.message for r in caplog.records if r.levelno > logging.INFO]
    assert warning.startswith("p is not applied (conflict)" if rank == "0" else "p (conflict): ")
    assert ("Remedy" in warning) == (rank == "0") and (len(warning) <= 160) == (rank != "0")


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_replacement_may_say_that_it_keeps_the_fix(one_patch, ours_first, caplog):
    """It is trusted and named, in either order; and nothing is amiss."""
    if ours_first:
        shim.apply(require=["p"])
    theirs = shim.compatible(CORE + "ops:double", version="0.1.0")(lambda x: "fixed")
    one_patch.set("ops:double", theirs)
    shim.apply(require=["p"])
    report = shim.check()
    assert (report["p"].state, report["p"].targets) == ("applied", {CORE + "ops:double": "kept"})
    assert "says that it keeps" in report["p"].others[0] and "as of shim 0.1.0" in report["p"].others[0]
    assert one_patch.get("ops:double")(2) == "fixed"
    assert report.lost == () and not [r for r in caplog.records if r.levelno > logging.INFO]


def test_a_patch_that_wraps_any_call_lies_above_a_replacement(world):
    world.patch("p", [{"target": CORE + "ops:double", "wraps": "true"}])
    upstream = world.get("ops:double")
    world.set("ops:double", lambda x, scale=2: "replaced")
    before = world.snapshot()
    assert shim.apply()["p"].state == "applied"
    assert world.get("ops:double")(2) == ("p", "replaced")
    shim.revert()
    assert same(before, world.snapshot()) == [] and upstream(2) == 4
    world.set("ops:double", lambda x: "replaced")  # the factory could look for `scale`
    assert shim.apply()["p"].state == "conflict"
