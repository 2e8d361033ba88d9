"""What FP8 weights do to a model, by kind of matrix: error of the products, of the logits, and of the perplexity. CPU or GPU.

A kind is what a layer has one of: qkv, o, gate_up, down. Its own error is that of its products, over all layers, on the
activations that the unquantised model has there, without the bias. Its error of the logits is what comes out at the end when that
kind alone is in FP8. The unquantised model is in fp32, and so are the activations beside FP8 weights, so that nothing but the
weights differs. The baseline is the whole model in bf16, weights and activations, held against the same fp32.

A model folder reads English prose that every Python brings; a shape has random weights and reads random tokens, which says what
rounding does to products and nothing about answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from pydoc_data.topics import topics

import click
import torch
from torch.overrides import TorchFunctionMode

from comm.single import SingleCommunicator
from engine.bench.load import errors_in_one_line, record_option
from engine.bench.records import Record, commit, cpu_device
from engine.eager import EagerStep
from engine.kv_cache import KvCache
from engine.loading import Blueprint, draw_blueprint, load_blueprint_weights
from engine.settings import DEFAULT_PAGE_SIZE, EngineSettings
from engine.step_batch import RowSpan, StepBatch
from engine.text import Text
from engine.weights import MATRICES, LayerWeights, ModelWeights
from kernels.linear import linear
from kernels.quantize import Fp8Weight, quantize
from launch.devices import resolve_device
from launch.environment import Environment
from launch.world import World

TOPICS = ("assignment", "class", "numbers", "exceptions")
CHUNK = 512  # tokens of a text
PERPLEXITY_LIMIT_PERCENT = 1.0
BASELINE = "bf16"


@dataclass
class ProductError:
    """Of one kind of matrix: summed squares of the error and of what is right."""

    squared: float = 0.0
    right: float = 0.0

    def add(self, found: torch.Tensor, right: torch.Tensor) -> None:
        self.squared += float((found.float() - right.float()).square().sum())
        self.right += float(right.float().square().sum())

    @property
    def percent(self) -> float:
        return 100 * math.sqrt(self.squared / self.right)


@dataclass
class LogitError(ProductError):
    """Of logits less their mean, since a softmax does not see it. `largest`: of the differences; `agreeing`: tokens with the same
    likeliest next one; `divergence`: summed KL from right to found, in nats; `losses`: of right and found, summed, in nats."""

    largest: float = 0.0
    agreeing: int = 0
    divergence: float = 0.0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])
    num_tokens: int = 0
    num_logits: int = 0

    def add_logits(self, found: torch.Tensor, right: torch.Tensor, ids: torch.Tensor) -> None:
        """`found`, `right`: fp32 `[tokens, vocab]`; `ids`: int64 `[tokens]`, the text."""
        centred = [logits - logits.mean(-1, keepdim=True) for logits in (found, right)]
        self.add(*centred)
        self.largest = max(self.largest, float((centred[0] - centred[1]).abs().max()))
        self.agreeing += int((found.argmax(-1) == right.argmax(-1)).sum())
        log_found, log_right = found.log_softmax(-1), right.log_softmax(-1)
        self.divergence += float((log_right.exp() * (log_right - log_found)).sum())
        for idx, logs in enumerate((log_right, log_found)):
            self.losses[idx] -= float(logs[:-1].gather(1, ids[1:, None]).sum())
        self.num_tokens += len(ids)
        self.num_logits += right.numel()

    def metrics(self, num_chunks: int) -> dict[str, float]:
        right, found = self.losses
        return {
            "logits_error_percent": self.percent,
            "logits_rms_error": math.sqrt(self.squared / self.num_logits),
            "logits_max_error": self.largest,
            "top1_agreement": self.agreeing / self.num_tokens,
            "kl_nats": self.divergence / self.num_tokens,
            "perplexity_percent": 100 * math.expm1((found - right) / (self.num_tokens - num_chunks)),
        }


class WatchProducts(TorchFunctionMode):
    """While it is active, every product with a matrix of `right` is repeated with that of each of `others`, and compared.

    `errors`: by the name of the other, then by kind.
    """

    def __init__(self, right: ModelWeights, others: dict[str, ModelWeights]):
        super().__init__()
        self.errors = {name: {kind: ProductError() for kind in MATRICES} for name in others}
        self._place = {id(getattr(layer, kind)): (idx, kind) for idx, layer in enumerate(right.layers) for kind in MATRICES}
        self._others = others

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        place = self._place.get(id(args[1])) if len(args) > 1 else None
        if place is not None:
            idx, kind = place
            x, bias = args[0], args[2] if len(args) > 2 else None
            right = out if bias is None else out - bias
            for name, other in self._others.items():
                matrix = getattr(other.layers[idx], kind)
                dtype = x.dtype if isinstance(matrix, Fp8Weight) else matrix.dtype
                self.errors[name][kind].add(linear(x.to(dtype), matrix), right)
        return out


@dataclass(frozen=True)
class Fp8Report:
    """`products`, `logits`: by kind, of FP8; `whole`: all kinds in FP8. `baseline_…`: of the model in bf16."""

    products: dict[str, ProductError]
    logits: dict[str, LogitError]
    whole: LogitError
    baseline_products: dict[str, ProductError]
    baseline_whole: LogitError
    num_chunks: int

    @property
    def metrics(self) -> dict[str, float]:
        own = {f"{kind}_error_percent": error.percent for kind, error in self.products.items()}
        alone = {f"{kind}_logits_percent": error.percent for kind, error in self.logits.items()}
        return own | alone | self.whole.metrics(self.num_chunks)

    @property
    def baseline(self) -> dict[str, float]:
        """The same metrics; beside a kind's error of the logits stands that of the whole model."""
        own = {f"{kind}_error_percent": error.percent for kind, error in self.baseline_products.items()}
        alone = {f"{kind}_logits_percent": self.baseline_whole.percent for kind in self.logits}
        return own | alone | self.baseline_whole.metrics(self.num_chunks)


