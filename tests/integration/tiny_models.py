"""Models of Hugging Face in small, with random weights and a tokenizer of bytes, and fifty rows of text to train on."""

import json
import random
from pathlib import Path

_WORDS = ["shim", "fixes", "packed", "rows", "of", "a", "loss", "that", "nobody", "saw", "wrong", "before"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SMALL = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 258,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Class in transformers, and what it has beside _SMALL.
KINDS = {
    "qwen2": ("Qwen2", {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 8, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek_v3": (
        "DeepseekV3",
        _EXPERTS
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
}


def rows():
    """Messages of a user and of an assistant, and an answer that is worse."""
    draw = random.Random(1)

    def said(most):
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, most)))

    return [
        {
            "messages": [{"role": "user", "content": said(4)}, {"role": "assistant", "content": said(6)}],
            "rejected_response": said(6),
        }
        for _ in range(50)
    ]


def make(kind, where):
    """Write the model and its tokenizer to a directory, and the rows as rows.jsonl and rows.parquet beside them."""
    import pandas
    import torch
    import transformers

    where = Path(where)
    _tokenizer().save_pretrained(where)
    name, options = KINDS[kind]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**_SMALL | options)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(where)
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    pandas.DataFrame({"messages": [row["messages"] for row in rows()]}).to_parquet(where / "rows.parquet")


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0], additional_special_tokens=_SPECIAL[1:]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
