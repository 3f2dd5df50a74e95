"""Other trainers on two ranks: see test_other_trainers.py, whose world of one rank cannot be forked."""

import trainer_ranks
from trainer_cases import alone

CELLS = {"0.19.2": "all"}

ABOUT = []  # the patches, see chosen.py


def test_ranks_that_bind_in_different_orders_agree(ranks2):
    """check() would raise on both if their digests differed."""
    found = ranks2.run(trainer_ranks.in_the_order, "shim", "trainer")
    assert found[0] == found[1] == (alone().digest, True)


def test_groups_that_a_trainer_wraps_are_taken(ranks2):
    """What shim sends between ranks goes through torch.distributed by name, as the trainer has it then."""
    for plain, wrapped, digest in ranks2.run(trainer_ranks.through_reloadable_groups):
        assert plain == wrapped and any(plain[0]) and digest == alone().digest
