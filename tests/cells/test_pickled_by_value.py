"""What cloudpickle sends by value of a module of megatron-core, it sends with shim applied too.

Ray and others pickle functions of `register_pickle_by_value` modules with the globals that they read.
"""

import sys

import cloudpickle
from contract_cases import import_targets

import shim
from shim._engine.engine import ENGINE
from shim._engine.names import unwrap

CELLS = {"0.14.0": "all", "0.19.2": "all"}

# What these patches keep of a process, or read of torch's, has no value to send.
LEFT = {"moved-symbols", "mtp-loss-options", "paged-stash", "fused-linear-logprob"}


def sends(value):
    try:
        return bool(cloudpickle.dumps(value))
    except Exception:
        return False


def test_what_stock_sends_by_value_is_sent_with_shim_too():
    import_targets(shim.plan())
    modules = []
    with shim.patched():
        chains = [chain for chain in ENGINE.binder.chains.values() if chain.top is not chain.base]
        chains = [chain for chain in chains if LEFT.isdisjoint(layer.patch for layer in chain.layers)]
        modules = [sys.modules[name] for name in {chain.target.partition(":")[0] for chain in chains}]
        try:
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            refused = [chain.target for chain in chains if not sends(unwrap(chain.top)) and sends(unwrap(chain.base))]
            assert not refused
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
