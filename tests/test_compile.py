"""Compiled blocks: what they compute, that the start-up check compares them, and that nothing compiles after it."""

import functools
import re
from collections.abc import Callable

import pytest
import torch
from breadth import long, wide
from forked import succeed
from functorch.compile import make_boxed_func
from processes import flags
from small_runs import LENGTHS, OPTIONS, make_inputs, make_micro_batch
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, build, check, compile_by, make_osft, save_model, save_tokenizer
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer

from mini_trainer.distributed.compilation import Compiled, count_graphs
from mini_trainer.distributed.devices import run_eagerly
from mini_trainer.model import attention as packed_attention
from mini_trainer.model.compiled_check import check_compiled
from mini_trainer.model.method import Full
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.objectives.next_tokens import CausalLM, CrossEntropy, TrainedTokens, sum_token_loss
from mini_trainer.options import DataOptions, LoRAOptions
from mini_trainer.options.places import COMPILED

pytestmark = pytest.mark.slow

# As many tokens as the hidden size, which torch.compile would take for the same number.
FIRST = (13, 1, 11, SHAPE["hidden_size"] - 25)


def attend_traceable(query, key, value, row, rule):
    """What the kernels for CUDA take: cumulative lengths and the longest one; it can be compiled anywhere."""
    position = torch.arange(query.shape[2])
    sequence = torch.bucketize(position, row.cu_seqlens, right=True)
    distance = position[:, None] - position
    mask = (sequence[:, None] == sequence) & (distance >= 0) & (distance < row.max_seqlen)
    if rule.window is not None:
        mask = mask & (distance < rule.window)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling, enable_gqa=True)
    return output.transpose(1, 2)


