"""The whole state of a training in a folder: each rank writes its part, and all of it counts or none.

A state folder holds one save, `save-000007`, in the format of torch.distributed.checkpoint. A new one is
written under a name that nobody reads, renamed once every rank has written, and only then the old one goes:
a crash at any moment leaves a save that is whole. Names are those of the whole model, so that a state is
read at any number of stages. On several hosts the folder is on a disk that all of them see.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..plan.errors import require
from .rank_pipeline import RankPipeline

Route = tuple[str, ...]  # where an entry is in the tree: ("optimizer", "0.weight", "exp_avg")
NOT_SETTINGS = ("params", "param_names")  # of an optimizer's group: which parameters, not how they move
_PREFIX = "save-"
_UNFINISHED = ".part"


def save_state(pipeline: RankPipeline, folder: str | Path, steps: int) -> Path:
    """Write the state after `steps` steps; the save. All ranks call this together.

    Raises `RuntimeError` on every rank where one cannot write; the previous save is then still there.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    name = [_next_save(Path(folder)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, device=torch.device("cpu"))
    assert name[0] is not None
    save = Path(folder) / name[0]
    unfinished = save.with_name(save.name + _UNFINISHED)
    try:
        dcp.save(state_tree(pipeline, steps), checkpoint_id=unfinished)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {what[0]}" for rank, what in error.failures.items())
        raise RuntimeError(f"the state could not be saved in {folder}: {reasons}") from error
    if dist.get_rank() == 0:
        _put_in_place(unfinished, save)
    dist.all_reduce(torch.zeros(1))  # nobody goes on before the save counts
    return save


def load_state(pipeline: RankPipeline, folder: str | Path) -> int:
    """Take on what a state folder has for the stages here; the number of steps that led to it.

    Weights, optimizer, learning rates and gradients not yet used are set; what was saved without an
    optimizer leaves the one here as it is. Raises `InputError` where there is no save, or one that lacks a
    weight.
    """
    save = latest_save(folder)
    training = {route[1]: value for route, value in read(save, lambda route: route[0] == "training").items()}
    ties = training["ties"]
    weights = pipeline.weights()
    stored = {name: _stored_name(own, ties) for name, own in _stored_names(pipeline).items()}
    wanted = set(stored.values())
    entries = read(save, lambda route: route[0] != "training" and route[1] in wanted)
    found: dict[str, dict[str, Any]] = {part: {} for part in ("weights", "gradients", "groups", "optimizer")}
    for (part, name, *key), value in entries.items():
        if key:
            found[part].setdefault(name, {})[key[0]] = value
        else:
            found[part][name] = value
    missing = [name for name in weights if stored[name] not in found["weights"]]
    require(
        not missing,
        "a state has every weight of the model that takes it on",
        got=f"none for {', '.join(missing)}",
        where=str(save),
        remedy="load it into the model that it was saved from",
    )
    pipeline.load_state_dict({name: found["weights"][stored[name]] for name in weights})
    pipeline.zero_grad()
    pipeline.gradients.restore({n: found["gradients"].get(stored[n]) for n in pipeline.parameters})
    if pipeline.optimizer is not None:
        names = {id(p): stored[name] for name, p in pipeline.parameters.items()}
        _restore_optimizer(pipeline.optimizer, names, found["groups"], found["optimizer"], save)
        pipeline.count_optimizer()
    if pipeline.scheduler is not None and training["scheduler"]:
        pipeline.scheduler.load_state_dict(dict(training["scheduler"]))
    return training["steps"]


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a saved state for plain torch: `model.load_state_dict(gl.load_weights(folder))`.

    Names are those of the whole model, tied weights under each of theirs. Needs no process group.
    """
    entries = read(latest_save(folder), lambda route: route[0] in ("weights", "training"))
    ties = entries["training", "ties"]
    weights = {route[1]: value for route, value in entries.items() if route[0] == "weights"}
    return weights | {name: weights[names[0]] for names in ties for name in names}


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


def state_tree(pipeline: RankPipeline, steps: int) -> dict[str, Any]:
    """What this rank has to save; an equal entry of several ranks is written by one of them.

    Settings and the like are tuples of pairs, which are written as one entry each.
    """
    ties = tuple(tie.names for tie in pipeline.spec.ties)
    stored = _stored_names(pipeline)
    scheduler = () if pipeline.scheduler is None else tuple(pipeline.scheduler.state_dict().items())
    tree: dict[str, Any] = {
        "training": {"steps": steps, "ties": ties, "scheduler": scheduler},
        "weights": {stored[name]: value for name, value in pipeline.weights().items()},
        "gradients": {stored[name]: value for name, value in pipeline.pending_gradients().items()},
        "optimizer": {},
        "groups": {},
    }
    names = {id(p): stored[name] for name, p in pipeline.parameters.items()}
    for group in [] if pipeline.optimizer is None else pipeline.optimizer.param_groups:
        settings = tuple((key, value) for key, value in group.items() if key not in NOT_SETTINGS)
        for parameter in group["params"]:
            tree["groups"][names[id(parameter)]] = settings
            tree["optimizer"][names[id(parameter)]] = dict(pipeline.optimizer.state[parameter])  # type: ignore[union-attr]
    return tree


def read(save: Path, wanted: Callable[[Route], bool]) -> dict[Route, Any]:
    """The entries of a save whose route is wanted, on the CPU."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(save)
    metadata = reader.read_metadata()
    routes = {key: tuple(map(str, route)) for key, route in metadata.planner_data.items()}
    entries = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
        if wanted(routes[key])
    }
    if entries:
        with warnings.catch_warnings():  # each process reads by itself, as is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(entries, storage_reader=reader, no_dist=True)
    return {routes[key]: value for key, value in entries.items()}


def _stored_names(pipeline: RankPipeline) -> dict[str, str]:
    """What the weights here are called and the name that each is saved under."""
    ties = tuple(tie.names for tie in pipeline.spec.ties)
    return {name: _stored_name(name, ties) for name in (*pipeline.weights(), *pipeline.parameters)}


def _stored_name(name: str, ties: tuple[tuple[str, ...], ...]) -> str:
    """The name that a weight is saved under: of tied ones the first."""
    return next((names[0] for names in ties if name in names), name)


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    settings: dict[str, Any],
    states: dict[str, dict[str, Any]],
    save: Path,
) -> None:
    """Give an optimizer the saved settings of its groups and states of its parameters, known by `names`."""
    own = optimizer.state_dict()
    for group, saved in zip(optimizer.param_groups, own["param_groups"], strict=True):
        found = [settings[names[id(p)]] for p in group["params"] if names[id(p)] in settings]
        require(
            all(one == found[0] for one in found),
            "parameters of one group of the optimizer were saved with the same settings",
            got=", ".join(names[id(p)] for p in group["params"]),
            where=str(save),
            remedy="group the parameters as when they were saved",
        )
        saved.update(found[0] if found else {})
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            if states.get(names[id(parameter)]):
                own["state"][index] = states[names[id(parameter)]]
    optimizer.load_state_dict(own)


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
