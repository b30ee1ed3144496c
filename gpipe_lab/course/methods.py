"""Ways to share a model over ranks, each run as torch has it: what a step sends and what a rank holds.

Everything runs on CPUs over gloo, whatever GPUs there are, so that the kernel can be asked for the bytes on
the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ..engine.ledger import Ledger
from ..engine.loss import LossFn
from ..engine.models import Block
from ..lab.worker import RankContext
from ..plan.errors import require
from .collectives import Collective, CountCollectives, ring_bytes, wire_bytes_sent

WARM_UP_STEPS = 2  # DDP sorts its buckets, with a broadcast, before its second step


def one_device(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Nothing is shared: every rank does all the work, to compare with."""
    return model


def data_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Every rank has the whole model and a share of the rows; gradients are averaged once a step."""
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fully_sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Every rank keeps 1/N of each layer's parameters, and gathers a layer when its turn comes."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Every rank has 1/N of each block's matrices, and all of the rows."""
    for layer in model:
        if isinstance(layer, Block):
            deal_heads(layer.qkv, mesh.size())  # a rank's slice: queries, keys, values of its own heads
            parallelize_module(
                layer,
                mesh,
                {
                    "qkv": ColwiseParallel(),
                    "project": RowwiseParallel(),
                    "expand": ColwiseParallel(),
                    "contract": RowwiseParallel(),
                },
            )
    return model


METHODS: dict[str, Callable[[nn.Sequential, DeviceMesh], nn.Module]] = {
    "one device": one_device,
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    "tensor parallel": tensor_parallel,
}
SHARES_ROWS = ("data parallel", "fully sharded")


@dataclass(frozen=True)
class MethodStep:
    """One training step of a method, as one rank saw it.

    calls: its collectives. wire_bytes: what the kernel says it sent, None where it does not say. held: bytes
    by category after the step, `saved` after the forward. gradients: the whole model's, on rank 0.
    """

    method: str
    num_ranks: int
    loss: float
    calls: tuple[Collective, ...]
    wire_bytes: int | None
    held: dict[str, int]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def ring_bytes(self) -> float:
        """The bytes that this rank sends where every collective runs as a ring."""
        return ring_bytes(self.calls, self.num_ranks)

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of collective was called."""
        return dict(Counter(call.kind for call in self.calls))


def step_of_method(
    context: RankContext,
    method: str,
    factories: Sequence[Callable[[], nn.Module]],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_fn: LossFn,
) -> MethodStep:
    """One step of `method` over all ranks, for `Lab.launch`; steps before it warm up and are not counted.

    loss_fn is a mean over rows. Raises `InputError` where N does not divide the rows.
    """
    num_ranks = context.num_ranks
    if method in SHARES_ROWS:
        require(
            len(inputs) % num_ranks == 0,
            "ranks that share the rows get equally many",
            got=f"{len(inputs)} rows for {num_ranks} ranks",
            where="step_of_method",
        )
        inputs, targets = (t.chunk(num_ranks)[context.rank] for t in (inputs, targets))
    mesh = init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(0)
    plain = nn.Sequential(*(build() for build in factories))
    model = METHODS[method](plain, mesh)
    optimizer = torch.optim.AdamW(plain.parameters())
    ledger = Ledger(context.rank)
    for _ in range(WARM_UP_STEPS):
        loss_fn(model(inputs), targets).backward()
        optimizer.zero_grad()

    dist.barrier()
    before = wire_bytes_sent()
    with CountCollectives() as counted:
        with saved_activations(ledger, plain):
            loss = loss_fn(model(inputs), targets)
        held = ledger.totals
        loss.backward()
    dist.barrier()  # by then all messages have left
    after = wire_bytes_sent()

    optimizer.step()
    held |= _held_by(plain, optimizer)
    whole_loss = loss.detach().clone()
    if method in SHARES_ROWS:
        dist.all_reduce(whole_loss)
        whole_loss /= num_ranks
    gradients = whole_gradients(plain, method, num_ranks)
    return MethodStep(
        method=method,
        num_ranks=num_ranks,
        loss=whole_loss.item(),
        calls=tuple(counted.calls),
        wire_bytes=None if before is None or after is None else after - before,
        held=held,
        gradients=gradients if context.rank == 0 else {},
    )


@contextmanager
def saved_activations(ledger: Ledger, model: nn.Module) -> Iterator[None]:
    """Count what autograd saves within this as `saved`, parameters left out: whole or gathered, they are
    the method's to keep or to let go. Counted until the ledger ends, so a forward's end is its peak.
    """
    kept = []  # the ledger tells storages apart by address, so they must live

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor).detach()
        if local.untyped_storage().data_ptr() not in _addresses(model):
            ledger.hold("saved", [local])
            kept.append(local)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _addresses(model: nn.Module) -> set[int]:
    return {local_part(p).untyped_storage().data_ptr() for p in model.parameters()}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank itself holds of a tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.wait() if hasattr(tensor, "wait") else tensor  # a collective's result, once it is there


def _held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    ledger = Ledger(0)
    parameters = [local_part(p.detach()) for p in model.parameters()]
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    ledger.hold("parameters", parameters)
    ledger.hold("gradients", gradients)
    ledger.hold("optimizer", [local_part(value) for value in states])
    return {name: ledger.totals[name] for name in ("parameters", "gradients", "optimizer")}


def whole_gradients(model: nn.Module, method: str, num_ranks: int) -> dict[str, torch.Tensor]:
    """Every parameter's gradient in whole, with heads where they were; a collective call of all ranks."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        dealt = method == "tensor parallel" and ".qkv." in name
        found[name] = gather_heads(whole, num_ranks) if dealt else whole.clone()
    return found


def deal_heads(qkv: nn.Linear, num_ranks: int) -> None:
    """Reorder the rows of a projection, from all queries, keys, values to those of each rank together."""
    with torch.no_grad():
        for p in qkv.parameters():
            p.copy_(p.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2).clone())


def gather_heads(rows: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """`deal_heads` undone, for a weight, a bias or a gradient of either."""
    return rows.unflatten(0, (num_ranks, 3, -1)).transpose(0, 1).flatten(0, 2)
