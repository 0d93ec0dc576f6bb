"""The layer of OSFT: its forward pass, its initial values, and the weight that it represents.

The letters are those of osft.py; docs/reference/osft.md has the mathematics.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from mini_trainer.distributed.world import World, broadcast_from_rank0
from mini_trainer.model.methods.osft_subspaces import BASES, Bases, complement, is_on_input, orient, oriented_shape
from mini_trainer.model.weights import Reader

# Singular values below this share of the largest count as zero: they are rounding errors of the weight.
NULL = 1e-10


class OSFTLinear(nn.Module):
    """A linear layer with weight W0 + dW: `base` holds W0, frozen, and dW = B V_low^T with trainable B (L, r).

    `project_updates` keeps B orthogonal to U_high after each optimizer step. A square weight with few free directions
    uses dW = U_low C V_low^T instead, with trainable C (r, r), and needs no projection: at R = 0.25 this takes 42 %
    (bfloat16: 50 %) less memory than B, which is 6 to 7 % of a Llama whose q and o are square, in about the same time
    (benchmarks/results/osft_cost.txt). `base`, `V_low` and `U_low` are frozen parameters that FSDP shards with their
    block; `U_high` is a buffer, sharded by rows like B.
    """

    def __init__(self, module: nn.Linear | Conv1D, *, num_kept: int, basis: str, compute_dtype: torch.dtype):
        super().__init__()
        self.is_conv1d = isinstance(module, Conv1D)
        self.on_input = is_on_input(module, basis)  # A = W, else A = W^T
        self.num_rows, self.num_columns = oriented_shape(module, basis)  # L, s
        self.num_kept, num_free = num_kept, self.num_columns - num_kept
        self.is_core = not BASES[basis] and self.num_rows == self.num_columns and num_free <= num_kept
        self.projects = not BASES[basis] and num_kept > 0 and not self.is_core
        device = module.weight.device
        self.bias = module.bias
        self.base = nn.Parameter(
            torch.empty(self.num_rows, self.num_columns, dtype=compute_dtype, device=device), False
        )
        rows = num_free if self.is_core else self.num_rows
        self.coefficients = nn.Parameter(torch.empty(rows, num_free, device=device))  # C or B
        self.V_low = nn.Parameter(torch.empty(self.num_columns, num_free, device=device), False)
        self.register_parameter("U_low", None)
        if self.is_core:
            self.U_low = nn.Parameter(torch.empty(self.num_rows, num_free, device=device), False)
        U_high = torch.empty(self.num_rows, num_kept, device=device) if self.projects else None
        self.register_buffer("U_high", U_high)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """Computes x W0^T + x dW^T through the free directions, without building dW."""
        flat = x.reshape(-1, x.shape[-1])  # (T, in)
        if self.on_input:
            low = linear(flat @ self.V_low, self.coefficients)
            update, base = low if self.U_low is None else linear(low, self.U_low), self.base.t()
        else:
            low = flat if self.U_low is None else flat @ self.U_low
            update, base = linear(low @ self.coefficients, self.V_low), self.base
        if self.bias is not None:
            update = update + self.bias
        out = torch.addmm(update, flat, base)  # last, and the only addmm: see choose_kept_operations in model
        return out.view(*x.shape[:-1], out.shape[-1])

    @torch.no_grad()
    def local_update(self) -> Tensor:  # (this rank's rows of L, s)
        """This rank's rows of dW, in fp32. All ranks call this."""
        rows = self.coefficients.to_local()
        if self.U_low is not None:
            rows = self.U_low.to_local() @ self.coefficients.full_tensor()
        return rows @ self.V_low.full_tensor().T

    @property
    def num_left(self) -> int:
        """Number of elements of the kept directions of its output side."""
        return self.num_rows * self.num_kept if self.projects or self.is_core else 0

    @torch.no_grad()
    def gather_bases(self, *, world: World) -> Bases | None:
        """The free and the kept directions, unsharded, on rank 0's CPU; None on other ranks. All ranks call this."""
        left = self.U_low if self.is_core else self.U_high
        V_low, left = self.V_low.full_tensor(), None if left is None else left.full_tensor()
        if world.rank != 0:
            return None
        left = complement(left) if self.is_core else left
        return Bases(V_low.cpu(), None if left is None else left.cpu().contiguous())

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the replaced layer's weight, in its layout."""
        shape = (self.num_rows, self.num_columns)
        return shape if self.on_input != self.is_conv1d else shape[::-1]

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype) -> Tensor:
        """W0 + dW, unsharded, in the replaced layer's layout. All ranks call this."""
        base = self.base
        rows = (base.to_local().float() + self.local_update()).to(dtype)
        whole = DTensor.from_local(
            rows, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
        ).full_tensor()
        return orient(whole, on_input=self.on_input, is_conv1d=self.is_conv1d)


