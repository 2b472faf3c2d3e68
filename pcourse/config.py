"""What to train, how to split it, how to step it: three frozen dataclasses that refuse what cannot work.

Nothing here imports torch, so a bad value is refused before any process starts.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields, replace
from numbers import Integral, Real

LARGEST = 2**31
LONGEST = 250_000  # bytes of text in one sequence; every installation of Python has more
ATTENTION = ("explicit", "fused")
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}  # of a number
DTYPES = tuple(BYTES)
OPTIMIZERS = ("adamw", "sgd")
PARTITIONS = ("uniform", "compute", "memory")
RECOMPUTE = ("none", "selective", "full")
GRAD_DTYPES = ("same", "float32", "both")


class ConfigError(ValueError):
    """A configuration that cannot run; the message says why and which values would do."""


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def listed(values) -> str:
    return ", ".join(str(v) for v in values)


def _require_whole(config, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value < LARGEST:
            raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more and below 2³¹")
        object.__setattr__(config, name, int(value))  # numpy's integers too


def _require_yes_or_no(config, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r} must be True or False")


def _require_one_of(config, name: str, legal) -> None:
    value = getattr(config, name)
    if not any(type(value) is type(one) and value == one for one in legal):
        raise ConfigError(f"{name}={value!r} is not known; {name} can be {listed(legal)}")


def _require_number(config, name: str, least: float, below: float | None = None) -> None:
    value = getattr(config, name)
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not least <= value < math.inf or (below is not None and not value < below):
        limit = f"at least {least:g}" + (f" and below {below:g}" if below is not None else "")
        raise ConfigError(f"{name}={value!r} must be a number, {limit}")
    object.__setattr__(config, name, value if isinstance(value, (int, float)) else float(value))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the GPT in `model.py`.

    `layers` L, `hidden` h, `heads` a, `vocab` V and `sequence` s are the symbols of the papers. `kv_heads` below
    `heads` is grouped-query attention. `attention="fused"` never holds the score matrices, so that it has no scores
    to drop: dropout then acts on the embedding and on the two residual branches only.
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads
    ffn: int | None = None  # None: 4 * hidden
    vocab: int = 256
    sequence: int = 256
    dropout: float = 0.0
    tied: bool = True
    attention: str = "explicit"
    dtype: str = "float32"

    def __post_init__(self):
        _require_whole(self, "layers", "hidden", "heads", "vocab", "sequence")
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "ffn", 4 * self.hidden if self.ffn is None else self.ffn)
        _require_whole(self, "kv_heads", "ffn")
        _require_yes_or_no(self, "tied")
        _require_number(self, "dropout", 0, below=1)
        _require_one_of(self, "attention", ATTENTION)
        _require_one_of(self, "dtype", DTYPES)
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden={self.hidden} does not split into heads={self.heads} heads of one width; "
                f"heads can be {listed(divisors(self.hidden))}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} cannot share kv_heads={self.kv_heads} evenly; "
                f"kv_heads can be {listed(divisors(self.heads))}"
            )

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    def but(self, **changes) -> ModelConfig:
        """A copy with `changes`; `ffn` and `kv_heads` follow `hidden` and `heads` if they did so before."""
        derived = {}
        if self.ffn == 4 * self.hidden:
            derived["ffn"] = None
        if self.kv_heads == self.heads:
            derived["kv_heads"] = None
        return replace(self, **{**derived, **changes})


@dataclass(frozen=True)
class ParallelConfig:
    """Into how many pieces each axis cuts the training step: tp · pp · dp · cp ranks.

    With pp=1, `micro_batches` is gradient accumulation. `chunks` is v, the model chunks per pipeline rank.

    `zero` is the ZeRO stage: the dp replicas share out the optimizer's state (1), gradients (2), parameters too (3).
    `reshard=False` keeps the parameters that stage 3 has gathered until backward. `recompute` runs each layer that
    `recompute_every` divides again in backward ("full"), or its attention between q, k, v and output ("selective").

    With 16-bit weights, `grad_dtype` is in what gradients are added up and reduced: in the weights' own ("same"), in
    float32, or in "both": added up in their own and copied to float32. `master_weights` keeps a float32 copy of the
    weights, which the optimizer steps, and with it float32 state.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    micro_batches: int = 1
    chunks: int = 1
    partition: str = "uniform"
    zero: int = 0
    recompute: str = "none"
    recompute_every: int = 1
    reshard: bool = True
    grad_dtype: str = "same"
    master_weights: bool = False

    def __post_init__(self):
        _require_whole(self, "tp", "pp", "dp", "cp", "micro_batches", "chunks", "recompute_every")
        _require_yes_or_no(self, "sequence_parallel", "reshard", "master_weights")
        _require_one_of(self, "partition", PARTITIONS)
        _require_whole(self, "zero", least=0)
        _require_one_of(self, "zero", (0, 1, 2, 3))
        _require_one_of(self, "recompute", RECOMPUTE)
        _require_one_of(self, "grad_dtype", GRAD_DTYPES)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of `rank`: the ranks count along tp first, then cp, pp and dp."""
        return rank // (self.cp * self.tp) % self.pp

    def replica_of(self, rank: int) -> int:
        """The data-parallel replica that `rank` belongs to."""
        return rank // (self.cp * self.tp * self.pp)


@dataclass(frozen=True)
class TrainConfig:
    """How to step: `batch` is the global batch in sequences, `warmup` steps run first and are not reported."""

    batch: int = 16
    steps: int = 5
    warmup: int = 2
    optimizer: str = "adamw"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    clip: float | None = None
    seed: int = 0

    def __post_init__(self):
        _require_whole(self, "batch", "steps")
        _require_whole(self, "warmup", "seed", least=0)
        _require_one_of(self, "optimizer", OPTIMIZERS)
        _require_number(self, "weight_decay", 0)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", 1e-3 if self.optimizer == "adamw" else 0.1)
        _require_number(self, "learning_rate", 0)
        if self.clip is not None:
            _require_number(self, "clip", 0)


# Every technique joins the list with the code that carries it; until then its only legal value is its default.
BUILT = frozenset(field.name for field in fields(ParallelConfig)) - {"cp", "sequence_parallel"}


def validate(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Refuse what cannot run, before any process starts.

    Raises ConfigError naming the rule, the values that broke it, and the values that would do.
    """
    for value, kind in ((model, ModelConfig), (parallel, ParallelConfig), (train, TrainConfig)):
        if not isinstance(value, kind):
            raise ConfigError(f"{type(value).__name__} stands where a {kind.__name__} must: model, parallel, train")
    if model.sequence > LONGEST:
        raise ConfigError(f"sequence={model.sequence} is longer than the text allows; sequence can be 1 to {LONGEST:,}")
    for field in fields(ParallelConfig):
        value = getattr(parallel, field.name)
        if field.name not in BUILT and value != field.default and field.default is not MISSING:
            raise ConfigError(
                f"{field.name}={value!r} is not built yet in this version; {field.name} can be {field.default!r}"
            )
    legal = tp_degrees(model)
    if parallel.tp not in legal:
        heads = f"{model.heads} heads" + (f" with {model.kv_heads} kv_heads" if model.kv_heads != model.heads else "")
        reason = (
            f"{heads} do not split over tp={parallel.tp}"
            if model.kv_heads % parallel.tp
            else f"vocab={model.vocab} and ffn={model.ffn} leave a rank of tp={parallel.tp} without a row"
        )
        raise ConfigError(f"{reason}; tp can be {listed(legal)}")
    _require_sequences(parallel, train)
    _require_of_use(model, parallel)
    from pcourse.parallel.partition import stages_of  # which needs the classes of this file

    stages_of(model, parallel, train)


