"""GGUF files: read back by transformers, the weights, logits, tokenizer and template are the model's; or refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from make_tiny_model import train_tokenizer
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, change_json, save_model, save_tokenizer
from tokenizers import Regex, pre_tokenizers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.tokenization_utils_base import generate_merges

from mini_trainer.options.tools import ExportGgufOptions
from mini_trainer.tools.export_gguf import export_gguf

LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
# transformers' reader assumes head sizes of 128 and 256 and ignores the file's.
CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**SHAPE),
    "mistral": hf.MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "qwen2": hf.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**SHAPE, head_dim=128),
    "gemma3": hf.Gemma3TextConfig(**SHAPE | dict(num_hidden_layers=7), head_dim=256, sliding_window=5),
}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
MOE = hf.Qwen3MoeConfig(**SHAPE, head_dim=16, **EXPERTS)
SAMPLING = dict(do_sample=True, temperature=0.5, top_k=7, top_p=0.75, repetition_penalty=1.25)
IDS = torch.arange(3, 40)[None]
TEXTS = ("Hi", " The  answer\n is 1234, isn't it?", "żółw 🚀 한국어", "<|im_start|>user\n<s>\t", "in the  inner the")


def save(config: hf.PreTrainedConfig, path: Path) -> Path:
    """A model whose norm weights are of bf16, as in an export: then no digit is lost where 1 is added to them."""
    train_tokenizer(TEXTS * 9, vocab_size=VOCAB_SIZE - 4).save_pretrained(save_model(config, path))
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(config, root / name) for name, config in CONFIGS.items()}


def export(model_dir: Path, output: Path, dtype: str = "f32") -> Path:
    export_gguf(ExportGgufOptions(model_name_or_path=str(model_dir), output=str(output), dtype=dtype))
    return output


def read_fields(path: Path) -> dict[str, object]:
    return {name: value.contents() for name, value in gguf.GGUFReader(path).fields.items()}


def read_model(path: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_same_model(name, models, tmp_path):
    path = export(models[name], tmp_path / "model.gguf")
    model, own = read_model(path), hf.AutoModelForCausalLM.from_pretrained(models[name])
    weights = model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in own.state_dict().items())
    assert torch.equal(model(IDS).logits, own(IDS).logits)
    assert model.config.tie_word_embeddings == own.config.tie_word_embeddings
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "q8_0"])
def test_rounded_weights_are_those_of_the_gguf_package(dtype, models, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.use.exporters.gguf_file.ROW_BYTES", 2500)  # several pieces of a tensor
    path = export(models["qwen3"], tmp_path / "model.gguf", dtype)
    own = hf.AutoModelForCausalLM.from_pretrained(models["qwen3"])
    for param in own.parameters():
        if param.ndim == 2:
            # Blocks of q8_0 have 32 numbers, some rows 48.
            kind = gguf.GGMLQuantizationType["F16" if dtype == "q8_0" and param.shape[1] % 32 else dtype.upper()]
            rounded = gguf.dequantize(gguf.quantize(param.detach().numpy(), kind), kind)
            param.data.copy_(torch.from_numpy(rounded))
    assert torch.equal(read_model(path)(IDS).logits, own(IDS).logits)
    kinds = {tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"f32", dtype} | ({"f16"} if dtype == "q8_0" else set())


def test_biases_and_a_tied_head_are_written(tmp_path):
    """Transformers' reader makes a Llama without biases, and is given one that has them."""
    own = hf.AutoModelForCausalLM.from_pretrained(save(FAMILIES["llama_tied_bias"], tmp_path / "model"))
    path = export(tmp_path / "model", tmp_path / "model.gguf")
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=own)["tensors"]
    expected = own.state_dict()
    assert tensors.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def test_experts_are_three_tensors_and_their_router_stays_in_fp32(tmp_path):
    """Transformers' reader has no conversion back for experts of Qwen 3."""
    own = hf.AutoModelForCausalLM.from_pretrained(save(MOE, tmp_path / "model")).state_dict()
    path = export(tmp_path / "model", tmp_path / "model.gguf", "f16")
    tensors, fields = read_tensors(path), read_fields(path)
    for layer in range(MOE.num_hidden_layers):
        experts = own[f"model.layers.{layer}.mlp.experts.gate_up_proj"].half().numpy()
        parts = [tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), experts)
        down = own[f"model.layers.{layer}.mlp.experts.down_proj"].half().numpy()
        np.testing.assert_array_equal(tensors[f"blk.{layer}.ffn_down_exps.weight"], down)
        router = own[f"model.layers.{layer}.mlp.gate.weight"].numpy()
        np.testing.assert_array_equal(tensors[f"blk.{layer}.ffn_gate_inp.weight"], router)
    counts = [fields[f"qwen3moe.{key}"] for key in ("expert_count", "expert_used_count", "expert_feed_forward_length")]
    assert counts == [4, 2, 24]


