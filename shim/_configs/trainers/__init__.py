"""One table of facts for each trainer: its settings that say what concerns a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shim._configs.settings import MEGATRON, Table

__all__ = ["ONE", "SIZES", "Trainer"]

SIZES = ("tp", "cp", "pp", "ep")
ONE = dict.fromkeys(SIZES, False)  # the defaults of a trainer whose parallel sizes are 1 unless it is told otherwise


@dataclass(frozen=True)
class Trainer:
    """What is known of a trainer. The conditions are those of shim._configs.settings.

    marks: settings, or ends of sections with settings, by any of which its files are known.
    programs: words in a command, by any of which its scripts are known.
    fork_of: the trainer whose marks it has. Of a file with these it is the trainer if the file has its name.
    settings: the conditions of each word, instead of those of megatron-core.
    left_out: sections of engines that generate, and of other backends.
    engines: keys of a section that name its engine. The section counts if the value has "megatron" in it.
    with_megatron, without: conditions that say whether it trains with megatron at all.
    by_default: what holds of a word if no setting decides it. Nothing of a word whose default comes from elsewhere.
    without_by_default: whether a script trains without megatron unless a setting says otherwise.
    implied: word -> the word from which it follows, as sequence parallelism from tensor parallelism.
    configs: program -> the package and the name of the config that it reads.
    sizes_from: where sizes come from that FILE does not set, if not from defaults.
    """

    name: str
    marks: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    fork_of: str = ""
    settings: Table = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    with_megatron: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    by_default: Mapping[str, bool] = field(default_factory=dict)
    without_by_default: bool = False
    implied: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    sizes_from: str = ""

    @property
    def table(self) -> Table:
        return {**MEGATRON, **self.settings}


GENERATES = ("rollout", "generation", "vllm", "vllm_cfg", "vllm_kwargs", "sglang", "inference", "inference_engine")
NO_DATASETS = {"datasets": False}  # it has data sets of its own
