"""Which patches concern a run, by what is known of it and by their `concerns` (see shim._matrix.concerns)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shim._errors import OptionError
from shim._matrix.concerns import WORDS
from shim._matrix.spelling import did_you_mean

__all__ = [
    "NO",
    "SIZES",
    "UNKNOWN",
    "UNSAID",
    "YES",
    "Facts",
    "Run",
    "facts_from",
    "given_facts",
    "run_named",
    "setting_names",
    "words_of",
]

YES, NO, UNKNOWN = "yes", "no", "unknown"

Facts = Mapping[str, bool]  # a word of WORDS -> whether it holds. A word that is absent is not known.


@dataclass(frozen=True)
class Run:
    """What is known of a run. `words`: it, in a few words. `notes`: sentences on how that is known."""

    facts: Facts
    words: str
    notes: tuple[str, ...] = ()

    def concern_of(self, concerns: Iterable[Iterable[str]]) -> str:
        """YES if all words of an alternative hold, NO if each alternative has one that does not, else UNKNOWN."""
        found = [_all(words, self.facts) for words in concerns] or [None]
        return YES if True in found else UNKNOWN if None in found else NO

    def words_that_would(self, concerns: Iterable[Iterable[str]]) -> tuple[str, ...]:
        """The words, each of which alone would make `concern_of` YES. () if it is not NO."""
        concerns = [tuple(words) for words in concerns]
        if self.concern_of(concerns) != NO:
            return ()
        open_ones = [[word for word in words if not self.facts.get(word)] for words in concerns]
        return tuple(dict.fromkeys(words[0] for words in open_ones if len(words) == 1))

    def missing_words(self, concerns: Iterable[Iterable[str]]) -> tuple[str, ...]:
        """The words that are not known and keep `concern_of` from a verdict; () if it has one."""
        concerns = [tuple(words) for words in concerns]
        if self.concern_of(concerns) != UNKNOWN:
            return ()
        open_ones = [words for words in concerns if _all(words, self.facts) is None]
        return tuple(dict.fromkeys(word for words in open_ones for word in words if word not in self.facts))


def _all(words: Iterable[str], facts: Facts) -> bool | None:
    found = [facts.get(word) for word in words]
    return False if False in found else None if None in found else True


# What a user names: shim plan --for packed,lora,tp

OTHER_NAMES = {
    "thd": "packed",
    "packing": "packed",
    "padding-free": "packed",
    "peft": "lora",
    "frozen": "lora",
    "adapters": "lora",
    "experts": "moe",
    "hybrid": "mamba",
    "vlm": "mrope",
    "checkpointing": "recompute",
    "fp4": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp8",
    "resume": "checkpoint",
    "save": "checkpoint",
    "replay": "router-replay",
    "cuda-graphs": "cuda-graph",
    "megatron-fsdp": "fsdp",
    "cpu-offloaded-optimizer": "offloaded-optimizer",
    "r3": "router-replay",
}
IMPLIED = {"sp": ("tp",), "layout": ("pp",), "router-replay": ("moe",)}
OF_ENVIRONMENT = ("te", "no-te")
UNSAID = ("any", *OF_ENVIRONMENT)  # the words that need not be said of a run


def given_facts(te_is_installed: bool) -> dict[str, bool]:
    """What holds of every run with this environment: the words of UNSAID."""
    return {"any": True, "te": te_is_installed, "no-te": not te_is_installed}


def run_named(text: str, te_is_installed: bool) -> Run:
    """The run that is what `text` names, words with commas between, and nothing else. OptionError for other words."""
    facts = {**dict.fromkeys(WORDS, False), **given_facts(te_is_installed)}
    for given in text.replace(",", " ").lower().split():
        word = OTHER_NAMES.get(given.replace("_", "-"), given.replace("_", "-"))
        if word not in WORDS or word in OF_ENVIRONMENT:
            known = [word for word in WORDS if word not in OF_ENVIRONMENT]
            raise OptionError(
                f"--for does not know {given!r}; {did_you_mean(given, [*known, *OTHER_NAMES])} "
                f"Words are {', '.join(known)}."
            )
        facts.update(dict.fromkeys([word, *IMPLIED.get(word, ())], True))
    named = [word for word in WORDS if facts[word] and word not in UNSAID]
    if not named:
        raise OptionError("--for is empty; name what you train, such as --for packed,lora,tp")
    return Run(facts, f"a run with {', '.join(named)}")


# What settings say: the names of megatron-core's config and arguments, and those of trainers

_OFF = ("", "0", "0.0", "false", "no", "none", "null", "off", "disabled")


def _on(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() not in _OFF
    return bool(value)


def _above_one(value: Any) -> bool:
    return re.fullmatch(r"[0-9]+", str(value)) is not None and int(str(value)) > 1


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: str(getattr(value, "name", value)).lower() in names


def _names(part: str) -> Callable[[Any], bool]:
    return lambda value: part in str(value).lower()


# A word holds if all settings of one of its entries are as they should be.
Entry = Mapping[str, Callable[[Any], bool]]
_SETTINGS: Mapping[str, tuple[Entry, ...]] = {
    "mtp": ({"mtp_num_layers": _on},),
    "moe": ({"num_moe_experts": _on}, {"num_experts": _on}),
    "router-replay": (
        {"moe_enable_routing_replay": _on},
        {"router_replay.mode": _on},
        {"use_rollout_routing_replay": _on},
    ),
    "mla": ({"multi_latent_attention": _on},),
    "gated-attention": ({"attention_output_gate": _on},),
    "mamba": ({"is_hybrid_model": _on}, {"hybrid_override_pattern": _on}, {"hybrid_layer_pattern": _on}),
    "gdn": (
        {"experimental_attention_variant": _is("gated_delta_net")},
        {"linear_attention_type": _is("gated_delta_net")},
    ),
    "dsa": ({"experimental_attention_variant": _is("dsa")},),
    "mrope": ({"mrope_section": _on}, {"position_embedding_type": _is("mrope")}),
    "fused-rope": ({"apply_rope_fusion": _on},),
    "fp32-residual": ({"fp32_residual_connection": _on},),
    "expert-bias": ({"moe_router_enable_expert_bias": _on},),
    "per-token-loss": ({"calculate_per_token_loss": _on},),
    "max-logit": ({"log_max_attention_logit": _on}, {"qk_clip": _on}),
    "packed": (
        {"packing": _on},
        {"padding_free": _on},
        {"use_remove_padding": _on},
        {"sequence_packing": _on},
        {"sequence_packing.enabled": _on},
        {"qkv_format": _is("thd")},
    ),
    "lora": (
        {"lora_rank": _on},
        {"lora.rank": _on},
        {"train_type": _is("lora", "adalora", "longlora")},
        {"tuner_type": _is("lora", "adalora", "longlora")},
        {"lora.enabled": _on},
        {"lora_cfg.enabled": _on},
        {"peft.enabled": _on},
        {"peft_scheme": _on},
    ),
    "recompute": (
        {"recompute_granularity": _on},
        {"moe_layer_recompute": _on},
        {"activation_checkpointing": _on},
        {"recompute_activations": _on},
    ),
    "label-smoothing": ({"label_smoothing": _on}, {"label_smoothing_factor": _on}),
    "fused-loss": ({"cross_entropy_loss_fusion": _on, "cross_entropy_fusion_impl": _is("te")},),
    "tp": ({"tensor_model_parallel_size": _above_one}, {"tensor_parallel_size": _above_one}),
    "sp": ({"sequence_parallel": _on},),
    "cp": ({"context_parallel_size": _above_one},),
    "pp": ({"pipeline_model_parallel_size": _above_one}, {"pipeline_parallel_size": _above_one}),
    "layout": ({"pipeline_model_parallel_layout": _on},),
    "ep": ({"expert_model_parallel_size": _above_one}, {"expert_parallel_size": _above_one}),
    "fp8": ({"fp8": _on}, {"fp4": _on}, {"fp8_format": _on}, {"fp4_format": _on}, {"fp8_cfg.enabled": _on}),
    "cuda-graph": ({"enable_cuda_graph": _on}, {"external_cuda_graph": _on}, {"cuda_graph_impl": _on}),
    "distributed-optimizer": ({"use_distributed_optimizer": _on},),
    "offloaded-optimizer": ({"optimizer_cpu_offload": _on},),
    "muon": ({"optimizer": _names("muon")}, {"optimizer.type": _names("muon")}),
    "fsdp": ({"use_megatron_fsdp": _on}, {"use_custom_fsdp": _on}),
    "param-groups": ({"decoupled_lr": _on}, {"vit_lr": _on}, {"aligner_lr": _on}),
    "checkpoint": (
        {"save_interval": _on},
        {"save_steps": _on},
        {"save_freq": _on},
        {"checkpointing.enabled": _on},
        {"load": _on},
        {"resume_from_checkpoint": _on},
    ),
    "datasets": ({"data_path": _on}, {"data_args_path": _on}, {"train_data_path": _on}),
}
SIZES = ("tp", "cp", "pp", "ep")  # 1 in every trainer that does not say otherwise


def facts_from(read: Callable[[str], Sequence[Any]], words: Iterable[str] = _SETTINGS) -> dict[str, bool]:
    """What settings say of each of `words`. Nothing of a word whose settings are all absent.

    read: the values of a setting, by its name or by one section and its name (`peft.enabled`). Several models of a run
        may each have one.
    """
    found = {word: [_holds(entry, read) for entry in _SETTINGS[word]] for word in words}
    return {word: True in holds for word, holds in found.items() if set(holds) != {None}}


def _holds(entry: Entry, read: Callable[[str], Sequence[Any]]) -> bool | None:
    values = [(read(name), holds) for name, holds in entry.items()]
    if not all(given for given, _ in values):
        return None
    return all(any(map(holds, given)) for given, holds in values)


def words_of(names: Iterable[str]) -> set[str]:
    """The words that settings of these names may decide."""
    given = set(names)
    return {word for word, entries in _SETTINGS.items() if any(given & entry.keys() for entry in entries)}


def setting_names() -> set[str]:
    """The names that `facts_from` reads, without the section before."""
    return {name.rpartition(".")[2] for entries in _SETTINGS.values() for entry in entries for name in entry}
