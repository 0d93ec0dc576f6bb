"""The kernels for CUDA are asked for what SDPA computes one sequence at a time, by every release that is supported.

The kernels do not run here: in their place stands their documentation, written out, behind the recorded signatures.
"""

import importlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from breadth import long, wide
from hand_made import pack_samples
from in_process import train_here
from kernel_standins import FLASH, VARLEN, FlashOperators, Kernels
from recorded import RECORDED, RELEASES, list_names
from small_runs import OPTIONS, make_inputs, make_micro_batch, read_rows
from tiny_models import FAMILIES, build, check, compile_by, save_model
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface

from mini_trainer.model import attention as packed_attention
from mini_trainer.model.activation_checkpointing import ATTENTION
from mini_trainer.model.attention import Rule, attend_eager, attend_sdpa, choose_backend
from mini_trainer.model.attention_kernels import activate_kernels
from mini_trainer.objectives.families.family import Row
from mini_trainer.options import doors

LENGTHS = (7, 1, 12, 3)
NUM_HEADS, NUM_KEY_VALUE_HEADS, HEAD_SIZE = 4, 2, 8
# One release for each signature.
DISTINCT = [
    (package, entry["releases"][0])
    for package, name in (("torch", VARLEN), ("flash-attn", FLASH))
    for entry in RECORDED["signatures"][package][name]
]
OPTION = {"torch": "varlen", "flash-attn": "flash_attn"}


@pytest.fixture(params=DISTINCT, ids="-".join)
def kernels(request, monkeypatch) -> Kernels:
    """One release's kernels, on a machine where nothing stands in their way."""
    kernels = Kernels(*request.param)
    kernels.install(monkeypatch)
    monkeypatch.setattr(packed_attention, "find_obstacle", lambda *args, **kwargs: None)
    return kernels


def make_row() -> Row:
    return pack_samples([(np.arange(length), np.arange(length), None) for length in LENGTHS]).row


