"""Compares liger-kernel's Triton kernels, in Triton's interpreter on the CPU, with transformers' own code.

    pip install --no-deps --target /tmp/liger triton==3.7.1 liger-kernel==0.8.5
    PYTHONPATH=/tmp/liger OMP_NUM_THREADS=1 python benchmarks/liger_kernels.py

Each model is built as in a run, with the kernels in place, and must pass the start-up check; then loss and gradients of
a packed row are compared with the same model's without them. In fp32: the interpreter multiplies the bits of bf16
numbers as integers. Two gaps of the interpreter are filled: functions of CUDA's library, and floats as arguments.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
os.environ["HF_HUB_OFFLINE"] = "1"

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import paths

ROOT = paths.ROOT

import numpy as np
import triton
import triton.language as tl
from small_runs import full_gradients, make_micro_batch
from tiny_models import FAMILIES, build, check, save_model
from torch import Tensor
from triton.runtime import interpreter

from mini_trainer.distributed.world import World, init_world
from mini_trainer.model import faster_layers
from mini_trainer.objectives.objective import PackedModel

LENGTHS = (13, 1, 22, 7)
CASES = ("llama", "qwen2", "qwen3", "mistral_window", "gemma2_softcaps", "gemma3", "phi3", "olmo2", "granite_scaled",
         "mixtral", "gpt_oss_sinks")  # fmt: skip
MODES = ("none", "selective", "full")
MOST = 1e-5  # relative difference of a gradient


def main() -> None:
    replace_cuda_functions()
    convert_floats()
    faster_layers.check_device = lambda device: None
    world = init_world()
    packages = ("torch", "transformers", "triton", "liger-kernel")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    print(f"{'model':18} " + " ".join(f"{mode:>10}" for mode in MODES) + "   largest relative difference of a gradient")
    results = [compare(case, world) for case in sys.argv[1:] or CASES]
    sys.exit(0 if all(results) else 1)


def replace_cuda_functions() -> None:
    """Functions of CUDA's library are only declared: in the interpreter they return None."""
    import liger_kernel.transformers.monkey_patch  # noqa: F401  (imports all kernels)

    own = {"rsqrt": rsqrt, "tanh": tanh}
    for file, module in list(sys.modules.items()):
        for name in own.keys() & vars(module).keys() if file.startswith("liger_kernel.ops") else ():
            setattr(module, name, own[name])


def convert_floats() -> None:
    """A kernel's float is an fp32 tensor when compiled; the interpreter hands Python's on, which has no `to`."""
    convert = interpreter._implicit_cvt

    def convert_argument(argument: object) -> object:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_argument


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def compare(case: str, world: World) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(FAMILIES[case], Path(folder))
        expected = measure(build(path, world))
        texts, is_right = [], True
        for mode in MODES:
            try:
                ours = build(path, world, use_liger_kernels=True, activation_checkpointing=mode)
                check(ours, world)
                check_experts(ours)
                error = max(measure_error(each, expected[name]) for name, each in measure(ours).items())
            except Exception as failure:  # of the interpreter, which may be anything
                texts.append(f"{case}, {mode}: {type(failure).__name__}: {failure}"[:300])
                is_right = False
            else:
                texts.append(f"{error:10.1e}")
                is_right &= error <= MOST
    print(f"{case:18} {' '.join(texts)}", flush=True)
    return is_right


def check_experts(packed_model: PackedModel) -> None:
    """RuntimeError if experts held as one tensor have code of liger-kernel's."""
    for name, module in packed_model.named_modules():
        if any(param.ndim == 3 for param in module.parameters(recurse=False)) and "forward" in vars(module):
            raise RuntimeError(f"{name} was replaced")


def measure(packed_model: PackedModel) -> dict[str, Tensor]:
    """The loss and the gradients of a packed row."""
    loss = packed_model(make_micro_batch(LENGTHS, seed=0)).loss
    loss.backward()
    return {"loss": loss.detach()} | full_gradients(packed_model)


def measure_error(ours: Tensor, expected: Tensor) -> float:
    return ((ours - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    main()