@torch.no_grad()
def fill_layer(
    layer: OSFTLinear,
    name: str,
    readers: dict[str, Reader],
    subspace: dict[str, Tensor],
    *,
    num_earlier: int = 0,
    world: World,
) -> None:
    """Fills a meta layer, except its bias: W0, a zero update and directions, from rank 0's `readers` and `subspace`.

    `subspace` is that of `make_subspace`. After earlier tasks, which keep `num_earlier` directions, its basis holds the
    others, (s, s - num_earlier), and `U_earlier` (L, num_earlier) what they keep of the output side.
    """
    weight = None
    if world.rank == 0:
        weight = readers.pop(f"{name}.weight")()
        weight = orient(weight, on_input=layer.on_input, is_conv1d=layer.is_conv1d)
    num_columns, num_new, device = layer.num_columns, layer.num_kept - num_earlier, world.device
    shape = (num_columns, num_columns - num_earlier)
    basis = broadcast_from_rank0(subspace.get("basis"), shape, dtype=torch.float32, device=device)
    values = broadcast_from_rank0(subspace.get("singular_values"), shape[1:], dtype=torch.float64, device=device)
    base = broadcast_from_rank0(weight, layer.base.shape, dtype=layer.base.dtype, device=device)
    layer.base = nn.Parameter(base, requires_grad=False)
    layer.coefficients = nn.Parameter(torch.zeros(layer.coefficients.shape, device=device))
    layer.V_low = nn.Parameter(basis[:, num_new:].contiguous(), requires_grad=False)
    if layer.is_core and num_earlier == 0:
        square = (num_columns, num_columns)
        left = broadcast_from_rank0(subspace.get("left"), square, dtype=torch.float32, device=device)
        layer.U_low = nn.Parameter(left[:, num_new:].contiguous(), requires_grad=False)
        return
    if layer.projects or layer.is_core:
        earlier = None
        if num_earlier > 0:
            shape = (layer.num_rows, num_earlier)
            earlier = broadcast_from_rank0(subspace.get("U_earlier"), shape, dtype=torch.float32, device=device)
        U_high = make_U_high(base, basis[:, :num_new], values, earlier=earlier, world=world)
        if layer.projects:
            layer.U_high = U_high
        else:
            U_low = complement(U_high.full_tensor())
            U_low = broadcast_from_rank0(U_low, U_low.shape, dtype=torch.float32, device=device)
            layer.U_low = nn.Parameter(U_low, requires_grad=False)


def make_U_high(
    base: Tensor, V_high: Tensor, singular_values: Tensor, *, earlier: Tensor | None = None, world: World
) -> DTensor:  # (L, k)
    """U_high = A V_high / S_high, sharded by rows; zero where S is zero, since any direction would do there.

    Each rank computes its own rows in fp64. After the division, directions with small singular values are not exactly
    orthogonal, which the Cholesky factor of their Gram matrix corrects. `earlier` directions (L, num_earlier) come
    first, as they are, and the new ones are made orthogonal to them.
    """
    num_new = V_high.shape[1]
    kept_values = singular_values[:num_new]
    largest = singular_values[0] if earlier is None else base.double().norm()
    is_null = kept_values <= NULL * largest
    scale = torch.where(is_null, 0.0, 1 / kept_values)
    mesh = world.shard_mesh

    def own_rows(matrix: Tensor) -> Tensor:  # as Shard(0) does
        chunks, part = matrix.chunk(mesh.size()), mesh.get_local_rank()
        return chunks[part] if part < len(chunks) else matrix[:0]

    U_high = own_rows(base).double() @ (V_high.double() * scale)
    if earlier is not None:
        earlier = own_rows(earlier)
        for _ in range(2 if num_new > 0 else 0):  # the second time removes the rounding error
            seen = earlier.double().T @ U_high
            dist.all_reduce(seen, group=mesh.get_group())
            U_high = U_high - earlier.double() @ seen
    if num_new > 0:
        gram = U_high.T @ U_high
        dist.all_reduce(gram, group=mesh.get_group())
        factor = torch.linalg.cholesky(gram + torch.diag(is_null.double()))
        U_high = torch.linalg.solve_triangular(factor.T, U_high, upper=True, left=False)
    U_high = U_high.float() if earlier is None else torch.cat([earlier, U_high.float()], dim=1)
    return shard_rows(U_high, (len(base), U_high.shape[1]), world=world)


def shard_rows(rows: Tensor, shape: tuple[int, int], *, world: World) -> DTensor:
    """Makes a DTensor of `shape`, sharded over the ranks of one copy of the model, from this rank's `rows`."""
    return DTensor.from_local(rows, world.shard_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