def make_tensors() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), HEAD_SIZE) for heads in (NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_KEY_VALUE_HEADS)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 100])  # of 2 and 3, the shortest sample has one more, and as many
@pytest.mark.parametrize("extras", [{}, dict(is_two_sided=True), dict(softcap=1.5)])
def test_kernels_are_asked_for_what_a_plain_mask_computes(kernels, extras, window):
    attends = [attend_eager] if "softcap" in extras else [attend_eager, attend_sdpa]
    if kernels.package != "torch" or "softcap" not in extras:  # which varlen does not have
        attends.append(doors.ATTENTION[OPTION[kernels.package]])
    tensors, results = make_tensors(), []
    rule = Rule(scaling=0.3, window=window, **extras)
    for function in (attend_plainly, *attends):
        output = function(*tensors, make_row(), rule)
        assert output.shape == (1, sum(LENGTHS), NUM_HEADS, HEAD_SIZE)
        results.append((output, *torch.autograd.grad(output.square().sum(), tensors)))
    assert kernels.num_calls == (attends[-1] is not attend_eager)
    for found in results[1:]:
        for ours, expected in zip(found, results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, row: Row, rule: Rule) -> Tensor:
    """Each token and those that it sees, by the definition of a window."""
    sequence = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    window = len(sequence) if rule.window is None else rule.window

    def sees(i: int, j: int) -> bool:
        return sequence[i] == sequence[j] and abs(i - j) < window and (j <= i or rule.is_two_sided)

    mask = torch.tensor([[sees(i, j) for j in range(len(sequence))] for i in range(len(sequence))])
    key, value = (each.repeat_interleave(NUM_HEADS // NUM_KEY_VALUE_HEADS, dim=1) for each in (key, value))
    scores = query @ key.mT * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def test_cpus_attend_to_short_sequences_in_fp32(monkeypatch):
    """Rounded to bfloat16 once, at the end; longer ones are close to that."""
    rounded = [tensor.bfloat16().detach().requires_grad_() for tensor in make_tensors()]
    results = []
    for tensors, short in ((rounded, 128), ([one.float() for one in rounded], 128), (rounded, 0)):
        monkeypatch.setattr(packed_attention, "SHORT", short)
        output = attend_sdpa(*tensors, make_row(), Rule(scaling=0.3))
        assert output.dtype == tensors[0].dtype
        results.append((output, *torch.autograd.grad(output.float().sum(), tensors)))
    for short, exact, plain in zip(*results, strict=True):
        assert torch.equal(short, exact.bfloat16())
        torch.testing.assert_close(plain.float(), exact.float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(results[0][1], results[2][1])


def join_last_two(q, k, v, row, rule):
    lengths = [row.seq_lengths[0], sum(row.seq_lengths[1:])]
    return attend_sdpa(q, k, v, SimpleNamespace(seq_lengths=lengths), rule)


def attend_to_what_follows(q, k, v, row, rule):
    """From the row's end: the first sequence sees the second, and no other sees one."""
    first, second, *others = row.seq_lengths
    reverse = SimpleNamespace(seq_lengths=[*others[::-1], first + second])
    return attend_sdpa(*(t.flip(2) for t in (q, k, v)), reverse, rule).flip(1)


def double_last(q, k, v, row, rule):
    factors = torch.ones(1, q.shape[2], 1, 1)
    factors[:, -1] = 2
    return attend_sdpa(q, k, v, row, rule) * factors


ISOLATION = {
    "the last sees the one before": (join_last_two, "see each other"),
    "only later ones are seen": (attend_to_what_follows, "see each other"),
    "not a number": (lambda *args: attend_sdpa(*args) * float("nan"), "see each other; .* by nan"),
    "one token": (double_last, "differ from the model's own forward pass"),
    "fails": (lambda *args: 1 / 0, "fails on a packed row: division"),
}


@pytest.mark.parametrize("case", ISOLATION)
def test_the_start_up_check_finds_attention_that_is_wrong(case, world, tmp_path, monkeypatch):
    wrong, reason = ISOLATION[case]
    model = build(save_model(FAMILIES["llama"], tmp_path), world, attention="sdpa")
    name = packed_attention.registered_name("sdpa")
    monkeypatch.setitem(AttentionInterface._global_mapping, name, packed_attention.make_interface("sdpa", wrong))
    with pytest.raises(ValueError, match=reason):
        check(model, world)


def test_the_start_up_check_finds_another_loss_and_windows_that_are_not_passed_on(world, tmp_path, monkeypatch):
    model = build(save_model(FAMILIES["gemma3"], tmp_path), world, attention="sdpa")
    check(model, world)
    assert model.training
    own = model.reference
    for share in (0.9999, 1.0001):
        monkeypatch.setattr(model, "reference", lambda row, share=share: (own(row)[0], own(row)[1] * share))
        with pytest.raises(ValueError, match="the loss over 3 sequences"):
            check(model, world)
    monkeypatch.undo()
    next(each for each in model.modules() if getattr(each, "sliding_window", None)).sliding_window = None
    with pytest.raises(ValueError, match=r"declares \d layers with a sliding window, but \d use one"):
        check(model, world)


@pytest.mark.parametrize("family", ["llama", long("mistral_window"), long("gemma2_softcaps")])
def test_a_run_trains_to_the_same_numbers(kernels, family, world, tmp_path):
    """The whole way: the start-up check, and two steps with recomputation."""
    if kernels.package == "torch" and family == "gemma2_softcaps":
        pytest.skip("varlen has no softcap")
    options = OPTIONS | make_inputs(tmp_path, family)
    options |= dict(max_steps=2, checkpoint_every_steps=None, compute_dtype="float32")
    rows = []
    for attention in (OPTION[kernels.package], "eager"):
        output_dir = tmp_path / attention
        train_here(world, **options, output_dir=str(output_dir), attention=attention)
        rows.append([(row["loss"], row["grad_norm"]) for row in read_rows(output_dir)])
    assert rows[0] == [pytest.approx(row, rel=1e-4) for row in rows[1]]
    assert kernels.num_calls > 10


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.cu_seqlens.data.add_(1),
        lambda row: setattr(row, "cu_seqlens", row.cu_seqlens.long()),
        lambda row: setattr(row, "max_seqlen", row.max_seqlen - 1),
        lambda row: setattr(row, "max_seqlen", torch.tensor(row.max_seqlen)),
    ],
    ids=["borders", "int64", "too short", "tensor"],
)
def test_a_wrong_argument_fails(kernels, spoil):
    attend, row = doors.ATTENTION[OPTION[kernels.package]], make_row()
    holder = SimpleNamespace(cu_seqlens=row.cu_seqlens.clone(), max_seqlen=row.max_seqlen)
    attend(*make_tensors(), holder, Rule(scaling=0.3))
    spoil(holder)
    with pytest.raises(AssertionError):
        attend(*make_tensors(), holder, Rule(scaling=0.3))


def test_an_argument_that_a_release_does_not_take_fails(kernels, monkeypatch):
    wrong = {"torch": {"causal": True}, "flash-attn": {"enable_gqa": True}}[kernels.package]
    is_torch = kernels.package == "torch"
    function = varlen.varlen_attn if is_torch else importlib.import_module("flash_attn").flash_attn_varlen_func
    row, (query, key, value) = make_row(), (t[0].transpose(0, 1) for t in make_tensors())
    borders = (row.cu_seqlens, row.cu_seqlens, row.max_seqlen, row.max_seqlen)
    with pytest.raises(TypeError, match=f"'{next(iter(wrong))}'"):
        function(query, key, value, *borders, **wrong)


def test_selective_checkpointing_knows_the_operators_of_every_release():
    for operator, package in (
        ("torch_attn::_varlen_attn", "torch"),
        ("flash_attn::_flash_attn_varlen_forward", "flash-attn"),
    ):
        assert operator in ATTENTION
        assert all(operator in list_names(package, release) for release in RELEASES[package])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode", "compiled"),
    [
        ("llama", "selective", False),
        ("llama", "full", False),
        wide("llama", "full", True),
        wide("mistral_window", "selective", True),
    ],
)
def test_torchs_own_operator_is_kept_compiled_and_right(family, mode, compiled, world, tmp_path, monkeypatch):
    """varlen_attn of the installed torch, down to the operators that only CUDA implements."""
    monkeypatch.setattr(packed_attention, "find_obstacle", lambda *args, **kwargs: None)
    if compiled:
        torch._dynamo.reset()
        compile_by("aot_eager", monkeypatch)
    operators, results = FlashOperators(), []
    path = save_model(FAMILIES[family], tmp_path)
    with torch.library._scoped_library("aten", "IMPL") as library:
        operators.register(library)
        for options in (
            dict(attention="varlen", activation_checkpointing=mode, compile=compiled),
            dict(attention="eager"),
        ):
            model = build(path, world, **options)
            check(model, world)
            operators.num_forward = 0
            loss = model(make_micro_batch(LENGTHS, seed=0)).loss
            loss.backward()
            results.append([loss.detach(), *(param.grad.full_tensor() for param in model.parameters())])
            if options["attention"] == "varlen":
                assert operators.num_forward == (4 if mode == "full" else 2) and operators.num_backward == 2
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
def test_torchs_own_operator_is_traced_without_a_break(monkeypatch):
    """Called as compiled blocks call it; test-wide compiles whole models with it."""
    monkeypatch.setattr(packed_attention, "find_obstacle", lambda *args, **kwargs: None)
    operators, row, tensors, results = FlashOperators(), make_row(), make_tensors(), []
    compiled = torch.compile(doors.ATTENTION["varlen"], backend="aot_eager", fullgraph=True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        operators.register(library)
        for attend in (compiled, attend_sdpa):
            output = attend(*tensors, row, Rule(scaling=0.3, window=4))
            results.append((output, *torch.autograd.grad(output.square().sum(), tensors)))
    assert (operators.num_forward, operators.num_backward) == (1, 1)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("head_size", "expected"), [(64, "varlen"), (20, "sdpa"), (512, "sdpa")])
