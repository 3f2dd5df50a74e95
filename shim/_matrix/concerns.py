"""The words in which a patch says which runs it concerns, and whether it concerns a run of which something is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shim._errors import OptionError
from shim._printing.printable import did_you_mean
from shim._record import record

__all__ = [
    "IMPLIED",
    "NO",
    "UNKNOWN",
    "UNSAID",
    "WORDS",
    "YES",
    "Facts",
    "Run",
    "given_facts",
    "is_word",
    "run_named",
    "run_of",
    "words_named",
]

# A size counts above 1. "any" is every run; "own-code" is one whose trainer calls or subclasses what the patch adds.
WORDS = {
    "any": "every run",
    "own-code": "a trainer's own code",
    "config-override": "shim.config_override",
    "te": "Transformer Engine",
    "no-te": "no Transformer Engine",
    "mtp": "multi-token prediction",
    "moe": "mixture of experts",
    "router-replay": "router replay",
    "expert-bias": "moe_router_enable_expert_bias",
    "padding-mask": "a padding mask",
    "mla": "multi-latent attention",
    "gated-attention": "gated attention",
    "mamba": "Mamba layers, as in hybrid models",
    "gdn": "gated delta net",
    "dsa": "DeepSeek sparse attention",
    "mrope": "multimodal rotary positions",
    "fused-rope": "fused rotary embeddings",
    "fp32-residual": "fp32_residual_connection",
    "max-logit": "log_max_attention_logit",
    "packed": "packed rows (THD)",
    "lora": "LoRA, or other frozen weights",
    "recompute": "activation recompute",
    "label-smoothing": "label smoothing",
    "per-token-loss": "calculate_per_token_loss",
    "fused-loss": "Transformer Engine's fused cross entropy",
    "tp": "tensor parallelism",
    "sp": "sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "layout": "pipeline_model_parallel_layout",
    "ep": "expert parallelism",
    "fp8": "FP8 or FP4",
    "cuda-graph": "CUDA graphs",
    "distributed-optimizer": "the distributed optimizer",
    "offloaded-optimizer": "the CPU-offloaded optimizer",
    "muon": "the Muon optimizer",
    "fsdp": "Megatron-FSDP",
    "param-groups": "parameter groups with separate learning rates",
    "checkpoint": "saving or loading a checkpoint",
    "datasets": "megatron-core's own datasets, such as GPTDataset",
}

YES, NO, UNKNOWN = "yes", "no", "unknown"

Facts = Mapping[str, bool]  # a word of WORDS -> whether it holds. A word that is absent is not known.


@record
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


def is_word(text: str) -> bool:
    """Whether the text is one of the words, or another name of one."""
    word = text.lower().replace("_", "-")
    return word in WORDS or word in OTHER_NAMES


def words_named(text: str, what: str = "--for") -> tuple[str, ...]:
    """The words in `text`, with commas between, and those that they imply. OptionError for others; `what` gave them."""
    found: set[str] = set()
    for given in text.replace(",", " ").lower().split():
        word = OTHER_NAMES.get(given.replace("_", "-"), given.replace("_", "-"))
        if word not in WORDS or word in OF_ENVIRONMENT:
            known = [word for word in WORDS if word not in OF_ENVIRONMENT]
            raise OptionError(
                f"{what} does not know {given!r}; {did_you_mean(given, [*known, *OTHER_NAMES])} "
                f"Words are {', '.join(known)}."
            )
        found.update([word, *IMPLIED.get(word, ())])
    named = tuple(word for word in WORDS if word in found)
    if not named:
        raise OptionError(f"{what} is empty; name what you train, such as packed,lora,tp")
    return named


def run_named(text: str, te_is_installed: bool) -> Run:
    """The run that is what `text` names, words with commas between, and nothing else. OptionError for other words."""
    return run_of(words_named(text), te_is_installed)


def run_of(named: Iterable[str], te_is_installed: bool) -> Run:
    """The run that has these words of `words_named`, and no other."""
    facts = {**dict.fromkeys(WORDS, False), **given_facts(te_is_installed), **dict.fromkeys(named, True)}
    return Run(facts, f"a run with {', '.join(word for word in named if word not in UNSAID) or 'none of the words'}")
