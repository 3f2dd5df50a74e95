"""How a release could give each layer its own entry of cp_comm_type."""

RELEASE = "0.16.1"
INIT = "megatron.core.transformer.transformer_layer:TransformerLayer.__init__"
ENTRY = "config.cp_comm_type[self.layer_number]"
SET = f"            attention_optional_kwargs['cp_comm_type'] = {ENTRY}"
NEXT = "    attention_optional_kwargs['pg_collection'] = pg_collection"
CONFIG = "    attention_optional_kwargs = {}"

FIXES = {
    "takes the number less one": {INIT: [(ENTRY, "config.cp_comm_type[self.layer_number - 1]")]},
    "counts from zero in a name": {
        INIT: [
            (
                SET,
                "            index = self.layer_number - 1\n            attention_optional_kwargs['cp_comm_type'] = config.cp_comm_type[index]",
            )
        ]
    },
    "takes the list first": {
        INIT: [
            (
                SET,
                "            kinds = config.cp_comm_type\n            attention_optional_kwargs['cp_comm_type'] = kinds[self.layer_number - 1]",
            )
        ]
    },
    "has a list with an entry before the first": {
        INIT: [
            (
                SET,
                "            kinds, config.cp_comm_type = (config.cp_comm_type, [None, *config.cp_comm_type])\n"
                + SET
                + "\n            config.cp_comm_type = kinds",
            )
        ]
    },
    "corrects it behind": {
        INIT: [
            (SET, "            attention_optional_kwargs['cp_comm_type'] = None"),
            (
                NEXT,
                "    if isinstance(attention_optional_kwargs.get('cp_comm_type', ''), type(None)):\n"
                "        attention_optional_kwargs['cp_comm_type'] = self.config.cp_comm_type[self.layer_number - 1]\n"
                + NEXT,
            ),
        ]
    },
    "corrects what stays as it was": {
        INIT: [
            (
                SET,
                SET.replace(
                    "self.layer_number]", "self.layer_number] if self.layer_number < len(config.cp_comm_type) else None"
                ),
            ),
            (
                NEXT,
                "    if isinstance(self.config.cp_comm_type, list):\n"
                "        attention_optional_kwargs['cp_comm_type'] = self.config.cp_comm_type[self.layer_number - 1]\n"
                + NEXT,
            ),
        ]
    },
    "counts the layer from zero for a moment": {
        INIT: [(SET, "            self.layer_number -= 1\n" + SET + "\n            self.layer_number += 1")]
    },
}
