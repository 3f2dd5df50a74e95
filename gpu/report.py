"""What a run of gpu/run.sh has shown, into docs/gpu.json and from there into the pages and README.

    python gpu/report.py DIRECTORY      with log.txt and results.jsonl of the run

Refuses, and changes nothing, if the run was dry or without a GPU, if it was of other sources than these, or if a result
is not what its output in the log says. `make docs` writes the pages again from docs/gpu.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from steps import READERS, TOP, said_in, tree_digest

from shim.maintenance import docs
from shim.maintenance.docs_gpu import RECORD

STATES = ("ended", "over its limit", "cut")


class NoRunError(ValueError):
    """There is no run behind these results."""


def record_of(directory: Path, tree: str) -> dict[str, Any]:
    """The record of the run in this directory, of sources with this digest.

    Raises NoRunError if there is none.
    """
    results, log = directory / "results.jsonl", directory / "log.txt"
    for file in (results, log):
        if not file.is_file():
            raise NoRunError(f"{file} is not there: gpu/run.sh writes it")
    machine, *found = [json.loads(line) for line in results.read_text("utf-8").splitlines()] or [{}]
    if any(each.get("dry") for each in (machine, *found)):
        raise NoRunError("this was a dry run")
    if machine.get("step") != "machine" or not machine.get("gpu"):
        raise NoRunError("this run had no GPU")
    if machine.get("tree") != tree:
        raise NoRunError(f"this run was of the sources {machine.get('tree')}, and these are {tree}: check out those")
    text = log.read_text("utf-8")
    ran = [each for each in found if each["state"] in STATES]
    if not ran:
        raise NoRunError("no step has run")
    for each in ran:
        said = READERS[each["kind"]](said_in(text, each["step"]))
        # As JSON, because that is what was written.
        odd = [name for name, value in json.loads(json.dumps(said)).items() if each.get(name) != value]
        if odd:
            raise NoRunError(f"{each['step']}: {', '.join(odd)} are not what the log says")
    return {"machine": machine, "steps": found}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the results of a run on a GPU into the documents.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    try:
        record = record_of(directory, tree_digest())
    except NoRunError as error:
        print(f"Nothing was written: {error}.")
        return 1
    (TOP / "docs" / RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return docs.main([])


if __name__ == "__main__":
    raise SystemExit(main())
