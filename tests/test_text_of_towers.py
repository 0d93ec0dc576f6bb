"""Text towers of models whose own forward asks for more than its decoder on text, or changes the logits."""

import torch
from tiny_models import SHAPE, VOCAB_SIZE, build, check, save_tokenizer
from transformers import (
    AutoModelForMultimodalLM,
    Gemma3nAudioConfig,
    Gemma3nConfig,
    MuseGlimmerConfig,
    SiglipVisionConfig,
)

from mini_trainer.objectives.families.text_tower import AbsentEmbedder, find_placeholders, keep_text_tower

SEES, HEARS = 272, 280  # the first ids that a tower's own embedding stands for


def make_gemma3n() -> Gemma3nConfig:
    """With another tower than its own, which needs a package that is not here, and the same embedders."""
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision.vocab_size, vision.vocab_offset, vision.rms_norm_eps = 8, SEES, 1e-6
    audio = Gemma3nAudioConfig(vocab_size=8, vocab_offset=HEARS, hidden_size=32, conf_num_attention_heads=2,
                               conf_num_hidden_layers=1, input_feat_size=16, sscp_conv_channel_size=[4, 4])  # fmt: skip
    text = SHAPE | dict(
        head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=256, laurel_rank=4, sliding_window=5,
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], altup_num_inputs=2,
    )  # fmt: skip
    config = Gemma3nConfig(text_config=text, audio_config=audio)
    vars(config)["vision_config"] = vision  # past the check of its type
    return config


@torch.no_grad()
def test_a_text_is_what_it_was_where_the_forward_pass_asks_absent_embedders():
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(make_gemma3n(), dtype=torch.float32).eval()
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
    config = MuseGlimmerConfig(
        text_config=SHAPE | dict(head_dim=8, sliding_window=5, output_multiplier=0.3, final_logit_softcapping=2.0),
        vision_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
    )
    torch.manual_seed(0)
    AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    check(build(tmp_path, world), world)
    assert config.image_token_id > VOCAB_SIZE