def deepen(family: str, num_layers: int):
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    changes = dict(num_hidden_layers=num_layers) | (dict(layer_types=kinds) if family == "gemma3" else {})
    return type(FAMILIES[family]).from_dict(FAMILIES[family].to_dict() | changes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "checkpointing", "is_traceable", "backend"),
    [
        wide("llama", "none", False, "eager"),
        ("mistral_window", "selective", True, "aot_eager"),
        wide("gemma3", "selective", True, "aot_eager"),
    ],
)
def test_no_micro_batch_after_the_first_compiles_again(
    family, checkpointing, is_traceable, backend, world, tmp_path, monkeypatch
):
    if is_traceable:
        monkeypatch.setattr(packed_attention, "attend_sdpa", attend_traceable)
        monkeypatch.setattr(packed_attention, "UNCOMPILED", frozenset())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compile_by(counter, monkeypatch)
    in_chunks = functools.partial(sum_token_loss, chunk_bytes=16 * 4 * VOCAB_SIZE)  # of 16 rows
    monkeypatch.setattr("mini_trainer.objectives.next_tokens.sum_token_loss", in_chunks)
    path = save_model(deepen(family, 10), tmp_path)
    model = build(path, world, activation_checkpointing=checkpointing, compile=True)
    reference = build(path, world)
    check(model, world)
    assert counter.frame_count == 0
    check_compiled(model, CausalLM(), world=world)
    num_checked, num_graphs, counts = counter.frame_count, count_graphs(), []
    for seed, lengths in enumerate((FIRST, *LENGTHS)):
        micro_batch = make_micro_batch(lengths, seed=seed)
        losses = []
        for one in (reference, model):
            one.zero_grad()
            losses.append(one(micro_batch).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        for param, other in zip(reference.parameters(), model.parameters(), strict=True):
            expected = param.grad.to_local()
            torch.testing.assert_close(
                other.grad.to_local(), expected, rtol=1e-4, atol=1e-5 + 1e-4 * expected.abs().max().item()
            )
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * len(counts)
    assert count_graphs() == num_graphs + 1  # the loss
    assert 0 < num_checked < len(find_blocks(model.model))  # blocks of a kind share their code


def list_warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mini_trainer" and record.levelno >= 30]


METHODS = {
    "lora": dict(family="llama"),
    "lora, checkpointing": dict(family="llama", activation_checkpointing="full"),
    "osft": dict(family="llama"),
    "experts": dict(family="mixtral"),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", METHODS)
def test_training_and_validation_compile_once_each(case, world, tmp_path, monkeypatch, caplog):
    torch.compiler.reset()
    compile_by("eager", monkeypatch)
    family, options = METHODS[case]["family"], {k: v for k, v in METHODS[case].items() if k != "family"}
    path = save_tokenizer(save_model(FAMILIES[family], tmp_path))
    method = Full()
    if case.startswith("lora"):
        method = LoRA(LoRAOptions(lora=True, lora_rank=4), seed=0)
        method.open_files(AutoTokenizer.from_pretrained(path), DataOptions(data_path=("",)))
    elif case == "osft":
        method = make_osft(tmp_path, osft_unfreeze_rank_ratio=0.5)
    model = build(path, world, method=method, compile=True, **options)
    check_compiled(model, CausalLM(), world=world)
    num_checked, counts = count_graphs(), {"train": [], "score": []}
    for seed, lengths in enumerate(LENGTHS[2:7] * 2):
        micro_batch = make_micro_batch(lengths, seed=seed)
        model(micro_batch).loss.backward()
        counts["train"].append(count_graphs())
        if seed >= 5:
            model.eval()
            model.score(micro_batch)
            reshard(model)
            model.train()
            counts["score"].append(count_graphs())
    assert counts["train"][4:6] == [num_checked + 1] * 2  # the loss
    assert {*counts["score"]} == {*counts["train"][6:]} == {counts["score"][0]}
    assert list_warnings(caplog) == []


def miscompile(where: str) -> Callable:
    """A backend that adds one to what it computes in this pass."""

    def add_one(graph, inputs):
        return make_boxed_func(
            lambda *args: tree_map_only(Tensor, lambda t: t + 1 if t.is_floating_point() else t, graph(*args))
        )

    def keep(graph, inputs):
        return make_boxed_func(graph)

    passes = dict(fw_compiler=keep, bw_compiler=keep) | {f"{where}_compiler": add_one}
    return aot_autograd(**passes)


def fail(graph, inputs):
    raise RuntimeError("no compiler\nfound")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (miscompile("fw"), r"computes .*\(2 of 2 "),
        long(miscompile("bw"), "computes "),
        long(fail, "cannot .*no compiler found"),
    ],
)
def test_a_block_that_is_compiled_wrongly_is_refused_by_name(backend, reason, world, tmp_path, monkeypatch):
    torch.compiler.reset()
    compile_by(backend, monkeypatch, dynamic=False)
    model = build(save_model(FAMILIES["llama"], tmp_path), world, compile=True)
    with pytest.raises(ValueError, match=rf"^--compile: model\.layers\.0 \(LlamaDecoderLayer\) {reason}"):
        check_compiled(model, CausalLM(), world=world)


