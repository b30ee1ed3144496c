"""What each way of sharing a model over devices holds and sends."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..plan.errors import require, require_count
from . import traffic

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, VALUE_BYTES = 2, 2, 12, 2
METHODS = (
    "one device",
    "data parallel",
    "ZeRO-1",
    "ZeRO-2",
    "fully sharded",
    "tensor parallel",
    "tensor + sequence parallel",
    "pipeline",
)


class Transformer(Protocol):
    """What is asked of a model: `gpipe_lab.planner.models.Model` is one."""

    @property
    def parameters(self) -> int: ...
    @property
    def layers(self) -> int: ...
    def layer_saved_bytes(self, microbatch_size: int, *, fused_attention: bool = True) -> int: ...
    def boundary_bytes(self, microbatch_size: int) -> int: ...


class Share(NamedTuple):
    """Bytes on the fullest rank. `activations`: of all layers on the rank; `sent`: in one step."""

    method: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    sent: float

    @property
    def held(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def share(
    model: Transformer,
    method: str,
    num_ranks: int,
    *,
    rows: int = 1,
    fused_attention: bool = True,
) -> Share:
    """What one rank holds and sends for `rows` rows a rank (data parallel, ZeRO) or in all (the others).

    Equal layers; embedding and head are counted with the parameters and spread like them. The pipeline is
    GPipe: at the turn, all rows are in flight, however many micro-batches they are cut into. Tensor
    parallelism cuts 24 of 34 parts of a layer's activations, and its attention scores: what the norms, their
    dropouts and the inputs of the matrices keep is whole on every rank. Sequence parallelism cuts that too,
    and sends as much (Korthikanti et al. 2022, arXiv 2205.05198, §4.1 and 4.2).
    """
    require(
        method in METHODS,
        f"a method is one of {', '.join(METHODS)}",
        got=f"method={method!r}",
        where="share",
        remedy=f"method={METHODS[0]!r}",
    )
    require_count(num_ranks, "num_ranks", where="share")
    n = num_ranks
    whole = model.parameters * VALUE_BYTES
    boundary = model.boundary_bytes(rows)
    tensor_sent = traffic.tensor_parallel_bytes(model.layers, boundary, n)
    sent = {
        "one device": 0.0,
        "data parallel": traffic.data_parallel_bytes(whole, n),
        "ZeRO-1": traffic.data_parallel_bytes(whole, n),
        "ZeRO-2": traffic.data_parallel_bytes(whole, n),
        "fully sharded": traffic.fully_sharded_bytes(whole, n),
        "tensor parallel": tensor_sent,
        "tensor + sequence parallel": tensor_sent,
        "pipeline": traffic.pipeline_bytes(boundary, middle=n > 2) if n > 1 else 0.0,
    }
    cuts_all = method in ("fully sharded", "tensor parallel", "tensor + sequence parallel", "pipeline")
    linear, kept = (
        model.layers * model.layer_saved_bytes(rows, fused_attention=fused)
        for fused in (True, fused_attention)
    )
    activations = {
        "tensor parallel": linear * (10 + 24 / n) / 34 + (kept - linear) / n,
        "tensor + sequence parallel": kept / n,
        "pipeline": kept / n,
    }
    return Share(
        method=method,
        parameters=model.parameters * PARAMETER_BYTES / (n if cuts_all else 1),
        gradients=model.parameters * GRADIENT_BYTES / (n if cuts_all or method == "ZeRO-2" else 1),
        optimizer=model.parameters
        * OPTIMIZER_BYTES
        / (n if cuts_all or method in ("ZeRO-1", "ZeRO-2") else 1),
        activations=activations.get(method, kept),
        sent=sent[method],
    )
