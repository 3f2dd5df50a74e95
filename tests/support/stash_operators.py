"""Every differentiable operator of torch that can be sampled, under a paged stash: docs/paged-stash-operators.md.

    python tests/support/stash_operators.py            write the page
    python tests/support/stash_operators.py --quick    check the operators that it says are stashed, or divide
    python tests/support/stash_operators.py --all      check every sample of every operator

An operator gets rows in the samples of torch's own tests. The first rows of its output get a gradient, and gradients of
all its inputs have to be those without a stash, bit for bit. Samples come from torch.testing's database of operators,
which wants a package for comparing texts that is not used here.
"""

import argparse
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
PAGE = TOP / "docs" / "paged-stash-operators.md"
SAMPLES = 3  # of each operator, for the page

# With a pole where rows come back as zeros.
DIVIDE = (
    "hypot addcdiv fmod remainder xlogy special.entr igamma igammac nn.functional.kl_div linalg.solve linalg.qr "
    "linalg.solve_triangular cholesky linalg.cholesky div true_divide rsqrt sqrt log log1p atan2 norm "
    "linalg.vector_norm prod cumprod pow float_power lgamma digamma reciprocal std logaddexp logsumexp amax"
)
FAILS = (RuntimeError, ValueError, NotImplementedError, TypeError, AssertionError, ImportError)  # without a stash

# What autograd can do, what the stash does with it, and the test that holds it.
FEATURES = [
    ("backward, retained graphs, several backward passes", "stashed", "test_two_backwards_through_a_retained_graph"),
    ("double backward", "stashed", "test_double_backward"),
    (
        "`torch.autograd.Function`: inputs and outputs that come from the inputs",
        "stashed",
        "test_rows_are_known_by_where_they_come_from",
    ),
    (
        "`torch.autograd.Function`: tensors that it makes itself",
        "left alone, unless `block_of` knows it",
        "test_experts_in_three_dimensions_are_known_by_block_of",
    ),
    (
        "`torch.autograd.Function` without `inputs`",
        "left alone",
        "test_without_inputs_functions_of_ones_own_are_left_alone",
    ),
    (
        "autocast, and casts of weights that it caches",
        "rows are stashed, weights left alone",
        "test_rows_are_known_by_where_they_come_from",
    ),
    ("frozen weights, adapters", "rows are stashed, weights left alone", "test_frozen_weights_with_an_adapter"),
    ("operators in place on a whole tensor", 'as without "in place"', "test_operators_in_place"),
    ("operators in place on a view", "left alone", "test_operators_in_place"),
    ("regions compiled by `torch.compile`", "left alone", "test_what_was_compiled_is_left_alone"),
    (
        "regions of functions that `compiled` names",
        "stashed",
        "test_what_was_compiled_of_a_known_function_is_stashed",
    ),
    (
        "callers of `run` or `group` that are being compiled",
        "left alone, not counted",
        "test_what_is_being_compiled_is_left_alone",
    ),
    ("`torch.func.grad`, `vjp`, `jvp`, `vmap`", "left alone", "test_transforms_of_functions_are_left_alone"),
    (
        "forward-mode differentiation, also over backward",
        "left alone",
        "test_forward_mode_over_backward_has_its_tangents",
    ),
    (
        "`torch.utils.checkpoint`, hooks on saved tensors, `save_on_cpu`",
        "left alone",
        "test_with_hooks_of_somebody_else",
    ),
    ("recomputation in backward", "left alone", "test_with_hooks_of_somebody_else"),
    ("`no_grad`, inference mode", "nothing is saved", "test_without_gradients_nothing_is_stashed"),
    ("outputs in tuples, lists, dicts", "stashed", "test_nests_of_outputs_and_one_that_is_not_connected"),
    (
        "outputs in dataclasses",
        "stashed",
        "test_tensors_in_a_dataclass_are_found_and_elsewhere_there_is_a_reason",
    ),
    (
        "outputs in other objects",
        "left alone",
        "test_tensors_in_a_dataclass_are_found_and_elsewhere_there_is_a_reason",
    ),
    (
        "`copy.deepcopy`, pickle of a stash",
        "a new, empty stash with the same settings",
        "test_a_copy_is_a_new_stash_with_the_same_settings",
    ),
    (
        "no pool while a CUDA graph is captured",
        "refused: RuntimeError",
        "test_no_pool_is_made_while_a_graph_is_captured",
    ),
    (
        "a kept original that is changed in place",
        "refused: RuntimeError, as without a stash",
        "test_an_original_that_was_kept_must_not_be_changed_in_place",
    ),
    (
        'too few pages, with overflow="raise" or "spill"',
        "refused by `check`: StashOverflowError",
        "test_raise_tells_what_was_lost_and_the_remedy_and_begins_anew",
    ),
]

