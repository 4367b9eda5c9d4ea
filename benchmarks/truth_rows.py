"""Published step times as steps that the models can say: what to trace, on which machine, under which sharding.

A row that cannot be said is `LeftOut`, with the reason. What a table does not say is assumed, and each assumption is named.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors

HERE = Path(__file__).parent
Line = Mapping[str, str]

PRESETS: Mapping[str, str] = {
    "A100 80G SXM": "dgx-a100",
    "A100 80G (Selene)": "dgx-a100",
    "a100_80gb": "dgx-a100",
    "a100_40gb": "dgx-a100-40gb",
    "A100 (one 8-GPU node)": "dgx-a100",
    "A100 (512-GPU cluster, 800 Gb/s a node)": "hgx-a100-800g",
    "H100 80G SXM": "dgx-h100",
    "h100_80gb": "dgx-h100",
    "H100 80G SXM (GCP A3)": "gcp-a3-high",
    "H100 (p5.48xlarge)": "p5.48xlarge",
    "H100 (p5.48xlarge 8x64)": "p5.48xlarge",
    "H100 96G HBM2e 500W (Grand Teton, 400 Gb/s per GPU)": "grand-teton",
    "V100 16G (p3.16xlarge, NVLink)": "p3.16xlarge",
    "V100 16G (p3.16xlarge; 25 Gb/s between nodes)": "p3.16xlarge",
    "V100 32G (p3dn.24xlarge, NVLink)": "p3dn.24xlarge",
}


EAGER = ("LLM Foundry", "Megatron-DeepSpeed", "Megatron-LM")
"""The frameworks whose rows ran PyTorch without compilation."""


TRITON = "FlashAttention 1 in Triton"
"""The default of LLM Foundry's benchmark scripts at that time (scripts/train/benchmarking/submit_benchmarks.py, attn_impl)."""


def triton_on_a100(*, forwards: int) -> float:
    """The part of an A100's peak that FlashAttention 1 in Triton reaches in so many forward passes and one backward.

    FlashAttention-2 reaches at most 73% of it forward and 63% backward (Dao 2023, section 1), and is 1.3 to 1.5 times as fast as
    that one forward, about 2 times backward (section 4.1). A forward pass has two products, a backward pass five.
    """
    forward, backward = 2 * forwards, 5
    return (forward + backward) / (forward / (0.73 / 1.4) + backward / (0.63 / 2))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Ways of each kind, the innermost last: ``data`` copies of ``fsdp`` shards of ``tensor`` parts.

    ``zero``: optimizer state is split over the data parallel devices (ZeRO-1 and 2). ``sequence``: sequence parallelism.
    ``searched``: how activations lie was searched, and is not published.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: bool = False
    sequence: bool = False
    searched: bool = False

    @property
    def whole_residual(self) -> bool:
        """Whether tensor parallelism leaves what lies between layers whole."""
        return self.tensor > 1 and not self.sequence and not self.searched

    @property
    def batch_ways(self) -> int:
        """Into how many parts the batch is split."""
        return self.data * self.fsdp

    def on(self, cluster: Cluster) -> tuple[tuple[Factor, ...], dict[str, Any]]:
        """The factors of a cluster and the roles that they have (`shardplan.search.baselines.recipes.written`)."""
        left = [["data", self.data], ["shard", self.fsdp], ["tensor", self.tensor]]
        parts: dict[str, list[int]] = {}
        names: list[str] = []  # of the factors, the innermost first
        for level in reversed(cluster.levels):
            room = level.size
            while room > 1:
                while left[-1][1] == 1:
                    left.pop()
                kind, ways = left[-1]
                take = math.gcd(room, int(ways))
                assert take > 1, f"{self} does not lie on {cluster.shape}"
                parts.setdefault(level.name, []).insert(0, take)
                names.append(str(kind))
                room, left[-1][1] = room // take, int(ways) // take
        names.reverse()
        found = factors(cluster, {name: tuple(sizes) for name, sizes in parts.items()})
        of = {kind: tuple(i for i, name in enumerate(names) if name == kind) for kind in ("data", "shard", "tensor")}
        batch = tuple(sorted((*of["data"], *of["shard"])))
        roles = {"data": batch, "shard": of["shard"], "tensor": of["tensor"], "sequence": self.sequence}
        return found, roles | {"zero": batch if self.zero else ()}


