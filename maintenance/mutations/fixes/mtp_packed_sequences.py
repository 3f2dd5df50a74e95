"""How a release could roll packed rows with padding between sequences."""

RELEASE = "0.19.2"
MTP = "megatron.core.transformer.multi_token_prediction:"
PACKED, ROLL, LOSS = f"{MTP}_roll_tensor_packed_seq", f"{MTP}roll_tensor", f"{MTP}process_mtp_loss"
EMBEDDINGS = f"{MTP}MultiTokenPredictionLayer._get_embeddings"
READ = "cu_seqlens = packed_seq_params.cu_seqlens_q\n"
PADDED = "packed_seq_params.cu_seqlens_q_padded"
CALL = "_roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)"
WITH = (
    "    if packed_seq_params is not None and {0} is not None:\n"
    "        import dataclasses\n"
    "        {1} = dataclasses.replace(packed_seq_params, cu_seqlens_q={0})\n"
).format

FIXES = {
    "rolls between the padded offsets": {
        PACKED: [(READ, f"cu_seqlens = packed_seq_params.cu_seqlens_q if {PADDED} is None else {PADDED}\n")]
    },
    "finds the padded offsets by their names": {
        PACKED: [
            (
                READ,
                "offsets = [getattr(packed_seq_params, f'cu_seqlens_q{end}') for end in ('_padded', '')]\n"
                "    cu_seqlens = next((found for found in offsets if found is not None))\n",
            )
        ]
    },
    "gives the roll padded offsets": {
        ROLL: [
            (
                f"        return {CALL}",
                WITH(PADDED, "padded").replace("\n    ", "\n        ").replace("    if", "        if", 1)
                + "        else:\n            padded = packed_seq_params\n"
                f"        return {CALL.replace('packed_seq_params, cp', 'padded, cp')}",
            )
        ]
    },
    "has padded offsets from the first roll on": {
        LOSS: [
            ("    mtp_labels = labels.clone()", WITH(PADDED, "packed_seq_params") + "    mtp_labels = labels.clone()")
        ],
        EMBEDDINGS: [
            ("    input_ids, _ = roll_tensor", WITH(PADDED, "packed_seq_params") + "    input_ids, _ = roll_tensor")
        ],
    },
    "has padded offsets under another name": {
        ROLL: [
            (
                "    if packed_seq_params is not None:",
                WITH(PADDED, "packed_seq_params") + "    if packed_seq_params is not None:",
            )
        ]
    },
}
