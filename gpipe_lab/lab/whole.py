"""What ranks hold, by the names of the whole model: put together, checked, and taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..engine.pipeline import StageSpec
from ..plan.errors import require


def joined(stages: Sequence[StageSpec], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks gave by parameter name, in the order of the model's layers."""
    position = {name: at for at, name in enumerate(name for stage in stages for name in stage.names)}
    found = {name: value for part in parts for name, value in part.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: position[name.split(".")[0]])}


def parts(
    stages: Sequence[StageSpec], stage_to_rank: Sequence[int], state: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """For every rank of a replica the entries of a whole model's state that belong to its stages."""
    prefixes: list[tuple[str, ...]] = [()] * (1 + max(stage_to_rank))
    for stage, rank in zip(stages, stage_to_rank, strict=True):
        prefixes[rank] += tuple(f"{name}." for name in stage.names)
    return [{name: value for name, value in state.items() if name.startswith(here)} for here in prefixes]


def require_fitting(state: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `InputError` for a state of another model than the one with the `expected` shapes."""
    given = {name: tuple(value.shape) for name, value in state.items()}
    wrong = [f"no {name}" for name in expected if name not in given]
    wrong += [f"{name}, which the model has not" for name in given if name not in expected]
    wrong += [
        f"{name} of shape {given[name]} for {shape}"
        for name, shape in expected.items()
        if given.get(name, shape) != shape
    ]
    require(
        not wrong,
        "a state has the weights and buffers of the whole model, as pipe.state_dict() does",
        got="; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""),
        where="Pipeline.load_state_dict",
    )