@dataclass(frozen=True, slots=True)
class Row:
    """One published step. ``options`` are those of a model's factory for one microbatch of all devices.

    ``measured_s`` is None where it ran out of memory. ``sweep`` names the rows that are compared in order. ``uncompiled``: the
    table says that this row was not compiled.
    """

    id: str
    framework: str
    sweep: str
    model: str
    options: Mapping[str, Any]
    cluster: Cluster
    sharding: Sharding
    microbatches: int
    measured_s: float | None
    memory_gb: float | None
    assumed: tuple[str, ...] = ()
    uncompiled: bool = False

    @property
    def samples(self) -> int:
        """Sequences or images of a step."""
        return int(self.options["batch"]) * self.microbatches

    @property
    def attention_kernel(self) -> str:
        """The attention kernel that it ran, if that is not one of those that the presets' rates are of; else empty."""
        return TRITON if self.framework == "LLM Foundry" and self.options.get("fused") else ""

    @property
    def eager(self) -> bool:
        """Whether PyTorch ran it without compilation: kernel by kernel, launched from the host."""
        return self.framework in EAGER or self.uncompiled


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One published step of a pipeline: ``stage`` is its model, whole, on the devices of one stage; ``whole`` are all devices.

    Of ``stages``, each runs equally many ``chunks``. The row is the fastest with any of these numbers of ``microbatches``.
    """

    stage: Row
    whole: Cluster
    stages: int
    chunks: int
    counts: tuple[int, ...]

    @property
    def machine(self) -> str:
        """The name of its preset, with "one node" for a node or a part of one."""
        return f"{self.whole.name}, one node" if self.whole.shape[0] == 1 else self.whole.name

    def of(self, count: int) -> PipelineRow:
        """The row with so many microbatches."""
        options = {**self.stage.options, "batch": self.stage.samples // count}
        return replace(self, stage=replace(self.stage, options=options, microbatches=count), counts=(count,))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not predicted, and why."""

    id: str
    framework: str
    reason: str


def rows() -> tuple[list[Row], list[LeftOut]]:
    """The rows of both tables."""
    lines = _lines(HERE / "measured_steps.csv")
    read = [_row(line) for line in lines] + [_megatron(line) for line in _lines(HERE / "megatron_a100.csv")]
    return [r for r in read if isinstance(r, Row)], [r for r in read if isinstance(r, LeftOut)]


def pipeline_rows() -> tuple[list[PipelineRow], list[LeftOut]]:
    """The rows with pipelines, which `rows` leaves out."""
    read = [_pipeline(line) for line in _lines(HERE / "measured_steps.csv") if _ways(line["pp"]) > 1]
    return [r for r in read if isinstance(r, PipelineRow)], [r for r in read if isinstance(r, LeftOut)]


_SEARCHED = (64, 128, 256, 512, 1024)
"""The numbers of microbatches that Alpa's row is the fastest of (alpa, benchmark/alpa/exp_inter_only.py)."""


