"""What to train and how, from a TOML file. `data/train.toml` is an example with every key."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..plan.errors import is_count, require
from ..plan.recompute import parse_mode
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES

PRECISIONS = ("float32", "bfloat16", "float64")  # bfloat16: autocast, with weights and gradients in float32


def _field(default: Any, what: str, fits: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"what": what, "fits": fits})


def count(default: int, least: int = 1) -> Any:
    return _field(default, f"a whole number of at least {least}", lambda value: is_count(value, least))


def number(default: float, least: float = 0.0, most: float = math.inf) -> Any:
    def fits(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    return _field(default, f"a number from {least:g} to {most:g}", fits)


def text(default: str, known: Sequence[str] | None = None) -> Any:
    what = "text" if known is None else f"one of {', '.join(known)}"
    return _field(default, what, lambda value: isinstance(value, str) and (known is None or value in known))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the file. Raises `InputError` for a value that its field does not take."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(
                each.metadata["fits"](value),
                f"{each.name} is {each.metadata['what']}",
                got=f"{each.name} = {value!r}",
                where=f"[{self.name()}]",
                remedy=f"{each.name} = {each.default!r}",
            )

    @classmethod
    def name(cls) -> str:
        return cls.__name__.removesuffix("Config").lower()


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """How the work is laid out; num_ranks 0 is all processes there are, shared by the replicas."""

    schedule: str = text("one_f_one_b", tuple(SCHEDULES))
    num_ranks: int = count(0, least=0)
    num_replicas: int = count(1)
    num_microbatches: int = count(4)
    checkpoint: str = text("never")
    device: str = text("auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_mode(self.checkpoint)

    def ranks_per_replica(self, num_processes: int) -> int:
        """P. Raises `InputError` where the processes are not P times the replicas."""
        num_ranks = self.num_ranks or max(num_processes // self.num_replicas, 1)
        require(
            num_ranks * self.num_replicas == num_processes,
            "a job has a process for every rank of every replica",
            got=f"{num_processes} processes for {self.num_replicas} x {num_ranks} ranks",
            where="[pipeline]",
            remedy=f"torchrun --nproc-per-node {num_ranks * self.num_replicas} -m gpipe_lab.train ...",
        )
        return num_ranks

    def make_schedule(self, num_ranks: int) -> Schedule:
        """One replica's schedule."""
        return SCHEDULES[self.schedule](num_ranks, self.num_microbatches)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The course's GPT."""

    num_blocks: int = count(6)
    width: int = count(64)
    num_heads: int = count(4)
    length: int = count(64)
    dropout: float = number(0.0, most=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.width % self.num_heads == 0,
            "heads share the width evenly",
            got=f"width = {self.width}, num_heads = {self.num_heads}",
            where="[model]",
            remedy=f"width = {self.num_heads * max(self.width // self.num_heads, 1)}",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """AdamW; the learning rate rises for warmup_steps and then falls to a tenth along a cosine.

    rows: of a whole batch, over all replicas. A transfer that takes longer than timeout_s is a failure, and
    so is an operation that takes longer than watchdog_s without waiting for another rank.
    """

    num_steps: int = count(100)
    rows: int = count(32)
    learning_rate: float = number(1e-3)
    warmup_steps: int = count(10, least=0)
    weight_decay: float = number(0.01)
    max_norm: float = number(1.0)
    seed: int = count(0, least=0)
    precision: str = text("float32", PRECISIONS)
    corpus_bytes: int = count(1 << 20)
    timeout_s: float = number(600.0)
    watchdog_s: float = number(120.0)

    def learning_rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


@dataclass(frozen=True, kw_only=True)
class SaveConfig(Section):
    """A state every so many steps and after the last, in a folder that all hosts see; "" saves nothing."""

    folder: str = text("")
    every: int = count(100)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """A line every so many steps; the trace of trace_step, of all ranks on one clock, in trace_file."""

    every: int = count(10)
    trace_file: str = text("")
    trace_step: int = count(2)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All of it; each field is a table of the TOML file."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


SECTIONS: dict[str, type[Section]] = {
    cls.name(): cls for cls in (PipelineConfig, ModelConfig, TrainingConfig, SaveConfig, LogConfig)
}


def read_config(path: str | Path) -> TrainConfig:
    """The config in a TOML file. Raises `InputError` for a key or value that means nothing."""
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        require(False, "a config is a TOML file", got=str(error), where=str(path), remedy="data/train.toml")
    _check_keys(given, list(SECTIONS), str(path))
    return TrainConfig(**{name: _read_section(SECTIONS[name], table) for name, table in given.items()})


def _read_section(cls: type[Section], table: Any) -> Any:
    where = f"[{cls.name()}]"
    require(isinstance(table, Mapping), "a config consists of tables", got=repr(table), where=where)
    defaults = {each.name: each.default for each in fields(cls)}
    _check_keys(table, list(defaults), where)
    return cls(
        **{k: float(v) if type(v) is int and type(defaults[k]) is float else v for k, v in table.items()}
    )


def _check_keys(given: Mapping[str, Any], known: list[str], where: str) -> None:
    unknown = [key for key in given if key not in known]
    require(
        not unknown,
        "a config has keys that mean something",
        got=", ".join(unknown),
        where=where,
        remedy=f"one of {', '.join(known)}",
    )
