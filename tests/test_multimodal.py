"""Multi-modal checkpoints trained on text: in and out in their own class, the other towers untouched and not loaded.

Tensors that transformers' class has no place for are reported, and kept byte by byte. Text towers whose own forward
asks for more than its decoder on text, or changes the logits, compute what they did.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from breadth import wide
from exports import MODELS, export
from hand_made import pack_samples
from harness import read_stored
from in_process import train_here, train_on
from peft_runs import LORA
from quantizing import save_fp8
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_runs import NUM_SAMPLES, OPTIONS, read_weights
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, build, change_json, check, load_source, save_model, save_tokenizer
from tiny_vision import load

from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.model.build import build_model
from mini_trainer.model.method import Full
from mini_trainer.model.weights import list_left_out
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import AbsentEmbedder, find_placeholders, keep_text_tower, text_config
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.tools import MergeAdapterOptions
from mini_trainer.tools.merge_adapter import merge_adapter

IMAGE, VIDEO = 280, 281  # token ids that stand for what is no text
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16)
CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "qwen2.5-vl": hf.Qwen2_5_VLConfig(
        text_config=SHAPE | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])),
        vision_config=dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32,
                           fullatt_block_indexes=[0]),
        image_token_id=IMAGE, video_token_id=VIDEO,
    ),
    "gemma3": hf.Gemma3Config(
        text_config=SHAPE | dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
        vision_config=VISION | dict(patch_size=4), image_token_index=IMAGE, mm_tokens_per_image=4,
    ),
    "llava": hf.LlavaConfig(
        text_config=SHAPE | dict(model_type="llama"),
        vision_config=hf.CLIPVisionConfig(**VISION, patch_size=4, projection_dim=32), image_token_index=IMAGE,
    ),
    "smolvlm": hf.SmolVLMConfig(
        text_config=SHAPE | dict(model_type="llama"), vision_config=VISION | dict(patch_size=4), image_token_id=IMAGE,
        scale_factor=2, tie_word_embeddings=True,
    ),
}  # fmt: skip
TEXT_TOWER = ("language_model", "lm_head", "text_model", "model.layers", "model.norm", "model.embed_tokens")
LENGTHS = (45, 1, 70, 7)


def is_text(name: str) -> bool:
    """Whether a stored tensor is the text tower's."""
    return any(part in name for part in TEXT_TOWER) and not any(part in name for part in ("vision", "visual"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    """Random models whose other towers are in bfloat16, and what prepares images for them."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.05)
        found[name] = path = save_tokenizer(root / name)
        model.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        tensors = {key: tensor if is_text(key) else tensor.bfloat16() for key, tensor in tensors.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}\n')
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data") / "data.arrow", make_samples(20, vocab_size=IMAGE))


def train(world, path: Path, data: Path, output_dir: Path, *, num_ranks: int = 1, **options: object) -> Path:
    given = OPTIONS | dict(model_name_or_path=path, data_path=data, output_dir=output_dir, max_steps=3) | options
    train_on(num_ranks, world, **given)
    return max((output_dir / "hf_format").glob("samples_*"))


def make_texts() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(3, IMAGE, length) for length in LENGTHS]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_losses_and_gradients_are_the_whole_models_own(name, paths, world):
    model = build(paths[name], world)
    check(model, world)
    loss = model(pack_samples([(ids, ids, None) for ids in make_texts()])).loss
    loss.backward()
    own, total = load(paths[name]), 0.0
    for ids in map(torch.from_numpy, make_texts()):
        logits = own(input_ids=ids[None], use_cache=False).logits[0]
        own_loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        own_loss.backward()
        total += own_loss.item()
    assert loss.item() == pytest.approx(total, rel=1e-6)
    gradients = {key: param.grad for key, param in own.named_parameters() if param.grad is not None}
    params = dict(model.model.named_parameters())
    assert params.keys() == gradients.keys(), "what trains is what a text reaches"
    for key, gradient in gradients.items():
        assert (params[key].grad.full_tensor() - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, key


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2.5-vl", {}),
        wide("gemma3", {}),
        ("llava", {}),
        ("smolvlm", {}),
        ("gemma3", dict(osft=True, osft_unfreeze_rank_ratio=0.5)),
    ],
)
def test_an_export_is_the_whole_model_with_the_other_towers_byte_by_byte(
    name, options, paths, data, world, tmp_path, caplog
):
    if options:
        options |= dict(osft_cache_dir=str(tmp_path / "osft"))
    with caplog.at_level("INFO", logger="mini_trainer"):
        export = train(world, paths[name], data, tmp_path / "run", **options)
    assert any("text tower" in line for line in caplog.messages)
    before, after = read_stored(paths[name]), read_stored(export)
    assert before.keys() == after.keys()
    others = {key for key in before if not is_text(key)}
    assert others and all(before[key] == after[key] and before[key][0] == "BF16" for key in others)
    trained = [key for key in before.keys() - others if "proj.weight" in key or not options]
    assert trained and all(before[key] != after[key] for key in trained if "bias" not in key)
    assert type(load(export)) is type(load(paths[name]))
    assert (export / "preprocessor_config.json").read_bytes() == (paths[name] / "preprocessor_config.json").read_bytes()

    # What it computes is what was trained last.
    checkpoint = json.loads((tmp_path / "run/checkpoints/step_3/manifest.json").read_text())
    assert not any(key in name for name in checkpoint["tensors"] for key in ("vision", "visual", "projector"))


@pytest.mark.parametrize("name", [wide("gemma3"), "llava"])
def test_an_adapter_loads_onto_the_whole_model_and_merges_into_it(name, paths, data, world, tmp_path):
    from peft import PeftModel

    export = train(world, paths[name], data, tmp_path / "run", lora=True, lora_rank=4, lora_export="both")
    model = PeftModel.from_pretrained(load(paths[name]), str(export / "adapter"))
    adapted = [key for key, _ in model.named_parameters() if ".lora_" in key]
    with safe_open(export / "adapter/adapter_model.safetensors", "pt") as file:
        assert len(adapted) == len(list(file.keys()))
    assert adapted and not any("vision" in key for key in adapted)
    ids = torch.from_numpy(make_texts()[0])[None]
    with torch.no_grad():
        expected, merged = model.eval()(input_ids=ids).logits, load(export)(input_ids=ids).logits
        before = load(paths[name])(input_ids=ids).logits
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)

    # Merged later, it is the same export.
    files = dict(adapter=str(export / "adapter"), output_dir=str(tmp_path / "merged"))
    merge_adapter(MergeAdapterOptions(**files, export_dtype="float32"), world)
    assert read_stored(tmp_path / "merged") == read_stored(export)
    assert (tmp_path / "merged/preprocessor_config.json").exists()


def test_data_that_holds_what_stands_for_an_image_is_refused_with_its_row(paths, world, tmp_path):
    samples = make_samples(20, vocab_size=IMAGE)
    samples[12][0][1] = VIDEO
    data = write_samples(tmp_path / "data.arrow", samples)
    with pytest.raises(ValueError, match=r"data.arrow: row 13 .* 281, .*video_token_id"):
        train(world, paths["qwen2.5-vl"], data, tmp_path / "run")
    train(world, paths["gemma3"], data, tmp_path / "other", max_steps=1)  # where 281 is a token like any other


def test_placeholders_are_found_by_what_configs_call_them():
    assert find_placeholders(CONFIGS["qwen2.5-vl"]) == {IMAGE: "image_token_id", VIDEO: "video_token_id"}
    assert find_placeholders(CONFIGS["gemma3"]) == {IMAGE: "image_token_index"}
    assert find_placeholders(text_config(CONFIGS["gemma3"])) == {}


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_a_vocabulary_grows_in_the_text_tower(name, paths, world):
    source = load_source(paths[name])
    text_config(source.config).vocab_size = VOCAB_SIZE + 32
    options = group_options(TrainOptions, model_name_or_path="", data_path="", output_dir="")
    model = build_model(
        source, options.compute, options.sharding, objective=CausalLM(), method=Full(), world=world
    ).model
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        rows = module.weight.full_tensor()
        assert len(rows) == VOCAB_SIZE + 32
        torch.testing.assert_close(rows[-1], rows[:VOCAB_SIZE].mean(dim=0))


def test_a_template_that_only_the_processor_has_is_the_tokenizers(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"


HIDDEN = SHAPE["hidden_size"]
# As releases call them: a whole layer behind the last one, or a module of its own.
BEHIND_THE_LAST = {
    "model.layers.2.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
    "model.layers.2.enorm.weight": (HIDDEN,),
    "model.layers.2.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "model.layers.2.mlp.experts.0.up_proj.weight": (16, HIDDEN),
    "model.layers.2.mlp.gate.e_score_correction_bias": (4,),
    "model.layers.2.shared_head.head.weight": (VOCAB_SIZE, HIDDEN),
}
A_MODULE = {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.layers.0.self_attn.q_proj.weight": (32, HIDDEN)}
CASES = [("deepseek_v3", BEHIND_THE_LAST), ("glm4_moe", BEHIND_THE_LAST), ("qwen3", A_MODULE), ("llama", A_MODULE)]
NUM_PREDICTED = dict(num_nextn_predict_layers=1)


def save_with(path: Path, family: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A model with tensors in bfloat16 of a file of their own beside its weights; those tensors."""
    change_json(save_tokenizer(save_model((FAMILIES | MODELS)[family], path)) / "config.json", **NUM_PREDICTED)
    return add_file(path, {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()})


def add_file(path: Path, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves to two files and an index."""
    own = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    save_file(more, path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(own, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(more, "model-00002-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return more


def make_data(path: Path) -> str:
    return str(write_samples(path, make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)))


@pytest.mark.parametrize(("family", "shapes"), CASES)
def test_a_run_reports_and_exports_them(family, shapes, world, tmp_path, caplog):
    more = save_with(tmp_path / "model", family, shapes)
    given = dict(model_name_or_path=str(tmp_path / "model"), data_path=make_data(tmp_path / "data.arrow"))
    with caplog.at_level("INFO", logger="mini_trainer"):
        train_here(world, **OPTIONS | given, output_dir=str(tmp_path / "run"), max_steps=1)
    (line,) = [line for line in caplog.messages if f"hold {len(shapes)} tensors" in line]
    assert "exports " in line and "unchanged" in line
    assert ".".join(min(shapes).split(".")[:3]) in line
    (exported,) = (tmp_path / "run" / "hf_format").glob("samples_*")
    found = read_weights(exported)
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in more.items())
    assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == 1
    own = read_weights(tmp_path / "model")
    assert found.keys() == own.keys()
    assert not torch.equal(found["model.norm.weight"], own["model.norm.weight"])
    report = hf.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)[1]
    assert not report["missing_keys"] and not report["mismatched_keys"]
    again = export(exported, tmp_path / "again", world)  # an export is a model like any other
    assert read_weights(again).keys() == own.keys()


def test_a_merged_adapter_has_them(world, tmp_path):
    more = save_with(tmp_path / "model", "llama", A_MODULE)
    given = dict(model_name_or_path=str(tmp_path / "model"), data_path=make_data(tmp_path / "data.arrow"))
    run = dict(output_dir=str(tmp_path / "run"), max_steps=1, checkpoint_every_steps=1)
    train_here(world, **OPTIONS | LORA | given | run)
    (exported,) = (tmp_path / "run" / "hf_format").glob("samples_*")
    merge_adapter(MergeAdapterOptions(adapter=str(exported / "adapter"), output_dir=str(tmp_path / "merged")), world)
    for directory in (exported, tmp_path / "merged"):
        found = read_weights(directory)
        assert all(torch.equal(found[name], tensor) for name, tensor in more.items())


def test_those_of_a_quantized_release_are_dequantized(tmp_path):
    path = tmp_path / "model"
    save_fp8(path)
    stored = load_file(path / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    extra = {name: tensor for name, tensor in stored.items() if name.startswith(f"{layer}.")}
    assert len(extra) == 2
    add_file(path, {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in extra.items()})
    left_out = list_left_out(load_source(path), TextFamily())
    assert left_out.keys() == {"model.layers.2.mlp.down_proj.weight"}
    weight, scale = extra[f"{layer}.weight"].float(), extra[f"{layer}.weight_scale_inv"]
    rows, columns = (size // parts for size, parts in zip(weight.shape, scale.shape, strict=True))
    expected = weight * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    torch.testing.assert_close(
        left_out["model.layers.2.mlp.down_proj.weight"].read().float(), expected, rtol=1e-2, atol=0
    )


def test_an_embedding_among_them_grows_with_the_vocabulary(tmp_path):
    more = save_with(tmp_path / "model", "deepseek_v3", BEHIND_THE_LAST)
    source = load_source(tmp_path / "model")
    source.config.vocab_size = VOCAB_SIZE + 16
    left_out = list_left_out(source, TextFamily())
    assert left_out.keys() == more.keys()
    for name, tensor in more.items():
        read = left_out[name].read()
        assert read.dtype == torch.bfloat16 and read.shape == left_out[name].shape
        assert torch.equal(read[: len(tensor)], tensor)
        assert len(read) == len(tensor) + (16 if len(tensor) == VOCAB_SIZE else 0)
    rows = left_out["model.layers.2.embed_tokens.weight"].read()
    expected = more["model.layers.2.embed_tokens.weight"].float().mean(0)
    torch.testing.assert_close(rows[-1].float(), expected, rtol=1e-2, atol=1e-3)


SEES, HEARS = 272, 280  # the first ids that a tower's own embedding stands for


def make_gemma3n() -> hf.Gemma3nConfig:
    """With another tower than its own, which needs a package that is not here, and the same embedders."""
    vision = hf.SiglipVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision.vocab_size, vision.vocab_offset, vision.rms_norm_eps = 8, SEES, 1e-6
    audio = hf.Gemma3nAudioConfig(vocab_size=8, vocab_offset=HEARS, hidden_size=32, conf_num_attention_heads=2,
                               conf_num_hidden_layers=1, input_feat_size=16, sscp_conv_channel_size=[4, 4])  # fmt: skip
    text = SHAPE | dict(
        head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=256, laurel_rank=4, sliding_window=5,
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], altup_num_inputs=2,
    )  # fmt: skip
    config = hf.Gemma3nConfig(text_config=text, audio_config=audio)
    vars(config)["vision_config"] = vision  # past the check of its type
    return config


@torch.no_grad()
def test_a_text_is_what_it_was_where_the_forward_pass_asks_absent_embedders():
    torch.manual_seed(0)
    model = hf.AutoModelForMultimodalLM.from_config(make_gemma3n(), dtype=torch.float32).eval()
    ids = torch.randint(3, SEES, (1, 30))
    expected = model(input_ids=ids, use_cache=False).logits
    left_out = keep_text_tower(model)
    assert set(left_out.parts) == {
        "model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"
    }  # fmt: skip
    assert isinstance(model.model.embed_vision, AbsentEmbedder)
    assert all("embed_vision" not in name for name, _ in model.named_parameters())
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=0)


def test_ids_that_stand_for_parts_of_images_and_sounds_are_placeholders():
    found = find_placeholders(make_gemma3n())
    assert set(range(SEES, HEARS + 8)) <= found.keys()
    assert found[SEES + 1] == "vision_config.vocab_offset" and found[HEARS] == "audio_config.vocab_offset"


def test_a_multiplier_of_logits_is_followed(world, tmp_path):
    config = hf.MuseGlimmerConfig(
        text_config=SHAPE | dict(head_dim=8, sliding_window=5, output_multiplier=0.3, final_logit_softcapping=2.0),
        vision_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
    )
    torch.manual_seed(0)
    hf.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    check(build(tmp_path, world), world)
    assert config.image_token_id > VOCAB_SIZE
