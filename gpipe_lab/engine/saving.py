"""The whole state of a training in a folder: each rank writes its part, and all of it counts or none.

A state folder holds one save, `save-000007`, in the format of torch.distributed.checkpoint. A new one is
written under a name that nobody reads, renamed once every rank has written, and only then the old one goes:
a crash at any moment leaves a save that is whole. Names are those of the whole model, so that a state is
read at any number of stages. On several hosts the folder is on a disk that all of them see.

Optimizers are not saved by `torch.distributed.checkpoint.state_dict`: it has one that has not stepped yet
take a step first, after which training would not go on as it would have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..plan.errors import InputError, require
from .gradients import first_name
from .layer_state import generator_state, set_generator_state
from .rank_pipeline import RankPipeline
from .transport import Transport

State = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...] | None]  # None: not a tensor
FORMAT = 2  # of what is saved, and how it is named
_PREFIX = "save-"
_UNFINISHED = ".part"


def save_state(pipeline: RankPipeline, transport: Transport, folder: str | Path, steps: int) -> Path:
    """Write the state after `steps` steps; the save. All ranks call this together.

    Raises `RuntimeError` on every rank where one cannot write; the previous save is then still there.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    save = Path(folder) / transport.gather(_next_save(Path(folder)) if transport.rank == 0 else "")[0]
    unfinished = save.with_name(save.name + _UNFINISHED)
    try:
        dcp.save(_state_of(pipeline, steps), checkpoint_id=unfinished)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {what[0]}" for rank, what in error.failures.items())
        raise RuntimeError(f"the state could not be saved in {folder}: {reasons}") from error
    if transport.rank == 0:
        _put_in_place(unfinished, save)
    transport.barrier()  # nobody goes on before the save counts
    return save


def _state_of(pipeline: RankPipeline, steps: int) -> State:
    """What this rank has to save; an equal entry of several ranks is written by one of them.

    `settings` has, for each rank with an optimizer, its groups and its scheduler: stages may group their
    weights differently. Tuples are written as one entry each.
    """

    def saved(values: Mapping[str, Any]) -> State:
        return {pipeline.first_name(name): value for name, value in values.items()}

    settings = pipeline.updates.settings() if pipeline.spec.replica == 0 else None
    return {
        "training": {
            "format": FORMAT,
            "steps": steps,
            "ties": tuple(tie.names for tie in pipeline.spec.ties),
        },
        "weights": saved(pipeline.weights()),
        "gradients": saved(pipeline.pending_gradients()),
        "optimizer": pipeline.updates.states(),
        "generators": {
            f"{name}/{pipeline.spec.replica}": (generator_state(generator),)
            for name, generator in pipeline.generators().items()
        },
        "settings": {} if settings is None else {str(pipeline.rank): settings},
    }


