"""Somebody's own function in the place of upstream's: whoever came first, the same is bound, and the same is said."""

import logging

import pytest
from fake_world import Model, same

import shim

CORE = "megatron.core."
DOUBLE, OTHER, HALVE = CORE + "ops:double", CORE + "other:other", CORE + "ops:halve"
FORWARD, BACKWARD = CORE + "layers:Layer.forward", CORE + "layers:Layer.backward"
in_both_orders = pytest.mark.parametrize("first", ["shim", "trainer"])


@pytest.fixture
def replaced():
    """A new function for each test: its names in modules are aliases, which shim binds."""

    def replaced(x, scale=2):
        return "replaced"

    return replaced


def bind(world, first, *places, **arguments):
    """Apply shim and put somebody's functions on places, {place: function}, in an order. Returns the report."""
    for place in ("ops:double", "other:other", "layers:Layer", "users:twice"):
        world.get(place)
    world.before = world.snapshot()
    if first == "shim":
        shim.apply(**arguments)
    for place, function in places:
        world.set(place, function)
    return shim.apply(**arguments) if first == "trainer" else shim.status()


# Targets


@in_both_orders
def test_a_target_that_a_patch_needs_takes_all_of_it_along(world, first, replaced):
    """Half a patch may be worse than none, and the order of imports is not to decide."""
    world.patch("p", [DOUBLE, OTHER])
    world.patch("q", [OTHER])
    found = bind(world, first, ("ops:double", replaced))
    assert found["p"].state == "conflict" and "replaced" in found["p"].reason and found["q"].state == "applied"
    assert world.get("other:other")(2) == ("q", 2) and world.get("ops:double") is replaced
    world.set("ops:double", world.before["ops:megatron.core.ops", "double"])
    assert shim.status()["p"].state == "applied"
    assert world.get("other:other")(2) == ("q", ("p", 2)) and world.get("users:twice")(2) == ("p", 4)
    shim.revert()
    assert same(world.before, world.snapshot()) == []


@in_both_orders
def test_a_target_that_a_patch_can_do_without_leaves_the_rest(world, first, caplog, replaced):
    world.patch("p", [{"target": DOUBLE, "without": "doubling is wrong"}, OTHER])
    found = bind(world, first, ("ops:double", replaced), require=["p"])["p"]
    assert found.state == "applied" and "doubling is wrong" in found.others[0]
    assert world.get("other:other")(2) == ("p", 2)
    shim.check()
    assert "doubling is wrong" in caplog.text


@in_both_orders
def test_no_patch_can_do_without_all_of_its_targets(world, first, replaced):
    world.patch("p", [{"target": DOUBLE, "without": "a"}, {"target": OTHER, "without": "b"}])
    found = bind(world, first, ("ops:double", replaced), ("other:other", replaced))["p"]
    assert found.state == "conflict" and DOUBLE in found.reason and OTHER in found.reason


@in_both_orders
def test_a_required_patch_raises_at_check_and_not_in_a_report(world, first, replaced):
    world.patch("p", [DOUBLE, OTHER])
    if first == "trainer":
        with pytest.raises(shim.NotMetError):
            bind(world, first, ("ops:double", replaced), require=["p"])
        return
    assert bind(world, first, ("ops:double", replaced), require=["p"])["p"].state == "conflict"
    with pytest.raises(shim.NotMetError):
        shim.check()


# Targets that a patch goes around


@in_both_orders
def test_a_patch_goes_around_a_function_and_names_it(world, first, replaced):
    """`wraps` is no knowledge of the body: the reason says which function runs, and `others` names it."""
    world.patch("p", [{"target": DOUBLE, "wraps": "true"}])
    found = bind(world, first, ("ops:double", replaced))["p"]
    assert found.state == "applied" and world.get("ops:double")(2) == ("p", "replaced")
    assert "the body is" not in found.reason.partition("; but ")[2] and "replaced in " in found.reason
    assert found.others == (f"{DOUBLE} is replaced by {describe(replaced)}; the patch goes around it",)
    shim.revert()
    assert world.get("ops:double") is replaced and len(same(world.before, world.snapshot())) == 1


def describe(function):
    code = function.__code__
    return f"{function.__module__}.{function.__qualname__} in {__file__}:{code.co_firstlineno}"


@in_both_orders
def test_what_a_patch_goes_around_may_be_taken_back(world, first, replaced):
    """Whoever undoes a replacement puts back what was there before it, which may be an object of shim's."""
    world.patch("p", [{"target": DOUBLE, "wraps": "true"}])
    world.get("ops:double"), world.get("users:twice")
    before = world.snapshot()
    if first == "shim":
        shim.apply()
    held = world.get("ops:double")
    world.set("ops:double", replaced)
    shim.apply()
    assert world.get("ops:double")(2) == ("p", "replaced")
    world.set("ops:double", held)
    found = shim.status()["p"]
    assert (found.state, found.others) == ("applied", ()) and "replaced" not in found.reason
    assert world.get("ops:double")(2) == world.get("users:twice")(2) == ("p", 4)
    shim.revert()
    assert same(before, world.snapshot()) == []