HEAD = """# What the paged stash does with each operator

The tool `tests/support/stash_operators.py` generates this page (`make docs`). It runs every differentiable operator of
torch that torch's own tests can sample, with valid and invalid rows. It compares all gradients, bit for bit, with those
without a stash. Saved tensors of every other operator are left alone: autograd keeps them, and gradients are right.

The stash follows rows from the outputs of a forward back to its inputs. A saved tensor is stashed on three conditions:
its operator, and every operator from there to an output, is known to keep rows in place (`shim/ops/_row_rules.py`),
and the tensor is the operand that holds the rows. Weights, and copies, casts, slices and concatenations of
weights, never qualify.

The stash expects of its user:

- Invalid rows of the outputs get no gradient, and neither does anything else made from invalid rows.
- All outputs with a gradient are in the result of the function, or in the argument of `commit`.
- A custom `torch.autograd.Function` keeps rows in place and works on rows of zeros. The stash trusts it. Do not use a
  function that permutes rows, or divides by its saved tensors, under a stash.
- An argument of `run` with `rows` rows counts as rows, unless it is a parameter or in a dict.

## Features of autograd

A test in `tests/ops` holds each row of this table.

| feature | what the stash does | test |
|---|---|---|
{features}

## Operators

With torch {version}. "divides": the operator's backward divides by its saved tensors, or raises e to them. "rows end
here": the operator moves or mixes rows, or is not known to keep them in place, so tensors saved before it are also
left alone.

| operator | node | what the stash does |
|---|---|---|
"""


def head(version):
    """The page above the table of operators."""
    features = "\n".join(f"| {feature} | {does} | {test} |" for feature, does, test in FEATURES)
    return HEAD.replace("{version}", version).replace("{features}", features)


def database():
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.name + (f" ({op.variant_test_name})" if op.variant_test_name else ""): op
        for op in op_db
        if op.supports_autograd and op.op is not None
    }


def tensors_of(value):
    import torch

    found = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, value)
    return found


class Tried:
    """What became of an operator's samples."""

    def __init__(self):
        self.samples = self.stashed = self.before = 0
        self.skipped, self.nodes, self.wrong = Counter(), Counter(), []

    def outcome(self):
        if not self.samples:
            return "not tried: no sample has rows"
        if self.wrong:
            return "WRONG"
        rows = "" if self.before else "; rows end here"
        if self.stashed:
            return "stashed"
        reasons = {reason for reason in self.skipped if "16 bytes" not in reason}
        if any("divides" in reason for reason in reasons):
            return "left alone: divides" + rows
        return ("left alone" if reasons else "saves no rows") + rows

    def row(self, name):
        node = self.nodes.most_common(1)[0][0] if self.nodes else ""
        return f"| {name} | {node} | {self.outcome()} |"


def with_rows(op, sample):
    """The sample; that of a function of one number has but one dimension."""
    from torch.testing._internal.opinfo.core import UnaryUfuncInfo

    if isinstance(op, UnaryUfuncInfo) and sample.input.dim() == 1 and len(sample.input) % 4 == 0:
        sample.input = sample.input.detach().view(4, -1).requires_grad_()
    return sample


