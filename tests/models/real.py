"""Models that other people wrote, small, with weights drawn anew, each as the layers of a pipeline too.

What a model's own `forward` does between its blocks is written here as layers: the model itself, called as
its authors mean it, is then what a pipeline of these layers is held against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def _import_torchvision() -> None:
    """torchvision, also where its compiled operators are for another build of torch.

    The models are plain Python and use none of them; but its import describes each to torch's compiler, and
    so fails unless there is something by these names.
    """
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            )
        import torchvision  # noqa: F401


_import_torchvision()  # ahead of transformers, which imports it where it can; in workers, too

from torchvision import models as vision  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask  # noqa: E402

VOCABULARY, LENGTH, CLASSES = 32, 6, 5
IGNORED = -100


@dataclass(frozen=True)
class Real:
    """A model, called on a micro-batch by `call`; the same as layers; and a batch for it."""

    call: Callable[[Any], torch.Tensor]
    layers: list[nn.Module]
    inputs: Any
    targets: torch.Tensor


class Then(nn.Module):
    """A layer of the pipeline made of modules one after the other, as they are in the model.

    Every layer is of a class of this module, which a worker thus imports ahead of theirs.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class GPT2Start(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.tokens, self.positions = model.config, model.wte, model.wpe

    def forward(self, batch: Any) -> Any:
        ids, mask = batch
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.tokens(ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=mask, cache=None, position_ids=positions
        )
        return x + self.positions(positions), mask


class LlamaStart(nn.Module):
    """Besides the mask every block is given the turning angles of the positions, which need no gradient."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.tokens, self.angles = model.config, model.embed_tokens, model.rotary_emb

    def forward(self, batch: Any) -> Any:
        ids, mask = batch
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.tokens(ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=mask, cache=None, position_ids=positions
        )
        return x, {"attention_mask": mask, "position_embeddings": self.angles(x, position_ids=positions)}


class BidirectionalStart(nn.Module):
    """Of BERT and of T5's encoder."""

    def __init__(self, config: Any, embeddings: nn.Module) -> None:
        super().__init__()
        self.config, self.embeddings = config, embeddings

    def forward(self, batch: Any) -> Any:
        ids, mask = batch
        x = self.embeddings(ids)
        return x, create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=mask)


class Masked(nn.Module):
    """A block that takes the mask by name; what goes on is (x, mask)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Any) -> Any:
        x, mask = value
        return self.block(x, attention_mask=mask), mask


class Named(nn.Module):
    """A block that takes several things by name; what goes on is (x, those)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Any) -> Any:
        x, rest = value
        return self.block(x, **rest), rest


class Biased(nn.Module):
    """A block of T5: the first makes the bias of relative positions that all of them use, and that trains."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Any) -> Any:
        x, mask, bias = value if len(value) == 3 else (*value, None)
        x, bias, _ = self.block(x, attention_mask=mask, position_bias=bias)
        return x, mask, bias


class End(nn.Module):
    """The last modules, on the first of what blocks give; classes in the second dimension, as losses want."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, value: Any) -> torch.Tensor:
        x = value[0]
        for part in self.parts:
            x = part(x)
        return x.transpose(1, 2)


def gpt2() -> Real:
    """Its head is its table of tokens: one weight, on the first stage and on the last."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    body = model.transformer
    assert model.lm_head.weight is body.wte.weight
    layers = [GPT2Start(body), *map(Masked, body.h), End(body.ln_f, model.lm_head)]
    return _of_tokens(lambda ids, mask: model(ids, attention_mask=mask).logits, layers)


def llama() -> Real:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    body = model.model
    layers = [LlamaStart(body), *map(Named, body.layers), End(body.norm, model.lm_head)]
    return _of_tokens(lambda ids, mask: model(ids, attention_mask=mask).logits, layers)


def bert() -> Real:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config).train()
    body = model.bert
    layers = [BidirectionalStart(config, body.embeddings), *map(Masked, body.encoder.layer), End(model.cls)]
    return _of_tokens(lambda ids, mask: model(ids, attention_mask=mask).logits, layers)


def t5_encoder() -> Real:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=4, num_heads=2, dropout_rate=0.0
    )
    model = T5EncoderModel(config).train()
    body = model.encoder
    head = nn.Linear(16, VOCABULARY)
    layers = [
        BidirectionalStart(body.config, body.embed_tokens),
        *map(Biased, body.block),
        End(body.final_layer_norm, head),
    ]
    return _of_tokens(lambda ids, mask: head(model(ids, attention_mask=mask).last_hidden_state), layers)


def _of_tokens(call: Callable[..., torch.Tensor], layers: list[nn.Module]) -> Real:
    """Rows of several lengths, filled up; in some micro-batches no row is, in one all are."""
    ids = torch.randint(1, VOCABULARY, (8, LENGTH))
    lengths = torch.tensor([LENGTH, LENGTH, LENGTH - 1, LENGTH, LENGTH, LENGTH, 2, 3])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    targets = torch.randint(1, VOCABULARY, (8, LENGTH)).masked_fill(mask == 0, IGNORED)
    return Real(lambda batch: call(*batch).transpose(1, 2), layers, (ids * mask, mask), targets)


def resnet() -> Real:
    model = vision.resnet.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES).train()
    first = Then(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [Then(*stage) for stage in (model.layer1, model.layer2, model.layer3, model.layer4)]
    return _of_images(model, [first, *blocks, Then(model.avgpool, nn.Flatten(), model.fc)])


def mobilenet() -> Real:
    """With depthwise convolutions and hard swishes, and squeeze-and-excitation in half the blocks."""
    part = vision.mobilenetv3
    settings = [
        part.InvertedResidualConfig(8, 3, 16, 8, True, "RE", 2, 1, 1.0),
        part.InvertedResidualConfig(8, 3, 16, 8, False, "HS", 1, 1, 1.0),
        part.InvertedResidualConfig(8, 5, 24, 16, True, "HS", 2, 1, 1.0),
    ]
    model = part.MobileNetV3(settings, last_channel=24, num_classes=CLASSES, dropout=0.0).train()
    return _of_images(
        model, [*map(Then, model.features), Then(model.avgpool, nn.Flatten(), model.classifier)]
    )


def densenet(memory_efficient: bool = False) -> Real:
    """memory_efficient: it checkpoints within its layers, by torch's own torch.utils.checkpoint."""
    model = vision.DenseNet(
        growth_rate=4,
        block_config=(2, 2, 2),
        num_init_features=8,
        bn_size=2,
        num_classes=CLASSES,
        memory_efficient=memory_efficient,
    ).train()
    end = Then(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), model.classifier)
    return _of_images(model, [*map(Then, model.features), end])


def memory_efficient_densenet() -> Real:
    return densenet(memory_efficient=True)


def _of_images(model: nn.Module, layers: list[nn.Module]) -> Real:
    """Images of 64 × 64: deep enough down every batch norm still sees several values of a channel."""
    return Real(model, layers, torch.randn(8, 3, 64, 64), torch.randint(CLASSES, (8,)))


MODELS = {
    make.__name__: make
    for make in (resnet, mobilenet, densenet, memory_efficient_densenet, gpt2, bert, t5_encoder, llama)
}


def make(name: str) -> Real:
    """The model of that name, the same at every call."""
    torch.manual_seed(1)
    return MODELS[name]()
