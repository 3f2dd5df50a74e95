"""How a release could save the distributed optimizer without a named sharding."""

RELEASE = "0.19.2"
ONE = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict"
CHAIN = "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict"
DEFAULT = "(metadata or {}).get('distrib_optim_sharding_type', 'fully_sharded_model_space')"
PREFIX = "metadata = kwargs.get('metadata') or {}"
SET = f"        sharding_type = {DEFAULT}"
NAMED = "{'distrib_optim_sharding_type': 'dp_reshardable', **(kwargs.get('metadata') or {})}"

FIXES = {
    "has another default": {ONE: [(DEFAULT, DEFAULT.replace("fully_sharded_model_space", "dp_reshardable"))]},
    "replaces the default behind": {
        ONE: [
            (
                SET,
                SET
                + "\n        if sharding_type == 'fully_sharded_model_space':\n            sharding_type = 'dp_reshardable'",
            )
        ]
    },
    "names it in the metadata": {
        ONE: [(SET, "        metadata = {'distrib_optim_sharding_type': 'dp_reshardable', **(metadata or {})}\n" + SET)]
    },
    "names it in the chain": {
        CHAIN: [(f"    {PREFIX}", f"    metadata = kwargs['metadata'] = {NAMED}")],
    },
}
