"""References to pull requests, issues and commits, as version_matrix.yaml has them in words, and as links."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["linked", "segments", "short"]

# Name in the matrix -> repository on GitHub. A longer name comes before one that it ends with.
REPOSITORIES = {
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "ROCm Transformer Engine": "ROCm/TransformerEngine",
    "Transformer Engine": "NVIDIA/TransformerEngine",
    "SkyRL": "NovaSky-AI/SkyRL",
    "verl": "verl-project/verl",
    "slime": "THUDM/slime",
    "ms-swift": "modelscope/ms-swift",
    "mcore-bridge": "modelscope/mcore-bridge",
    "AReaL": "areal-project/AReaL",
}
PLACES = {"pull request": "pull", "issue": "issues", "commit": "commit"}
NUMBER = r"[0-9a-f]{10}|[0-9]+"
REFERENCE = re.compile(
    rf"(?P<name>{'|'.join(REPOSITORIES)}) (?P<kind>{'|'.join(PLACES)})s? "
    rf"(?P<numbers>(?:{NUMBER})(?:(?:, | and )(?:{NUMBER}))*)"
)
LONGEST = 110  # characters of a cell
OPEN = re.compile(r"\(([^()]*\b)?open\)")


def _links(found: re.Match[str]) -> list[tuple[str, str]]:
    """(number, address) of each thing that a reference names."""
    where = f"https://github.com/{REPOSITORIES[found['name']]}/{PLACES[found['kind']]}/"
    return [(number, where + number) for number in re.findall(NUMBER, found["numbers"])]


def segments(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces, each with the address it leads to; "" for none."""
    done = 0
    for found in REFERENCE.finditer(text):
        for number, address in _links(found):
            place = text.index(number, max(done, found.start("numbers")))
            if place > done:
                yield text[done:place], ""
            yield number, address
            done = place + len(number)
    if done < len(text):
        yield text[done:], ""


def linked(text: str) -> str:
    """The text, whose numbers are links."""
    return "".join(f"[{piece}]({address})" if address else piece for piece, address in segments(text))


def short(text: str) -> str:
    """For a cell of a table: "[Megatron-LM 6205](...), open". A text without numbers stays as it is, if it is short."""
    links = [
        f"[{found['name']} {number}]({address})"
        for found in REFERENCE.finditer(text)
        for number, address in _links(found)
    ]
    if not links:
        return text if len(text) <= LONGEST else "see below"
    return ", ".join(links + ["open"] * bool(OPEN.search(text)))
