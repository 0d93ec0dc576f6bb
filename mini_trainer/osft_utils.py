"""Red Hat's table of the matrices that OSFT decomposes, by family of models: training_hub estimates memory with it.

Training does not read it: by default every linear layer of the blocks is decomposed (docs/reference/osft.md).
"""

LLAMA = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]

MODEL_CONFIGS: dict[str, dict[str, list[str]]] = {
    family: {"patterns": patterns}
    for family, patterns in {
        **dict.fromkeys(("llama", "mistral", "qwen", "gemma", "granite", "default"), LLAMA),
        "qwen3_5": [*LLAMA, "linear_attn.out_proj"],
        "phi3": ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
        "opt": [*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "fc1", "fc2"],
        "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
        "gpt-j": [*(f"attn.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.fc_in", "mlp.fc_out"],
        "gpt-neo": [*(f"attn.attention.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.c_fc", "mlp.c_proj"],
        "gpt-oss": [f"self_attn.{name}_proj" for name in "qkvo"],
    }.items()
}