def in_dtype(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    """A copy of plain weights."""

    def convert(layer: LayerWeights) -> LayerWeights:
        values = {each.name: getattr(layer, each.name) for each in fields(layer)}
        return LayerWeights(**{name: None if value is None else value.to(dtype) for name, value in values.items()})

    embedding = weights.embedding.to(dtype)
    head = embedding if weights.head is weights.embedding else weights.head.to(dtype)
    return ModelWeights(embedding, [convert(layer) for layer in weights.layers], weights.final_norm.to(dtype), head)


@torch.inference_mode()
def measure(blueprint: Blueprint, chunks: Sequence[Sequence[int]]) -> Fp8Report:
    """Compare the model of `blueprint`, in fp32, with itself in FP8 and in bf16 on the texts `chunks`, each read alone."""
    weights = load_blueprint_weights(blueprint)
    fp8 = [{kind: quantize(getattr(layer, kind)) for kind in MATRICES} for layer in weights.layers]
    half = in_dtype(weights, torch.bfloat16)
    right = _step(blueprint, weights, max(map(len, chunks)))  # packs the matrices, which the copies below then share

    def with_fp8(kinds: Sequence[str]) -> ModelWeights:
        layers = [replace(layer, **{kind: own[kind] for kind in kinds}) for layer, own in zip(weights.layers, fp8)]
        return replace(weights, layers=layers)

    models = {kind: with_fp8((kind,)) for kind in MATRICES} | {"whole": with_fp8(MATRICES), BASELINE: half}
    steps = {name: _step(blueprint, model, max(map(len, chunks))) for name, model in models.items()}
    errors = {name: LogitError() for name in steps}
    watch = WatchProducts(weights, {"whole": models["whole"], BASELINE: half})
    for ids in chunks:
        with watch:
            wanted = _logits(right, ids)
        for name, step in steps.items():
            errors[name].add_logits(_logits(step, ids), wanted, torch.tensor(ids, device=wanted.device))
    return Fp8Report(
        watch.errors["whole"],
        {kind: errors[kind] for kind in MATRICES},
        errors["whole"],
        watch.errors[BASELINE],
        errors[BASELINE],
        len(chunks),
    )


def _step(blueprint: Blueprint, weights: ModelWeights, num_tokens: int) -> EagerStep:
    config, plan, dtype = blueprint.config, blueprint.plan, weights.embedding.dtype
    num_pages = -(-num_tokens // DEFAULT_PAGE_SIZE)
    kv = KvCache.allocate(
        config.num_layers, num_pages, DEFAULT_PAGE_SIZE, plan.local_kv_heads, config.head_dim, dtype, blueprint.device
    )
    return EagerStep(config, plan, weights, SingleCommunicator(), kv)


def _logits(step: EagerStep, ids: Sequence[int]) -> torch.Tensor:
    """fp32 `[len(ids), full_vocab]`."""
    positions = torch.arange(len(ids), device=step.device)
    pages = tuple(range(step.kv.num_slots // step.kv.page_size))
    batch = StepBatch(torch.tensor(ids, device=step.device), positions, positions, positions, (RowSpan(0, len(ids), 0, pages),))
    return step.run(batch)[:, : step.config.full_vocab]


def read_text(blueprint: Blueprint, num_tokens: int) -> list[list[int]]:
    """`num_tokens` in chunks of `CHUNK`; prose, or random for a model without a tokenizer."""
    if blueprint.checkpoint is None:
        rng = random.Random(0)
        ids = [rng.randrange(blueprint.config.full_vocab) for _ in range(num_tokens)]
    else:
        ids = Text.load(Path(blueprint.settings.model)).encode("\n".join(topics[name] for name in TOPICS))
        if len(ids) < num_tokens:
            raise click.UsageError(f"the text has {len(ids)} tokens, fewer than --tokens {num_tokens}")
    return [ids[first : min(first + CHUNK, num_tokens)] for first in range(0, num_tokens, CHUNK)]


def make_record(model: str, num_tokens: int, report: Fp8Report) -> Record:
    case = {"model": Path(model).name, "dtype": "fp8", "activations": "fp32", "tokens": num_tokens}
    ceiling = {"perplexity_percent": PERPLEXITY_LIMIT_PERCENT}
    return Record("fp8_error", case, report.metrics, ceiling, {"name": BASELINE, **report.baseline}, checked=True)


def describe(record: Record) -> list[str]:
    """What a person wants to know of it."""
    metrics, peer = record.metrics, record.peer
    lines = [f"{record.case['model']}, {record.case['tokens']} tokens: FP8 weights against fp32 (in brackets: all of it in bf16)"]
    for kind in MATRICES:
        own, alone = f"{kind}_error_percent", f"{kind}_logits_percent"
        errors = f"products off by {metrics[own]:.2f} % ({peer[own]:.2f}); alone, logits off by {metrics[alone]:.2f} %"
        lines.append(f"  {kind:9} {errors}")
    lines += [
        f"  logits    off by {metrics['logits_error_percent']:.2f} % ({peer['logits_error_percent']:.2f}), "
        f"rms {metrics['logits_rms_error']:.3f} ({peer['logits_rms_error']:.3f}), "
        f"largest {metrics['logits_max_error']:.2f} ({peer['logits_max_error']:.2f})",
        f"  top 1     {100 * metrics['top1_agreement']:.1f} % the same ({100 * peer['top1_agreement']:.1f})",
        f"  KL        {metrics['kl_nats']:.5f} nats ({peer['kl_nats']:.5f})",
        f"  perplexity {metrics['perplexity_percent']:+.2f} % ({peer['perplexity_percent']:+.2f}), "
        f"of at most {PERPLEXITY_LIMIT_PERCENT:g}",
    ]
    return lines


@click.command()
@click.option("--model", default="models/smollm2-135m", show_default=True, help="A model folder, or a shape as qwen2.5-0.5b.")
@click.option("--tokens", "num_tokens", type=click.IntRange(2), default=4 * CHUNK, show_default=True, help="Of the text.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@record_option
def main(model: str, num_tokens: int, device: str, record: Path | None) -> None:
    """Report what FP8 weights cost a model."""
    commit()
    load_format = "auto" if Path(model).is_dir() else "dummy"
    with errors_in_one_line():
        world = World(device=resolve_device(device, Environment.read()))
        settings = EngineSettings(model, load_format=load_format, dtype="float32", device=str(world.device))
        blueprint = draw_blueprint(settings, world)
        result = make_record(model, num_tokens, measure(blueprint, read_text(blueprint, num_tokens)))
    click.echo("\n".join(describe(result)))
    if record is not None:
        on_gpu = blueprint.device.type == "cuda"
        result.append_to(record, f"1 x {torch.cuda.get_device_name()}" if on_gpu else cpu_device(), "engine.bench.fp8_error")


if __name__ == "__main__":
    main()
