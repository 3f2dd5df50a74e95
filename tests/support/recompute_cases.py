"""What the tests of MTP recompute on one rank and over ranks share: methods, rows, and cases in pairs."""

import itertools

import torch

from shim import testing
from shim.patches.megatron_core.mtp_recompute.proof import OneSequence

METHODS = {
    f"{method} {layers}": {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }
    for method, layers in itertools.product(("uniform", "block"), (1, 2))
}
# Which of two MTP layers are recomputed.
RECOMPUTED = {"uniform 1": [1, 1], "uniform 2": [1, 1], "block 1": [1, 0], "block 2": [1, 1]}


def row_of(rows, kind):
    """One of `rows`, which are lengths and an alignment; None is one sequence without packed_seq_params."""
    lengths, align = rows[kind]
    row = testing.pack(testing.random_sequences(lengths), align=align or 1)
    return row if align else OneSequence(**vars(row))


def equal_bits(a, b):
    """Whether two results of testing.run_packed and the like are the same to the last bit."""
    same = torch.equal(a.main, b.main) and torch.equal(a.logged, b.logged) and a.grads.keys() == b.grads.keys()
    return same and all(map(torch.equal, a.mtp, b.mtp)) and all(torch.equal(a.grads[n], b.grads[n]) for n in a.grads)


def all_pairs(**factors):
    """Few cases in which every two values of every two factors meet."""
    sizes = [range(len(values)) for values in factors.values()]
    missing = set().union(*(_pairs(case) for case in itertools.product(*sizes)))
    cases = []
    while missing:
        best = max(itertools.product(*sizes), key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append({name: list(factors[name])[place] for name, place in zip(factors, best)})
    return cases


def _pairs(case):
    return set(itertools.combinations(enumerate(case), 2))
