"""`python -m shim._matrix [FILE]`: write the fast form of the matrix, here or to FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from shim._matrix.load import compile_matrix

if __name__ == "__main__":
    file, text = compile_matrix()
    Path(sys.argv[1] if sys.argv[1:] else file).write_text(text, "utf-8")
