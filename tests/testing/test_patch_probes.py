"""The probes of patches, on small modules: True of a right function, False of a wrong one, else why it cannot tell.

Those that train a model beside an override are in tests/cells/test_effect.py. Each probe is named here or there.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
import yaml
from unit_helpers import REPOSITORY

from shim._engine.models import run

torch = pytest.importorskip("torch")

BY_TRAINING = {"mtp-recompute", "mtp-packed-sequences", "frozen-recompute", "mtp-loss-cp", "paged-stash"}
IN_CELLS = {
    "yarn-none-fields",
    "rope-thd",
    "rope-fusion",
    "fp32-residual",
}  # test_yarn_none_fields.py, test_rope_thd_tried.py and so on
PATCHES = REPOSITORY / "patches"
WITH_PROBE = {
    path.parent.name.replace("_", "-")
    for path in PATCHES.glob("*/*/patch.yaml")
    if "probe" in yaml.safe_load(path.read_text("utf-8"))
}
BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock._get_layer"
CANNOT_TELL = "cannot tell"


def verdict(id, module, method="module:Class.method", models=()):
    """True, False, or CANNOT_TELL if the probe gives a reason in place of a verdict."""
    place = importlib.import_module(f"shim.patches.megatron_core.{id.replace('-', '_')}")
    found, why = run(place.probe, module, method, list(models))
    assert "raised" not in why, why
    assert (found is None) == bool(why)
    return CANNOT_TELL if found is None else found


class Module(torch.nn.Module):
    def __init__(self, config=None, **attributes):
        super().__init__()
        self.config = SimpleNamespace(**(config or {}))
        for name, value in attributes.items():
            setattr(self, name, value)


def group(size):
    return SimpleNamespace(size=lambda: size)


# Probes that ask the config and the groups, and leave what they cannot run

STILL = {
    "frozen-recompute": [
        (Module({"recompute_granularity": None, "recompute_modules": None}, layers=[]), True),
        (Module({"recompute_granularity": "full", "recompute_modules": None}, trained=torch.nn.Linear(1, 1)), True),
    ],
    "packed-seq-aux-loss": [
        (Module({"num_moe_experts": experts, "moe_router_load_balancing_type": kind}), said)
        for experts, kind, said in (
            (None, "seq_aux_loss", True),
            (4, "aux_loss", True),
            (4, "seq_aux_loss", CANNOT_TELL),
            (4, ["aux_loss", "seq_aux_loss"], CANNOT_TELL),
        )
    ],
    "mla-rope-table": [
        (Module(cp_group=None), True),
        (Module(cp_group=group(1)), True),
        (Module(cp_group=group(2)), CANNOT_TELL),
    ],
    "mrope-thd": [
        (Module({"context_parallel_size": 2}, position_embedding_type="rope"), True),
        (Module({"context_parallel_size": 1}, position_embedding_type="mrope"), True),
        (Module({"context_parallel_size": 2}, position_embedding_type="mrope"), CANNOT_TELL),
        (SimpleNamespace(cp_group=group(1)), True),  # an embedding has no config
        (SimpleNamespace(cp_group=group(2)), CANNOT_TELL),
    ],
    "sp-unscattered-embeddings": [
        (Module({"sequence_parallel": True}, pre_process=True, embedding=SimpleNamespace()), True),
        (Module({"sequence_parallel": False}, pre_process=True, embedding=None), True),
        (Module({"sequence_parallel": True}, pre_process=False), True),
        *(
            (
                Module(
                    {"sequence_parallel": True},
                    pre_process=True,
                    embedding=SimpleNamespace(scatter_to_sequence_parallel=scatters),
                ),
                said,
            )
            for scatters, said in ((True, True), (False, CANNOT_TELL))
        ),
    ],
    "recompute-padding-mask": [
        (
            Module(
                {
                    "recompute_method": method,
                    "recompute_num_layers": layers,
                    "recompute_granularity": granularity,
                    "num_moe_experts": experts,
                },
                layers=[1, 2],
            ),
            said,
        )
        for method, layers, granularity, experts, said in (
            ("block", 1, "full", 4, CANNOT_TELL),
            ("block", 2, "full", 4, True),
            ("uniform", 1, "full", 4, True),
            ("block", 1, "selective", 4, True),
            ("block", 1, "full", None, True),
        )
    ],
    "mla-rope-key-gradient": [
        (
            Module(
                {"kv_lora_rank": 4, "qk_pos_emb_head_dim": 2, "sequence_parallel": sequence_parallel},
                pg_collection=SimpleNamespace(tp=group(ranks)),
                linear_kv_down_proj=torch.nn.Linear(3, rows),
            ),
            said,
        )
        for ranks, sequence_parallel, rows, said in (
            (1, False, 6, True),
            (2, True, 6, True),
            (2, False, 6, CANNOT_TELL),
            (2, True, 3, CANNOT_TELL),
        )
    ],
}


@pytest.mark.parametrize(
    ("id", "module", "expected"), [(id, module, said) for id, cases in STILL.items() for module, said in cases]
)
def test_a_probe_says_true_only_where_nothing_can_be_lost(id, module, expected):
    assert verdict(id, module) == expected


@pytest.mark.parametrize(
    ("sequence_parallel", "scatters", "expected"),
    [(False, False, True), (True, True, True), (True, None, True), (True, False, CANNOT_TELL)],
)
def test_mtp_layers_get_whole_rows_only_if_an_embedding_does_not_scatter(sequence_parallel, scatters, expected):
    module = Module({"sequence_parallel": sequence_parallel})
    part = Module() if scatters is None else Module(scatter_to_sequence_parallel=scatters)
    assert verdict("mtp-full-embeddings", module, models=[torch.nn.ModuleList([Module(), part])]) == expected


@pytest.mark.parametrize(
    ("method", "fp8", "expected"), [(BLOCK, None, True), (BLOCK, "e4m3", CANNOT_TELL), ("a:B.c", None, CANNOT_TELL)]
)
def test_a_block_without_fp8_loses_nothing_of_its_recompute(method, fp8, expected):
    assert verdict("fp8-fp4-recompute", Module({"fp8": fp8}), method) == expected


# Probes that run the function


def counts(self, routing, mask):
    self.local_tokens_per_expert += (routing & ~mask.reshape(-1, 1)).sum(dim=0)


def counts_padding(self, routing, mask):
    self.local_tokens_per_expert += routing.sum(dim=0)


def counts_padding_alone(self, routing, mask):
    self.local_tokens_per_expert += (routing & mask.reshape(-1, 1)).sum(dim=0)


def masks_the_first(self, routing, mask):
    counts(self, routing, mask.flip(0))


def masks_experts(self, routing, mask):
    self.local_tokens_per_expert += (routing & ~mask[: routing.shape[1]]).sum(dim=0)


def counts_twice(self, routing, mask):
    counts(self, routing, mask)
    counts(self, routing, mask)


def counts_experts_the_other_way(self, routing, mask):
    counts(self, routing.flip(1), mask)


def counts_nothing(self, routing, mask):
    pass


def counts_if_enabled(self, routing, mask):
    if self.enable_expert_bias:
        counts(self, routing, mask)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(counts, True), (counts_if_enabled, True), (counts_nothing, CANNOT_TELL)]
    + [(f, False) for f in (counts_padding, counts_padding_alone, masks_the_first, masks_experts, counts_twice)]
    + [(counts_experts_the_other_way, False)],
)
def test_expert_bias_padding(function, expected):
    """Only a router with a bias is tried, and its own counts stay."""

    class Router(Module):
        def _apply_expert_bias(self, routing_map, padding_mask=None):
            return function(self, routing_map, padding_mask)

    own = torch.tensor([7.0, 9.0])
    router = Router({"moe_router_enable_expert_bias": True}, local_tokens_per_expert=own, enable_expert_bias=False)
    assert verdict("expert-bias-padding", router) == expected
    assert router.local_tokens_per_expert is own and own.tolist() == [7.0, 9.0]
    router.config.moe_router_enable_expert_bias = False
    assert verdict("expert-bias-padding", router) is True


class Block(Module):
    """Runs its layers in chunks, as TransformerBlock does under uniform recompute."""

    end = staticmethod(lambda layers, asked: min(layers, asked))

    def forward(self, states, mask):
        chunk = self.config.recompute_num_layers
        for first in range(0, len(self.layers), chunk):
            for number in range(first, self.end(len(self.layers), first + chunk)):
                states = self.layers[number](states, mask)
                states = states[0] if isinstance(states, tuple) else states
        return states


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda layers, asked: min(layers, asked), True),
        (lambda layers, asked: asked, False),  # behind the last layer
        (lambda layers, asked: min(layers, asked) - (asked > layers), False),  # leaves the last layer out
        (lambda layers, asked: min(layers, asked - 1), False),  # and each second one
    ],
)
def test_uniform_recompute_end(end, expected):
    config = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    block = type("Theirs", (Block,), {"end": staticmethod(end)})(config, layers=[1, 2, 3])
    assert verdict("uniform-recompute-end", block) is expected
    for other in ({"recompute_method": "block"}, {"recompute_granularity": None}, {"recompute_num_layers": 3}):
        even = type("Theirs", (Block,), {"end": staticmethod(end)})({**config, **other}, layers=[1, 2, 3])
        assert verdict("uniform-recompute-end", even) is True, "it never has to end a chunk early"


def runs_the_first_for_all(self, states, mask):
    for _ in self.layers:
        states = self.layers[0](states, mask)
        states = states[0] if isinstance(states, tuple) else states
    return states


def loses_what_the_last_has_made(self, states, mask):
    outputs = [states]
    for layer in self.layers:
        made = layer(outputs[-1], mask)
        outputs.append(made[0] if isinstance(made, tuple) else made)
    return outputs[-2]


@pytest.mark.parametrize("forward", [runs_the_first_for_all, loses_what_the_last_has_made])
def test_a_block_without_chunks_of_its_own_is_judged_by_what_runs_and_what_comes_out(forward):
    config = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    block = type("Theirs", (Block,), {"forward": forward})(config, layers=[1, 2, 3])
    assert verdict("uniform-recompute-end", block) is False


def table_of(places, sections, frequencies, repeat, order=(0, 1, 2)):
    """Angles of [3, tokens] places: each section of the frequencies takes those of one kind."""
    parts = frequencies.split(sections)
    angles = torch.cat([places[kind][:, None] * part for kind, part in zip(order, parts, strict=True)], dim=-1)
    return repeat(angles)[:, None, None, :]


def interleaved(angles):
    return angles.repeat_interleave(2, dim=-1)


def halves(angles):
    return torch.cat((angles, angles), dim=-1)


@pytest.mark.parametrize("factor", [None, 2.0])
@pytest.mark.parametrize(
    ("repeat", "order", "scaled", "expected"),
    [
        (interleaved, (0, 1, 2), True, True),
        (halves, (0, 1, 2), True, False),
        (interleaved, (0, 0, 0), True, False),
        (interleaved, (2, 1, 0), True, False),
        (lambda angles: angles, (0, 1, 2), True, False),
        (interleaved, (0, 1, 2), False, None),
    ],
)
def test_mrope_rotary_interleaved(monkeypatch, repeat, order, scaled, expected, factor):
    """None: right without an interpolation factor, and wrong if it ignores one."""

    class Rotary(Module):
        def forward(self, position_ids, mrope_section):
            places = position_ids[:, 0].float()
            places = places / factor if factor and scaled else places
            return table_of(places, mrope_section, self.inv_freq, repeat, order)

    state = SimpleNamespace(model_parallel_is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    frequencies = 1.0 / 100 ** (torch.arange(6) / 6)
    rotary = Rotary(rotary_interleaved=True, inv_freq=frequencies, seq_len_interpolation_factor=factor)
    assert verdict("mrope-rotary-interleaved", rotary) is (factor is None if expected is None else expected)
    rotary.rotary_interleaved = False
    assert verdict("mrope-rotary-interleaved", rotary) is True


class TakesNoMask(Module):
    def forward(self, input_ids):
        return input_ids


class TakesAMask(Module):
    def forward(self, input_ids, padding_mask=None):
        return input_ids


@pytest.mark.parametrize(
    ("kind", "experts", "depths", "expected"),
    [
        (TakesAMask, 4, 1, CANNOT_TELL),
        (TakesNoMask, 4, 1, True),
        (TakesAMask, None, 1, True),
        (TakesAMask, 4, None, True),
    ],
)
def test_a_mask_can_be_lost_only_if_the_model_takes_one_and_has_experts_in_prediction(kind, experts, depths, expected):
    config = {"num_moe_experts": experts, "mtp_num_layers": depths}
    assert verdict("router-padding-mask", kind(config)) == expected


def test_every_probe_has_such_a_test():
    tested = {*STILL, "mtp-full-embeddings", "fp8-fp4-recompute", "expert-bias-padding", "uniform-recompute-end"}
    tested |= {"mrope-rotary-interleaved", "router-padding-mask"}
    assert WITH_PROBE - tested - BY_TRAINING == IN_CELLS