def _require_sequences(parallel: ParallelConfig, train: TrainConfig) -> None:
    """Each micro-batch of each replica has a sequence."""
    if parallel.dp > train.batch:
        raise ConfigError(
            f"batch={train.batch} sequences cannot fill dp={parallel.dp} replicas; dp can be 1 to {train.batch}"
        )
    least = train.batch // parallel.dp
    if parallel.micro_batches > least:
        replicas = f" on each of dp={parallel.dp} replicas" if parallel.dp > 1 else ""
        raise ConfigError(
            f"batch={train.batch} sequences cannot fill micro_batches={parallel.micro_batches}{replicas}; "
            f"{'it' if replicas else 'micro_batches'} can be 1 to {least}"
        )


def _require_of_use(model: ModelConfig, parallel: ParallelConfig) -> None:
    """An option that would change nothing is a mistake."""
    for useless, words in (
        (parallel.recompute == "none" and parallel.recompute_every > 1,
         f"recompute_every={parallel.recompute_every} says which layers to recompute, and recompute='none'; "
         "recompute_every can be 1, or recompute can be selective or full"),
        (parallel.recompute_every > model.layers,
         f"recompute_every={parallel.recompute_every} is more than layers={model.layers}; "
         f"it can be 1 to {model.layers}"),
        (not parallel.reshard and parallel.zero < 3,
         f"reshard=False keeps parameters that zero=3 has gathered, and zero={parallel.zero}; reshard can be True"),
        (parallel.grad_dtype != "same" and model.dtype != "bfloat16",
         f"grad_dtype={parallel.grad_dtype!r} is for bfloat16 weights, and dtype={model.dtype!r}; it can be same"),
        (parallel.master_weights and model.dtype != "bfloat16",
         f"master_weights copy bfloat16 weights to float32, and dtype={model.dtype!r}; master_weights can be False"),
    ):  # fmt: skip
        if useless:
            raise ConfigError(words)


def tp_degrees(model: ModelConfig) -> list[int]:
    """The tensor-parallel degrees that this model allows: each rank holds whole heads and at least one row."""
    return [t for t in divisors(model.kv_heads) if t <= min(model.vocab, model.ffn)]
