"""Serve checkpoints of OldLlama, whose config.json has GPT-2's names for the sizes, as models of the Llama family."""

from minisgl import hookimpl

NAMES = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


@hookimpl
def minisgl_read_config(raw):
    if raw.get("architectures") != ["OldLlama"]:
        return None
    renamed = {NAMES.get(name, name): value for name, value in raw.items()}
    return {**renamed, "architectures": ["LlamaForCausalLM"]}
