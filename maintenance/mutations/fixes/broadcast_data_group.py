"""How a release could send sizes over the group of the data."""

RELEASE = "0.19.2"
DATA = "megatron.core.tensor_parallel.data:broadcast_data"
SIZES = "megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries"
CALL = "_build_key_size_numel_dictionaries(keys, data)"

FIXES = {
    "gives the group by position": {DATA: [(CALL, CALL.replace("data)", "data, tp_group)"))]},
    "gives the group in a mapping": {DATA: [(CALL, CALL.replace("data)", "data, **{'tp_group': tp_group})"))]},
    "finds the group first": {
        DATA: [
            (
                f"    key_size, key_numel, total_numel = {CALL}",
                "    tp_group = get_tensor_model_parallel_group_if_none(tp_group)\n"
                f"    key_size, key_numel, total_numel = {CALL.replace('data)', 'data, tp_group=tp_group)')}",
            )
        ]
    },
    "sets the group aside": {
        DATA: [
            (
                f"    key_size, key_numel, total_numel = {CALL}",
                "    _build_key_size_numel_dictionaries.__dict__['group'] = tp_group\n"
                f"    key_size, key_numel, total_numel = {CALL}",
            )
        ],
        SIZES: [
            (
                "    tp_group = get_tensor_model_parallel_group_if_none(tp_group)",
                "    tp_group = _build_key_size_numel_dictionaries.__dict__.pop('group', None) if tp_group is None else tp_group\n"
                "    tp_group = get_tensor_model_parallel_group_if_none(tp_group)",
            )
        ],
    },
}
