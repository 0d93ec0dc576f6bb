"""A hundred and more experts a layer: read with few openings of files, multiplied in groups, exactly as one by one."""

import pytest
import torch
from safetensors.torch import load_file
from small_runs import make_micro_batch
from tiny_models import SHAPE, build, load_source, save_model
from transformers import AriaTextConfig, AutoModelForCausalLM, Qwen3MoeConfig

from mini_trainer.model import stored_tensors as stored
from mini_trainer.model.flops import count_flops
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily

NUM_EXPERTS, LENGTHS = 128, (30, 1, 17)
CONFIG = Qwen3MoeConfig(
    **SHAPE, head_dim=8, num_experts=NUM_EXPERTS, num_experts_per_tok=8, moe_intermediate_size=16, norm_topk_prob=True
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """In bf16, with the experts stored apart, as releases are."""
    path = save_model(CONFIG, tmp_path_factory.mktemp("experts"))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    names = load_file(path / "model.safetensors").keys()
    assert f"model.layers.1.mlp.experts.{NUM_EXPERTS - 1}.down_proj.weight" in names
    return path


def test_experts_are_put_together_in_their_own_type_and_a_file_is_opened_once(path, monkeypatch):
    readers = read_weights(load_source(path), TextFamily())
    opened, safe_open = [], stored.safe_open
    monkeypatch.setattr(stored, "safe_open", lambda *args, **kwargs: opened.append(args) or safe_open(*args, **kwargs))
    experts = readers["model.layers.0.mlp.experts.gate_up_proj"]()
    assert experts.shape == (NUM_EXPERTS, 32, 32) and experts.dtype == torch.bfloat16
    assert len(opened) == 1
    readers["model.norm.weight"]()
    assert len(opened) == 2  # nothing has stayed open


def test_grouped_products_give_the_losses_and_gradients_of_experts_one_by_one(path, world):
    model = build(path, world)
    assert model.model.config._experts_implementation == "grouped_mm"
    micro_batch = make_micro_batch(LENGTHS, seed=0)
    loss_sum = model(micro_batch).loss
    loss_sum.backward()

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    ids, total = micro_batch.row.input_ids[0], torch.zeros(())
    for sequence in ids.split(LENGTHS):
        if len(sequence) > 1:
            logits = reference(input_ids=sequence[None].long(), use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, sequence[1:].long(), reduction="sum")
    total.backward()
    assert loss_sum.item() == pytest.approx(total.item(), rel=1e-6)
    own = dict(model.model.named_parameters())
    for name, param in reference.named_parameters():
        difference = own[name].grad.full_tensor() - param.grad
        assert difference.norm() <= 2e-6 * param.grad.norm(), name


@pytest.mark.parametrize(
    ("config_class", "names"),
    [(Qwen3MoeConfig, ("num_experts", "num_experts_per_tok")), (AriaTextConfig, ("moe_num_experts", "moe_topk"))],
)
def test_experts_that_a_token_does_not_go_to_cost_no_flops(config_class, names):
    """Twice the experts cost their rows of the router, and twice the choices what the chosen experts multiply."""
    counts = {}
    for num_experts, num_chosen in ((4, 2), (8, 2), (8, 4)):
        config = config_class(**SHAPE, **dict(zip(names, (num_experts, num_chosen), strict=True)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counts[num_experts, num_chosen] = count_flops(model).per_token
        of_one = sum(6 * param.numel() / num_experts for param in model.parameters() if param.ndim == 3)
    router_rows = 6 * 4 * SHAPE["hidden_size"] * SHAPE["num_hidden_layers"]
    assert counts[8, 2] - counts[4, 2] == pytest.approx(router_rows)
    assert counts[8, 4] - counts[8, 2] == pytest.approx(2 * of_one)
