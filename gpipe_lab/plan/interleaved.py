"""Several stages on every rank, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from .build import alternate, build, check_counts, loop_placement
from .errors import require
from .ops import Kind, Op
from .schedule import Schedule


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: `num_chunks` stages on each rank (Megatron-LM, arXiv 2104.04473 §2.2.2).

    Stage s is on rank s mod P. Micro-batches go in groups of P: a rank runs a whole group through one of
    its stages, then through its next; so M is a multiple of P. Between warmup and cooldown one forward
    and one backward alternate, as in 1F1B. The bubble *time* falls by the number of chunks v, the bubble
    fraction is (P-1)/(vM+P-1); a step sends 2M(vP-1) messages, and for M > P rank 0 holds 1+(P-1)/(Pv)
    times what 1F1B holds. One chunk is 1F1B with a deeper warmup. Raises `InputError` for other M.
    """
    check_counts("interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    multiple = num_ranks * -(-num_microbatches // num_ranks)
    require(
        num_microbatches % num_ranks == 0,
        "interleaved runs micro-batches in groups of P: num_microbatches is a multiple of num_ranks",
        got=f"num_microbatches={num_microbatches}, num_ranks={num_ranks}",
        where="interleaved(num_ranks, num_microbatches, num_chunks)",
        remedy=f"num_microbatches={multiple}",
    )

    def order(kind: Kind, rank: int) -> list[Op]:
        """The rank's operations of one kind: group by group, forwards first stage first, backwards last."""
        chunks = range(num_chunks) if kind is Kind.F else reversed(range(num_chunks))
        stages = [chunk * num_ranks + rank for chunk in chunks]
        groups = range(0, num_microbatches, num_ranks)
        return [Op(kind, s, first + i) for first in groups for s in stages for i in range(num_ranks)]

    def row(rank: int) -> list[Op]:
        num_warmup = (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
        return alternate(order(Kind.F, rank), order(Kind.B, rank), num_warmup)

    return build("interleaved", num_microbatches, loop_placement(num_ranks, num_chunks), row)