def test_smollm_3_is_a_llama_some_of_whose_layers_do_not_rotate(tmp_path):
    shape = SHAPE | dict(num_hidden_layers=5)
    path = save(hf.SmolLM3Config(**shape), tmp_path / "model")
    output = export(path, tmp_path / "model.gguf")
    assert read_fields(output)["smollm3.block_count"] == 5
    twin = tmp_path / "llama"
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**shape, tie_word_embeddings=True))
    model.load_state_dict(hf.AutoModelForCausalLM.from_pretrained(path).state_dict())
    model.save_pretrained(save(model.config, twin))
    expected = read_tensors(export(twin, tmp_path / "llama.gguf"))
    tensors = read_tensors(output)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name])


def test_llama_3_scales_its_rotary_frequencies(tmp_path):
    path = save(hf.LlamaConfig(**SHAPE | dict(rope_parameters=LLAMA3_ROPE | dict(rope_theta=1e4))), tmp_path / "model")
    output = export(path, tmp_path / "model.gguf")
    factors = read_tensors(output)["rope_freqs.weight"]
    own = hf.AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(1e4 ** -(np.arange(0, 8, 2) / 8) / factors, own, rtol=1e-6)
    assert len(set(factors.tolist())) > 2


def test_rotary_scaling_and_windows_are_in_the_header(tmp_path):
    yarn = dict(rope_type="yarn", rope_theta=5e3, factor=4.0, original_max_position_embeddings=64, beta_fast=16.0)
    linear = dict(rope_type="linear", rope_theta=1e6, factor=8.0)
    local = dict(rope_type="default", rope_theta=1e4)
    gemma = dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=5, final_logit_softcapping=30.0)
    cases = {
        "qwen2": (
            hf.Qwen2Config(**SHAPE, rope_parameters=yarn),
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
             "rope.scaling.yarn_beta_fast": 16.0, "rope.freq_base": 5e3, "context_length": 256},
        ),
        "gemma3": (
            hf.Gemma3TextConfig(
                **SHAPE, **gemma, layer_types=["sliding_attention", "full_attention"],
                rope_parameters=dict(full_attention=linear, sliding_attention=local),
            ),
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6,
             "rope.freq_base_swa": 1e4, "attention.sliding_window": 5, "context_length": 256,
             "attention.sliding_window_pattern": [True, False], "final_logit_softcapping": 30.0},
        ),
        # llama.cpp has no window for it: within one, attention is full.
        "llama": (FAMILIES["mistral_window"], {"context_length": 5}),
    }  # fmt: skip
    for arch, (config, expected) in cases.items():
        fields = read_fields(export(save(config, tmp_path / arch), tmp_path / f"{arch}.gguf"))
        assert {key: fields[f"{arch}.{key}"] for key in expected} == expected
        assert f"{arch}.attention.sliding_window" in fields or arch != "gemma3"


# --- Tokenizers ----------------------------------------------------------------------------------------------


