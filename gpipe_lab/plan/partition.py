"""Cut a list of layers into stages."""

from __future__ import annotations

from .errors import require, require_count


def uniform(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Consecutive layers for every stage, as even as can be; the first stages take what is left over.

    Every layer is in exactly one stage. Raises `InputError` where there are fewer layers than stages.
    """
    require_count(num_stages, "num_stages", where="partition")
    require(
        num_layers >= num_stages,
        "every stage holds at least one layer",
        got=f"{num_layers} layers for {num_stages} stages",
        where="partition",
        remedy=f"at most {max(num_layers, 1)} stages, or a model of more layers",
    )
    share, left_over = divmod(num_layers, num_stages)
    sizes = [share + (stage < left_over) for stage in range(num_stages)]
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
