"""shim.testing.proof: one side of a proof is right, wrong, cannot run, or broken, and says so."""

import inspect
import math
from importlib.metadata import version
from types import SimpleNamespace

import proof_cases
import pytest
import torch

from shim import testing
from shim._matrix.load import load_matrix
from shim.maintenance.docs_defects import proof_texts
from shim.testing.proof import CannotRunError, Here, Measured, Side, measure, proof, proofs_of


class InterpreterError(Exception):
    """Triton's is of this name."""


class ModelError(Exception):
    """That of the proofs about checkpoints is of this name."""


def side_of(measured, **options):
    """The side of a proof that returns, or raises, this."""

    @proof(options.pop("says", "off by {:.1e}"), **options)
    def something(here):
        """A reproduction."""
        if isinstance(measured, Exception):
            raise measured
        return measured

    return measure(something, Here(device="cuda"))  # which substitutes nothing


@pytest.mark.parametrize(
    "measured, bound, state, text",
    [
        (0.0, 0.0, "right", "off by 0.0e+00"),
        (1e-7, 1e-6, "right", "off by 1.0e-07"),
        (1e-5, 1e-6, "wrong", "off by 1.0e-05"),
        (math.nan, 1e-6, "wrong", "off by nan"),
        (math.inf, 1e-6, "wrong", "off by inf"),
    ],
)
def test_a_number_is_right_up_to_the_bound(measured, bound, state, text):
    side = side_of(measured, bound=bound)
    assert (side.state, side.text) == (state, text)


def test_zero_has_words_of_its_own():
    assert side_of(0, right="bit-equal").text == "bit-equal"
    assert side_of(2, says="{:.0f} differ", right="bit-equal").text == "2 differ"


def test_what_torch_or_triton_cannot_do_is_no_defect():
    for error, reason in (
        (ValueError("Cannot use ReduceOp.AVG with Gloo"), f"gloo of torch {version('torch')} has no ReduceOp.AVG"),
        (RuntimeError("ProcessGroupGloo does not support reduce_scatter"), "has no reduce_scatter"),
        (RuntimeError("Backend gloo does not support alltoall_base"), "has no alltoall_base"),
        (ModelError("saving, RuntimeError: Backend gloo does not support gather"), "has no gather"),
        (ModelError("loading, TypeError: load() got an unexpected keyword argument 'no_dist'"), "loads no file"),
        (InterpreterError("TypeError('only 0-dimensional arrays can be converted')"), f"numpy {version('numpy')}"),
    ):
        side = side_of(error)
        assert side.state == "cannot run" and reason in side.text, error
    assert side_of(RuntimeError("gloo: connection refused")).state == "broken"
    named = side_of(RuntimeError("Backend gloo does not support x"), crashes="Backend gloo does not support")
    assert named.state == "wrong"


def test_curves_are_handed_on():
    assert side_of(Measured(0, {"truth": [1.0]})).curves == {"truth": [1.0]}


def test_a_crash_is_wrong_only_where_it_is_the_one_that_was_named():
    assert side_of(TypeError("no argument x"), crashes="TypeError: no argument").state == "wrong"
    other = side_of(KeyError("x"), crashes="TypeError: no argument")
    assert other.state == "broken" and "KeyError: 'x'" in other.text and "Traceback" in other.details
    assert other.text == "KeyError: 'x' (the proof expects 'TypeError: no argument')"
    unexpected = side_of(TypeError("x"))
    assert (unexpected.state, unexpected.text) == ("broken", "TypeError: x")


def test_what_cannot_run_says_why():
    side = side_of(CannotRunError("no FP8 on this GPU"))
    assert (side.state, side.text, side.value) == ("cannot run", "no FP8 on this GPU", None)


