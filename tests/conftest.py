import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores would make every test crawl
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.getoption("-m"):  # exactness is tested on the CPU, also where there is a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def world() -> Iterator:
    """A process group of one process, as `python train.py` makes it."""
    import torch.distributed as dist

    from ranks.world import init_world

    yield init_world()
    dist.destroy_process_group()
