"""Which tokens of a packed row a context-parallel rank holds."""

import torch


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def places_of(total, slots, rank, ranks, partition):
    """Told piece by piece: of the whole row, or of each of its slots."""
    places, start = [], 0
    for length in [total] if partition == "row" else slots:
        share = length // ranks
        front, tail = (share + 1) // 2, share // 2
        places += range(start + rank * front, start + (rank + 1) * front)
        behind = start + ranks * front + (ranks - 1 - rank) * tail
        places += range(behind, behind + tail)
        start += length
    return torch.tensor(places, dtype=torch.long)
