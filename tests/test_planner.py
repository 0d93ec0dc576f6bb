"""The plan of a run: its memory is what the run needs, it finds every problem, and it leaves nothing behind."""

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from breadth import long, wide
from forked import succeed
from in_process import print_plan, train_here
from processes import flags
from small_runs import make_inputs
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, HYBRIDS, SHAPE, VOCAB_SIZE, build, load_source, save_model, save_tokenizer
from tiny_pairs import write_pairs
from torch.distributed.fsdp._fully_shard._fsdp_param import _chunk_with_empty
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Qwen3Config

from mini_trainer.data.columns.base import DataTask
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.model import activation_memory
from mini_trainer.model.optim.averages import make_average
from mini_trainer.model.optim.optimizers import build_optimizer, reduce_step
from mini_trainer.model.sharding import prepare_backward
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.objective import Objective, find_data_kind, make_objective
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.run.auto_settings import MemoryCounter
from mini_trainer.run.export import ExportParts
from mini_trainer.run.exports import Exports
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.plan.simulation import Load, Ranks, StepMemory, cut_first, lay_out_model, simulate_step
from mini_trainer.run.start import choose_method, choose_settings
from mini_trainer.run.step import TrainState, run_backward

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_TRAINED, LONGEST = 400, 300, 60
LEAST_TOKENS = 64  # of a tile
SIMULATIONS = [  # family, options
    wide("llama", dict(lora=True, base_quantization="nf4", compute_dtype="bfloat16")),
    long("mixtral", dict(lora=True, base_quantization="nf4", compute_dtype="bfloat16")),
    wide("phi_head_bias", dict(activation_checkpointing="selective")),
    wide("mistral_window", dict(optimizer="adamw8bit", master_weights="bfloat16")),
    ("llama", dict(optimizer="muon", weight_average="ema", average_over=8)),
    wide("mixtral", dict(compute_dtype="bfloat16", micro_batch_grad_sync="last", reshard_after_forward="never")),
    wide("llama", dict(activation_checkpointing="none", osft=True, osft_unfreeze_rank_ratio=0.25)),
    wide("gated delta net, experts", dict(activation_checkpointing="full")),
    long("mamba 2, attention, experts", dict(activation_checkpointing="none")),
    wide("short convolution", dict(activation_checkpointing="selective")),
    wide("attention that chooses keys", dict(activation_checkpointing="none")),
    long("qwen3", dict(reshard_after_backward="never", compute_dtype="bfloat16")),
    wide("llama", dict(reshard_after_backward="never", reshard_after_forward="never", micro_batch_grad_sync="last")),
    long("qwen3", dict(tiled_mlp=True, offload_activations=True)),
    ("llama", dict(objective="preference", activation_checkpointing="none")),
    ("llama", dict(objective="kto")),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("inputs")
    config = Qwen3Config(**SHAPE | dict(num_hidden_layers=1), head_dim=16, tie_word_embeddings=True)
    sizes = dict(max_steps=5, batch_size=8, max_tokens_per_gpu=64)
    return make_inputs(root, config, num_samples=40) | sizes | dict(output_dir=str(root / "run"), dry_run=True)


@pytest.fixture(scope="module")
def plan(elsewhere, inputs) -> Callable[..., tuple[ExitCode, str]]:
    """The exit code of a plan for other ranks than this one, and what it prints."""

    def plan_changed(**changes) -> tuple[ExitCode, str]:
        return elsewhere(print_plan, inputs | dict(plan_for="2") | changes)

    return plan_changed


@pytest.mark.parametrize("objective", sorted(OBJECTIVES.keys() - {"causal-lm"}))
def test_data_of_another_objective_is_one_problem_of_a_plan(objective, plan):
    code, text = plan(objective=objective)
    assert code == ExitCode.BAD_INPUT
    assert re.search(rf"^1 problem found\n  - --objective {objective}: .*--objective causal-lm", text, re.MULTILINE)


FEW = "only 25 optimizer updates"


@pytest.mark.long
def test_few_updates_are_said_before_they_are_made(plan, inputs, world, tmp_path, caplog):
    """40 samples make 5 updates an epoch; --max-steps asks for its number."""
    ends = [dict(max_steps=None, max_epochs=5), dict(max_steps=None, max_epochs=6), dict(max_steps=25)]
    texts = [plan(**end)[1] for end in ends]
    assert [FEW in text for text in texts] == [True, False, False]
    usual = "--batch-size 6 or --max-epochs 6 or more data. Usual learning rates of full fine-tuning are 2e-6 to 2e-5,"
    assert f"30 or more are usual: {usual} this run's is 0.001" in texts[0]
    assert "Usual learning rates of LoRA are 1e-4 to 2e-4" in plan(**ends[0], lora=True)[1]
    osft = dict(osft=True, osft_unfreeze_rank_ratio=0.25)
    assert "Usual learning rates of OSFT are 1e-4 to 1e-3" in plan(**ends[0], **osft)[1]
    run = inputs | dict(output_dir=str(tmp_path), dry_run=False) | ends[0]
    train_here(world, **run, activation_checkpointing="none")
    assert len((tmp_path / "training_metrics_0.jsonl").read_text().splitlines()) == 25
    assert sum(FEW in record.message for record in caplog.records if record.levelname == "WARNING") == 1


def choose(options: TrainOptions) -> Objective:
    name = options.classification.objective
    return make_objective(name, choose_settings(options), TextFamily(), DataTask(find_data_kind(name)))


def predict(path: Path, num_ranks: int, options: dict) -> StepMemory:
    activation_memory.LEAST_TOKENS = LEAST_TOKENS
    options = group_options(TrainOptions, model_name_or_path=str(path), data_path="", output_dir="", **options)
    dtype = getattr(torch, options.compute.compute_dtype)
    inputs = RunInputs(TextFamily(), choose_method(options), options.data, options, dtype, objective=choose(options))
    inputs.model_dir, inputs.config = str(path), load_source(path).config
    planned = lay_out_model(choose_step_options(options), inputs, options.compute, choose_method(options))
    return simulate_step(
        choose_step_options(options), planned, Load(NUM_TOKENS, NUM_TRAINED, LONGEST, True), Ranks(num_ranks, num_ranks)
    )


@pytest.mark.parametrize(("family", "changes"), SIMULATIONS)
def test_the_simulated_peak_is_that_of_a_real_step(family, changes, elsewhere, world, tmp_path, monkeypatch):
    monkeypatch.setattr(activation_memory, "LEAST_TOKENS", LEAST_TOKENS)
    path = save_model((FAMILIES | HYBRIDS)[family], tmp_path / "model")
    changes = dict(compute_dtype="float32", osft_cache_dir=str(tmp_path)) | changes
    predicted = elsewhere(predict, path, 1, changes)
    options = group_options(TrainOptions, model_name_or_path=str(path), data_path="", output_dir="", **changes)
    compute, master_weights = options.compute, options.optimization.master_weights
    model = build(
        path, world, activation_checkpointing=compute.activation_checkpointing, tiled_mlp=compute.tiled_mlp,
        offload_activations=compute.offload_activations, dtype=getattr(torch, compute.compute_dtype),
        weights_dtype=getattr(torch, master_weights), method=choose_method(options), objective=choose(options),
        **vars(options.sharding),
    )  # fmt: skip
    optimizer = build_optimizer(model, options.optimization)
    average = make_average(model, options.optimization, end=0)
    counter = MemoryCounter()
    copies = model.placed_weights.copies if model.is_whole else []
    averages = [] if average is None else average.values.values()
    for tensor in [*model.parameters(), *model.buffers(), *copies, *averages]:
        counter.count(tensor)
    with counter:
        for _ in range(2):
            for k in range(2):
                prepare_backward(model, options.sharding, is_last=k == 1)
                micro_batch = choose(options).make_probe(NUM_TOKENS, NUM_TRAINED, longest=LONGEST)
                run_backward(model, micro_batch, choose(options).weigh(1, 1, ()))
            optimizer.step()
            optimizer.zero_grad()
    assert predicted.total == pytest.approx(counter.num_peak, rel=0.03)
    assert 0.5 * counter.num_peak > counter.num_live > 0  # what is freed is counted as freed


def test_no_gradient_outlives_its_step(inputs, world, tmp_path, monkeypatch):
    """What the plan takes for granted: the loop holds nothing on to the next step."""
    held, num_alive = [], []

    def look_at_gradients(sums: list, gradients: list, **kwargs):
        held.append([StorageWeakRef(gradient.untyped_storage()) for gradient in gradients])
        return reduce_step(sums, gradients, **kwargs)

    def look_back(*args, **kwargs):
        num_alive.append([sum(not reference.expired() for reference in step) for step in held])
        prepare_backward(*args, **kwargs)

    monkeypatch.setattr("mini_trainer.run.step.reduce_step", look_at_gradients)
    monkeypatch.setattr("mini_trainer.run.step.prepare_backward", look_back)
    train_here(world, **inputs | dict(dry_run=False, max_steps=3, max_tokens_per_gpu=1000, output_dir=str(tmp_path)))
    assert len(held[0]) > 10 and num_alive == [[], [0], [0, 0]]  # at the beginning of each step


@pytest.mark.long
def test_every_problem_is_found_at_once(plan, inputs, tmp_path):
    model = Path(shutil.copytree(inputs["model_name_or_path"], tmp_path / "model"))
    (model / "model.safetensors").unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("of another's")
    code, text = plan(
        model_name_or_path=str(model), max_tokens_per_gpu=20, plan_for="16xH9000", num_warmup_steps=9,
        memory_budget_gb=1e-4, keep_checkpoints=10**9, output_dir=str(tmp_path / "full"),
    )  # fmt: skip
    assert code == ExitCode.BAD_INPUT
    for problem in (
        "no weights",
        "longer than --max-tokens-per-gpu 20",
        "and of 0.0 GiB",
        f"--output-dir {tmp_path / 'full'}: ",
        "--plan-for 16xH9000: ",
    ):
        assert text.count(problem) == 1, f"{problem}\n{text}"
    assert "6 problems found" in text  # neither room nor the right directory
    assert re.search(r"^warning: --batch-size 8: .* 16 ranks", text, re.MULTILINE)
    assert re.search(r"^warning: --num-warmup-steps 9: .* 5 steps", text, re.MULTILINE)
    code, text = plan(batch_size=None, batch_tokens=20, max_steps=5)
    assert code == ExitCode.BAD_INPUT and "1 problem found" in text and "--batch-tokens 20: " in text
    code, text = plan(num_warmup_steps=9)
    assert code == ExitCode.DONE and "warning: --num-warmup-steps 9" in text  # of which a run only warns, too
    code, text = plan(output_dir=str(tmp_path / "full"))
    assert code == ExitCode.BAD_INPUT and f"1 problem found\n  - --output-dir {tmp_path / 'full'} " in text


@pytest.mark.long
def test_a_plan_for_gpus_offloads_activations_and_one_for_this_cpu_refuses(elsewhere, inputs):
    values = inputs | dict(plan_for="2xH100", memory_budget_gb=80.0, max_tokens_per_gpu=256, offload_activations=True)
    assert "in CPU memory" in elsewhere(print_plan, values)[1]
    _, text = elsewhere(print_plan, values | dict(plan_for="2"))
    assert re.search(r"^  - --offload-activations .*CPU", text, re.MULTILINE)


def test_a_plan_for_gpus_names_kernels_and_counts_what_they_keep(plan, tmp_path):
    config = Qwen3Config(**SHAPE | dict(num_hidden_layers=8, hidden_size=256, intermediate_size=768), head_dim=64)
    given = dict(model_name_or_path=str(save_tokenizer(save_model(config, tmp_path))), max_tokens_per_gpu=4096)
    data = write_samples(tmp_path / "long.arrow", make_samples(8, vocab_size=VOCAB_SIZE, max_len=4096))
    given |= dict(data_path=str(data), plan_for="1xH100", memory_budget_gb=80)
    sizes = {}
    for kernels, mode in itertools.product((None, "eager"), ("none", "selective")):
        _, text = plan(**given, activation_checkpointing=mode, kernels=kernels)
        assert f" {kernels or 'fused'} kernels" in text
        (size,) = re.findall(r"one token more in a micro-batch +([\d.]+) KiB", text)
        sizes[kernels, mode] = float(size)
    assert sizes[None, "none"] < 0.9 * sizes["eager", "none"]
    # Less than torch's selective checkpoints keep, though nothing looks at each operation.
    assert sizes[None, "selective"] < 0.9 * sizes["eager", "selective"]


@pytest.mark.long
def test_a_plan_for_gpus_that_are_not_here(plan, elsewhere, inputs):
    code, text = plan(plan_for="8xH100", memory_budget_gb=80)
    assert code == ExitCode.DONE and "plan for 8 x H100, 80.0 GiB" in text
    assert "bfloat16 compute" in text and "assumed: 40% of 989 TFLOP/s" in text
    model = Path(inputs["model_name_or_path"])
    alone, shared = (elsewhere(predict, model, num_ranks, dict(compute_dtype="float32")).peak for num_ranks in (1, 4))
    for kind in ("weights", "gradients", "optimizer"):
        assert alone[kind] == pytest.approx(4 * shared[kind], rel=0.02), kind
    assert alone["activations"] == pytest.approx(shared["activations"], rel=0.1)


def test_the_only_shard_that_a_simulation_cuts_is_the_first_of_fsdp():
    for size, num_ranks, dim in itertools.product((1, 5, 8, 1000), (1, 3, 8, 1024), (0, 1)):
        weight = torch.arange(2 * size).view((size, 2) if dim == 0 else (2, size))
        (cut,), (first, *_) = cut_first(weight, num_ranks, dim), _chunk_with_empty(weight, num_ranks, dim)
        assert torch.equal(cut, first) and cut.data_ptr() == first.data_ptr() and cut.stride() == first.stride()


@pytest.mark.long
def test_hybrid_sharding_divides_by_fewer_ranks(plan):
    code, text = plan(plan_for="8", sharding="hybrid", shard_size=4)
    assert code == ExitCode.DONE, text
    code, text = plan(plan_for="8", sharding="hybrid", shard_size=3)
    assert code == ExitCode.BAD_INPUT and re.search(r"--sharding hybrid: .* 8 ranks .* 3 ranks", text)


def test_ranks_that_share_rows_are_planned_as_fewer_with_longer_rows(plan):
    ranks = dict(plan_for="4", context_parallel=2), dict(plan_for="2", max_tokens_per_gpu=128)
    shared, fewer = (plan(**given, batch_size=40)[1] for given in ranks)
    packed = r"micro-batches of at most 128 tokens, in the next \d+ batches: [\d.]+ a"
    assert re.search(packed, shared)[0] == re.search(packed, fewer)[0]


def test_a_plan_without_data_or_model_says_what_it_can(plan, tmp_path):
    code, text = plan(data_path=str(tmp_path / "none.arrow"))
    assert code == ExitCode.BAD_INPUT and f"--data-path {tmp_path / 'none.arrow'}: " in text and "model: qwen3" in text
    code, text = plan(model_name_or_path=str(tmp_path / "none"))
    assert code == ExitCode.BAD_INPUT and f"--model-name-or-path {tmp_path / 'none'}: " in text and "40 samples" in text


@pytest.mark.long
def test_the_plan_of_a_run_that_goes_on_knows_its_checkpoint(plan, inputs, world, tmp_path):
    run = dict(output_dir=str(tmp_path / "run"), checkpoint_every_steps=2, save_final_checkpoint=False)
    train_here(world, **inputs | run | dict(dry_run=False, max_steps=2))
    code, text = plan(**run)
    assert code == ExitCode.DONE and re.search(r"5 steps of 8 samples, 2 ", text), text
    code, text = plan(**run | dict(learning_rate=1.0))
    assert code == ExitCode.BAD_INPUT and re.search(r"learning-rate \(0.001 .* 1\.0\)", text), text


@pytest.mark.parametrize(
    "changes",
    [
        dict(weight_average="ema", average_over=8),
        long(dict(weight_average="tail", average_over=2)),
        long(dict(weight_average="tail", average_over=2, keep_exports=2)),
    ],
)
def test_the_disk_of_a_plan_holds_the_exports_of_averages(changes, plan, inputs, world, tmp_path, monkeypatch):
    most, write = Counter(), Exports._write

    def look(exports: Exports, state: TrainState, export_dir: Path, parts: ExportParts, **others: bool) -> None:
        names = {path.name for path in export_dir.parent.glob("*") if not path.is_symlink()}
        names |= {f"new {export_dir.name}"}
        most["averages"] = max(most["averages"], sum("average_" in name for name in names))
        most["all"] = max(most["all"], len(names))
        write(exports, state, export_dir, parts, **others)

    given = dict(min_samples_per_checkpoint=8, export_dtype="float32", max_tokens_per_gpu=1000) | changes
    _, text = plan(**given)
    found = re.search(r"one being written\), (\d+) exports, (\d+) of them of an average, of ([\d.]+) GB", text)
    monkeypatch.setattr(Exports, "_write", look)
    train_here(world, **inputs | given | dict(dry_run=False, output_dir=str(tmp_path / "run")))
    num_exports, num_averages = int(found[1]), int(found[2])
    assert num_averages == most["averages"]
    assert num_exports == most["all"]


@pytest.mark.parametrize("objective", ["causal-lm", long("preference"), long("reward")])
def test_a_dry_run_measures_a_step_and_leaves_nothing(objective, request, tmp_path):
    given = request.getfixturevalue("inputs" if objective == "causal-lm" else "pairs") | dict(objective=objective)
    folders = (tmp_path.parent, Path(given["data_path"]).parent)
    before = [sorted(folder.rglob("*")) for folder in folders]
    result = succeed(0, "train.py", *flags(**given | dict(output_dir=tmp_path / "run")))
    assert "on 3 micro-batches" in result.stdout and "no problems found" in result.stdout
    assert [sorted(folder.rglob("*")) for folder in folders] == before


@pytest.mark.wide
def test_auto_settings_are_planned_by_the_room_there_is(plan):
    kept = (
        "none activation checkpointing, eager kernels, --reshard-after-forward never, --reshard-after-backward never, "
    )
    freed = "full activation checkpointing, eager kernels, --reshard-after-backward always, "
    for budget, words in ((80, kept), (0.0005, freed)):
        _, text = plan(activation_checkpointing="auto", kernels="eager", plan_for="2xH100", memory_budget_gb=budget)
        assert words in text, text
    code, text = plan(activation_checkpointing="auto", plan_for="2xH100")
    assert code == ExitCode.BAD_INPUT and "--activation-checkpointing auto " in text and "--memory-budget-gb" in text


# A reference model.


@pytest.fixture(scope="module")
def pairs(inputs, tmp_path_factory) -> dict:
    """Options of a dry run on random pairs."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.arrow"
    write_pairs(path, inputs["model_name_or_path"], size=40)
    return inputs | dict(objective="preference", data_path=str(path))


@pytest.mark.long
def test_the_references_scores_count_until_a_run_has_written_them(plan, pairs, world, tmp_path):
    elsewhere_on = dict(plan_for="2xH100", memory_budget_gb=80.0)
    code, text = plan(**pairs, **elsewhere_on)
    assert code == ExitCode.DONE and re.search("^reference: 40 samples .* 0.00 TFLOP", text, re.MULTILINE), text
    assert "the samples to score, 0:00:00" in text and "while --reference-model" not in text
    _, text = plan(**pairs, **elsewhere_on, preference_loss="simpo")
    assert "reference" not in text
    _, text = plan(**pairs, **elsewhere_on, preference_loss="orpo")  # whose gradients have a divisor of their own
    assert "together" in text and "memory: not known" not in text, text
    train_here(world, **pairs | dict(dry_run=False, max_steps=1, output_dir=str(tmp_path / "run")))
    _, text = plan(**pairs, **elsewhere_on)
    found = re.search(r"reference: ([\d,]+) samples", text)  # scored in the compute type of this machine, not bfloat16
    assert found is not None and found[1] == "40"
    _, text = plan(**pairs)
    assert "reference: all samples" in text


@pytest.mark.long
def test_another_reference_model_needs_memory_while_it_scores(plan, pairs, tmp_path):
    other = save_tokenizer(save_model(FAMILIES["qwen3"], tmp_path / "other", seed=1))
    target = dict(plan_for="2xH100", lora=True, reference_model=str(other))
    code, text = plan(**pairs, **target, memory_budget_gb=80.0)
    assert code == ExitCode.DONE and "while --reference-model" in text, text
    code, text = plan(**pairs, **target, memory_budget_gb=1e-5)
    assert code == ExitCode.BAD_INPUT and "--reference-model needs 0.0 GiB" in text
    shutil.rmtree(other)
    code, text = plan(**pairs, **target, memory_budget_gb=80.0)
    assert code == ExitCode.BAD_INPUT and "--reference-model" in text
