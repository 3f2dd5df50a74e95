"""How a release could build multi-latent attention without Transformer Engine."""

RELEASE = "0.16.1"
INIT = "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__"
ASKED = "HAVE_TE and isinstance(self.linear_proj, TELinear)"

FIXES = {
    "asks for a class": {INIT: [(ASKED, f"isinstance(TELinear, type) and {ASKED}")]},
    "asks for the config first": {INIT: [(ASKED, f"(self.config.fp8 or self.config.fp4) and {ASKED}")]},
    "asks the module of extensions": {
        INIT: [
            (
                "    if HAVE_TE and",
                "    from megatron.core.extensions.transformer_engine import HAVE_TE as have\n    if have and HAVE_TE and",
            )
        ]
    },
    "asks for the name of the class": {INIT: [(ASKED, "HAVE_TE and 'TE' in type(self.linear_proj).__name__")]},
}