def try_sample(op, sample, tried):
    import torch

    from shim.ops.paged_stash import PagedStash

    given = with_rows(op, sample).input, sample.args, sample.kwargs
    leaves = [one for one in tensors_of(given) if one.requires_grad]
    if not leaves or any(leaf.layout != torch.strided or not leaf.numel() for leaf in leaves):
        return
    ones = {id(leaf): torch.ones_like(leaf, requires_grad=False) for leaf in leaves}

    def function(*_):
        torch.manual_seed(1)
        return op.op(given[0], *given[1], **given[2])

    def behind_a_product(*_):
        """Its `ones` are saved, and are zeros where rows are not valid, if rows are the same before and behind `op`."""
        torch.manual_seed(1)
        changed = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda one: one * ones[id(one)] if id(one) in ones else one, given
        )
        return op.op(changed[0], *changed[1], **changed[2])

    def gradients(output):
        outs = [out for out in tensors_of(output) if out.grad_fn is not None and out.dim() and len(out) == rows]
        grads = [torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype) for out in outs]
        for grad in grads:
            grad[rows // 2 :] = 0
        return torch.autograd.grad(outs, leaves, grads, allow_unused=True)

    try:
        first = next((out for out in tensors_of(function()) if out.grad_fn is not None), None)
        if first is None or first.layout != torch.strided or first.dim() < 2 or len(first) < 2:
            return
        rows = len(first)
        expected = [gradients(call()) for call in (function, behind_a_product)]
    except FAILS:
        return
    tried.samples += 1
    tried.nodes[type(first.grad_fn).__name__] += 1
    for call, wanted in zip((function, behind_a_product), expected):
        stash = PagedStash(1000, page_size=1, overflow="raise")
        found = gradients(stash.run(call, *leaves, rows=rows, valid=rows // 2))
        # What is wrong without a stash, by a pole in a sample, is as wrong with it.
        if not all((a is None and b is None) or _same(a, b) for a, b in zip(found, wanted)):
            tried.wrong.append(f"{call.__name__}: {sample.summary()}")
        if call is function:
            tried.stashed += stash.statistics().stashed
            tried.skipped.update(stash.skipped)
        else:
            tried.before += stash.statistics().stashed
    tried.before -= tried.stashed  # what the operator saves is in both


def _same(one, other):
    return one is not None and other is not None and bool(((one == other) | (one.isnan() & other.isnan())).all())


def try_operator(op, most):
    import torch

    tried = Tried()
    dtype = torch.float64 if op.supports_dtype(torch.float64, "cpu") else torch.float32
    samples = iter(op.sample_inputs("cpu", dtype, requires_grad=True))
    while tried.samples < most:
        try:
            sample = next(samples, None)
        except FAILS:  # torch has no samples for this operator here
            break
        if sample is None:
            break
        try_sample(op, sample, tried)
    return tried


def written():
    """The page's rows, by operator."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    found = (re.match(r"\| (.+?) \| \w* \| .* \|$", line) for line in lines)
    return {match[1]: match[0] for match in found if match}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    operators, page = database(), written()
    if options.quick:
        wanted = {name for name, row in page.items() if row.endswith("| stashed |")}
        operators = {
            name: op for name, op in operators.items() if name in wanted or name.partition(" (")[0] in DIVIDE.split()
        }
    rows, wrong = [], 0
    for name, op in sorted(operators.items()):
        tried = try_operator(op, 10**9 if options.all else SAMPLES)
        if tried.wrong:
            wrong += 1
            print("wrong:", name, *dict.fromkeys(tried.wrong), sep="\n    ")
        rows.append(tried.row(name))
        if options.quick and page.get(name) != rows[-1]:
            wrong += 1
            print("not as in the page:", rows[-1])
    if options.quick or options.all:
        print(len(rows), "operators")
    else:
        version = torch.__version__.partition("+")[0]
        PAGE.write_text(head(version) + "\n".join(rows) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
