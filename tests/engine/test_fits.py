"""The guard against misfits: what a factory returns takes every call that upstream's object takes."""

import functools

import pytest

import shim
from shim._engine.factories import misfit
from shim.patches._arguments import takes

CORE = "megatron.core."


def upstream(self, x, scale=1, *, bias=None):
    return x


def open_upstream(self, x, *args, **kwargs):
    return x


def narrow(x, scale=1):
    return x


def handing_on(original):
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    return wrapper


def through_a_partial(original):
    run = functools.partial(original)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return run(*args, **kwargs)

    return wrapper


def instead(original):
    """Hands what it is given on to a function of its own."""

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        return narrow(*args, **kwargs)

    return wrapper


def instead_and_says_so(original):
    wrapper = instead(original)
    takes(wrapper, ["x", "scale"])
    return wrapper


def either(original):
    """Upstream's in one case, and one of its own in the other."""
    other = instead_and_says_so(original)

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        return (original if args else other)(self, *args, **kwargs)

    return wrapper


def above(original):
    """On top of one that says what it takes, whose attributes functools.wraps copies."""
    inner = instead_and_says_so(original)

    @functools.wraps(inner)
    def wrapper(self, *args, **kwargs):
        return narrow(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("factory", [handing_on, through_a_partial])
@pytest.mark.parametrize("original", [upstream, open_upstream])
def test_what_is_handed_on_to_upstreams_function_fits(factory, original):
    assert misfit(factory(original), original) == ""


@pytest.mark.parametrize("factory", [instead, instead_and_says_so, either, above])
def test_what_is_handed_on_to_a_narrower_function_does_not_fit(factory):
    """functools.wraps has it show upstream's signature, and its code takes anything: the call would fail inside."""
    with pytest.raises(TypeError, match="bias"):
        factory(upstream)("self", *(() if factory is either else (1,)), bias=2)
    assert misfit(factory(upstream), upstream)


def test_who_says_what_he_takes_fits_where_that_is_all():
    def earlier(self, x, scale=1):
        return x

    assert misfit(instead_and_says_so(earlier), earlier) == ""
    assert misfit(either(earlier), earlier) == ""
    assert "bias" in misfit(instead_and_says_so(upstream), upstream)


def test_a_namespace_is_not_upstreams_function():
    """A wrapper may hold the dictionary of upstream's module, in which everything is."""
    namespace = {"upstream": upstream, "narrow": narrow}

    @functools.wraps(upstream)
    def wrapper(self, *args, **kwargs):
        return namespace["narrow"](*args, **kwargs)

    assert "does not say" in misfit(wrapper, upstream)


def test_code_that_takes_no_further_arguments_does_not_fit_one_that_does():
    @functools.wraps(open_upstream)
    def without_names(self, x, *args):
        return open_upstream(self, x, *args)

    @functools.wraps(open_upstream)
    def without_positions(self, x, **kwargs):
        return open_upstream(self, x, **kwargs)

    assert "by any name" in misfit(without_names, open_upstream)
    assert "any number" in misfit(without_positions, open_upstream)


def test_code_that_takes_by_name_alone_what_calls_pass_by_position_does_not_fit():
    """Behind *args a call by position does not reach the parameter: its code would read the default."""

    def misreading(original):
        @functools.wraps(original)
        def wrapper(self, *args, scale=1, **kwargs):
            return original(self, *args, **kwargs) * scale

        return wrapper

    def reading(original):
        @functools.wraps(original)
        def wrapper(self, *args, bias=None, **kwargs):
            return original(self, *args, bias=bias, **kwargs)

        return wrapper

    assert "scale by name alone" in misfit(misreading(upstream), upstream)
    assert misfit(reading(upstream), upstream) == ""


def test_code_that_needs_an_argument_by_name_which_calls_may_leave_out_does_not_fit():
    def strict(self, x, *, must):
        return x

    def wrapping(original):
        @functools.wraps(original)
        def wrapper(self, *args, must, **kwargs):
            return original(self, *args, must=must, **kwargs)

        return wrapper

    assert misfit(wrapping(strict), strict) == ""
    assert "needs an argument must by name" in misfit(wrapping(upstream), upstream)


def test_a_class_that_passes_for_a_function_does_not_fit():
    """isinstance asks an object for its __class__, and a proxy lends that of what it wraps."""

    class Proxy:
        def __init__(self, wrapped):
            self.__wrapped__ = wrapped

        @property
        def __class__(self):
            return type(self.__wrapped__)

        def __getattr__(self, name):
            return getattr(self.__wrapped__, name)

        def __call__(self, *args, **kwargs):
            return self.__wrapped__(*args, **kwargs)

    assert isinstance(Proxy(upstream), type(upstream))
    assert "Proxy" in misfit(Proxy(upstream), upstream)


def test_a_patch_that_hands_on_too_much_is_rolled_back(world):
    source = """
        import functools

        def mine(x):
            return x

        def bindings(variant, options):
            def factory(original):
                return functools.wraps(original)(lambda *args, **kwargs: mine(*args, **kwargs))
            return dict.fromkeys(TARGETS, factory)
        """
    world.patch("p", [CORE + "ops:double"], source)
    world.get("ops:double")
    with pytest.raises(shim.BindError, match=r"incompatible signature.*scale"):
        shim.apply()
