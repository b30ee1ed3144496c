"""How one rank's weights change: its optimizer and its scheduler, and what is saved of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..plan.errors import require
from .ledger import Ledger

NamedParameters = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
State = dict[str, Any]
Source = tuple[State, int, int]  # a saved scheduler, one of its optimizer's groups, and how many that had
NOT_SETTINGS = ("params", "param_names")  # of an optimizer's group: which parameters, not how they move


class Updates:
    """The optimizer and the scheduler of one rank, None where nothing here is trained.

    parameters: by whole-model names, a tied weight by the first of its names wherever it is, so that groups
    made by name are the same for all its copies. per: whether the scheduler moves with each "step", or only
    when it is told to ("epoch").
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: MakeOptimizer | None,
        scheduler: MakeScheduler | None,
        *,
        per: str,
        ledger: Ledger,
    ) -> None:
        trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
        self._names = {id(p): name for name, p in trained}
        self._per = per
        self._ledger = ledger
        self._keys: list[int] = []  # the ledger's
        self.optimizer = optimizer(trained) if optimizer is not None and trained else None
        is_optimizer = isinstance(self.optimizer, torch.optim.Optimizer)
        require(
            optimizer is None or not trained or (is_optimizer and steps_alone(type(self.optimizer))),
            "optimizer gives a torch Optimizer whose step needs no closure",
            got=type(self.optimizer).__name__,
            where="optimizer",
            remedy="functools.partial(torch.optim.SGD, lr=0.1)",
        )
        self.scheduler = scheduler(self.optimizer) if scheduler is not None and self.optimizer else None
        require(
            self.scheduler is None or per == "epoch" or steps_alone(type(self.scheduler)),
            "scheduler gives one whose step needs no metric",
            got=type(self.scheduler).__name__,
            where="scheduler",
            remedy='scheduler_per="epoch", and pipe.scheduler_step(metric) after each',
        )

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self._count()
        if self._per == "step":
            self.scheduler_step()

    def scheduler_step(self, *metrics: float) -> None:
        if self.scheduler is not None:
            self.scheduler.step(*metrics)

    def set_lr(self, lr: float) -> None:
        for group in self._groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each trained parameter."""
        return {name: float(group["lr"]) for group in self._groups for name in self._names_in(group)}

    @property
    def _groups(self) -> list[State]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _names_in(self, group: State) -> tuple[str, ...]:
        return tuple(self._names[id(p)] for p in group["params"])

    def _count(self) -> None:
        """Tell the ledger what the optimizer holds now."""
        assert self.optimizer is not None
        self._ledger.release("optimizer", self._keys)
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        self._keys = self._ledger.hold("optimizer", state)

    def states(self) -> dict[str, State]:
        """What the optimizer has for each parameter."""
        found = {} if self.optimizer is None else self.optimizer.state
        return {self._names[id(p)]: dict(state) for p, state in found.items() if id(p) in self._names}

    def settings(self) -> State | None:
        """The optimizer's groups and the scheduler's state, to be saved; tuples, not to be taken apart."""
        if self.optimizer is None:
            return None
        names = map(self._names_in, self._groups)
        moves = [tuple((k, v) for k, v in group.items() if k not in NOT_SETTINGS) for group in self._groups]
        return {
            "optimizer": _kind(self.optimizer),
            "groups": tuple(zip(names, moves, strict=True)),
            "scheduler": "" if self.scheduler is None else _kind(self.scheduler),
            "schedule": () if self.scheduler is None else tuple(self.scheduler.state_dict().items()),
        }

    def fit(
        self,
        settings: Sequence[State],
        states: Mapping[str, State],
        saved_name: Callable[[str], str],
        *,
        where: object,
    ) -> list[State | None]:
        """What `load` is to be given to go on from saved `settings` of ranks and `states` of parameters.

        The ranks may have been others, with other groups, and other weights tied: `saved_name` gives the name
        that one of a weight here was saved under.
        Raises `InputError` where they do not fit.
        """
        _require_kind(self.optimizer, {each["optimizer"] for each in settings}, where)
        _require_kind(self.scheduler, {each["scheduler"] for each in settings}, where)
        if self.optimizer is None:
            return [None, None]
        homes = {
            n: (rank, i) for rank in settings for i, (group, _) in enumerate(rank["groups"]) for n in group
        }
        names = [list(map(saved_name, self._names_in(group))) for group in self._groups]
        found = [[homes[name] for name in group if name in homes] for group in names]
        optimizer = self.optimizer.state_dict()
        for group, own, saved in zip(names, optimizer["param_groups"], found, strict=True):
            moves = [dict(rank["groups"][index][1]) for rank, index in saved]
            require(
                all(one == moves[0] for one in moves),
                "parameters of one group of the optimizer were saved with the same settings",
                got=", ".join(group),
                where=str(where),
                remedy="group the parameters as when they were saved",
            )
            own.update(moves[0] if moves else {})
            known = zip(own["params"], group, strict=True)
            optimizer["state"] |= {i: states[name] for i, name in known if name in states}
        schedules = [dict(each["schedule"]) for each in settings if each["scheduler"]]
        if self.scheduler is None or not schedules:
            return [optimizer, None]
        sources = [(dict(s[0][0]["schedule"]), s[0][1], len(s[0][0]["groups"])) if s else None for s in found]
        return [optimizer, _schedule_for(self.scheduler.state_dict(), schedules[0], sources)]

    def load(self, optimizer: State | None, scheduler: State | None) -> None:
        """Go on from what `fit` has found."""
        if self.optimizer is not None and optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
            self._count()
        if self.scheduler is not None and scheduler is not None:
            self.scheduler.load_state_dict(scheduler)


def _schedule_for(own: State, saved: State, sources: Sequence[Source | None]) -> State:
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
            state[key] = [_schedule_for(*each) for each in zip(value, saved[key], inner, strict=True)]
        elif len(value) == len(found) and all(s is None or len(s[0]) == s[2] for s in found):
            state[key] = [old if s is None else s[0][s[1]] for old, s in zip(value, found, strict=True)]
    return state


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _require_kind(own: object | None, saved: set[str], where: object) -> None:
    """An optimizer's or scheduler's state is for its own class; none at all leaves the new one as it is."""
    others = saved - {"", _kind(own)}
    require(
        own is None or not others,
        "an optimizer or scheduler goes on from the state of one of its own kind",
        got=f"{', '.join(sorted(others))} saved, for {_kind(own)}",
        where=str(where),
        remedy="make the pipeline with the kind that was saved, or take the weights alone: "
        "pipe.load_state_dict(gl.load_weights(folder))",
    )


def steps_alone(kind: type | None) -> bool:
    """Whether an optimizer or scheduler of this class steps without arguments; yes where nothing is known."""
    if kind is None:
        return True
    taken = list(inspect.signature(getattr(kind, "step", kind)).parameters.values())[1:]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return hasattr(kind, "step") and all(p.default is not p.empty or p.kind in optional for p in taken)