@in_both_orders
def test_a_patch_that_goes_around_brings_none_along_that_does_not(world, first, replaced):
    """Both bind one target. Only one of them holds around a function that is not upstream's."""
    world.patch("p", [{"target": DOUBLE, "wraps": "true"}])
    world.patch("q", [DOUBLE])
    bind(world, first, ("ops:double", replaced))
    for _ in range(2):  # the first looks at the name, the second at what is bound there
        found = shim.status()
        assert (found["p"].state, found["q"].state) == ("applied", "conflict"), found["q"].reason
        assert world.get("ops:double")(2) == ("p", "replaced")
    shim.apply()
    assert shim.status()["q"].state == "conflict" and world.get("ops:double")(2) == ("p", "replaced")


# Methods, which a model can try


def right(self, x):
    return ("p", x)


def wrong(self, x):
    return x


def unclear(self, x):
    raise ValueError("it needs a GPU")


@in_both_orders
@pytest.mark.parametrize(("function", "state"), [(right, "applied"), (wrong, "conflict"), (unclear, "unknown")])
def test_a_replaced_method_is_tried_in_a_model(world, first, function, state, caplog):
    """As an override is. What is right raises nothing under `require`, and no remedy says to remove it."""
    world.patch("p", [FORWARD, OTHER], probe=[FORWARD])
    found = bind(world, first, ("layers:Layer.forward", function), require=["p"])["p"]
    assert (
        found.state == "unknown"
        and found.reason.startswith("it cannot be told")
        and "shim.check(model)" in found.remedy
    )
    assert world.get("other:other")(2) == ("p", 2), "the rest is bound in both orders"
    model = Model(world.get("layers:Layer")())
    if state == "conflict":
        with pytest.raises(shim.NotMetError, match="keeps the patch from its effect"):
            shim.check(model)
    else:
        assert shim.check(model)["p"] == shim.status()["p"]
    found = shim.status()["p"]
    assert found.state == state, found.reason
    if state == "applied":
        assert function.__name__ in found.others[0] and "loses nothing by it" in found.others[0] and not found.remedy
        assert found.targets[FORWARD] == "kept"
    if state == "unknown":
        assert "it needs a GPU" in found.reason and "shim.compatible" in found.remedy
    assert ("remove" in found.remedy) == (state == "conflict")
    assert world.get("layers:Layer.forward") is function


@in_both_orders
def test_a_model_that_does_not_run_the_method_loses_nothing(world, first):
    world.patch("p", [FORWARD, OTHER], probe=[FORWARD])
    bind(world, first, ("layers:Layer.forward", wrong))
    assert shim.check(Model(world.get("layers:Base")()))["p"].state == "applied"


@in_both_orders
def test_a_method_that_a_patch_can_do_without_is_tried_too(world, first):
    """Without the target is one thing, and a function that does something else in its place is another."""
    world.patch("p", [{"target": FORWARD, "without": "layers do not count"}, OTHER], probe=[FORWARD])
    bind(world, first, ("layers:Layer.forward", wrong))
    assert shim.check(Model(world.get("layers:Layer")()))["p"].state == "conflict"


@in_both_orders
def test_a_method_that_a_patch_goes_around_is_tried_too(world, first):
    """It takes the same arguments, and what it does with them only a model shows."""
    probe = """

    def bindings(variant, options):
        return dict.fromkeys(TARGETS, lambda original: lambda self, x: original(self, x))


    def probe(module, method, models):
        return module.forward(2) == 3
    """
    world.patch("p", [{"target": FORWARD, "wraps": "true"}], probe, probe=[FORWARD])
    assert bind(world, first, ("layers:Layer.forward", wrong))["p"].state == "applied"
    assert shim.check(Model(world.get("layers:Layer")()))["p"].state == "conflict"


def test_without_a_probe_a_replaced_method_is_a_conflict(world):
    world.patch("p", [FORWARD])
    assert bind(world, "shim", ("layers:Layer.forward", right))["p"].state == "conflict"


# Ways

WAYS = """
    def inner(x):
        return x


    def other_inner(x):
        return -x


    def outer(x):
        return inner(x)


    class Model:
        def step(self, x):
            return outer(x)
    """


@pytest.fixture
def way(world):
    """The patch p on ways:inner, which a call reaches by ways:outer."""
    module = world.module("ways", WAYS)
    world.patch("p", [{"target": module + ":inner", "reached_by": f"[{module}:outer]"}, OTHER])
    world.get("ways:outer"), world.get("other:other")
    return world


IMPORTS_IT = "from megatron.core.ways import inner; return inner(x)"


def on_the_way(world, first, function):
    if first == "shim":
        shim.apply()
    world.set("ways:outer", function)
    return shim.apply()["p"] if first == "trainer" else shim.status()["p"]


