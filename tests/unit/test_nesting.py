"""Who is outside where patches of the shipped matrix share a target. A patch further down in the file is outside."""

from itertools import combinations

from shim._matrix.load import load_matrix


def test_every_pair_that_shares_a_target_is_known_with_its_order():
    """Whoever adds a pair, or moves a patch in the file, says in patch.yaml why that is right."""
    matrix = load_matrix()
    found = set()
    for distribution, releases in matrix.supported.items():
        for release in releases:
            on = {}
            for id, entry in matrix.patches.items():
                pin = matrix.pins[distribution][release].get(id)
                if pin is not None and pin.variant is not None:
                    for target in entry.variants[pin.variant].targets:
                        on.setdefault(target, []).append(id)
            for ids in on.values():
                found.update(combinations(ids, 2))
    said = {(inside, id) for id, entry in matrix.patches.items() for inside in entry.outside_of}
    assert said == found and len(found) > 40