def test_heads_that_the_kernel_does_not_know_go_to_sdpa(head_size, expected, monkeypatch):
    assert choose(monkeypatch, head_size=head_size) == expected


def choose(monkeypatch, *, head_size: int = 64, requested: str = "auto", capability: tuple[int, int] = (9, 0)) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {capability}")
    config = SimpleNamespace(head_dim=head_size, num_attention_heads=4)
    return choose_backend(
        requested, model=torch.nn.Linear(2, 2), config=config, device=torch.device("cuda"), dtype=torch.bfloat16
    )


def test_flash_attention_3_is_chosen_by_name_where_it_runs(monkeypatch):
    installed = {"flash_attn_interface"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert choose(monkeypatch) == "varlen"
    assert choose(monkeypatch, requested="varlen_fa3") == "varlen_fa3"
    with pytest.raises(ValueError, match=r"--attention varlen_fa3: .*Hopper .*\(10, 0\)"):
        choose(monkeypatch, requested="varlen_fa3", capability=(10, 0))
    installed.clear()
    with pytest.raises(ValueError, match="flash_attn_interface"):
        choose(monkeypatch, requested="varlen_fa3")
    with pytest.raises(ValueError, match="multiples of 8"):
        choose(monkeypatch, requested="varlen_fa3", head_size=20)


def test_flash_attention_3_is_active_for_the_runs_that_ask_for_it():
    """torch's own registry, with an implementation in place of FlashAttention 3."""
    from torch.nn.attention import _registry

    active, own = [], _registry._FLASH_ATTENTION_IMPLS["FA3"]
    handle = SimpleNamespace(remove=lambda: active.remove("FA3"))
    _registry.register_flash_attention_impl("FA3", register_fn=lambda: active.append("FA3") or handle)
    try:
        for backend, expected in (("varlen", []), ("varlen_fa3", ["FA3"]), ("varlen_fa3", ["FA3"]), ("sdpa", [])):
            activate_kernels(backend)
            assert active == expected
    finally:
        _registry.register_flash_attention_impl("FA3", register_fn=own)
