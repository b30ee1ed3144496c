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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..plan.errors import InputError, require
from .rank_pipeline import RankPipeline
from .transport import Transport

State = dict[str, Any]
Ties = tuple[tuple[str, ...], ...]  # the names of each tied weight
Shapes = Mapping[str, tuple[int, ...] | None]  # None: not a tensor
Home = tuple[State, int]  # where a parameter was saved: a rank's settings, and the group of its optimizer
Source = tuple[State, int, int]  # a saved scheduler, a group of its optimizer's, and how many that had
NOT_SETTINGS = ("params", "param_names")  # of an optimizer's group: which parameters, not how they move
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
    ties = tuple(tie.names for tie in pipeline.spec.ties)
    optimizer, scheduler = pipeline.optimizer, pipeline.scheduler
    names = {id(p): _saved_name(name, ties) for name, p in pipeline.parameters.items()}
    state: State = {
        "training": {"steps": steps, "ties": ties},
        "weights": {_saved_name(name, ties): value for name, value in pipeline.weights().items()},
        "gradients": {_saved_name(n, ties): value for n, value in pipeline.pending_gradients().items()},
        "optimizer": {},
        "settings": {},
    }
    if optimizer is not None:
        state["optimizer"] = {names[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in names}
        if pipeline.spec.replica == 0:
            state["settings"][str(pipeline.rank)] = {
                "optimizer": _kind(optimizer),
                "groups": tuple(
                    (tuple(names[id(p)] for p in group["params"]), tuple(_settings(group).items()))
                    for group in optimizer.param_groups
                ),
                "scheduler": "" if scheduler is None else _kind(scheduler),
                "schedule": () if scheduler is None else tuple(scheduler.state_dict().items()),
            }
    return state


def load_state(pipeline: RankPipeline, transport: Transport, folder: str | Path) -> int:
    """Take on what a state folder has for the stages here; the number of steps that led to it.

    Weights, optimizer, learning rates and gradients not yet used are set; what was saved without an
    optimizer leaves the one here as it is. All ranks call this together: where the state does not fit on one
    of them, all raise its `InputError`, and nothing has changed.
    """
    save = latest_save(folder)
    about = _read(save, {"training", "settings"})
    ties, settings = about["training"]["ties"], list(about.get("settings", {}).values())
    own_ties = tuple(tie.names for tie in pipeline.spec.ties)

    def saved_name(name: str) -> str:
        return _saved_name(_saved_name(name, own_ties), ties)

    here = {saved_name(name) for name in (*pipeline.weights(), *pipeline.parameters)}
    saved = _read(save, {f"{part}.{name}" for part in ("weights", "gradients", "optimizer") for name in here})
    names = {id(p): saved_name(name) for name, p in pipeline.parameters.items()}
    homes = {n: (rank, i) for rank in settings for i, (group, _) in enumerate(rank["groups"]) for n in group}
    refused, optimizer = None, None
    try:
        _require_kind(pipeline.optimizer, {each["optimizer"] for each in settings}, save)
        _require_kind(pipeline.scheduler, {each["scheduler"] for each in settings}, save)
        if pipeline.optimizer is not None:
            states = saved.get("optimizer", {})
            optimizer = _optimizer_state(pipeline.optimizer, names, homes, states, save)
    except InputError as error:
        refused = error
    parts = transport.gather((refused, pipeline.shapes()))
    for complaint, _ in parts:
        if complaint is not None:
            raise complaint
    whole = {name: shape for _, shapes in parts for name, shape in shapes.items()}
    given = saved_shapes(save)
    found = {name: given[saved_name(name)] for name in whole if saved_name(name) in given}
    require_fitting({name: shape for name, shape in given.items() if name not in whole} | found, whole, save)

    pipeline.load_state_dict({name: saved["weights"][saved_name(name)] for name in pipeline.weights()})
    pipeline.zero_grad()
    gradients = saved.get("gradients", {})
    pipeline.gradients.restore({name: gradients.get(saved_name(name)) for name in pipeline.parameters})
    if optimizer is not None:
        pipeline.optimizer.load_state_dict(optimizer)  # type: ignore[union-attr]
        pipeline.count_optimizer()
    schedules = [dict(each["schedule"]) for each in settings if each["scheduler"]]
    if pipeline.scheduler is not None and schedules:
        sources = _sources(pipeline.optimizer, names, homes)  # type: ignore[arg-type]
        own = pipeline.scheduler.state_dict()
        pipeline.scheduler.load_state_dict(_scheduler_state(own, schedules[0], sources))
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


def _saved_name(name: str, ties: Ties) -> str:
    """The name that a weight is saved under: of tied ones the first."""
    return next((names[0] for names in ties if name in names), name)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _require_kind(own: object | None, saved: set[str], save: Path) -> None:
    """An optimizer's or scheduler's state is for its own class; none at all leaves the new one as it is."""
    others = saved - {"", _kind(own)}
    require(
        own is None or not others,
        "an optimizer or scheduler goes on from the state of one of its own kind",
        got=f"{', '.join(sorted(others))} saved, for {_kind(own)}",
        where=str(save),
        remedy="make the pipeline with the kind that was saved, or take the weights alone: "
        "pipe.load_state_dict(gl.load_weights(folder))",
    )


def _optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    homes: Mapping[str, Home],
    states: Mapping[str, State],
    save: Path,
) -> State:
    """An optimizer's state with the saved settings of its groups and states of its parameters."""
    state = optimizer.state_dict()
    for group, own in zip(optimizer.param_groups, state["param_groups"], strict=True):
        here = [names[id(p)] for p in group["params"]]
        found = [rank["groups"][index][1] for rank, index in (homes[n] for n in here if n in homes)]
        require(
            all(one == found[0] for one in found),
            "parameters of one group of the optimizer were saved with the same settings",
            got=", ".join(here),
            where=str(save),
            remedy="group the parameters as when they were saved",
        )
        own.update(found[0] if found else ())
        state["state"] |= {i: states[n] for i, n in zip(own["params"], here, strict=True) if n in states}
    return state


def _sources(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], homes: Mapping[str, Home]
) -> list[Source | None]:
    """For each group of an optimizer the saved group of its parameters, None where none was saved."""
    groups = [[homes.get(names[id(p)]) for p in group["params"]] for group in optimizer.param_groups]
    found = [next((home for home in group if home is not None), None) for group in groups]
    return [h and (dict(h[0]["schedule"]), h[1], len(h[0]["groups"])) for h in found]


def _scheduler_state(own: State, saved: State, sources: Sequence[Source | None]) -> State:
    """The saved state of a scheduler for groups that may be others than those it was saved with.

    own: its state as it was made here. A list with an entry for each group has those of the groups' sources.
    """
    state = dict(saved)
    for key, value in own.items():
        if not isinstance(value, list) or saved.get(key, value) == value:
            continue
        found = [None if source is None else (source[0][key], *source[1:]) for source in sources]
        if key == "_schedulers":  # the states of those that torch's SequentialLR and ChainedScheduler hold
            inner = [[s and (s[0][i], *s[1:]) for s in found] for i in range(len(value))]
            state[key] = [_scheduler_state(*each) for each in zip(value, saved[key], inner, strict=True)]
        elif len(value) == len(found) and all(s is None or len(s[0]) == s[2] for s in found):
            state[key] = [old if s is None else s[0][s[1]] for old, s in zip(value, found, strict=True)]
    return state


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
