"""What tests of memory share."""

import weakref

import pytest


@pytest.fixture(scope="session")
def Peak():
    """A context whose `most` is the largest number of bytes that storages made inside of it held at one time.

    It sees every operation below autograd, in backward too, and every result that lies in a storage which was not
    there before; a storage counts until it is freed. Temporaries inside of one operation are not seen.
    """
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Peak(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.held = self.most = 0
            self.known = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if torch.is_tensor(value)}
            found = function(*args, **(kwargs or {}))
            for value in tree_iter(found):
                if torch.is_tensor(value) and value.untyped_storage()._cdata not in self.known | given:
                    storage = value.untyped_storage()
                    self.known.add(storage._cdata)
                    self.held += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
            self.most = max(self.most, self.held)
            return found

        def _freed(self, storage, size):
            self.known.discard(storage)
            self.held -= size

    return Peak
