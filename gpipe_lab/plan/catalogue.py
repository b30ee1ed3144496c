"""The facts that come as files: models, devices, tables of papers; every row with its source."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from .errors import require
from .models import Device, Model

DATA = Path(__file__).resolve().parents[2] / "data"


@cache
def read(name: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """(where it comes from, its rows) of `data/NAME.csv`, whose first line is a comment."""
    path = DATA / f"{name}.csv"
    require(
        path.is_file(),
        "facts are read from the data folder beside the package",
        got=f"no {path}",
        where="data",
        remedy="pip install -e . in a copy of the repository",
    )
    comment, _, table = path.read_text(encoding="utf-8").partition("\n")
    return comment.removeprefix("#").strip(), tuple(csv.DictReader(table.splitlines()))


def _model(row: dict[str, str]) -> Model:
    return Model(
        name=row["name"],
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        ffn=int(row["ffn"]),
        vocab=int(row["vocab"]),
        sequence=int(row["sequence"]),
        positions=int(row["positions"]),
        gated=row["gated"] == "1",
        tied=row["tied"] == "1",
        dropout=row["dropout"] == "1",
        biases=row["biases"] == "1",
        published_parameters=float(row["parameters"]) if row["parameters"] else None,
        source=row["source"],
    )


def _device(row: dict[str, str]) -> Device:
    unit = {"GB": 10**9, "GiB": 2**30}[row["memory_unit"]]
    return Device(
        name=row["name"],
        title=row["title"],
        memory_bytes=int(float(row["memory_gb"]) * unit),
        peak_tflops=float(row["peak_tflops"]),
        node_gb_s=float(row["node_gb_s"]),
        link_gb_s=float(row["link_gb_s"]),
        per_node=int(row["per_node"]),
        format=row["format"],
        source=row["source"],
    )


MODELS: Mapping[str, Model] = MappingProxyType({row["name"]: _model(row) for row in read("models")[1]})
DEVICES: Mapping[str, Device] = MappingProxyType({row["name"]: _device(row) for row in read("devices")[1]})
