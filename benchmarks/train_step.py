"""Our training step against those of transformers, TRL and a plain FSDP2 loop, side by side on the same samples.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py --data-path gsm8k.arrow            # CPU, about 20 minutes
    python benchmarks/train_step.py --data-path gsm8k.arrow --shape qwen2.5-1.5b --batch-size 256 \
        --max-tokens-per-gpu 8192 --micro-batch-size 16 --compile ours trl              # one CUDA device
    … --shape qwen2.5-7b --activation-checkpointing full --methods ours trl
    … --model smollm2 --data-path gsm8k.arrow                                           # real weights

The same random weights, learning rate, AdamW, clipping, compute dtype and global batches for all; `METHODS` says what
each does. Each method runs in a process of its own, one after the other, round after round; the first step of each
process is not timed. On the CPU ratios go by CPU seconds, which other work on the machine moves less than the clock.

Loss: after each step, outside the timing, the mean over the trained tokens of the same held-out samples, one by one and
by the model's own forward pass. Methods with equal global batches and an exact loss show the same numbers.

cuDNN's attention is off for all: it makes a plan for each length.

Samples apart: one sample's tokens are changed, and the others' hidden states in the same row or batch looked at.

MFU: FLOPs that the samples need (`model.flops.FlopCount`: 6 per weight and token, the head for trained tokens only,
attention over real lengths, no recomputation, no padding) / what the device could do in the time: the data sheet's
number on CUDA; on the CPU, CPU seconds times the speed of a 2048 x 2048 fp32 product measured at the start.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train.py does, before importing torch
import paths  # noqa: F401
import torch
import torch.distributed as dist
from harness import build_state, describe_versions, make_options, pad_samples, time_call, write_random_data
from make_tiny_model import train_tokenizer
from packing import DISTRIBUTIONS, draw_lengths
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.devices import peak_flops, peak_memory
from mini_trainer.distributed.world import World, init_world, setup_logging
from mini_trainer.model.activation_checkpointing import apply_activation_checkpointing
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.model.method import Full, Method
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import LoRAOptions, TrainOptions
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import train_step
from mini_trainer.sampler import draw_samples, iterate_batches, pin_memory, prefetch

METHODS = {
    "ours": "train.py's step: packed, trained rows reach the head, one gradient per global batch",
    "padded": "transformers.Trainer, samples in order, padded to the longest of the micro-batch, all logits",
    "grouped": "the same with group_by_length: global batches of its own, of similar lengths",
    "rebalanced": "the same with batch_rebalance: each global batch sorted by length and cut at equal padded cost",
    "trl": "TRL's SFTTrainer, packing 'bfd' (padding-free), each global batch packed by itself",
    "trl-wrapped": "TRL's SFTTrainer, packing 'wrapped': one stream of tokens, cut anywhere",
    "plain": "an FSDP2 loop: fixed samples a micro-batch, padded, all logits, mean of means, .item() each time",
}
# With adapters of peft on every linear layer of the blocks; ours also with the base in NF4.
METHODS |= {f"{name}+lora": f"{METHODS[name]}, with LoRA" for name in ("ours", "padded", "grouped", "trl")}
METHODS["ours+qlora"] = f"{METHODS['ours']}, with LoRA on weights in NF4"
LORA_RANK = 16
SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary, tied head
    "nano": (32, 64, 2, 2, 1, 512, True),  # for the test
    "tiny": (128, 352, 4, 4, 2, 512, True),  # of benchmarks/scaling.py
    "medium": (768, 2048, 4, 12, 4, 8192, True),
    "small": (128, 352, 4, 4, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, False),  # with Qwen2's biases
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
BETAS, EPS, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0
NUM_HELD_OUT = 4
LEAK = 1e-3  # relative change of the others' hidden states above which samples are said to see each other


def read_config(args: argparse.Namespace) -> PretrainedConfig:
    return make_config(args.shape) if args.model is None else AutoConfig.from_pretrained(args.model)


def make_config(shape: str) -> Qwen2Config:
    hidden, inner, num_layers, num_heads, num_key_value_heads, vocab_size, tied = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads, vocab_size=vocab_size, tie_word_embeddings=tied,
        max_position_embeddings=32768, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def make_empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model whose weights have shapes alone."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def save_random_model(shape: str, model_dir: str | Path) -> None:
    torch.manual_seed(0)
    with find_device():
        AutoModelForCausalLM.from_config(make_config(shape), dtype=torch.bfloat16).save_pretrained(model_dir)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what is measured runs in other processes


# --- What every method shares -------------------------------------------------------------------------------


@dataclass
class Record:
    """What a method's run was: its timed steps, and the loss of the held-out samples before and after each step."""

    device: torch.device
    held_out: list[MicroBatch]  # of one sample each
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    leak: float = 0.0

    def start(self, sum_loss: Callable[[MicroBatch], Tensor]) -> None:
        """From here on steps are timed; `sum_loss` is the model's own loss of a sample, summed over its targets."""
        self.sum_loss = sum_loss
        self._evaluate()

    def step_done(self) -> None:
        now = self._clocks()
        self.seconds.append(now[0] - self.resumed[0])
        self.cpu_seconds.append(now[1] - self.resumed[1])
        self._evaluate()

    def _clocks(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic(), time.process_time()

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def _evaluate(self) -> None:
        loss_sum = sum(self.sum_loss(micro_batch).item() for micro_batch in self.held_out)
        self.losses.append(loss_sum / sum(len(micro_batch.targets.index) for micro_batch in self.held_out))
        self.resumed = self._clocks()


def sum_own_loss(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """The loss of a row's one sample by a model of transformers, as `PackedModel.reference` gives it for ours."""
    logits = model(input_ids=micro_batch.row.input_ids, use_cache=False).logits[0]  # (L, V)
    return nn.functional.cross_entropy(
        logits.float(), micro_batch.targets.labels, ignore_index=IGNORED, reduction="sum"
    )


@torch.no_grad()
def find_leak(encode: Callable[[Tensor], Tensor], input_ids: Tensor, sample_of: Tensor) -> float:
    """How far the other samples' hidden states move, relative to their size, when sample 0's tokens change.

    `input_ids`, `sample_of` (rows, T): the sample of each token, -1 for padding; `encode` returns (rows, T, H).
    """
    before = encode(input_ids)[sample_of > 0].float()
    after = encode(torch.where(sample_of == 0, (input_ids + 7) % 500, input_ids))[sample_of > 0].float()
    return ((after - before).norm(dim=-1) / before.norm(dim=-1)).max().item()


def plan_batches(data: Mixture, method: str, args: argparse.Namespace) -> list[np.ndarray]:
    """The rows of each global batch, the untimed first included: the stream's, but for group_by_length."""
    size = args.batch_size
    if method != "grouped":
        return [draw_samples(data, seed=args.seed, start=k * size, count=size) for k in range(args.num_steps + 1)]
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(args.seed)
    order = get_length_grouped_indices(data.lengths[data.kept].tolist(), size, generator=generator)
    order = data.kept[order[: len(order) // size * size]].reshape(-1, size)
    order = order[data.lengths[order].sum(axis=1).argsort()]
    middles = (np.arange(args.num_steps) + 0.5) / args.num_steps * len(order)
    return list(order[[len(order) // 2, *middles.astype(int)]])  # the timed ones: evenly from shortest to longest


def load_model(args: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The model as a user of transformers loads it."""
    is_trl = args.worker.startswith("trl")
    model = AutoModelForCausalLM.from_pretrained(
        args.model_dir, dtype=getattr(torch, args.weights), attn_implementation=args.trl_attention if is_trl else "sdpa"
    ).to(device)
    if args.worker.endswith("+lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model


def find_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@functools.cache
def open_world() -> World:
    """The process group of the methods that use FSDP; the trainers make their own arrangements."""
    return init_world()


# --- The methods: each trains the batches and fills the record ----------------------------------------------


def train_ours(args: argparse.Namespace, data: Mixture, batches: list[np.ndarray], record: Record) -> None:
    world = open_world()
    options = make_options(
        batch_size=args.batch_size, max_tokens_per_gpu=args.max_tokens_per_gpu, seed=args.seed,
        learning_rate=args.learning_rate, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS,
        max_grad_norm=MAX_GRAD_NORM, attention=args.attention, compile=args.worker in args.compile,
        activation_checkpointing=args.activation_checkpointing, data_path=args.data_path,
    )  # fmt: skip
    state = build_state(args.model_dir, options, world, method=make_method(args.worker, options))
    model = state.model
    planned = iterate_batches(
        data, options.data, objective=CausalLM(), num_steps=len(batches), world=world,
        attention_cost=count_flops(model.model).attention_cost,
    )  # fmt: skip
    if world.device.type == "cuda":
        planned = pin_memory(planned)

    def sum_loss(micro_batch: MicroBatch) -> Tensor:
        backend = model.model.config._attn_implementation
        model.model.set_attn_implementation("sdpa")
        _, loss_sum = model.reference(micro_batch)
        model.model.set_attn_implementation(backend)
        reshard(model)
        return loss_sum

    for batch, rows in zip(prefetch(planned), batches, strict=True):
        assert (batch.sample_ids == rows).all(), "the other methods train other samples"
        if batch.step == 0:
            first = next(m for m in batch.micro_batches if len(m.row.seq_lengths) > 1).to(world.device)
            lengths = torch.tensor(first.row.seq_lengths)
            borders = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            record.leak = find_leak(
                lambda ids, first=first: model.hidden_states(first.replace(row=replace(first.row, input_ids=ids))),
                first.row.input_ids,
                borders[None].to(world.device),
            )
            record.start(sum_loss)
        train_step(state, batch, choose_step_options(options), lr=args.learning_rate)
        record.step_done()


def make_method(name: str, options: TrainOptions) -> Method:
    """What trains in one of our own methods."""
    _, _, adapter = name.partition("+")
    if not adapter:
        return Full()
    quantization = "nf4" if adapter == "qlora" else "none"
    method = LoRA(LoRAOptions(lora=True, lora_rank=LORA_RANK, base_quantization=quantization), seed=options.data.seed)
    method.open_files(train_tokenizer([], vocab_size=288), options.data)
    return method


def train_plain(args: argparse.Namespace, data: Mixture, batches: list[np.ndarray], record: Record) -> None:
    world = open_world()
    model = load_model(args, world.device).train()
    blocks = find_blocks(model)
    if args.activation_checkpointing == "full":
        apply_activation_checkpointing(blocks)
    if "plain" in args.compile:
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=True)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*blocks, model):
        fully_shard(unit, mesh=world.mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
    )

    def sum_loss(micro_batch: MicroBatch) -> Tensor:
        loss_sum = sum_own_loss(model, micro_batch)
        model.reshard()
        return loss_sum

    record.start(sum_loss)
    for rows in batches:
        micro_batches = rows.reshape(-1, args.micro_batch_size)
        loss_of_step = 0.0
        for micro_rows in micro_batches:
            samples = [data.read(row) for row in micro_rows]
            loss = model(**pad_samples(samples, world.device), use_cache=False).loss / len(micro_batches)
            loss.backward()
            loss_of_step += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        record.step_done()


def pack_with_trl(rows: list[dict], strategy: str, max_length: int, num_packed: int | None) -> list[dict]:
    """One global batch packed by TRL; into exactly `num_packed` rows, if given, by a smaller length of rows."""
    from datasets import Dataset
    from trl import pack_dataset

    packed = pack_dataset(Dataset.from_list(rows), max_length, strategy)
    while num_packed is not None and len(packed) < num_packed:
        max_length -= 8
        packed = pack_dataset(Dataset.from_list(rows), max_length, strategy)
    assert num_packed in (None, len(packed)), f"{len(packed)} rows of {max_length} tokens instead of {num_packed}"
    return packed.to_list()


def train_with_trainer(args: argparse.Namespace, data: Mixture, batches: list[np.ndarray], record: Record) -> None:
    """transformers.Trainer, or TRL's, which loads the batches' samples in order."""
    import datasets
    from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    method, on_cuda = args.worker.partition("+")[0], record.device.type == "cuda"
    datasets.disable_progress_bars()
    model = load_model(args, record.device)
    tokenizer = train_tokenizer([], vocab_size=288)

    class TellRecord(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            record.step_done()

    class InOrder:
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            dataset = self.train_dataset if train_dataset is None else train_dataset
            if method != "rebalanced":
                return SequentialSampler(dataset)
            return BatchRebalanceSampler(
                [len(ids) for ids in dataset["input_ids"]], effective_batch_size=args.batch_size, dp_size=1,
                grad_accum=args.batch_size // args.micro_batch_size, shuffle=False,
            )  # fmt: skip

    settings = dict(
        output_dir=tempfile.gettempdir(), save_strategy="no", report_to="none", disable_tqdm=True,
        max_steps=len(batches), learning_rate=args.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused", bf16=on_cuda, use_cpu=not on_cuda, torch_compile=args.worker in args.compile,
        gradient_checkpointing=args.activation_checkpointing == "full",
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip

    def read(row: int, number: int) -> dict[str, list[int]]:
        sample = data.read(row)
        input_ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        return {"input_ids": input_ids, "labels": labels, "sample_of": [number] * len(input_ids)}

    per_batch = [[read(row, number) for number, row in enumerate(rows)] for rows in batches]
    if method.startswith("trl"):
        from trl import SFTConfig, SFTTrainer

        strategy = "wrapped" if method == "trl-wrapped" else "bfd"
        packed = [pack_with_trl(rows, strategy, args.max_tokens_per_gpu, None) for rows in per_batch]
        num_packed = max(map(len, packed))
        packed = [pack_with_trl(rows, strategy, args.max_tokens_per_gpu, num_packed) for rows in per_batch]
        rows = columns = [row for batch in packed for row in batch]
        own = SFTConfig(
            **settings, per_device_train_batch_size=1, gradient_accumulation_steps=num_packed, packing=True,
            packing_strategy=strategy, max_length=args.max_tokens_per_gpu,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        base, takes = SFTTrainer, {"processing_class": tokenizer}
        shown = [next(row for row in rows if len(set(row["sample_of"])) > 1)]
    else:
        rows = [row for batch in per_batch for row in batch]
        columns = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
        own = TrainingArguments(
            **settings, per_device_train_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=args.batch_size // args.micro_batch_size,
        )  # fmt: skip
        base, takes = Trainer, {"data_collator": DataCollatorForSeq2Seq(tokenizer, padding=True)}
        shown = rows[: args.micro_batch_size]
    dataset = datasets.Dataset.from_list(columns)
    trainer_class = type("InOrderTrainer", (InOrder, base), {})
    trainer = trainer_class(model=model, args=own, train_dataset=dataset, callbacks=[TellRecord()], **takes)
    trainer.remove_callback(PrinterCallback)  # stdout carries the result
    keys = set(shown[0]) - {"sample_of"}
    inputs = trainer.data_collator([{key: row[key] for key in keys} for row in shown])
    inputs = {k: v.to(record.device) if isinstance(v, Tensor) else v for k, v in inputs.items() if k != "labels"}
    samples_of = [torch.tensor(row["sample_of"]) for row in shown]
    sample_of = nn.utils.rnn.pad_sequence(samples_of, batch_first=True, padding_value=-1).to(record.device)
    sample_of = torch.where(sample_of == sample_of[0, 0], 0, torch.where(sample_of < 0, -1, sample_of + 1))
    plain = model.get_base_model() if "+" in args.worker else model
    with torch.autocast(record.device.type, torch.bfloat16, enabled=on_cuda):
        record.leak = find_leak(
            lambda ids: plain.base_model(**inputs | {"input_ids": ids}, use_cache=False).last_hidden_state,
            inputs["input_ids"],
            sample_of,
        )

    def sum_loss(micro_batch: MicroBatch) -> Tensor:
        with torch.autocast(record.device.type, torch.bfloat16, enabled=on_cuda):
            return sum_own_loss(model, micro_batch)

    record.start(sum_loss)
    trainer.train()


def run_worker(args: argparse.Namespace) -> dict[str, Any]:
    """Trains with one method in this process; `Record`'s numbers and the peak of memory."""
    data = open_data(args)
    method = args.worker.partition("+")[0]
    torch.backends.cuda.enable_cudnn_sdp(False)
    batches = plan_batches(data, method, args)
    held_out = draw_samples(data, seed=args.seed, start=(args.num_steps + 1) * args.batch_size, count=NUM_HELD_OUT)
    device = find_device()
    record = Record(device, [CausalLM().pack([data.read(row)]).to(device) for row in held_out])
    train = {"ours": train_ours, "plain": train_plain}.get(method, train_with_trainer)
    train(args, data, batches, record)
    return {
        "seconds": record.seconds[1:],
        "cpu_seconds": record.cpu_seconds[1:],
        "losses": record.losses,
        "leak": record.leak,
        "peak_bytes": peak_memory(record.device),
    }


def open_data(args: argparse.Namespace) -> Mixture:
    data = Mixture([TokenizedData(args.data_path)])
    data.fit_to(args.max_tokens_per_gpu, drop_overlong=True)
    data.vocab_size = read_config(args).vocab_size
    return data


# --- The rounds and the table -------------------------------------------------------------------------------


def measure_matmul(size: int = 2048) -> float:
    """FLOP per CPU second of a large fp32 matrix product: the best of five."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(time_call(lambda: torch.mm(a, b), torch.device("cpu")) for _ in range(5))


def start_worker(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Runs one method in a process of its own."""
    places = ["--model-dir", args.model_dir, "--data-path", args.data_path]
    command = [sys.executable, __file__, *sys.argv[1:], *places, "--worker", method]
    one_device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": one_device}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{method} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_table(
    args: argparse.Namespace, rounds: list[dict[str, dict]], flops: FlopCount, peak: float | None, on_cuda: bool
) -> None:
    data = open_data(args)
    clock = "seconds" if on_cuda else "cpu_seconds"
    batches = {method: np.concatenate(plan_batches(data, method.partition("+")[0], args)[1:]) for method in rounds[0]}
    reference = next((method for method in rounds[0] if method.startswith("ours")), None)
    num_tokens = {method: int(data.lengths[rows].sum()) for method, rows in batches.items()}

    def per_token(results: dict[str, dict], method: str, clock: str) -> float:
        return sum(results[method][clock]) / num_tokens[method]

    print(f"| method | samples/s | tokens/s | trained tokens/s | CPU s a step | peak memory | MFU | {reference} is"
          " faster by | by the clock | samples apart |")  # fmt: skip
    print("| --- " * 10 + "|")
    for method, rows in batches.items():
        runs = [results[method] for results in rounds]
        seconds = statistics.median(sum(run["seconds"]) for run in runs)
        counted = statistics.median(sum(run[clock]) for run in runs)
        num_trained = int(data.num_loss_tokens[rows].sum())
        can_tell = peak and "+" not in method  # FLOPs are those of a model that trains as a whole
        utilisation = flops.of_batch(data.lengths[rows], num_trained) / counted / peak if can_tell else None
        ratio, by_clock = (
            statistics.median(per_token(r, method, c) / per_token(r, reference, c) for r in rounds)
            if reference
            else float("nan")
            for c in (clock, "seconds")
        )
        cpu = statistics.median(sum(run["cpu_seconds"]) for run in runs) / args.num_steps
        print(
            f"| {method} | {len(rows) / seconds:.2f} | {num_tokens[method] / seconds:,.0f}"
            f" | {num_trained / seconds:,.0f} | {cpu:.2f} | {max(run['peak_bytes'] for run in runs) / 1e9:.2f} GB"
            f" | {'-' if utilisation is None else f'{utilisation:.1%}'} | {ratio:.2f} | {by_clock:.2f}"
            f" | {'yes' if max(run['leak'] for run in runs) < LEAK else '**no: they see each other**'} |"
        )
    print("\nloss of the held-out samples, before the first step and after each:")
    for method in batches:
        losses = " ".join(f"{loss:.4f}" for loss in rounds[0][method]["losses"])
        print(f"  {method:12} {losses}{'   (its own batches)' if method == 'grouped' else ''}")
    print("\nlargest change of other samples' hidden states:", end=" ")
    print(", ".join(f"{method} {rounds[0][method]['leak']:.1e}" for method in batches))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--model", help="a directory with weights, instead of a shape")
    parser.add_argument("--data-path", help="data set of process_data.py; without, random tokens")
    parser.add_argument("--lengths", choices=DISTRIBUTIONS, default="gsm8k", help="of the random tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if "+" not in m])
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a global batch")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=2048, help="of our micro-batches and TRL's rows")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples of the padded micro-batches")
    parser.add_argument("--num-steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--activation-checkpointing", choices=["none", "full"], default="none")
    parser.add_argument("--attention", default="auto", help="ours")
    parser.add_argument("--trl-attention", default="sdpa", help="flash_attention_2 where flash-attn is installed")
    parser.add_argument("--compile", nargs="*", choices=METHODS, default=[], help="methods that compile")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32",
                        help="of the others' weights; ours are fp32, computed in bf16 on CUDA")  # fmt: skip
    parser.add_argument("--in-one-process", action="store_true", help="for a test: peak memory means nothing")
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.batch_size % args.micro_batch_size:
        parser.error("--batch-size must be a multiple of --micro-batch-size")
    return args


def main() -> None:
    args = parse_args()
    setup_logging("ERROR")
    if args.worker:
        return print(json.dumps(run_worker(args)))
    device = find_device()
    on_cuda = device.type == "cuda"
    config = read_config(args)
    model = make_empty_model(config)
    flops = count_flops(model)
    peak = peak_flops(device, torch.bfloat16) if on_cuda else measure_matmul()
    with tempfile.TemporaryDirectory() as directory:
        args.model_dir = args.model or str(Path(directory) / "model")
        if args.model is None:
            save_random_model(args.shape, args.model_dir)
        if args.data_path is None:
            args.data_path = str(Path(directory) / "data.arrow")
            write_random_data(Path(args.data_path), draw_lengths(args.lengths, 2000)[0])
        rounds, failed = [], {}
        for _ in range(args.num_rounds):
            results = {}
            for method in args.methods:
                if method in failed:
                    continue
                args.worker = method
                try:
                    results[method] = run_worker(args) if args.in_one_process else start_worker(args, method)
                except RuntimeError as error:  # for lack of memory, most likely
                    failed[method] = str(error).strip().splitlines()[-1]
                    continue
                print(f"round {len(rounds) + 1}: {method}", results[method], file=sys.stderr, flush=True)
            rounds.append(results)
        rounds = [{m: result for m, result in results.items() if m not in failed} for results in rounds]
        if dist.is_initialized():
            dist.destroy_process_group()
        lengths = open_data(args).lengths
        print(f"python benchmarks/train_step.py {' '.join(sys.argv[1:])}")
        print(f"{torch.cuda.get_device_name() if on_cuda else 'CPU'}; torch threads {torch.get_num_threads()};"
              f" {describe_versions('torch', 'transformers', 'trl')}")  # fmt: skip
        print(f"{args.model or args.shape}: {model.num_parameters():,} parameters, vocabulary {config.vocab_size:,};"
              f" {'bf16 compute, fp32 weights' if on_cuda else 'fp32'}, activation checkpointing"
              f" {args.activation_checkpointing}; {args.batch_size} samples a step; lengths {lengths.mean():.0f} on"
              f" average, {np.percentile(lengths, 5):.0f} to {np.percentile(lengths, 95):.0f} in 9 of 10,"
              f" {lengths.max()} at most")  # fmt: skip
        print(f"{args.num_rounds} rounds of {args.num_steps} timed steps; medians over rounds; peak for the MFU:"
              f" {'unknown' if peak is None else f'{peak / 1e9:,.0f} GFLOP/s'}\n")  # fmt: skip
        print_table(args, rounds, flops, peak, on_cuda)
        for method, reason in failed.items():
            print(f"\n{method} failed: {reason}")


if __name__ == "__main__":
    main()