def test_a_recompilation_is_reported_once_with_its_reason(caplog, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(Compiled, "warned", set())
    double, before = Compiled(lambda x: 2 * x, "Block", backend="eager"), count_graphs()
    with run_eagerly():
        double(torch.ones(3))
    assert count_graphs() == before
    with torch.no_grad():
        double(torch.ones(3))
    double(torch.ones(3))  # the first call with gradients
    assert list_warnings(caplog) == []
    for dtype in (torch.float64, torch.float16):
        assert torch.equal(double(torch.ones(4, dtype=dtype)), torch.full((4,), 2, dtype=dtype))
    (warning,) = list_warnings(caplog)
    assert warning.startswith("warning: torch.compile: Block ") and "expected Float, actual Double" in warning


def test_blocks_of_which_nothing_is_compiled_are_refused(world, tmp_path):
    model = build(save_model(FAMILIES["llama"], tmp_path), world, compile=True)
    for compiled in model.compiled:
        compiled.compiled = compiled.function
    counters.clear()
    with pytest.raises(ValueError, match=r"--compile .*no part .*model\.layers\.0 \(Llama"):
        check_compiled(model, CausalLM(), world=world)


def skew(tensor: Tensor, by: float) -> Tensor:
    """The same values, with a gradient that is `by` times as large."""
    return by * tensor - ((by - 1) * tensor).detach()


FORMS = {  # of a block's function: of each, the outputs or one gradient is wrong
    "gradient of the input": lambda block, run, hidden, **row: run(skew(hidden, 2), **row),
    "gradient of a weight": lambda block, run, hidden, **row: (
        run(hidden, **row) + skew(block.mlp.down_proj.weight.sum(), 2) - block.mlp.down_proj.weight.sum()
    ),
    "one token": lambda block, run, hidden, **row: torch.cat([(out := run(hidden, **row))[:, :-1], 2 * out[:, -1:]], 1),
    "outputs": lambda block, run, hidden, **row: (out := run(hidden, **row)) + out.detach(),
    "not a number": lambda block, run, hidden, **row: run(hidden, **row) * float("nan"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_or_an_output_of_one_block_that_is_wrong_is_found(form, world, tmp_path):
    model = build(save_model(FAMILIES["llama"], tmp_path), world, compile=True)
    for compiled in model.compiled:
        compiled.compiled = compiled.function
    wrong, last = functools.partial(FORMS[form], find_blocks(model.model)[-1]), model.compiled[-1]
    last.compiled = functools.partial(wrong, last.function)
    with pytest.raises(
        ValueError, match=r"^--compile: model\.layers\.1 .*something else once compiled.*\(1 of 2 blocks"
    ):
        check_compiled(model, CausalLM(), world=world)
    assert model.training
    assert all(compiled.replacement is None for compiled in model.compiled)
    assert all(param.grad is None for param in model.parameters())


def test_selective_checkpointing_of_attention_that_cannot_be_compiled_is_refused(world, tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    with pytest.raises(ValueError, match=r"--activation-checkpointing selective .*--attention"):
        build(path, world, activation_checkpointing="selective", compile=True)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_plain", [True, False])
def test_the_fused_loss_is_the_same(is_plain, dtype):
    torch._dynamo.reset()
    hidden, weight = torch.randn(37, 16), torch.randn(50, 16)
    bias, weights, softcap = (None, None, None) if is_plain else (torch.randn(50).to(dtype), torch.rand(37), 2.0)
    targets = torch.randint(50, (37,))
    results = []
    for compiled in (False, True):
        inputs = [t.to(dtype).requires_grad_() for t in (hidden, weight, *([] if is_plain else [bias]))]
        tokens = TrainedTokens(*inputs, targets=targets, token_weights=weights, softcap=softcap)
        measure = CrossEntropy(tokens, 0.0 if is_plain else 0.1, compiled)
        loss = sum_token_loss(tokens, measure, chunk_bytes=12 * 4 * 50)
        loss.backward()
        results.append((loss, *(t.grad for t in inputs)))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, expected in zip(*reversed(results), strict=True):
        assert (ours - expected).norm() <= tolerance * expected.norm()


@pytest.mark.wide
def test_a_second_run_takes_its_blocks_from_the_cache(tmp_path):
    inputs = make_inputs(tmp_path, "llama")
    texts = []
    for name in ("first", "second"):
        options = OPTIONS | inputs | dict(compile=True, max_steps=1, output_dir=str(tmp_path / name))
        done = succeed(0, "train.py", *flags(**options), env={COMPILED: str(tmp_path / "cache")}, timeout=600)
        texts.append(re.search(r"(\d+) graphs compiled, (\d+) of them from (.*)", done.stderr).groups())
    (compiled, found, path), (again, found_again, _) = texts
    assert int(compiled) > 0 and found == "0" and path == str(tmp_path / "cache")
    assert again == found_again == compiled
