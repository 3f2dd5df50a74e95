"""Lost features: those that megatron-core silently switches off, because the TE release lacks a name."""