def load_state(pipeline: RankPipeline, transport: Transport, folder: str | Path) -> int:
    """Take on what a state folder has for the stages here; the number of steps that led to it.

    Weights, buffers, optimizer, learning rates, gradients not yet used and the random generators of layers
    are set; what was saved without an optimizer leaves the one here as it is. All ranks call this together:
    where the state does not fit on one of them, all raise its `InputError`, and nothing has changed.
    """
    save = latest_save(folder)
    about = _read(save, {"training", "settings"})
    require(
        about["training"].get("format") == FORMAT,
        f"a state is read in the format that it is written in, number {FORMAT}",
        got=f"a save in format {about['training'].get('format', 1)}",
        where=str(save),
        remedy="pipe.load_state_dict(gl.load_weights(folder)) for the weights alone",
    )
    ties, settings = about["training"]["ties"], list(about.get("settings", {}).values())

    def saved_name(name: str) -> str:
        return first_name(pipeline.first_name(name), ties)

    here = {saved_name(name) for name in (*pipeline.weights(), *pipeline.parameters)}
    random = {f"{name}/{replica}" for name in pipeline.generators() for replica in (0, pipeline.spec.replica)}
    parts = dict.fromkeys(("weights", "gradients", "optimizer"), here) | {"generators": random}
    saved = _read(save, {f"{part}.{name}" for part, names in parts.items() for name in names})

    def own(part: str, names: Iterable[str]) -> State:
        found = saved.get(part, {})
        return {name: found[saved_name(name)] for name in names if saved_name(name) in found}

    refused = None
    try:
        updates = pipeline.updates.fit(settings, saved.get("optimizer", {}), saved_name, where=save)
    except InputError as error:
        refused = error
    by_rank = transport.gather((refused, pipeline.shapes()))
    for complaint, _ in by_rank:
        if complaint is not None:
            raise complaint
    whole = {name: shape for _, shapes in by_rank for name, shape in shapes.items()}
    given = saved_shapes(save)
    found = {name: given[saved_name(name)] for name in whole if saved_name(name) in given}
    require_fitting({name: shape for name, shape in given.items() if name not in whole} | found, whole, save)

    pipeline.load_state_dict(own("weights", pipeline.weights()))
    pipeline.zero_grad()
    pipeline.gradients.restore(own("gradients", pipeline.parameters))
    pipeline.updates.load(*updates)
    states = saved.get("generators", {})
    for name, generator in pipeline.generators().items():
        if state := states.get(f"{name}/{pipeline.spec.replica}", states.get(f"{name}/0")):
            set_generator_state(generator, *state)
    return about["training"]["steps"]


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a saved state for plain torch: `model.load_state_dict(gl.load_weights(folder))`.

    Names are those of the whole model, tied weights under each of theirs. Needs no process group.
    """
    saved = _read(latest_save(folder), {"weights", "training"})
    weights = saved["weights"]
    return weights | {name: weights[names[0]] for names in saved["training"]["ties"] for name in names}


def require_fitting(given: Shapes, expected: Shapes, where: object) -> None:
    """Raise `InputError` for the shapes of another model's state than that with the `expected` ones."""
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
        where=str(where),
        remedy="load it into the model that it was saved from",
    )


def latest_save(folder: str | Path) -> Path:
    """The save in a state folder. Raises `InputError` where there is none."""
    found = saves(folder)
    require(
        bool(found),
        "a state is loaded from a folder that one was saved in",
        got=f"no {_PREFIX}* in {folder}",
        where="load_state",
        remedy="pipe.save_state(folder) first",
    )
    return found[-1]


def saves(folder: str | Path) -> list[Path]:
    """The complete saves in a folder, oldest first; more than one only where a crash left the older."""
    found = Path(folder).glob(f"{_PREFIX}*")
    return sorted((p for p in found if _number(p) is not None), key=lambda p: _number(p) or 0)


def saved_shapes(save: Path) -> Shapes:
    """The shapes of the weights and buffers in a save, by the names they are saved under."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(save).read_metadata()
    entries = [(metadata.planner_data[key], entry) for key, entry in metadata.state_dict_metadata.items()]
    sizes = {path[1]: getattr(entry, "size", None) for path, entry in entries if path[0] == "weights"}
    return {name: None if size is None else tuple(size) for name, size in sizes.items()}


def _read(save: Path, keys: set[str]) -> State:
    """What a save has under each of `keys`, on the CPU; each process reads by itself."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: State = {}  # read as torch's own dcp_to_torch_save does
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    _load_state_dict(found, storage_reader=FileSystemReader(save), planner=planner, no_dist=True)
    return found


def _number(save: Path) -> int | None:
    digits = save.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() else None


def _next_save(folder: Path) -> str:
    """The name of the next save, with what crashes have left cleared away."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
        shutil.rmtree(leftover)
    found = saves(folder)
    return f"{_PREFIX}{1 + (_number(found[-1]) or 0) if found else 0:06d}"


def _put_in_place(unfinished: Path, save: Path) -> None:
    """Make a finished save the one that counts, for good, and drop those before it."""
    os.replace(unfinished, save)
    descriptor = os.open(save.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    for older in saves(save.parent)[:-1]:
        shutil.rmtree(older)