def make_sentencepiece(tokenizer_class: type, **options: object) -> hf.LlamaTokenizer | hf.GemmaTokenizer:
    """A tokenizer as transformers makes one of a SentencePiece model: bytes, pieces in their order, all merges."""
    pieces = ["in", "th", "er", "the", "\u2581the", "\u2581in", "inner", "inn", "an", "ans", "we", "answer"]
    specials = ["<pad>", "<unk>", "<s>", "</s>"]
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyzTHI.,'?"]
    vocab = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    ids = {text: i for i, text in enumerate(vocab)}
    merges = generate_merges(ids, {text: -float(i) for i, text in enumerate(pieces)}, specials)
    names = dict(pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer = tokenizer_class(vocab=ids, merges=merges, **names, **options)
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def read_tokenizer(path: Path):
    return hf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize(("family", "tokenizer_class"), [("llama", hf.LlamaTokenizer), ("gemma3", hf.GemmaTokenizer)])
def test_a_sentencepiece_tokenizer_is_read_back(family, tokenizer_class, tmp_path, capsys):
    config = CONFIGS[family].to_dict() | dict(vocab_size=352)
    path = save(type(CONFIGS[family])(**config), tmp_path / "model")
    tokenizer = make_sentencepiece(tokenizer_class)
    tokenizer.save_pretrained(path)
    back = read_tokenizer(export(path, tmp_path / "model.gguf"))
    for text in (*TEXTS, "<think> in</s>", "theinner answering"):
        assert back(text).input_ids == tokenizer(text).input_ids, text
    messages = [dict(role="user", content="Hi")]
    assert back.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(messages, tokenize=False)
    fields = read_fields(tmp_path / "model.gguf")
    assert fields["tokenizer.ggml.add_space_prefix"] is (family == "llama")
    assert ("puts a blank" in capsys.readouterr().out) is (family == "llama")
    assert fields["tokenizer.ggml.add_bos_token"] is (tokenizer("a").input_ids[0] == 2)
    types = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    kinds = [types[text] for text in ("the", "<s>", "<think>", "<0x41>", "[PAD351]")]
    assert kinds == [1, 3, 4, 6, 5]  # normal, control, user-defined, byte, unused: llama.h


def split_by(expression: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
# As tokenizer.json of Llama 3, and with one digit that of Qwen 2, and that of Mistral Nemo have them.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")  # fmt: skip
UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NEMO = rf"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITTERS = {  # and whether whole words skip the merges
    "llama-bpe": (split_by(LLAMA3), True),
    "smaug-bpe": (split_by(LLAMA3), False),
    "qwen2": (split_by(LLAMA3.replace("{1,3}", "")), False),
    "tekken": (split_by(NEMO), True),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "smollm": (DIGITS, False),
}


@pytest.mark.parametrize("name", SPLITTERS)
def test_a_byte_level_tokenizer_is_read_back(name, tmp_path):
    path = save(CONFIGS["llama"], tmp_path / "model")
    tokenizer = train_tokenizer(TEXTS * 9, vocab_size=VOCAB_SIZE - 4)
    tokenizer.add_tokens(["<think>"])
    tokenizer.backend_tokenizer.pre_tokenizer, tokenizer.backend_tokenizer.model.ignore_merges = SPLITTERS[name]
    tokenizer.save_pretrained(path)
    fields = read_fields(export(path, tmp_path / "model.gguf"))
    assert fields["tokenizer.ggml.pre"] == name and len(fields["tokenizer.ggml.tokens"]) == VOCAB_SIZE
    back = read_tokenizer(tmp_path / "model.gguf")
    if name != "smollm":  # whose digits transformers' reader does not split
        for text in (*TEXTS, "<think>1234 5"):
            assert back(text).input_ids == tokenizer(text).input_ids, text
    assert back.chat_template == tokenizer.chat_template
    assert (back.eos_token, back.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)


def test_every_stop_token_and_the_defaults_for_sampling_are_written(tmp_path):
    path = save(CONFIGS["llama"], tmp_path / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    stops = [5, tokenizer.eos_token_id, 6]
    hf.GenerationConfig(eos_token_id=stops, **SAMPLING).save_pretrained(path)
    fields = read_fields(export(path, tmp_path / "model.gguf"))
    names = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eot", "eos", "eom")]
    assert names == stops
    assert [fields[f"general.sampling.{name}"] for name in ("temp", "top_k", "penalty_repeat")] == [0.5, 7, 1.25]


def test_stop_tokens_that_llama_cpp_leaves_out_or_adds_and_nfc_are_noted(tmp_path, capsys):
    path = save(CONFIGS["llama"], tmp_path / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    model |= dict(vocab=model["vocab"] | {"</s>": len(tokenizer)})
    change_json(path / "tokenizer.json", model=model, normalizer=dict(type="NFC"))
    stops = [tokenizer.eos_token_id, len(tokenizer), 5, 6, 7]
    hf.GenerationConfig(eos_token_id=stops).save_pretrained(path)
    fields = read_fields(export(path, tmp_path / "model.gguf"))
    said = capsys.readouterr().out
    assert "composes accents (NFC)" in said
    assert "treats these as stop tokens, which are plain text here: '</s>'" in said
    # llama.cpp finds </s> by itself, so both of its other places are free.
    assert [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eot", "eom")] == [5, 6]
    assert f"left out: {tokenizer.convert_ids_to_tokens(7)!r}" in said


def test_what_llama_cpp_writes_into_a_chat_is_noted(tmp_path, capsys):
    path = save(hf.LlamaConfig(**SHAPE | dict(vocab_size=352)), tmp_path / "model")
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    start = "{{ bos_token }}"
    cases = {
        start + chat: None,
        chat: "puts '<s>' before a chat",
        start + chat + "{{ '<think>' if enable_thinking else '</think>' }}": "--reasoning off",
        start + chat + "{{ '</think>' if enable_thinking is defined and not enable_thinking }}": None,
        start + "{{ date_string or '26 Jul 2024' }}" + chat: "today's date",
        start + "{{ messages[-1].content }}": "a system message before the first question",
        start + "{{ raise_exception('no') if messages[0].role == 'system' }}" + chat: None,
        "{{ raise_exception('no') }}": None,
    }
    for i, (template, expected) in enumerate(cases.items()):
        tokenizer = make_sentencepiece(hf.LlamaTokenizer, add_bos_token=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        export(path, tmp_path / f"{i}.gguf")
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: llama.cpp")]
        notes = [line for line in notes if "merges by scores" not in line and "puts a blank" not in line]
        assert len(notes) == (expected is not None) and (expected or "") in "".join(notes), (template, notes)


def test_a_modelfile_lacks_a_stop_token_or_a_sampling_default(tmp_path):
    path = save(CONFIGS["llama"], tmp_path / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    stops = [tokenizer.eos_token_id, 5]
    hf.GenerationConfig(eos_token_id=stops, **SAMPLING | dict(top_k=0)).save_pretrained(path)
    output = tmp_path / "out" / "chats.gguf"
    options = ExportGgufOptions(model_name_or_path=str(path), output=str(output), dtype="f32", modelfile=True)
    export_gguf(options)
    names = tokenizer.convert_ids_to_tokens(stops)
    assert (tmp_path / "out" / "Modelfile").read_text().splitlines() == [
        "FROM ./chats.gguf",
        *(f'PARAMETER stop "{name}"' for name in names),
        *(f"PARAMETER {line}" for line in ("temperature 0.5", "top_k 0", "top_p 0.75", "repeat_penalty 1.25")),
    ]
    output.unlink()
    with pytest.raises(ValueError, match="Modelfile already exists"):
        export_gguf(options)


# --- Refusals ------------------------------------------------------------------------------------------------

REFUSED = {
    "gpt2": (FAMILIES["gpt2"], "architecture gpt2"),
    "activation": (hf.LlamaConfig(**SHAPE, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "rope kind": (
        hf.LlamaConfig(**SHAPE, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
        "rope_type of full_attention is 'dynamic'",
    ),
    "rope of another": (hf.Qwen2Config(**SHAPE, rope_parameters=LLAMA3_ROPE | dict(rope_theta=1e4)), "is 'llama3'"),
    "rope parameter": (
        hf.Qwen3Config(**SHAPE, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
        "partial_rotary_factor",
    ),
    "bias": (hf.Qwen3Config(**SHAPE, attention_bias=True), "attention_bias is True"),
    "tokenizer": (hf.LlamaConfig(**SHAPE), "no merges"),
    "weights of experts": (hf.Qwen3MoeConfig(**SHAPE, **EXPERTS | dict(norm_topk_prob=False)), "norm_topk_prob is F"),
    "layers without experts": (hf.Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[1]), "mlp_only_layers is [1]"),
    "layers that rotate": (hf.SmolLM3Config(**SHAPE, no_rope_layer_interval=2), "no_rope_layers is [1, 0]"),
    "scale": (hf.Gemma3TextConfig(**SHAPE, head_dim=8), "query_pre_attn_scalar is 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(name, tmp_path):
    config, message = REFUSED[name]
    path = save_tokenizer(save_model(config, tmp_path / "model"))
    with pytest.raises(ValueError) as raised:
        export(path, tmp_path / "model.gguf")
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_other_directories_and_tokenizers_are_refused(tmp_path, models):
    path = save(CONFIGS["llama"], tmp_path / "model")
    splitter = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)
    cases = [
        ("config.json", dict(quantization_config=dict(quant_method="awq")), "quantized (awq)"),
        ("config.json", dict(vocab_size=100), "token id 283, .* 100 "),
        ("tokenizer.json", dict(pre_tokenizer=splitter), "splits text ({.*ByteLevel"),
        ("tokenizer.json", dict(pre_tokenizer=None), "(null, ignore_merges False)"),
        ("tokenizer.json", dict(normalizer=dict(type="Lowercase")), "normalizer Lowercase"),
        ("adapter_config.json", None, "mini-trainer merge-adapter --adapter"),
    ]
    for name, changes, message in cases:
        original = (path / name).read_text() if changes else None
        (path / name).write_text("{}") if original is None else change_json(path / name, **changes)
        with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
            export(path, tmp_path / "model.gguf")
        (path / name).unlink() if original is None else (path / name).write_text(original)
    assert export(path, tmp_path / "model.gguf").exists()
    with pytest.raises(ValueError, match="already exists"):
        export(path, tmp_path / "model.gguf")


def test_numbers_that_float16_does_not_have_are_refused_and_leave_nothing(tmp_path):
    path = save(CONFIGS["qwen2"], tmp_path / "model")
    model = hf.AutoModelForCausalLM.from_pretrained(path)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = -7e4
    model.save_pretrained(path)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*--dtype bf16"):
        export(path, tmp_path / "model.gguf", "f16")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    export(path, tmp_path / "model.gguf", "bf16")
