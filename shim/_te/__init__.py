"""What a megatron-core loses on a Transformer Engine, in silence: measured, and looked up."""
