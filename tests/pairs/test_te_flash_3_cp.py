"""te-flash-3-cp: each FlashAttention 3 beside each FlashAttention 2, in each kind of context parallelism."""

from types import SimpleNamespace

import pytest
import torch

import shim
from shim import testing
from shim.patches.transformer_engine.te_flash_3_cp import (
    BACKWARD,
    FORWARD,
    HOMES,
    Adapters,
    _names_of,
    in_both_places,
    renamed,
)
from shim.patches.transformer_engine.te_flash_3_cp.proof import (
    APIS,
    RANKS,
    backends,
    error_of,
    flash_attention_3,
    own_api,
)

CELLS = {"0.12.0+2.3.0": "all"}

ID = "te-flash-3-cp"
PLAN = shim.plan()[ID]
needed = pytest.mark.skipif(not PLAN.wanted, reason="this release needs no patch")
CP = testing.Layout(cp=RANKS)
KINDS = ("p2p", "a2a")  # the third, all_gather, needs FlashAttention 2
FLASH_2 = (None, "2.6.3", "2.7.3")


@pytest.fixture(scope="module")
def ranks():
    with testing.Ranks(RANKS) as pool:
        yield pool


def error(patched, api, flash_2, kind):
    """The error of this rank's output and gradients; infinite for a crash."""
    with testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), testing.layout_initialised(CP):
        with shim.patched(only=[ID] if patched else [], require=[ID] if patched else []):
            try:
                return error_of(api, flash_2, kind)
            except (IndexError, TypeError):
                return float("inf")


@needed
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_versions_is_right(ranks, kind):
    """In bf16. Stock takes its own API beside FlashAttention 2.7, and nothing else."""
    right = own_api(), "2.7.3"
    cases = [(api, flash_2) for api in APIS for flash_2 in FLASH_2]
    found = {case: max(ranks.run(error, True, *case, kind)) for case in cases}
    # A crash in the ring leaves messages behind, so that only the proofs have one.
    stock = {case: max(ranks.run(error, False, *case, kind)) for case in cases if kind != "p2p" or case == right}
    assert {case for case in stock if stock[case] < float("inf")} == {right}
    assert max(found.values()) < 4e-3, found
    assert found[right] == stock[right]  # the same bits


@needed
@pytest.mark.skipif(PLAN.variant == "v2_2", reason="its all_gather is for causal rows of its own order")
def test_all_gather_beside_flash_attention_2(ranks):
    assert max(ranks.run(error, True, "newer", "2.6.3", "all_gather")) < 4e-3
    assert max(ranks.run(error, False, "newer", "2.6.3", "all_gather")) == float("inf")


@needed
def test_functions_are_put_back():
    names = FORWARD, BACKWARD
    module = backends()
    with flash_attention_3("newer", None):
        stock = [vars(module)[name] for name in names]
        adapters = Adapters(HOMES[PLAN.variant][1])
        adapters.enter()
        first = [vars(module)[name] for name in names]
        assert not set(first) & set(stock) and adapters.held()
        adapters.enter()
        assert [vars(module)[name] for name in names] == first  # once
        adapters.release()
        assert [vars(module)[name] for name in names] == stock and not adapters.held()
        adapters.enter()
        setattr(module, FORWARD, print)  # another's, which stays
        adapters.release()
        assert [vars(module)[name] for name in names] == [print, stock[1]]


def test_arguments_get_the_names_that_a_function_takes():
    older, newer = ([_names_of(function) for function in APIS[api]] for api in ("older", "newer"))
    given = {"causal": True, "window_size": (-1, 0), "softcap": 0.0}
    sides = {"window_size_left": -1, "window_size_right": 0}
    assert renamed(given, older[0]) == renamed(given, older[1]) == given
    assert renamed(given, newer[0]) == {"causal": True, "softcap": 0.0, **sides}
    assert renamed(given, newer[1]) == {"is_causal": True, "softcap": 0.0, **sides}
    assert renamed({"is_causal": True, **sides}, older[1]) == {"causal": True, "window_size": (-1, 0)}
    assert renamed({"is_causal": True, **sides}, newer[1]) == {"is_causal": True, **sides}
    # A step of the ring names the window anew.
    assert renamed({"window_size_left": -1, "window_size_right": 0, "window_size": (-1, -1)}, newer[0]) == {
        "window_size_left": -1,
        "window_size_right": -1,
    }
    assert renamed(given, frozenset()) == renamed(given, frozenset({"args", "kwargs"})) == given


def test_the_names_of_an_operator_of_torch():
    def operator(q: torch.Tensor, window_size_left: int = -1, window_size_right: int = -1) -> torch.Tensor:
        return q.clone()

    made = torch.library.custom_op("shim_test::flash_3", operator, mutates_args=())
    assert _names_of(made) == {"q", "window_size_left", "window_size_right"}
    assert _names_of(SimpleNamespace()) == frozenset()


def test_results_that_are_not_of_flash_attention_3_stay():
    of_2 = tuple(range(8))
    assert in_both_places(of_2) is of_2
    assert in_both_places("output") == "output"
    assert in_both_places(("out", "sums")) == ("out", "sums", None, None, "out", "sums", None, None)
