"""The stand-ins of TE's multi-tensor operations: they launch what the compiled loop does, and compute as torch."""

import random

import pytest
import torch

from shim.testing import multi_tensor
from shim.testing.multi_tensor import TableOverrunError, launches
from shim.testing.transformer_engine import CompiledOpError, _stand_in, compiled_ops

ADAM, NORM = 4, 1  # lists of tensors


def chunks(sizes, lists=ADAM, chunk_size=4):
    return [pair for launch in launches(sizes, chunk_size, lists) for pair in launch]


def test_full_tensors_are_read_chunk_by_chunk():
    assert chunks([3, 9, 4]) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_all_wait_for_the_last_chunk_of_the_last_tensor():
    assert len(launches([3, 9, 4], 4, ADAM)) == 1
    assert chunks([3, 9, 4, 0]) == []
    assert chunks([0, 3, 0, 9, 4]) == [(1, 0), (3, 0), (3, 1), (3, 2), (4, 0)]


@pytest.mark.parametrize(("lists", "most"), [(1, 110), (4, 36), (5, 30)])
def test_a_full_table_is_launched(lists, most):
    assert [len(launch) for launch in launches([1] * (2 * most + 1), 4, lists)] == [most, most, 1]
    # Only what came after the last full table is lost.
    assert chunks([1] * (most + 1) + [0], lists) == [(tensor, 0) for tensor in range(most)]


def test_a_launch_has_320_chunks_at_most():
    """A tensor that goes on keeps a place in the next table."""
    assert [len(launch) for launch in launches([4 * 330], 4, ADAM)] == [320, 10]
    assert [len(launch) for launch in launches([4 * 330] + [1] * 36, 4, ADAM)] == [320, 10 + 35, 1]
    assert chunks([4 * 330, 0]) == [(0, chunk) for chunk in range(330)][:320]


def test_an_empty_tensor_in_the_last_place_lets_the_table_overrun():
    assert chunks([1] * 35 + [0]) == []
    with pytest.raises(TableOverrunError, match="tensor 36 would stand behind a table of 36"):
        launches([1] * 35 + [0, 1], 4, ADAM)


def test_every_chunk_of_full_tensors_is_read_once():
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.choice((1, 4, 5, 1300)) for _ in range(rng.randrange(1, 150))]
        assert chunks(sizes, NORM) == [(t, chunk) for t, size in enumerate(sizes) for chunk in range(-(-size // 4))]


@pytest.fixture(autouse=True)
def any_release(monkeypatch):
    monkeypatch.setattr(multi_tensor, "version", lambda name: "2.17.1")


def tensors(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(decoupled):
    weights, gradients = tensors(5, 9), tensors(5, 9, seed=1)
    right = [torch.nn.Parameter(weight.clone()) for weight in weights]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(right, lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2)
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    for step in (1, 2):
        for parameter, gradient in zip(right, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        lists = [gradients, weights, *moments]
        multi_tensor._adam(4, None, lists, 0.1, 0.9, 0.99, 1e-6, step, int(decoupled), 1, 0.2)
    for found, expected in zip(weights, right, strict=True):
        torch.testing.assert_close(found, expected.data)


def test_adam_keeps_main_weights():
    (main,) = tensors(5)
    weight = main.bfloat16()
    lists = [[torch.ones(5)], [weight], [torch.zeros(5)], [torch.zeros(5)], [main]]
    multi_tensor._adam(4, None, lists, 1e-4, 0.9, 0.99, 1e-6, 1, 1, 1, 0.0)
    torch.testing.assert_close(main, tensors(5)[0] - 1e-4)
    assert torch.equal(weight, main.bfloat16())


def test_norms_of_all_and_of_each():
    given = tensors(5, 9)
    total, single = multi_tensor._l2norm(4, None, [given], True)
    torch.testing.assert_close(total, torch.cat(given).norm().reshape(1))
    torch.testing.assert_close(single, torch.stack([tensor.norm() for tensor in given]))
    assert multi_tensor._l2norm(4, None, [given])[1].numel() == 0


def test_what_is_not_launched_is_not_scaled():
    given, target = tensors(5, 9, 0), [torch.zeros(size) for size in (5, 9, 0)]
    multi_tensor._scale(4, None, [given, target], 2.0)
    assert not torch.cat(target).any()
    multi_tensor._scale(4, None, [given[:2], target[:2]], 2.0)
    assert torch.equal(target[1], given[1] * 2)


def test_releases_from_2_18_on_refuse_tensors_without_elements(monkeypatch):
    monkeypatch.setattr(multi_tensor, "version", lambda name: "2.18.0")
    with pytest.raises(RuntimeError, match="takes no tensor without elements"):
        multi_tensor._l2norm(4, None, [tensors(5, 0)])


def test_operations_compute_only_within_the_context():
    refuse = _stand_in("multi_tensor_scale", set())
    (given,), (target,) = tensors(3), tensors(3)
    with multi_tensor.multi_tensor_ops():
        refuse(4, None, [[given], [target]], 2.0)
        with compiled_ops({"multi_tensor_scale": lambda *args: "another"}):
            assert refuse() == "another"
    assert torch.equal(target, given * 2)
    with pytest.raises(CompiledOpError):
        refuse(4, None, [[given], [target]], 2.0)
