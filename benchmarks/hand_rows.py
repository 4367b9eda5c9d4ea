"""The rows of `by_hand.py`: train steps, each on a cluster."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SLOW = str(ROOT / "benchmarks" / "clusters" / "dgx-h100-100g.toml")


@dataclass(frozen=True, slots=True)
class Row:
    """A step with a device's part of its batch on a cluster of nodes x GPUs, whose NICs are ``slow`` (100 Gb/s a GPU) or not.

    ``source`` is "models", or "hand" for `hand_steps`.
    """

    source: str
    name: str
    shape: str
    each: int
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    slow: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of nodes and of GPUs in each."""
        nodes, _, gpus = self.shape.rpartition("x")
        return int(nodes or 1), int(gpus)

    def cluster(self) -> Any:
        """The row's cluster. That with slow NICs is described in a file for other sizes, which are replaced here."""
        from shardplan import Cluster

        if not self.slow:
            return Cluster.load(self.shape)
        known = Cluster.load(SLOW)
        return replace(known, levels=tuple(replace(level, size=n) for level, n in zip(known.levels, self.sizes, strict=True)))

    def step(self, **more: Any) -> tuple[Any, Any]:
        """(step, (state, batch)) for the whole batch."""
        nodes, gpus = self.sizes
        options = {**self.options, **more, "batch": self.each * nodes * gpus}
        if self.source == "hand":
            from benchmarks.hand_steps import STEPS

            return STEPS[self.name](**options)
        return importlib.import_module(f"models.{self.name}").train_step(**options)


def gpt_options(width: int, heads: int, layers: int, sequence: int = 1024, **more: Any) -> dict[str, Any]:
    """The options of a GPT with the vocabulary of GPT-2, in bfloat16."""
    sizes = {"width": width, "heads": heads, "layers": layers, "sequence": sequence, "vocabulary": 50304}
    return {**sizes, "dtype": "bfloat16", **more}


LONG = {"scan": True, "remat": True}
LLAMA = {"layers": 4, "sequence": 4096, "block": 512, "dtype": "bfloat16", **LONG}
MOE = {"layers": 4, "width": 2048, "heads": 16, "key_heads": 8, "inner": 2048, "vocabulary": 32000, "sequence": 1024}
SMALL, MEDIUM = gpt_options(768, 12, 6), gpt_options(2048, 16, 4)
VIT = {"layers": 6, "width": 1024, "heads": 16, "image": 224}
T5 = {"layers": 4, "width": 1024, "heads": 16, "vocabulary": 32128, "sequence": 512}
# Widths and heads are those of the models by these names, sequences and batches ours; transformers have 4 to 8 layers.
ROWS = {
    "gpt-labels": Row("hand", "gpt", "8", 8, {**SMALL, "tied": False, "remat": True}),
    "gpt-labels-tied": Row("hand", "gpt", "2x4", 4, {**gpt_options(1024, 16, 4), "tied": True}),
    "gpt-smoothed": Row("hand", "gpt", "8", 4, {**SMALL, "smoothing": 0.1}),
    "gpt-f32": Row("hand", "gpt", "2x8", 2, {**SMALL, "dtype": "float32"}),
    "gpt-dropout": Row("hand", "gpt", "4x8", 4, {**SMALL, "dropout": 0.1}),
    "gpt-accumulated": Row("hand", "gpt", "4x8", 8, {**MEDIUM, "accumulate": 4}),
    "gpt-muon": Row("hand", "gpt", "2x8", 8, {**SMALL, "optimizer": "muon"}),
    "gpt-lora": Row("hand", "lora", "2x8", 2, {k: v for k, v in MEDIUM.items() if k != "dtype"}),
    "t5": Row("hand", "seq2seq", "4x8", 8, T5),
    "gpt-125m": Row("models", "gpt", "8", 16, SMALL),
    "gpt-125m-small-batch": Row("models", "gpt", "2x8", 2, SMALL),
    "gpt-125m-slow": Row("models", "gpt", "4x8", 8, SMALL, slow=True),
    "gpt-350m-scan": Row("models", "gpt", "4x8", 8, gpt_options(1024, 16, 8, scan=True)),
    "gpt-1.3b": Row("models", "gpt", "2x8", 8, MEDIUM),
    "gpt-1.3b-small-batch": Row("models", "gpt", "4x8", 1, MEDIUM),
    "gpt-1.3b-slow": Row("models", "gpt", "4x8", 4, MEDIUM, slow=True),
    "gpt-2.7b-scan": Row("models", "gpt", "4x8", 4, gpt_options(2560, 32, 8, 2048, **LONG)),
    "gpt-7b-scan": Row("models", "gpt", "8x8", 2, gpt_options(4096, 32, 8, 2048, **LONG)),
    "gpt-7b-scan-slow": Row("models", "gpt", "4x8", 2, gpt_options(4096, 32, 8, 2048, **LONG), slow=True),
    "llama-8b": Row("models", "llama", "8x8", 1, {"size": "8b", **LLAMA}),
    "llama-8b-slow": Row("models", "llama", "8x8", 1, {"size": "8b", **LLAMA}, slow=True),
    "llama-70b": Row("models", "llama", "8x8", 1, {"size": "70b", **LLAMA}),
    "moe": Row("models", "moe", "4x8", 4, {**MOE, "dtype": "bfloat16"}),
    "vit-large": Row("models", "vit", "8", 64, {**VIT, "dtype": "bfloat16"}),
    "vit-large-small-batch": Row("models", "vit", "4x8", 8, {**VIT, "dtype": "bfloat16"}),
    "wresnet-50-2": Row("models", "wresnet", "4x8", 16, {"depth": 50, "width": 2, "image": 224}),
    "unet": Row("models", "unet", "2x8", 16, {"channels": 128, "image": 64}),
}  # fmt: skip
BLOCKS = ("gpt", "llama", "moe", "vit", "seq2seq", "lora")
"""Models of equal blocks on activations [batch, sequence, width]: these take a ``boundary``."""
