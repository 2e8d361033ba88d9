"""One case on one GPU, predicted: as lines for a person, as JSON, and as records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from engine.bench.decode import Timing, make_record
from engine.bench.load import Case
from engine.bench.records import Record
from engine.cost.all_reduce import AllReduceTable
from engine.cost.constants import Constant
from engine.cost.gpus import Gpu
from engine.cost.peers import Peer, peer_of
from engine.cost.prediction import Prediction, predict_decode, predict_prefill
from engine.cost.prefill_parts import step_tokens
from engine.cost.setting import Setting
from engine.cost.shard import Shard

LEGEND = """\
TPOT and TTFT in ms, by part: weights, kv (keys and values), collectives, borders (kernels beyond bytes and operations), head.
roof: floor / time; the floor: all bytes at the fastest read measured, or all operations at the matrix rates, whichever is longer.
~ rests on a guess or a projection; * does not fit the GPU's memory. Decode is taken to run in graphs, prefill in graphs or
launched kernel by kernel, by the engine's own rule."""
_COLUMNS = {"weights": 9, "kv": 9, "collectives": 11, "borders": 9, "head": 9}  # and their widths
_HEADER = (
    f"{'gpu':5} {'model':12} {'tp':>2} {'dtype':5} {'batch':>5} {'context':>7} {'':4} "
    + " ".join(name.rjust(width) for name, width in _COLUMNS.items())
    + f" {'ms':>10} {'floor':>9} {'roof':>5} {'tok/s':>9}  peer"
)


