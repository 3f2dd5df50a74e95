"""What the tests of rotary embeddings share."""


class Group:
    """A context-parallel group of one process's imagination."""

    def __init__(self, ranks=1, rank=0):
        self._ranks, self._rank = ranks, rank

    def size(self):
        return self._ranks

    def rank(self):
        return self._rank