@pytest.mark.parametrize(("name", "state"), [("megatron", "cannot run"), ("numpy", "broken")])
def test_a_release_that_is_not_there_is_no_defect(name, state):
    side = side_of(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert side.state == state and name in side.text


def raises_on_rank(first, second):
    raise (first, second)[torch.distributed.get_rank()]


def side_of_two_ranks(monkeypatch, crashes, first, second):
    """The side of a proof whose ranks raise these."""
    monkeypatch.setattr("shim.testing.proof.layout_initialised", lambda layout: torch.no_grad())
    monkeypatch.setattr("shim.testing.proof.on_device", lambda device, te: torch.no_grad())

    @proof("{}", crashes=crashes, ranks=2)
    def on_two_ranks(here):
        """A reproduction."""
        here.run(raises_on_rank, first, second, layout=testing.Layout(tp=2))

    return measure(on_two_ranks, Here())


def test_the_error_of_a_rank_is_the_error(monkeypatch):
    error = ValueError("only on ranks")
    side = side_of_two_ranks(monkeypatch, "^ValueError: only on ranks$", error, error)
    assert (side.state, side.text) == ("wrong", "ValueError: only on ranks"), side


@pytest.mark.parametrize("turn", [1, -1])
def test_the_error_of_any_rank_counts(monkeypatch, turn):
    """Which rank fails first, and with what, is a matter of time."""
    errors = [KeyError("a symptom of the other rank"), ValueError("only on ranks")][::turn]
    side = side_of_two_ranks(monkeypatch, "^ValueError: only on ranks$", *errors)
    assert (side.state, side.text) == ("wrong", "ValueError: only on ranks"), side


def test_a_broken_proof_says_which_pattern_did_not_match_which_errors(monkeypatch):
    side = side_of_two_ranks(monkeypatch, "^IndexError: ", KeyError("x"), ValueError("y"))
    assert side.state == "broken"
    assert sorted(side.text.partition(" (")[0].split("; ")) == ["KeyError: 'x'", "ValueError: y"]
    assert side.text.endswith(" (the proof expects '^IndexError: ')")
    assert "KeyError: 'x'" in side.details and "ValueError: y" in side.details


def test_a_proof_cannot_run_where_one_rank_cannot(monkeypatch):
    side = side_of_two_ranks(monkeypatch, "", KeyError("the other is gone"), CannotRunError("no such layer"))
    assert (side.state, side.text) == ("cannot run", "no such layer")


def test_a_proof_needs_a_reproduction_and_a_known_kind():
    with pytest.raises(ValueError, match="no docstring"):
        proof("{}")(lambda here: 0)
    with pytest.raises(ValueError, match="is not one of silent"):
        proof("{}", defect="loud")


def test_the_proofs_of_a_patch_lie_beside_it():
    (found,) = proofs_of("shim.patches.megatron_core.label_smoothing")
    assert found.name == "smoothed-losses-under-tensor-parallelism" and found.ranks == 2
    assert proofs_of("shim.patches.megatron_core._token_losses") == []


def test_the_text_of_a_proof_says_what_the_proof_is():
    """Documents read the file, without importing it."""
    for entry in load_matrix().patches.values():
        made, read = proofs_of(entry.module), proof_texts(entry)
        assert [proof.name for proof in made] == [text.name for text in read], entry.id
        for found, text in zip(made, read):
            assert inspect.cleandoc(found.function.__doc__) == text.reproduction
            assert found.defect == text.keywords.get("defect", "silent") and found.te == text.keywords.get("te", False)


@pytest.mark.parametrize(
    "action, stock, patched, said",
    [
        (
            "apply",
            Side("wrong", "3 of 4 miscounted", 0.1, 3.0),
            Side("wrong", "2 of 4 miscounted", 0.2, 2.0),
            "with the patch is wrong, and has to be right: 2 of 4 miscounted (measured 2, right up to 0), 0.2 s\n"
            "stock is wrong, as it has to be: 3 of 4 miscounted (measured 3, right up to 0), 0.1 s\nvariant layer",
        ),
        (
            "apply",
            Side("right", "0 of 4 miscounted", 0.1, 0.0),
            None,
            "stock is right, and has to be wrong: 0 of 4 miscounted (measured 0, right up to 0), 0.1 s\nvariant layer",
        ),
        (
            "upstream",
            Side("broken", "KeyError: 'x'", 0.1, details="Traceback: where"),
            None,
            "stock is broken, and has to be right: KeyError: 'x', 0.1 s\nupstream by the matrix\nTraceback: where",
        ),
    ],
    ids=["not fixed", "not reproduced", "broken"],
)
def test_a_proof_that_fails_on_a_release_says_why(monkeypatch, action, stock, patched, said):
    """Both verdicts with their numbers, and no lines of the test."""
    decision = SimpleNamespace(action=action, variant="layer" if action == "apply" else None)
    monkeypatch.setattr(proof_cases, "plan", lambda: {"roll-fix": decision})
    monkeypatch.setattr(proof_cases, "on_stock", lambda found: stock)
    monkeypatch.setattr(proof_cases, "side", lambda found, id: patched)
    found = SimpleNamespace(name="counts", variants=(), bound=0.0)
    with pytest.raises(pytest.fail.Exception) as caught:
        proof_cases.assert_what_the_matrix_says("roll-fix", found)
    assert str(caught.value) == said and not caught.value.pytrace
