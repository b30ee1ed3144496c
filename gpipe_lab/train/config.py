"""What to train and how, from a TOML file. `data/train.toml` is an example with every key."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..plan.errors import is_count, require
from ..plan.recompute import parse_mode
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES

PRECISIONS = ("float32", "bfloat16", "float64")  # bfloat16: autocast, with weights and gradients in float32
Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the work is laid out; num_ranks 0 is all processes there are, shared by the replicas."""

    schedule: str = "one_f_one_b"
    num_ranks: int = 0
    num_replicas: int = 1
    num_microbatches: int = 4
    checkpoint: str = "never"
    device: str = "auto"

    def __post_init__(self) -> None:
        _check_counts(self, "pipeline", least=1, names=("num_replicas", "num_microbatches"))
        _check_counts(self, "pipeline", least=0, names=("num_ranks",))
        _check_choice(self.schedule, tuple(SCHEDULES), "[pipeline] schedule")
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
class ModelConfig:
    """The course's GPT."""

    num_blocks: int = 6
    width: int = 64
    num_heads: int = 4
    length: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_counts(self, "model", least=1, names=("num_blocks", "width", "num_heads", "length"))
        require(
            self.width % self.num_heads == 0,
            "heads share the width evenly",
            got=f"width = {self.width}, num_heads = {self.num_heads}",
            where="[model]",
            remedy=f"width = {self.num_heads * max(self.width // self.num_heads, 1)}",
        )
        _check_range(self.dropout, 0.0, 1.0, "[model] dropout")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """AdamW; the learning rate rises for warmup_steps and then falls to a tenth along a cosine.

    rows: of a whole batch, over all replicas. A transfer that takes longer than timeout_s is a failure.
    """

    num_steps: int = 100
    rows: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    weight_decay: float = 0.01
    max_norm: float = 1.0
    seed: int = 0
    precision: str = "float32"
    corpus_bytes: int = 1 << 20
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _check_counts(self, "training", least=1, names=("num_steps", "rows", "corpus_bytes"))
        _check_counts(self, "training", least=0, names=("warmup_steps", "seed"))
        _check_choice(self.precision, PRECISIONS, "[training] precision")
        for name in ("learning_rate", "weight_decay", "max_norm", "timeout_s"):
            _check_range(getattr(self, name), 0.0, math.inf, f"[training] {name}")

    def learning_rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """A state every so many steps and after the last, in a folder that all hosts see; "" saves nothing."""

    folder: str = ""
    every: int = 100

    def __post_init__(self) -> None:
        _check_counts(self, "save", least=1, names=("every",))


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """A line every so many steps; the trace of trace_step, of all ranks on one clock, in trace_file."""

    every: int = 10
    trace_file: str = ""
    trace_step: int = 2

    def __post_init__(self) -> None:
        _check_counts(self, "log", least=1, names=("every", "trace_step"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All of it; each field is a table of the TOML file."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


SECTIONS: dict[str, type] = {
    "pipeline": PipelineConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "save": SaveConfig,
    "log": LogConfig,
}


def read_config(path: str | Path) -> TrainConfig:
    """The config in a TOML file. Raises `InputError` for a key or value that means nothing."""
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        require(False, "a config is a TOML file", got=str(error), where=str(path), remedy="data/train.toml")
    _check_keys(given, list(SECTIONS), str(path))
    return TrainConfig(**{name: _section(SECTIONS[name], name, table) for name, table in given.items()})


def _section(cls: type[Section], name: str, table: Any) -> Section:
    where = f"[{name}]"
    require(isinstance(table, Mapping), "a config consists of tables", got=f"{name} = {table!r}", where=where)
    defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
    _check_keys(table, list(defaults), where)
    values = {}
    for key, value in table.items():
        kind: type = type(defaults[key])
        fits = type(value) is kind or (kind is float and type(value) is int)
        require(
            fits,
            f"{key} is {'text' if kind is str else 'a whole number' if kind is int else 'a number'}",
            got=f"{key} = {value!r}",
            where=where,
            remedy=f"{key} = {defaults[key]!r}",
        )
        values[key] = kind(value)
    return cls(**values)


def _check_keys(given: Mapping[str, Any], known: list[str], where: str) -> None:
    unknown = [key for key in given if key not in known]
    require(
        not unknown,
        "a config has keys that mean something",
        got=", ".join(unknown),
        where=where,
        remedy=f"one of {', '.join(known)}",
    )


def _check_counts(section: Any, table: str, *, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(section, name)
        require(
            is_count(value, least=least),
            f"{name} is a whole number of at least {least}",
            got=f"{name} = {value!r}",
            where=f"[{table}]",
            remedy=f"{name} = {max(least, 1)}",
        )


def _check_choice(value: str, known: tuple[str, ...], where: str) -> None:
    require(value in known, f"one of {', '.join(known)}", got=repr(value), where=where, remedy=known[0])


def _check_range(value: float, least: float, most: float, where: str) -> None:
    require(least <= value <= most, f"a number from {least:g} to {most:g}", got=repr(value), where=where)
