"""An override that calls the patched method keeps the patch in force; any other shadows it."""

import pytest
from fake_world import Model

import shim


@pytest.fixture
def layer(patched_world):
    """The class with the patched forward, which returns a tuple that begins with "count"."""
    found = patched_world.get("layers:Layer")
    patched_world.get("ops:double")
    patched_world.stock = vars(found)["forward"]
    shim.apply()
    return found


def state_with(instance):
    model = Model(instance)
    checked = shim.check(model)["count"]
    assert shim.status()["count"] == checked
    return checked.state


def test_an_override_that_calls_the_patched_method_hides_nothing(layer):
    """The remedy that a shadowed patch names: by super(), by the class, in a nested function, or as a wrapper."""
    base = layer

    class BySuper(layer):
        def forward(self, x):
            return super().forward(x)

    class ByName(layer):
        def forward(self, x):
            return (lambda: base.forward(self, x))()

    class Above(BySuper):
        def forward(self, x):
            return super().forward(x)

    wrapped = layer()
    patched = wrapped.forward
    wrapped.forward = lambda x: patched(x)
    for instance in (BySuper(), ByName(), Above(), wrapped):
        assert instance.forward(1)[0] == "count"
        assert state_with(instance) == "applied"


def test_an_override_that_calls_something_else_hides_the_patch(patched_world, layer):
    """Another method of the base class, that method of another object, an override below it, or upstream's function."""
    stock = patched_world.stock

    class Another(layer):
        def forward(self, x):
            return super().tag() and self.inner.forward(x)

    class Above(Another):
        def forward(self, x):
            return super().forward(x)

    earlier = layer()
    earlier.forward = lambda x: stock(earlier, x)
    for instance in (Another(), Above(), earlier):
        assert state_with(instance) == "shadowed"


def test_an_override_without_a_text_hides_the_patch(layer):
    """shim cannot tell what it calls."""
    names = {}
    exec("def forward(self, x):\n    return base.forward(self, x)\n", {"base": layer}, names)
    assert state_with(type("Unreadable", (layer,), names)()) == "shadowed"