def _pipeline(line: Line) -> PipelineRow | LeftOut:
    """A row with a pipeline: stages are consecutive devices, as in Megatron-LM, DeepSpeed and Alpa."""
    stages = _ways(line["pp"])
    given = line["grad_accum"]
    counts = (int(given),) if given.isdigit() else _SEARCHED if given.startswith("best of") else ()
    alone = {**line, "pp": "1", "vp": "1", "gpus": str(int(line["gpus"]) // stages), "grad_accum": str(max(counts, default=1))}
    if line["zero_or_fsdp"].startswith("pipeline only"):
        alone["zero_or_fsdp"] = ""
    stage = _row(alone)
    if isinstance(stage, LeftOut):
        return stage
    return PipelineRow(stage, cluster_of(PRESETS[line["gpu"]], int(line["gpus"])), stages, stages * _ways(line["vp"]), counts)


def _ways(text: str) -> int:
    """A number of ways; one where a table gives none."""
    return int(text) if text.isdigit() else 1


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def cluster_of(preset: str, gpus: int) -> Cluster:
    """So many GPUs of a preset: whole nodes, or a part of one."""
    base = Cluster.load(preset)
    inside = min(gpus, base.levels[-1].size)
    assert gpus % inside == 0, "a table names whole nodes"
    above, last = base.levels
    if last.also is not None and inside < last.size:  # a quad of the cube mesh of V100s: four of a GPU's six links stay in it
        assert inside in (1, 4), "the tables name quads"
        bandwidth = last.bandwidth_bytes_per_s * 4 / 6
        last = replace(last, kind="switch", also=None, bandwidth_bytes_per_s=bandwidth)
    return replace(base, levels=(replace(above, size=gpus // inside), replace(last, size=inside)))


def _row(line: Line) -> Row | LeftOut:
    reason = _why_not(line)
    if reason:
        return LeftOut(line["id"], line["framework"], reason)
    assumed: list[str] = []
    sharding = _sharding(line, assumed)
    if isinstance(sharding, str):
        return LeftOut(line["id"], line["framework"], sharding)
    microbatches = int(line["grad_accum"] or 1)
    batch = int(line["global_batch"]) // microbatches
    model, options = _MODELS[_kind(line)](line, sharding, assumed)
    return Row(
        line["id"],
        line["framework"].split(" (")[0],
        f"{line['framework']} {line['model']} {line['layers']} {line['hidden']} {line['gpu']}",
        model,
        {**options, "batch": batch},
        cluster_of(PRESETS[line["gpu"]], int(line["gpus"])),
        sharding,
        microbatches,
        float(line["step_time_s"]) if line["step_time_s"] else None,
        float(line["peak_mem_gb"]) if line["peak_mem_gb"] else None,
        tuple(assumed),
        "eager" in line["precision"],
    )


def _kind(line: Line) -> str:
    """The model that says a row; empty where none does."""
    name = line["model"].lower()
    if "lora" in name:
        return ""
    for words, kind in (
        (("gpt", "mpt"), "gpt"),
        (("llama", "fuji"), "llama"),
        (("vit",), "vit"),
        (("resnet",), "wresnet"),
    ):
        if any(word in name for word in words):
            return kind
    return "gpt" if line["id"].startswith(("vtrain", "calculon")) else ""


_UNSAID: Sequence[tuple[str, str]] = (
    ("lora", "LoRA: frozen weights beside small trained ones, which no model has"),
    ("t5", "T5: an encoder and a decoder with cross attention, which no model has"),
    ("imagen", "Imagen: its U-Nets' dims are not in the table"),
    ("moe", "GShard MoE: experts in every second layer, GELU; the model moe has Mixtral's layers"),
    ("nemotron", "Nemotron: its layers' dims are not in the table"),
)


def _why_not(line: Line) -> str:
    """Why a row is not predicted; empty where it is."""
    many = [(line["pp"], "pipeline"), (line["cp"], "context"), (line["ep"], "expert")]
    for ways, kind in many:
        if ways.isdigit() and int(ways) > 1:
            return f"{kind} parallelism, {ways} ways"
    if "pipeline" in line["zero_or_fsdp"]:
        return "pipeline parallelism"
    if "vp" in line and line["vp"].isdigit() and int(line["vp"]) > 1:
        return "virtual pipeline stages"
    if not _kind(line):
        name = line["model"].lower()
        return next((why for word, why in _UNSAID if word in name), f"no model says {line['model']}")
    if "fp8" in line["precision"].lower():
        return "FP8 products: models compute in bfloat16, float16 or float32"
    if not line["step_time_s"] and not line["peak_mem_gb"] and "latencies [-1]" not in line["trust_note"]:
        return "neither seconds nor a failure is published"
    if line["gpu"] not in PRESETS:
        return f"no preset for {line['gpu']}"
    return "" if line["global_batch"].isdigit() else "the batch is not in the table"


def _sharding(line: Line, assumed: list[str]) -> Sharding | str:
    """The sharding of a row, or why it cannot be said."""
    gpus, text = int(line["gpus"]), line["zero_or_fsdp"]
    fsdp, tensor = int(line["fsdp"] or 1), int(line["tp"] or 1)
    sequence = line["sp"].startswith("yes") or "sequence parallel" in line["remat"]
    if gpus == 1:
        return Sharding()
    if "shard-largest-dim" in text:
        return "Alpa's heuristic: how activations lie is left to XLA's propagation, and not published"
    if text.startswith("auto-sharding ILP, mesh (1,n)"):
        return "Alpa's search on one mesh axis: the plan that it found is not published"
    if text.startswith(("auto-sharding", "ILP")):
        assumed.append("Alpa's search on a fixed mesh: ZeRO-2 over its first axis, tensor parallelism over its second")
        return Sharding(data=gpus // tensor, tensor=tensor, zero=gpus > tensor, searched=True)
    if text.startswith(("FSDP", "HSDP", "data=-1", "ZeRO-3", "Megatron-FSDP")):
        ways = gpus // tensor
        inner = ways if text == "ZeRO-3" else fsdp
        return Sharding(data=ways // inner, fsdp=inner, tensor=tensor, sequence=sequence)
    zero = "ZeRO-2" in text or "distributed optimizer" in text
    return Sharding(data=gpus // tensor, tensor=tensor, zero=zero, sequence=sequence)


def _precision(line: Line, assumed: list[str]) -> str:
    text = line["precision"].lower()
    if "bf16" in text:
        return "bfloat16"
    if "fp16" in text:
        return "float16"
    if "fp32" in text:
        return "float32"
    assumed.append("bfloat16: the table names no precision")
    return "bfloat16"


def _remat(line: Line, assumed: list[str]) -> bool | str:
    """Whether layers are computed again, and whether the products with weights are kept."""
    text = line["remat"].lower()
    if text in ("none", "none(see config)"):
        return False
    if text.startswith("full"):
        return True
    if text.startswith(("selective", "per-op selective", "minimal", "save_dot")):
        return "products"
    if "175B" in line["model"]:
        assumed.append("each layer computed again: Paxml's default where a configuration names nothing")
        return True
    if line["framework"].startswith("AXLearn"):
        assumed.append("each layer computed again: AXLearn's default keeps attention's products too, which no option says")
        return True
    assumed.append("nothing computed again: the table does not say")
    return False


def _fused(line: Line, assumed: list[str]) -> bool:
    """Whether attention is a fused kernel that writes no scores."""
    text = line["attention"].lower()
    if any(word in text for word in ("flash", "cudnn", "sdpa")):
        return True
    if line["framework"].startswith("AXLearn"):
        assumed.append("fused attention: the table does not say")
        return True
    return False


def _scanned(line: Line) -> bool:
    """Whether layers run as a loop: Paxml's repeated layers and AXLearn's; Alpa, MaxText's rows and PyTorch unroll them."""
    paxml = line["framework"].startswith("Paxml") and line["model"] in ("GPT 5B", "GPT 175B")
    return paxml or line["framework"].startswith("AXLearn")


def _common(line: Line, assumed: list[str]) -> dict[str, Any]:
    return {
        "layers": int(line["layers"]),
        "width": int(line["hidden"]),
        "heads": int(line["heads"]),
        "sequence": int(line["seq"]),
        "dtype": _precision(line, assumed),
        "remat": _remat(line, assumed),
        "scan": _scanned(line),
        "fused": _fused(line, assumed),
    }


def _gpt(line: Line, sharding: Sharding, assumed: list[str]) -> tuple[str, dict[str, Any]]:
    vocabulary = int(line["vocab"].split()[0])
    if line["framework"].startswith("Megatron"):  # pads to a multiple of 128 on every tensor parallel device
        multiple = 128 * sharding.tensor
        vocabulary = -(-vocabulary // multiple) * multiple
    tied = not line["framework"].startswith("Alpa")
    return "gpt", {**_common(line, assumed), "vocabulary": vocabulary, "tied": tied}


def _llama(line: Line, sharding: Sharding, assumed: list[str]) -> tuple[str, dict[str, Any]]:
    heads = int(line["heads"])
    options = _common(line, assumed)
    inner, vocabulary, key_heads = line["ffn"], line["vocab"], line["kv_heads"]
    if not inner:
        inner, vocabulary = ("28672", "32000") if int(line["layers"]) == 80 else ("11008", "32000")
        assumed.append("the MLP's width and the vocabulary of LLaMA-2, which the table does not give")
    named = {"key_heads": int(key_heads or heads), "inner": int(inner), "vocabulary": int(vocabulary)}
    return "llama", {**options, **named}


def _vit(line: Line, sharding: Sharding, assumed: list[str]) -> tuple[str, dict[str, Any]]:
    assumed.append("ViT G/14: 48 layers of width 1664, 16 heads, MLP of 8192 (Zhai et al. 2022), 1000 classes")
    options = {"layers": 48, "width": 1664, "heads": 16, "inner": 8192, "image": 224, "patch": 14, "classes": 1000}
    more = {"dtype": _precision(line, assumed), "remat": _remat(line, assumed), "scan": True, "fused": False}
    return "vit", {**options, **more}


def _wresnet(line: Line, sharding: Sharding, assumed: list[str]) -> tuple[str, dict[str, Any]]:
    channels, middle = (int(word) for word in line["hidden"].replace("C=", "").split(" width "))
    assumed.append("Alpa's widening: of the 3x3 convolutions alone (alpa/model/wide_resnet.py); Adam, 1024 classes")
    return "wresnet", {
        "depth": int(line["layers"]),
        "channels": channels,
        "middle": middle,
        "image": 224,
        "classes": 1024,
        "dtype": _precision(line, assumed),
        "optimizer": "adam",
    }


_MODELS: Mapping[str, Callable[[Line, Sharding, list[str]], tuple[str, dict[str, Any]]]] = {
    "gpt": _gpt,
    "llama": _llama,
    "vit": _vit,
    "wresnet": _wresnet,
}


def _megatron(line: Line) -> Row:
    """A row of Megatron-LM's table, which gives TFLOP/s by its own formula (the head of the file)."""
    layers, width, batch, gpus = (int(line[k]) for k in ("layers", "hidden", "batch", "gpus"))
    vocabulary, sequence = 51200, 2048
    of_batch = 96 * batch * sequence * layers * width**2
    flop = of_batch * (1 + sequence / (6 * width) + vocabulary / (16 * layers * width))
    sharding = Sharding(data=int(line["data_parallel"]), tensor=int(line["tensor_parallel"]))
    microbatch = 4 * sharding.data
    return Row(
        f"megatron-{line['params_b']}B",
        "Megatron-LM",
        f"Megatron-LM {line['params_b']}B",
        "gpt",
        {
            "layers": layers,
            "width": width,
            "heads": int(line["heads"]),
            "sequence": sequence,
            "vocabulary": vocabulary,
            "dtype": "float16",
            "remat": True,
            "scan": False,
            "fused": False,
            "tied": True,
            "batch": microbatch,
        },
        cluster_of("dgx-a100", gpus),
        sharding,
        batch // microbatch,
        flop / (float(line["tflops_per_gpu"]) * 1e12 * gpus),
        None,
        ("microbatches of 4 a device: the table does not say",),
    )