@dataclass(frozen=True)
class Estimate:
    """`case` on `gpu`; a peer where one has a number for it. `step`: how its steps that prefill are started, the first of them
    if they differ, as prefill records name it."""

    case: Case
    gpu: Gpu
    shard: Shard
    decode: Prediction
    prefill: Prediction
    peer: Peer | None
    step: str

    @classmethod
    def of(
        cls, case: Case, model: str, gpu: Gpu, all_reduce: AllReduceTable | None, has_peers: bool | None = None, step: str = ""
    ) -> Estimate:  # fmt: skip
        """`model`: as `Shard.of`. `all_reduce`: needed where there are peers, which is from TP=2 on unless `has_peers` says no.
        `step`: as `Setting`.

        *Raises* as `Shard.of`.
        """
        shard = Shard.of(case, model)
        setting = Setting(shard, gpu, all_reduce, case.tp > 1 if has_peers is None else has_peers, step)
        peer, started = peer_of(case, gpu.name), setting.step_of(step_tokens(shard)[0])
        return cls(case, gpu, shard, predict_decode(setting), predict_prefill(setting), peer, started)

    @property
    def tpot_ms(self) -> float:
        return self.decode.us / 1e3

    @property
    def ttft_ms(self) -> float:
        return self.prefill.us / 1e3

    @property
    def decode_tok_s(self) -> float:
        return 1e3 * self.case.batch / self.tpot_ms

    @property
    def prefill_tok_s(self) -> float:
        return 1e3 * self.case.batch * self.case.prompt / self.ttft_ms

    @property
    def is_fitting(self) -> bool:
        return self.shard.needed_gb <= self.gpu.memory_gb

    @property
    def guesses(self) -> dict[str, Constant]:
        """The constants that the two times rest on and that are not measured."""
        used = {**self.decode.used, **self.prefill.used}
        return {name: constant for name, constant in used.items() if not constant.is_measured}

    def lines(self) -> list[str]:
        """Its two lines of the table."""
        peer = self.peer
        return [
            self._line("TPOT", self.decode, self.decode_tok_s, None if peer is None else peer.tpot_ms),
            self._line("TTFT", self.prefill, self.prefill_tok_s, None if peer is None else peer.ttft_ms),
        ]

    def _line(self, what: str, prediction: Prediction, tok_s: float, peer_ms: float | None) -> str:
        case, us = self.case, prediction.us
        found = prediction.parts
        parts = [_marked(found[name].us / 1e3, found[name].is_measured, width) for name, width in _COLUMNS.items()]
        total = _marked(us / 1e3, all(part.is_measured for part in found.values()), 10)
        peer = "" if peer_ms is None else f"{peer_ms:.2f} ms, {_roof(prediction, 1e3 * peer_ms)} of the roof: {self.peer.source}"
        fits = " " if self.is_fitting else "*"
        return (
            f"{self.gpu.name:5} {case.model:12} {case.tp:2} {case.dtype:5} {case.batch:5} {case.prompt:7}{fits}{what:4} "
            f"{' '.join(parts)} {total} {prediction.floor_us / 1e3:9.3f} {_roof(prediction, us):>5} {tok_s:9.1f}  {peer}"
        ).rstrip()

    def as_json(self) -> dict[str, object]:
        """Everything, in units that the keys name."""
        return {
            "case": asdict(self.case), "gpu": self.gpu.name, "is_fitting": self.is_fitting, "needed_gb": self.shard.needed_gb,
            "tpot_ms": self.tpot_ms, "decode_tok_s": self.decode_tok_s, "decode": _prediction_json(self.decode),
            "ttft_ms": self.ttft_ms, "prefill_tok_s": self.prefill_tok_s, "prefill": _prediction_json(self.prefill),
            "peer": None if self.peer is None else asdict(self.peer),
        }  # fmt: skip

    def records(self) -> list[Record]:
        """A decode and a prefill record of kind `projected`; the constants that each rests on stand in its `ceiling`."""
        return [self._decode_record(), self._prefill_record()]

    @property
    def _comm(self) -> str:
        return "ipc" if self.case.tp > 1 else "none"

    def _decode_record(self) -> Record:
        timing, shard = Timing(self.tpot_ms, None), self.shard
        record = make_record(self.case, timing, shard.reads, shard.num_layers, "graph", self._comm)
        floor_ms = self.decode.datasheet_floor_us / 1e3
        ceiling = {"tpot_ms": floor_ms, "decode_tok_s": 1e3 * self.case.batch / floor_ms, "hbm_tb_s": self.gpu.hbm_tb_s}
        metrics = {name: record.metrics[name] for name in ("tpot_ms", "decode_tok_s", "hbm_tb_s")}
        return self._projected(record, metrics, ceiling, self.decode, "tpot_ms")

    def _prefill_record(self) -> Record:
        floor_ms, tokens = self.prefill.datasheet_floor_us / 1e3, self.case.batch * self.case.prompt
        metrics = {"ttft_ms": self.ttft_ms, "prefill_tok_s": self.prefill_tok_s}
        ceiling = {"ttft_ms": floor_ms, "prefill_tok_s": 1e3 * tokens / floor_ms}
        case = {**vars(self.case), "output": 1, "backend": "graph", "comm": self._comm, "step": self.step}
        return self._projected(Record("prefill", case, {}, {}, {}, False), metrics, ceiling, self.prefill, "ttft_ms")

    def _projected(
        self, record: Record, metrics: dict[str, float], ceiling: dict[str, float], prediction: Prediction, time: str
    ) -> Record:
        parts = {f"{name}_us": part.us for name, part in prediction.parts.items()}
        fits = {name: constant.value for name, constant in prediction.used.items()}
        peer_ms = None if self.peer is None else getattr(self.peer, time)
        peer = {} if peer_ms is None else {"name": self.peer.source, time: round(peer_ms, 2)}
        return replace(
            record, metrics={**metrics, **parts}, ceiling={**ceiling, **fits}, peer=peer, kind="projected", checked=False
        )


def table(estimates: list[Estimate]) -> list[str]:
    """The table of the command: two lines a case, and the guesses under them."""
    lines = [LEGEND, "", _HEADER]
    for estimate in estimates:
        lines += estimate.lines()
    unmeasured = {(gpu.name, gpu.source): None for gpu in (e.gpu for e in estimates) if not gpu.is_measured}
    lines += [f"{name} is a projection from the H200's measurements by datasheet: {source}" for name, source in unmeasured]
    guesses = {(name, constant): None for e in estimates if e.gpu.is_measured for name, constant in e.guesses.items()}
    if guesses:
        lines += ["", "Not measured, and used above:"]
        lines += [f"  {name} = {constant.value:.4g} {constant.unit}: {constant.source}" for name, constant in guesses]
    return lines


def _marked(value: float, is_measured: bool, width: int) -> str:
    return f"{'' if is_measured else '~'}{value:.3f}".rjust(width)


def _roof(prediction: Prediction, us: float) -> str:
    return f"{100 * prediction.floor_us / us:.0f} %"


def _prediction_json(prediction: Prediction) -> dict[str, object]:
    return {
        "parts_us": {name: part.us for name, part in prediction.parts.items()},
        "floor_ms": prediction.floor_us / 1e3,
        "datasheet_floor_ms": prediction.datasheet_floor_us / 1e3,
        "constants": {name: asdict(constant) for name, constant in prediction.used.items()},
    }
