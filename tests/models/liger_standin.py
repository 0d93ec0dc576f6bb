"""A stand-in for liger-kernel: it replaces what the package replaces, the way it does, by torch's arithmetic."""

import sys
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from recorded import list_names, stand_in
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"
FAULTS = ("norm", "rotary", "mlp")


def rotate_in_place(tensor: Tensor, cos: Tensor, sin: Tensor) -> None:
    """(1, T, heads, D): the storage changes, and autograd does not know, as with a kernel."""
    half = tensor.shape[-1] // 2
    turned = torch.cat([-tensor[..., half:], tensor[..., :half]], dim=-1)
    tensor.data.copy_(tensor * cos[:, :, None] + turned * sin[:, :, None])


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        physical = [each.transpose(1, 2).contiguous() for each in (q, k)]
        for each in physical:
            rotate_in_place(each, cos, sin)
        return tuple(each.transpose(1, 2) for each in physical)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        physical = [each.transpose(1, 2).contiguous() for each in gradients]
        for each in physical:
            rotate_in_place(each, cos, -sin)
        return *(each.transpose(1, 2) for each in physical), None, None


class LigerKernel:
    """One release; `faulty` names the part that computes something else. Counts the calls of its parts."""

    def __init__(self, release: str, faulty: str | None = None):
        self.release, self.faulty, self.num_calls = release, faulty, dict.fromkeys(FAULTS, 0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        names = list_names("liger-kernel", self.release, beginning=TABLE)
        module = ModuleType("liger_kernel.transformers.monkey_patch")
        self.functions = {
            name[len(TABLE) + 1 : -1]: stand_in("liger-kernel", name, self.release, self.replace) for name in names
        }
        module.MODEL_TYPE_TO_APPLY_LIGER_FN = self.functions
        entry = "liger_kernel.transformers.monkey_patch._apply_liger_kernel_to_instance"
        module._apply_liger_kernel_to_instance = stand_in("liger-kernel", entry, self.release, self.apply)
        for name in ("liger_kernel", "liger_kernel.transformers", module.__name__):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["liger_kernel"].__spec__ = ModuleSpec("liger_kernel", None)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def apply(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
        """Leaves out what the family's function does not take, silently, as the package does."""
        function = self.functions[model.config.model_type]
        function(model=model, **{name: kwargs[name] for name in kwargs if name in function.__signature__.parameters})

    def replace(
        self,
        model: PreTrainedModel,
        rope: bool,
        rms_norm: bool,
        swiglu: bool,
        cross_entropy: bool,
        fused_linear_cross_entropy: bool,
    ) -> None:
        """What the functions for Llama and its like do."""
        assert not cross_entropy and not fused_linear_cross_entropy  # they would replace the loss
        file = sys.modules[type(model).__module__]
        if rope:
            self.monkeypatch.setattr(file, "apply_rotary_pos_emb", self.rotate)
        for module in model.modules():
            if rms_norm and type(module).__name__.endswith("RMSNorm"):
                module.offset, module.in_place = 0.0, True
                module.forward = MethodType(self.normalize, module)
            if swiglu and type(module).__name__.endswith("MLP"):
                module.forward = MethodType(self.run_mlp, module)

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: None = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        assert q.shape[2] == k.shape[2] == cos.shape[1] and q.transpose(1, 2).is_contiguous()
        self.num_calls["rotary"] += 1
        return Rotate.apply(q, k, cos, -sin if self.faulty == "rotary" else sin)

    def normalize(self, module: nn.Module, hidden: Tensor) -> Tensor:
        self.num_calls["norm"] += 1
        variance = hidden.float().square().mean(-1, keepdim=True)
        scaled = (hidden.float() * torch.rsqrt(variance + module.variance_epsilon)).to(hidden.dtype)
        return scaled * (module.weight + module.offset + (self.faulty == "norm"))

    def run_mlp(self, module: nn.Module, x: Tensor) -> Tensor:
        self.num_calls["mlp"] += 1
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(silu(up) * gate if self.faulty == "mlp" else silu(gate) * up)
