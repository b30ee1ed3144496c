"""Published models and devices, as planning on paper sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeVar

from ..plan.data import read
from ..plan.errors import is_count, require

TOKEN_BYTES = 8  # of a token's number
LOGIT_BYTES = 4  # logits and their softmax are kept in fp32
MASK_BYTES = 1  # of a dropout mask, for each element

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one parameter and what is kept with it, and of one value of an activation.

    As given: weights and activations in 16 bits, gradients in fp32, and Adam with its fp32 weights and two
    moments: 18 bytes a parameter (Megatron-LM's mixed precision).
    """

    parameter_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    value_bytes: int = 2

    @property
    def held_bytes(self) -> float:
        """Of one parameter with its gradient and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer that predicts the next token, by its shape.

    heads, kv_heads: of queries, and of keys and values (fewer in GQA). ffn: hidden units of the feed-forward
    block; gated: it has a third matrix. tied: the head uses the embedding's weights. positions: rows of a
    learned position embedding. published_parameters: what its paper says, to hold the formula against.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    kv_heads: int | None = None
    gated: bool = False
    tied: bool = False
    dropout: bool = False
    positions: int = 0
    biases: bool = False
    published_parameters: float | None = None
    source: str = "given here"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence"):
            value = getattr(self, name)
            require(
                is_count(value),
                "a model's sizes are whole numbers of at least 1",
                got=f"{name}={value!r}",
                where=f"Model {self.name!r}",
                remedy=f"{name}=1 or more",
            )
        divides = self.hidden % self.heads == 0 and self.heads % self.key_heads == 0
        require(
            divides,
            "heads divide the hidden size, and kv_heads divide the heads",
            got=f"hidden={self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}",
            where=f"Model {self.name!r}",
        )

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def _key_width(self) -> int:
        return self.hidden // self.heads * self.key_heads

    @property
    def matrix_parameters(self) -> int:
        """Weights of one layer's matrices: queries, keys, values, projection, feed-forward."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self._key_width
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        norms = 2 * self.hidden * (2 if self.biases else 1)
        biases = 3 * self.hidden + 2 * self._key_width + self.ffn if self.biases else 0
        return self.matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The final norm and the matrix to the vocabulary, which a tied head shares."""
        return self.hidden * ((2 if self.biases else 1) + (0 if self.tied else self.vocab))

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def layer_flops(self, microbatch_size: int) -> float:
        """Of one layer's forward: 2 a weight and token, and 4·s·h a token for scores and values.

        The whole square of scores is counted, as in Narayanan et al. 2021 (arXiv 2104.04473).
        """
        tokens = microbatch_size * self.sequence
        return tokens * (2 * self.matrix_parameters + 4 * self.sequence * self.hidden)

    def score_flops(self, microbatch_size: int) -> float:
        """The part of `layer_flops` that has no weights: products of queries, keys and values."""
        return microbatch_size * self.sequence * 4.0 * self.sequence * self.hidden

    def head_flops(self, microbatch_size: int) -> float:
        return 2.0 * microbatch_size * self.sequence * self.hidden * self.vocab

    def layer_saved_bytes(
        self, microbatch_size: int, *, fused_attention: bool = True, value_bytes: int = 2
    ) -> int:
        """What one layer keeps for its backward on one micro-batch.

        In 16 bits with dropout, ffn = 4·hidden and all heads: s·b·h·(34 + 5·a·s/h), the second term without
        fused attention only (Korthikanti et al., eq. 1).
        """
        tokens = microbatch_size * self.sequence
        values = (
            self.hidden
            * 4  # inputs of queries/keys/values, the queries, inputs of projection and feed-forward
            + self._key_width * 2  # keys and values
            + self.ffn * (3 if self.gated else 2)  # before and after the nonlinearity, and the gate
            + self.hidden * 2  # inputs of the two norms
        )
        masks = 2 * self.hidden if self.dropout else 0
        scores = 0
        if not fused_attention:
            dropped_out = value_bytes + MASK_BYTES if self.dropout else 0
            kept = value_bytes + dropped_out  # the softmax, and what dropout makes of it
            scores = self.heads * self.sequence * kept
        return tokens * (values * value_bytes + masks * MASK_BYTES + scores)

    def boundary_bytes(self, microbatch_size: int, *, value_bytes: int = 2) -> int:
        """s·b·h values: what passes from layer to layer."""
        return microbatch_size * self.sequence * self.hidden * value_bytes

    def embedding_saved_bytes(self, microbatch_size: int) -> int:
        mask = self.hidden * MASK_BYTES if self.dropout else 0
        return microbatch_size * self.sequence * (TOKEN_BYTES + mask)

    def head_saved_bytes(self, microbatch_size: int, *, value_bytes: int = 2) -> int:
        """Inputs of the last norm and of the head, and the logits (Korthikanti et al. §4.3)."""
        tokens = microbatch_size * self.sequence
        return tokens * (2 * self.hidden * value_bytes + self.vocab * LOGIT_BYTES)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one device holds and does. node_gb_s, link_gb_s: GB/s in one direction, in and between nodes.

    per_node: devices of a node; each has a port of link_gb_s of its own to the other nodes.
    """

    name: str
    title: str = ""
    memory_bytes: int
    peak_tflops: float
    node_gb_s: float
    link_gb_s: float
    per_node: int
    format: str = ""
    source: str = "given here"

    def compute_ms(self, flops: float, efficiency: float) -> float:
        return flops / (self.peak_tflops * 1e9 * efficiency)

    def send_gb_s(self, num_ranks: int, stride: int = 1) -> float:
        """From one of `num_ranks` ranks that stand `stride` apart to the next, at the widest gap."""
        return self.node_gb_s if num_ranks * stride <= self.per_node else self.link_gb_s

    def ring_gb_s(self, num_ranks: int, stride: int = 1) -> float:
        """Of a ring over `num_ranks` ranks that stand `stride` apart.

        A ring over nodes leaves each node through the ports of all its ranks there: with r of them in a
        node, r ports carry what one rank sends to the next.
        """
        if num_ranks * stride <= self.per_node:
            return self.node_gb_s
        return min(self.node_gb_s, max(1, self.per_node // stride) * self.link_gb_s)


def _row_of(kind: type[T], row: dict[str, str]) -> T:
    """A row of a table as a dataclass: each field by the type it is declared with; an empty one as given."""
    convert: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str, "bool": "1".__eq__}
    values = {
        field.name: convert[str(field.type).removesuffix(" | None")](row[field.name])
        for field in fields(kind)  # type: ignore[arg-type]
        if row.get(field.name)
    }
    return kind(**values)


def _device(row: dict[str, str]) -> Device:
    unit = {"GB": 10**9, "GiB": 2**30}[row["memory_unit"]]
    return _row_of(Device, row | {"memory_bytes": str(int(float(row["memory_gb"]) * unit))})


def _model(row: dict[str, str]) -> Model:
    return _row_of(Model, row | {"published_parameters": row["parameters"]})


MODELS: Mapping[str, Model] = MappingProxyType({row["name"]: _model(row) for row in read("models")[1]})
DEVICES: Mapping[str, Device] = MappingProxyType({row["name"]: _device(row) for row in read("devices")[1]})
