"""Make tiny models, adapters and a tokenizer, with the engine's own Python: python models.py DIRECTORY.

The models have no weights: the engine makes random weights (``--load-format dummy``). The tokenizer knows only single
bytes, because prompts are token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *BYTES))}
SIZE = 64
RANK = 8
COMMON = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": 64,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    bytewise = Tokenizer(models.BPE(VOCABULARY, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    start, end, padding = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token=start, eos_token=end, pad_token=padding)


def write_adapter(directory: Path, seed: int) -> None:
    """Write a LoRA adapter of the Llama model with random weights."""
    random = torch.Generator().manual_seed(seed)
    modules = {"q_proj": SIZE, "v_proj": SIZE // 2}
    weights = {}
    for layer in range(2):
        for module, size in modules.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora"
            weights[f"{name}_A.weight"] = torch.randn(RANK, SIZE, generator=random)
            weights[f"{name}_B.weight"] = torch.randn(size, RANK, generator=random)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama",
        "bias": "none",
    }
    config |= {"r": RANK, "lora_alpha": 16, "target_modules": list(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main(home: Path) -> None:
    for name, own in MODELS.items():
        directory = home / name
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer().save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(COMMON | own))
        (directory / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    for seed, name in enumerate(("lora-a", "lora-b")):
        write_adapter(home / name, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