@in_both_orders
def test_applied_is_what_a_call_reaches(way, first, replaced):
    """Somebody's function on the way does not lead to the target, so nothing calls the patch any more."""
    upstream = way.get("ways:outer")
    found = on_the_way(way, first, replaced)
    assert found.state == "conflict" and "ways:outer was replaced by" in found.reason and "replaced" in found.remedy
    assert "does not lead to megatron.core.ways:inner" in found.reason
    assert way.get("other:other")(2) == 2
    way.set("ways:outer", upstream)
    assert shim.status()["p"].state == "applied" and way.get("ways:outer")(2) == ("p", 2)


@in_both_orders
def test_a_function_on_the_way_that_leads_there_hides_nothing(way, first, caplog):
    """By upstream's function on the way, by the target's own name, or through functions of its own."""
    upstream, namespace = way.get("ways:outer"), {}
    exec("from megatron.core.ways import inner", namespace)

    def leads(x):
        from megatron.core.ways import inner

        return inner(x)

    def through(x):
        return leads(x)

    def wraps(x):
        return upstream(x)

    for function in (leads, through, wraps):
        assert on_the_way(way, first, function).state == "applied"
        assert way.get("ways:outer")(2) == ("p", 2)
        shim.revert()
        way.set("ways:outer", upstream)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@in_both_orders
def test_what_a_function_on_the_way_has_taken_before_is_not_the_patch(way, first):
    """Its closure holds upstream's function, which shim does not write to."""
    inner = way.get("ways:inner")
    assert on_the_way(way, first, lambda x: inner(x)).state == "conflict"
    assert shim.status()["p"].state == "conflict"


@in_both_orders
def test_what_has_no_byte_code_is_unknown(way, first):
    """A built-in function may call anything."""
    found = on_the_way(way, first, abs)
    assert found.state == "unknown" and found.reason.startswith(
        "it cannot be told whether builtins.abs, which replaces "
    )
    assert found.remedy == "exclude p, or test whether it has its effect"


@in_both_orders
@pytest.mark.parametrize(("text", "state"), [("return x", "conflict"), (IMPORTS_IT, "applied")])
def test_what_has_no_text_is_read_by_its_code(way, first, text, state):
    names = {}
    exec(f"def hidden(x):\n    {text}\n", names)
    found = on_the_way(way, first, names["hidden"])
    assert found.state == state


@in_both_orders
def test_what_a_patch_relies_on_is_reached_too(world, first, replaced):
    module = world.module("ways", WAYS)
    reads = [f"{{read: {module}:inner, reached_by: [{module}:outer]}}"]
    world.patch("p", [OTHER], reads=reads, pins={})
    world.get("ways:outer"), world.get("other:other")
    assert on_the_way(world, first, replaced).state == "conflict"


@in_both_orders
def test_a_marked_function_on_the_way_hides_nothing(way, first, replaced):
    marked = shim.compatible("megatron.core.ways:inner")(replaced)
    assert on_the_way(way, first, marked).state == "applied"


@in_both_orders
def test_a_method_on_the_way_is_tried(world, first):
    """As an override of it is."""
    module = world.module("ways", WAYS)
    probe = """

    def bindings(variant, options):
        return dict.fromkeys(TARGETS, lambda original: lambda x: ("p", original(x)))


    def probe(module, method, models):
        return module.step(2) == ("p", 2)
    """
    target = {"target": module + ":inner", "reached_by": f"[{module}:Model.step]"}
    world.patch("p", [target], probe, probe=[module + ":Model.step"])
    model = Model(world.get("ways:Model")())
    if first == "shim":
        shim.apply()
    world.set("ways:Model.step", lambda self, x: ("p", x))
    shim.apply()
    assert shim.status()["p"].state == "unknown"
    found = shim.check(model)["p"]
    assert (
        found.state == "applied"
        and "loses nothing by it" in found.others[0]
        and found.targets[module + ":inner"] == "bound"
    )
    world.set("ways:Model.step", lambda self, x: x)
    assert shim.check(model)["p"].state == "conflict"


@in_both_orders
def test_the_answer_to_one_question_settles_no_other(world, first):
    """A method on the way is tried, and right; a built-in function on another way still cannot be read."""
    module = world.module("ways", WAYS)
    probe = """

    def bindings(variant, options):
        return dict.fromkeys(TARGETS, lambda original: lambda x: ("p", original(x)))


    def probe(module, method, models):
        return True
    """
    target = {"target": module + ":inner", "reached_by": f"[{module}:Model.step, {module}:outer]"}
    world.patch("p", [target], probe, probe=[module + ":Model.step"])
    model = Model(world.get("ways:Model")())
    if first == "shim":
        shim.apply()
    world.set("ways:Model.step", lambda self, x: ("p", x))
    world.set("ways:outer", abs)
    shim.apply()
    found = shim.check(model)["p"]
    assert found.state == "unknown" and "builtins.abs" in found.reason and "exclude p" in found.remedy
    assert "loses nothing by it" in found.others[0]
