"""What a parameter's placement means to the optimizer: which part is here, and who holds the rest (DTensor, FSDP2)."""

from __future__ import annotations

import torch
import torch.distributed as dist

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
except ImportError:  # a torch built without distributed
    DTensor = None


def is_dtensor(tensor: torch.Tensor) -> bool:
    return DTensor is not None and isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows and columns held here (true ones, without FSDP2's padding), sharing memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


class ShardLayout:
    r"""Where the parts of one parameter lie.

    Attributes:
        shape (`torch.Size`): the whole parameter's shape.
        shards (`list[tuple[int, int]]`): (mesh dimension, tensor dimension) for every mesh dimension of more than one
            rank that cuts the tensor. Replicated dimensions (HSDP, DDP) need no exchange: gradients are equal there.
        regular (`bool`): one mesh dimension cuts, in contiguous parts.
    """

    def __init__(self, tensor: torch.Tensor, name: str = "parameter"):
        self.shape = tensor.shape
        self.mesh = tensor.device_mesh if is_dtensor(tensor) else None
        self.placements = tensor.placements if is_dtensor(tensor) else ()
        if any(isinstance(p, Partial) for p in self.placements):
            raise ValueError(f"{name}: a parameter with Partial placements cannot be optimised: {self.placements}")
        self.shards = [
            (mesh_dim, placement.dim % len(self.shape))
            for mesh_dim, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(mesh_dim) > 1
        ]
        self.regular = len(self.shards) == 1 and type(self.placements[self.shards[0][0]]) is Shard

    def groups(self, *tensor_dims: int) -> list[dist.ProcessGroup]:
        """Return the process groups across which any of these tensor dimensions is cut."""
        return [self.mesh.get_group(mesh_dim) for mesh_dim, dim in self.shards if dim in tensor_dims]

    def extents(self) -> list[tuple[int, int]]:
        """Return [start, stop) of every rank along the one dimension that is cut (torch.chunk's rule)."""
        ((mesh_dim, dim),) = self.shards
        ranks, size = self.mesh.size(mesh_dim), self.shape[dim]
        step = -(-size // ranks)
        return [(min(k * step, size), min((k + 1) * step, size)) for k in range(ranks)]

    def rank(self) -> int:
        """Return this process's index among the holders of the parts (regular layouts)."""
        return self.mesh.get_local_rank(self.shards[0][0])

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap a local part as a DTensor placed like the parameter."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the local part of a tensor `[shape]` that every rank holds whole."""
        replicated = DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return replicated.redistribute(placements=self.placements).to_local()

    def row_vector(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap one value a local row, `[rows here]`, as a DTensor `[rows]` cut like the parameter's rows."""
        if self.mesh is None:
            return local
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape[:1], stride=(1,)
        )


def summed(tensor: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Add a tensor up over each of the groups in turn (in place when there are any)."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def parameters_with_gradient(param_groups: list[dict]) -> set[torch.Tensor]:
    """Return the parameters that are updated in this step.

    A plain parameter is, when it has a gradient. For a sharded one all holders must agree, or the exchanges below would
    wait for ever: one small all-reduce for each mesh; a rank without a gradient joins with zeros.
    """
    present, by_mesh = set(), {}
    for group in param_groups:
        for p in group["params"]:
            if is_dtensor(p) and ShardLayout(p).shards:
                by_mesh.setdefault(p.device_mesh, []).append(p)
            elif p.grad is not None:
                present.add(p)
    for mesh, params in by_mesh.items():
        flags = torch.tensor([p.grad is not None for p in params], dtype=torch.int32, device=mesh.device_type)
        for mesh_dim in range(mesh.ndim):
            if mesh.size(mesh_dim) > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.get_group(mesh_dim))
        present.update(p for p, flag in zip(params, flags.tolist(), strict=True) if flag)
    return present


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local part of the gradient, dense and cut like the parameter; zeros where another rank alone has one."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(local_part(parameter))
    if is_dtensor(grad) and is_dtensor(parameter) and grad.placements != parameter.placements:
        # Tensor-parallel styles may leave a gradient unreduced or laid out otherwise.
        grad = grad.redistribute(placements=parameter.placements)
    grad = local_part(grad)
    return grad.coalesce().to_dense() if grad.is_sparse else grad
