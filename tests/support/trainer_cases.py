"""What the tests of other trainers share: what is true of each patch, and a trainer and shim in one process."""

import contextlib
import functools
import importlib

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from trainers_in_small import BLOCK, FINALIZE, RANDOM, ROUTER, Undo

import shim
from shim import testing
from shim._engine.engine import ENGINE
from shim._engine.names import MISSING, find_aliases, unwrap
from shim.patches.megatron_core._proof_rotations import Group

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
PACKED, RECOMPUTE, BIAS, ROPE_ID = "mtp-packed-sequences", "mtp-recompute", "expert-bias-padding", "rope-fusion"
COUNTS_PADDING = shim.plan()[BIAS].action == "apply"  # 0.16 to 0.19
for module in (ROUTER, "megatron.core.transformer.moe.moe_layer", BLOCK, FINALIZE, RANDOM):
    importlib.import_module(module)
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 looks it up in every step, and has it with Transformer Engine only


# The truth of each patch


def row_of(lengths=(5, 7, 4), align=4):
    return testing.pack(testing.random_sequences(lengths), align=align)


def packed_equals_alone():
    model = testing.build_gpt(mtp_num_layers=1)
    packed, alone = (run(model, row_of()) for run in (testing.run_packed, testing.run_alone))
    return testing.worst(testing.differences(packed, alone)) < 1e-6


def recompute_equals_none():
    """Of a row that a layer can be recomputed on: with padding, and with two chunks where one MTP layer has one."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    plain, again = (
        testing.run_packed(testing.build_gpt(mtp_num_layers=1, **options), row_of()) for options in ({}, full)
    )
    same = plain.grads.keys() == again.grads.keys()
    return same and all(torch.equal(plain.grads[name], again.grads[name]) for name in plain.grads)


def biased_model():
    """A mixture of experts with a bias of its experts."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_score_function": "sigmoid", "num_layers": 1}
    experts |= {"moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "none", "mtp_num_layers": None}
    return testing.build_gpt(**experts)


def padding_does_not_count():
    counts = []
    for padding in (0, 2):
        model, row = biased_model(), torch.arange(4 + padding)[None]
        mask = {"padding_mask": row >= 4} if padding else {}
        model(row, row, None, labels=row, **mask).mean().backward()
        counts.append(model.decoder.layers[0].mlp.router.local_tokens_per_expert)
    return torch.equal(*counts)


def rotation_is_per_token():
    """A fused rotation of packed rows takes no table with a row per token. The stand-in for the kernel takes none."""
    config = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=2)
    given = {} if VERSION < (0, 13) else {"cp_group": Group()}
    given |= {"t": torch.randn(8, 2, 12), "freqs": torch.randn(8, 1, 1, 8)}
    given["cu_seqlens"] = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as undo:
        undo.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", lambda t, *_, **__: t)
        undo.setattr(rope_utils, "is_te_min_version", lambda *_, **__: True, raising=False)
        undo.setattr(config, "apply_rope_fusion", True)
        return not torch.equal(rope_utils.apply_rotary_pos_emb(config=config, **given), given["t"])


@functools.cache
def alone():
    """The report of shim by itself."""
    with shim.patched() as report:
        return report


def holds(truth):
    """Whether the truth holds. Stock refuses some of it, which is no truth."""
    try:
        return truth()
    except (AssertionError, TypeError, RuntimeError, NotImplementedError):
        return False


@contextlib.contextmanager
def undoing():
    undo = Undo()
    try:
        yield undo
    finally:
        undo.undo()


@contextlib.contextmanager
def both(bind, id, first):
    """A trainer and one patch, in an order."""

    def trainer():
        bind(stack.enter_context(undoing()), [])

    def patch():
        stack.enter_context(shim.patched(only=[id], require=[id]))

    with contextlib.ExitStack() as stack:
        for enter in (trainer, patch) if first == "trainer" else (patch, trainer):
            enter()
        assert shim.check()[id].state == "applied"  # which goes around a trainer that came last
        yield


class Together:
    """A trainer and shim in one process, in an order, until the end of the with-block."""

    def __init__(self, bind, first):
        self.bind, self.first, self.undo, self.seen = bind, first, Undo(), []

    def __enter__(self):
        self.before = {t: held_at(t) for d in shim.plan().decisions.values() if d.wanted for t in loaded(d.targets)}
        self.aliases = aliases_of(self.before.values())
        try:
            for who in ("shim", "trainer") if self.first == "shim" else ("trainer", "shim"):
                shim.apply() if who == "shim" else self.bind(self.undo, self.seen)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        self.undo.undo()
        shim.revert()

    def strangers(self):
        """The names that do not hold what they held before."""
        status = shim.status()  # which takes back what a trainer's undo has put there since
        odd = [target for target, value in self.before.items() if held_at(target) is not value]
        missing = set(self.aliases) - set(aliases_of(self.before.values()))
        return [*odd, *missing, *status.lost]


def loaded(targets):
    return [target for target in targets if ENGINE.binder.loaded(target.partition(":")[0]) is not None]


def held_at(target):
    owner, name, _ = ENGINE.binder.resolve(target, may_be_missing=True)
    return vars(owner).get(name, MISSING)


def aliases_of(values):
    return [
        (getattr(owner, "__name__", owner), name)
        for owner, name, _ in find_aliases([unwrap(value) for value in values if callable(unwrap(value))])
    ]
