"""Stand-ins for liger-kernel's functions and for our rotary one, by torch's arithmetic: what Triton would compute."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from recorded import RELEASES, stand_in
from torch import Tensor
from torch.nn.functional import gelu, silu

PARTS = ("norm", "sum", "gated", "rotary")
NAMES = {
    "norm": "rms_norm.LigerRMSNormFunction",
    "sum": "fused_add_rms_norm.LigerFusedAddRMSNormFunction",
    "silu": "swiglu.LigerSiLUMulFunction",
    "gelu": "geglu.LigerGELUMulFunction",
}


class Kernels:
    """One release of liger-kernel; `faulty` names the part that computes something else, or is "gradient": that of
    "gated". Counts the calls of parts."""

    def __init__(self, release: str = RELEASES["liger-kernel"][-1], faulty: str | None = None):
        self.release, self.faulty, self.num_calls = release, faulty, dict.fromkeys(PARTS, 0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mini_trainer.model.kernels.find_obstacle", lambda device: None)
        for package in ("liger_kernel", "liger_kernel.ops"):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        for part, name in NAMES.items():
            file, _, function = name.partition(".")
            module = ModuleType(f"liger_kernel.ops.{file}")
            compute = getattr(self, part)
            called = stand_in("liger-kernel", f"{module.__name__}.{function}.forward", self.release, compute)
            setattr(module, function, SimpleNamespace(apply=lambda *args, called=called: called(None, *args)))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        rotary = ModuleType("mini_trainer.model.kernels.rotary")
        rotary.Rotation = SimpleNamespace(apply=self.rotate)
        monkeypatch.setitem(sys.modules, rotary.__name__, rotary)

    def count(self, part: str) -> bool:
        self.num_calls[part] += 1
        return self.faulty == part

    def norm(self, ctx: None, X: Tensor, W: Tensor, *, count: str = "norm", **kwargs: Any) -> Tensor:
        assert X.dtype == W.dtype and not kwargs["in_place"]
        scaled = X.float() * torch.rsqrt(X.float().square().mean(-1, keepdim=True) + kwargs["eps"])
        weight = kwargs["offset"] + W + self.count(count)
        if kwargs["casting_mode"] == "llama":
            return scaled.to(X.dtype) * weight
        assert kwargs["casting_mode"] == "gemma"
        return (scaled * weight.float()).to(X.dtype)

    def sum(self, ctx: None, X: Tensor, R: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        total = X + R
        return self.norm(ctx, total, count="sum", **kwargs), total

    def silu(self, ctx: None, a: Tensor, b: Tensor, **multipliers: float) -> Tensor:
        assert all(value == 1 for value in multipliers.values())
        result = silu(b) * a if self.count("gated") else silu(a) * b
        if self.faulty == "gradient" and result.requires_grad:
            result.register_hook(torch.neg)
        return result

    def gelu(self, ctx: None, a: Tensor, b: Tensor) -> Tensor:
        return gelu(a, approximate="none" if self.count("gated") else "tanh") * b

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        sign, half = -1 if self.count("rotary") else 1, query.shape[-1] // 2
        return tuple(
            x * cos[:, None] + sign * torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]
            for x in (query, key)
        )
