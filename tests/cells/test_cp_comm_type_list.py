"""cp-comm-type-list: layers of all stages take their own entries, and the config keeps its list."""

from unittest import mock

import pytest
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

import shim
from shim import testing
from shim.patches.megatron_core.cp_comm_type_list.proof import KINDS, taken
from shim.testing import Layout
from shim.testing.attention import CPUCoreAttention

CELLS = {"0.14.0": "all"}

ID = "cp-comm-type-list"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
RELEASE = tuple(int(part) for part in testing.release().split(".")[:2])
CP = {"context_parallel_size": 2}  # of the config alone: no message is sent by what builds a layer
pytestmark = pytest.mark.usefixtures("one_rank")


def applied():
    ids = [ID] if NEEDED else []
    return shim.patched(only=ids, require=ids)


def stages_on_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2, vp=2)), applied():
        return parallel_state.get_pipeline_model_parallel_rank(), taken(kinds=list("abcd"), mtp_num_layers=None, **CP)


def test_virtual_pipeline_stages(ranks2):
    assert dict(ranks2.run(stages_on_rank)) == {0: ["a", "c"], 1: ["b", "d"]}


@pytest.mark.parametrize("depths", [1, 2])
def test_multi_token_prediction(depths):
    """Its depths take the entries from the first on where they are numbered, and else that of the first layer."""
    with applied():
        found = taken(kinds=list("abcd"), mtp_num_layers=depths, **CP)
    assert found == [*"abcd", *("ab" if RELEASE >= (0, 16) else "aa")[:depths]]


@needed
def test_a_kind_for_all_layers_and_one_rank_alone_are_as_on_stock():
    for expected, options in (("p2p", {"kinds": "p2p", **CP}), ("", {"kinds": KINDS})):
        with applied():
            assert taken(mtp_num_layers=None, **options) == [expected] * 4


def config(kinds, **options):
    """A config of a model of 4 layers with these kinds, set later."""
    found = testing.build_gpt(num_layers=4, mtp_num_layers=None, **CP, **options).config
    found.cp_comm_type = kinds
    return found


def layer(config, number, submodules=None):
    from megatron.core.models.gpt import gpt_layer_specs

    if submodules is None:
        submodules = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts).submodules
        submodules.self_attention.submodules.core_attention = CPUCoreAttention
    return TransformerLayer(config, submodules, number)


@needed
def test_a_list_with_an_entry_in_front_is_as_on_stock():
    longer, found, init = config(list("-abcd")), [], CPUCoreAttention.__init__

    def recording(self, *args, cp_comm_type, **kwargs):
        found.append(cp_comm_type)
        init(self, *args, **kwargs)

    with mock.patch.object(CPUCoreAttention, "__init__", recording), applied():
        for number in (1, 4):
            layer(longer, number)
    assert found == ["a", "d"]


@needed
def test_the_config_keeps_its_list():
    """Also while the parts of the layer are built, for which experts copy the config, and after an error."""
    kinds, seen, init = list("abcd"), [], CPUCoreAttention.__init__

    def looking(self, config, *args, cp_comm_type, **kwargs):
        seen.append((cp_comm_type, config.cp_comm_type))
        init(self, config, *args, **kwargs)

    experts = config(kinds, num_moe_experts=2, moe_shared_expert_intermediate_size=8)
    with mock.patch.object(CPUCoreAttention, "__init__", looking), applied():
        built = layer(experts, 2)
        with pytest.raises(AttributeError):
            layer(experts, 3, submodules=object())
    assert seen[0][0] == "b"
    assert seen[0][1] is experts.cp_comm_type is kinds
    configs = {id(part.config): part.config for part in built.modules() if hasattr(part, "config")}
    assert {type(each.cp_comm_type) for each in configs.values()} == {list}
