"""Lost features: what megatron-core switches off in silence, because the TE release lacks a name."""
