"""In the place of tensorboard and matplotlib, with which ms-swift draws what it also writes into a file."""

import sys
from unittest.mock import MagicMock

for name in ("matplotlib", "matplotlib.pyplot", "torch.utils.tensorboard"):
    sys.modules[name] = MagicMock()
