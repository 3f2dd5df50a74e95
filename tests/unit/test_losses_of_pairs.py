"""What two releases lose together, told by their versions alone, as a page of documentation needs it."""

from packaging.version import Version

from shim._te.features import losses_of, places, remedy_for


def test_the_losses_of_a_pair_are_told_without_an_installation():
    """Of names, but for those that megatron-core gets by without, and of drifts."""
    core, te = Version("0.17.1"), Version("2.7.0")
    found = {feature.name: feature for feature in losses_of(core, te)}
    names = {name for name in places(core, te) if (remedy_for(name, core) or {"remedy": ""})["remedy"] != "unneeded"}
    drifts = {"transformer_engine.pytorch.cpu_offload:get_cpu_offload_context"}
    assert found.keys() == names | drifts and not any(feature.fixed for feature in found.values())
    assert found[drifts.pop()].patch == "te-cpu-offload"
    assert losses_of(Version("0.11.0"), te) == ()
