"""docs/trainers_pins.json: what `shim audit` says of each patch at the commits of megatron-core that trainers pin.

    python -m shim.maintenance.trainer_pins slime=TREE SkyRL=TREE

TREE: the sources as the trainer has them, which is its commit with the patches that it applies to files. Trainers that
are not named keep what is there. docs/trainers.md is made of the file, so run `make docs` after it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shim._archives.trees import open_tree
from shim._matrix import load
from shim._matrix.load import load_matrix
from shim._matrix.model import Matrix
from shim._tools.audit import audit

from .docs_trainers import PINS, Trainer, read_trainers

__all__ = ["audited", "main"]


def _nothing_to_fetch(distribution: str, release: str) -> Path:
    raise FileNotFoundError(f"{distribution} {release}: no sources are fetched, so no difference is shown")


def audited(trainer: Trainer, tree: str, matrix: Matrix) -> dict[str, Any]:
    """The record of a trainer: its pin in words, and the patches by verdict, in the order of the matrix."""
    verdicts: dict[str, list[str]] = {}
    for finding in audit(matrix, open_tree(tree, _nothing_to_fetch), _nothing_to_fetch).findings:
        verdicts.setdefault(finding.verdict, []).append(finding.id)
    return {"pin": trainer.pin, "verdicts": dict(sorted(verdicts.items()))}


def _written(records: Mapping[str, Any]) -> str:
    return json.dumps(dict(sorted(records.items())), indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit the trees that are named, and write the file. 2 if a name is no trainer with a pin."""
    docs = load.PACKAGE.parent / "docs"
    trainers = {trainer.name: trainer for trainer in read_trainers(docs / "trainers.yaml") if trainer.pin}
    given = dict(each.partition("=")[::2] for each in (sys.argv[1:] if arguments is None else arguments))
    unknown = [name for name, tree in given.items() if name not in trainers or not tree]
    if unknown or not given:
        print(f"give NAME=TREE, of {', '.join(trainers)}; not {', '.join(unknown) or 'nothing'}", file=sys.stderr)
        return 2
    file, matrix = docs / PINS, load_matrix()
    records = json.loads(file.read_text("utf-8")) if file.exists() else {}
    records |= {name: audited(trainers[name], tree, matrix) for name, tree in given.items()}
    file.write_text(_written(records), "utf-8")
    print(f"wrote docs/{PINS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
