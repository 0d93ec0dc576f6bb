"""Packed sequences of every model family: same loss and gradients as one by one, and no sequence sees another."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import save_tiny_model
from breadth import long
from hand_made import pack_samples
from small_runs import full_gradients
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, build, check, compile_by, save_model
from torch.distributed.tensor import Shard
from torch.nn.functional import scaled_dot_product_attention

from mini_trainer.data.columns.base import Sample
from mini_trainer.model import attention as packed_attention
from mini_trainer.model.config import check_rope
from mini_trainer.model.sharding import choose_dim
from mini_trainer.objectives.families.family import ReferenceForward, Targets
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import count_logits
from mini_trainer.objectives.next_tokens import TokenLoss

LENGTHS = (13, 1, 22, 7)


def make_samples(seed: int = 0) -> list[Sample]:
    """Sequences of `LENGTHS` with about half of their tokens masked."""
    random = np.random.default_rng(seed)
    samples = []
    for length in LENGTHS:
        input_ids = random.integers(3, VOCAB_SIZE, length)
        samples.append((input_ids, np.where(random.random(length) < 0.5, input_ids, -100), None))
    return samples


ENCODER = dict(
    **SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, summary_last_dropout=0.0, is_decoder=True
)

# Models of which something is unlike all of FAMILIES.
OTHERS = {
    "jetmoe_takes_views": hf.JetMoeConfig(**SHAPE | dict(num_attention_heads=2), kv_channels=8, num_local_experts=4),
    "diffllama_makes_parameters_by_itself": hf.DiffLlamaConfig(**SHAPE),
    "cohere_compass_has_no_scale": hf.CohereCompassTextConfig(
        **SHAPE, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ),
    "stablelm_hands_nothing_on": hf.StableLmConfig(**SHAPE),
    "nemotron_hands_nothing_on": hf.NemotronConfig(**SHAPE, head_dim=8),
    "longcat_has_two_layers_a_block": hf.LongcatFlashConfig(
        **SHAPE | dict(num_key_value_heads=4), num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=24, moe_topk=2,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8,
        n_routed_experts=4, zero_expert_num=2,
    ),
    "hrm_has_two_stacks": hf.HrmTextConfig(**SHAPE, head_dim=8, num_layers_per_stack=2, H_cycles=1, L_cycles=1),
    "electra_transforms_before_its_head": hf.ElectraConfig(**ENCODER, embedding_size=16),
    "roberta_counts_behind_its_padding": hf.RobertaConfig(**ENCODER | dict(pad_token_id=5)),
    "llama4_attends_in_chunks": hf.Llama4TextConfig(
        **SHAPE | dict(num_hidden_layers=4), head_dim=8, intermediate_size_mlp=48, num_local_experts=2,
        attention_chunk_size=6, floor_scale=4,
    ),
    "gemma4_shares_keys": hf.Gemma4TextConfig(
        **SHAPE | dict(num_hidden_layers=4), head_dim=8, global_head_dim=16, sliding_window=5, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "gemma4_mixture": hf.Gemma4TextConfig(
        **SHAPE, head_dim=8, global_head_dim=16, sliding_window=5, hidden_size_per_layer_input=0, num_experts=4,
        layer_types=["sliding_attention", "full_attention"], top_k_experts=2, moe_intermediate_size=24,
        enable_moe_block=True, attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=5.0,
    ),
    # Attention that stays the model's own.
    "bloom_has_biases_for_positions": hf.BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, hidden_dropout=0.0
    ),
    "gptj_is_told_positions": hf.GPTJConfig(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, initializer_range=0.2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES | OTHERS)
def test_packed_loss_and_gradients_are_those_of_padded_transformers(family, world, tmp_path):
    path = save_model((FAMILIES | OTHERS)[family], tmp_path)
    samples = make_samples()
    model = build(path, world)
    check(model, world)
    loss = model(pack_samples(samples)).loss
    loss.backward()

    reference = hf.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").train()
    input_ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    labels = torch.full_like(input_ids, -100)
    mask = torch.zeros_like(input_ids)
    for i, (ids, row_labels, _) in enumerate(samples):
        input_ids[i, : len(ids)] = torch.from_numpy(ids)
        labels[i, : len(ids)] = torch.from_numpy(row_labels)
        mask[i, : len(ids)] = 1
    logits = reference(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradients = full_gradients(model.model)
    references = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    assert gradients.keys() == references.keys()
    # Others have biases of keys, whose gradient is nothing but rounding, and gradients that are sums of large numbers.
    tolerance, rounding = (1e-5, 0.0) if family in FAMILIES else (5e-4, 1e-6)
    floor = rounding * torch.stack([gradient.norm() for gradient in references.values()]).norm()
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        error = (gradient - references[name]).norm() / max(references[name].norm(), floor / tolerance)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_changing_one_packed_sequence_leaves_the_others_bitwise_unchanged(family, world, tmp_path):
    model = build(save_model(FAMILIES[family], tmp_path), world).eval()
    before, other = make_samples(0), make_samples(1)
    after = [before[0], before[1], other[2], before[3]]
    with torch.no_grad():
        rows = [model.hidden_states(pack_samples(samples))[0].split(LENGTHS) for samples in (before, after)]
    assert not torch.equal(rows[0][2], rows[1][2])
    for i in (0, 1, 3):
        assert torch.equal(rows[0][i], rows[1][i]), f"sequence {i} moved"


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama_tied_bias", dict(activation_checkpointing="full")),
        ("llama_tied_bias", dict(attention="eager")),
        ("mistral_window", dict(attention="eager")),
        ("stablelm_hands_nothing_on", dict(activation_checkpointing="full")),
        ("nemotron_hands_nothing_on", dict(activation_checkpointing="selective")),
        ("gemma4_shares_keys", dict(activation_checkpointing="full")),
        ("llama4_attends_in_chunks", dict(activation_checkpointing="full")),
        ("gptj_is_told_positions", dict(activation_checkpointing="selective")),
        ("bloom_has_biases_for_positions", dict(activation_checkpointing="full")),
        pytest.param("mistral_window", dict(compile=True), marks=pytest.mark.slow),
        long("stablelm_hands_nothing_on", dict(compile=True)),
    ],
)
def test_how_it_is_computed_does_not_change_what_is_computed(family, change, world, tmp_path, monkeypatch):
    compile_by("eager", monkeypatch, dynamic=False)
    path = save_model((FAMILIES | OTHERS)[family], tmp_path)
    results = []
    for options in ({}, change):
        model = build(path, world, **options)
        loss = model(pack_samples(make_samples())).loss
        loss.backward()
        results.append((loss.detach(), full_gradients(model.model)))
    (loss, gradients), (changed_loss, changed_gradients) = results
    torch.testing.assert_close(changed_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            changed_gradients[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item()
        )


REFUSED = {
    "rwkv": (hf.RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2), "no num_attention_heads"),
    "xlm": (hf.XLMConfig(vocab_size=VOCAB_SIZE, emb_dim=32, n_layers=2, n_heads=4, causal=True), "'xlm' .*packed row"),
    "mistral": (hf.MistralConfig(**SHAPE, sliding_window=0), "sliding window of 0 tokens.*null"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_with_a_reason(family, world, tmp_path):
    config, reason = REFUSED[family]
    save_model(config, tmp_path)
    with pytest.raises(ValueError, match=reason):
        check(build(tmp_path, world), world)


def test_a_backend_is_not_asked_to_take_the_place_of_a_models_own_attention(world, tmp_path):
    save_model(OTHERS["gptj_is_told_positions"], tmp_path)
    assert build(tmp_path, world).backend == "own"
    with pytest.raises(ValueError, match="--attention sdpa: model type 'gptj'"):
        build(tmp_path, world, attention="sdpa")


def test_a_model_that_writes_no_text_is_told_so():
    obstacle = TextFamily().check_config(hf.ViTConfig(), trust_remote_code=False)
    assert obstacle.startswith("model type 'vit' ") and "encoder-decoder" not in obstacle
    bart = hf.BartConfig(), hf.BartConfig(is_encoder_decoder=False, is_decoder=True)
    for config in (hf.Florence2Config(), hf.T5Config(), *bart, hf.WhisperConfig()):
        obstacle = TextFamily().check_config(config, trust_remote_code=False)
        assert obstacle.startswith(f"model type '{config.model_type}' ") and "encoder-decoder" in obstacle


@pytest.mark.parametrize("config_class", [hf.AyaVisionConfig, hf.Cohere2VisionConfig])
def test_a_model_that_transformers_computes_without_its_scale_is_refused_by_that(config_class):
    text = hf.Cohere2Config(**SHAPE, head_dim=8, logit_scale=0.25)
    obstacle = TextFamily().check_config(config_class(text_config=text), trust_remote_code=False)
    assert "logit_scale" in obstacle and "(0.25)" in obstacle
    text.logit_scale = 1.0
    assert TextFamily().check_config(config_class(text_config=text), trust_remote_code=False) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_passes_in_bf16(family, world, tmp_path):
    model = build(save_model(FAMILIES[family], tmp_path), world, dtype=torch.bfloat16)
    check(model, world)


def attend_across_borders(query, key, value, row, rule):
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=True)
    return output.transpose(1, 2)


def attend_without_scaling(query, key, value, row, rule):
    return packed_attention.attend_eager(query, key, value, row, rule._replace(scaling=1.0))


def attend_without_window(query, key, value, row, rule):
    return packed_attention.attend_eager(query, key, value, row, rule._replace(window=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (attend_across_borders, "each other"),
        (attend_without_scaling, "hidden states differ"),
        (attend_without_window, "hidden states differ"),
    ],
)
def test_the_check_finds_a_broken_attention(attend, reason, dtype, world, tmp_path, monkeypatch):
    path = save_model(FAMILIES["mistral_window"], tmp_path)
    monkeypatch.setattr(packed_attention, "attend_sdpa", attend)
    with pytest.raises(ValueError, match=reason):
        check(build(path, world, dtype=dtype), world)


@pytest.mark.parametrize("kind", ["inkling_text", long("inkling2_text")])
def test_logits_end_where_the_model_cuts_them_off(kind, world, tmp_path):
    save_tiny_model(kind, tmp_path, changes=dict(unpadded_vocab_size=101))
    model = build(tmp_path, world)
    check(model, world)
    assert model.row_model.project(torch.zeros(1, 64)).weight.shape[0] == 101
    assert count_logits(model.model.config) == 101


class DoubledLoss(TokenLoss):
    def sum_own(self, own: ReferenceForward, targets: Targets) -> torch.Tensor:
        return 2 * super().sum_own(own, targets)


@pytest.mark.parametrize(
    ("family", "spoil", "reason"),
    [
        ("mistral_window", lambda model: setattr(model.model.config, "layer_types", ["sliding_attention"] * 3),
         r"3 layers .*2 use"),  # a window that does not arrive
        ("granite_scaled", lambda model: setattr(model.row_model, "logit_scale", 1.0), r"'granite' .*its head"),
        ("llama", lambda model: setattr(model, "loss", DoubledLoss()), r"'llama' .*Loss\.sum_own of .*causal-lm"),
    ],
)  # fmt: skip
def test_the_check_finds_windows_logits_and_losses_that_are_not_the_models_own(family, spoil, reason, world, tmp_path):
    model = build(save_model(FAMILIES[family], tmp_path), world)
    spoil(model)
    with pytest.raises(ValueError, match=reason):
        check(model, world)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 256),  # max_position_embeddings
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, None),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}, None),
        (dict(sliding_attention={"rope_type": "default", "rope_theta": 1e4},
              full_attention={"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}), 256),
    ],
)  # fmt: skip
def test_rotary_embeddings_that_look_at_the_whole_row_are_refused_beyond_their_limit(rope, limit):
    """Also as Gemma 3 has them, by the type of layer."""
    config = (hf.Gemma3TextConfig if "full_attention" in rope else hf.LlamaConfig)(**SHAPE, rope_parameters=rope)
    check_rope(config, longest=256)
    if limit is None:
        check_rope(config, longest=10_000)
    else:
        with pytest.raises(ValueError, match=f"than {limit}; .* 257 "):
            check_rope(config, longest=limit + 1)


def test_experts_are_sharded_by_rows_where_there_are_too_few_of_them():
    placement = partial(choose_dim, 3)
    assert placement(torch.empty(4, 96, 32)) == Shard(1)
    assert placement(torch.empty(6, 96, 32)) is None
    assert placement(torch.empty(4, 32, 32)) is None  # uneven either way
    assert placement(torch.empty(4, 96)) is None


def test_weights_of_tokens_are_not_rounded_to_the_compute_type(world, tmp_path, monkeypatch):
    model = build(save_model(FAMILIES["llama"], tmp_path), world, dtype=torch.bfloat16)
    seen = []
    monkeypatch.setattr(
        "mini_trainer.objectives.next_tokens.sum_token_loss", lambda tokens, measure: seen.append(tokens.token_weights)
    )
    ids = np.arange(3, 12)
    model(pack_samples([(ids, ids, np.full(len(ids), 0.3, dtype=np.float32))]))
    assert seen[0].dtype == torch.float32 and torch.equal(seen[0], torch.full((len(ids) - 1,), 0.3))
