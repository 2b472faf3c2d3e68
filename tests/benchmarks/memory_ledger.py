"""The ledger of a training step, measured beside formula: every category of every configuration, on its fullest rank.

    python tests/benchmarks/memory_ledger.py [--only pp zero …]

The bytes are counted on ranks that are threads of this process; they are the same on every machine with a CPU.
"""

from __future__ import annotations

import argparse

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.memory import memory, residual
from pcourse.report import CATEGORIES
from pcourse.train import memory_pass
from pcourse.world import World

MODEL = ModelConfig(layers=4, hidden=128, heads=4, vocab=512, sequence=64)
MIXED = MODEL.but(dtype="bfloat16", dropout=0.1)
BATCH = 16
ROWS: dict[str, tuple[ModelConfig, dict]] = {
    "explicit": (MODEL, {}),
    "fused": (MODEL.but(attention="fused"), {}),
    "explicit, dropout": (MODEL.but(dropout=0.1), {}),
    "fused, dropout": (MODEL.but(dropout=0.1, attention="fused"), {}),
    "bf16": (MODEL.but(dtype="bfloat16"), {}),
    "bf16, dropout": (MIXED, {}),
    "4 heads, 2 kv": (MODEL.but(kv_heads=2), {}),
    "fused, 2 kv": (MODEL.but(kv_heads=2, attention="fused"), {}),
    "ffn 2.7 h": (MODEL.but(ffn=344), {}),
    "untied": (MODEL.but(tied=False), {}),
    "long": (MODEL.but(sequence=256), {"micro_batches": 8}),
    "large vocabulary": (MODEL.but(vocab=8192), {"micro_batches": 4}),
    "accumulation": (MODEL, {"micro_batches": 8}),
    "tp 2": (MODEL, {"tp": 2}),
    "tp 4, uneven": (MODEL.but(ffn=345, vocab=511), {"tp": 4}),
    "tp 2, bf16, dropout": (MIXED, {"tp": 2}),
    **{
        f"pp 2, {name}": (MODEL, {"pp": 2, "schedule": name, "micro_batches": 8, "chunks": chunks})
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2))
    },
    "pp 4, 1f1b": (MODEL, {"pp": 4, "micro_batches": 8}),
    "pp 4, memory": (MODEL.but(vocab=4096), {"pp": 4, "micro_batches": 8, "partition": "memory"}),
    "tp 2, pp 2": (MODEL, {"tp": 2, "pp": 2, "micro_batches": 4}),
    **{f"dp 4, zero {stage}": (MODEL, {"dp": 4, "zero": stage}) for stage in range(4)},
    "dp 4, zero 3, m 4": (MODEL, {"dp": 4, "zero": 3, "micro_batches": 4}),
    "zero 3, no reshard": (MODEL, {"dp": 4, "zero": 3, "reshard": False}),
    "dp 3, zero 3, uneven": (MODEL.but(hidden=124, vocab=509), {"dp": 3, "zero": 3}),
    **{
        f"zero {stage}, master, {grads}": (
            MIXED,
            {"dp": 4, "zero": stage, "master_weights": True, "grad_dtype": grads},
        )
        for stage, grads in ((0, "same"), (0, "float32"), (0, "both"), (1, "float32"), (2, "both"), (3, "both"))
    },
    "selective": (MODEL, {"recompute": "selective"}),
    "selective, fused": (MODEL.but(attention="fused"), {"recompute": "selective"}),
    "full": (MODEL, {"recompute": "full"}),
    "full, every 2nd": (MODEL, {"recompute": "full", "recompute_every": 2}),
    "full, bf16, dropout": (MIXED, {"recompute": "full"}),
    "full, tp 2": (MODEL, {"recompute": "full", "tp": 2}),
    "full, pp 2": (MODEL, {"recompute": "full", "pp": 2, "micro_batches": 8}),
    "full, zero 3": (MODEL, {"recompute": "full", "dp": 4, "zero": 3}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name holds one of these words [all]")
    parser.add_argument("--residual", action="store_true", help="name what is temporary, too")
    options = parser.parse_args()
    print("kB, measured | formula, and the difference in %")
    print(f"{'':<24}" + "".join(f"{name:>26}" for name in (*CATEGORIES, "peak")))
    for name, (model, sizes) in ROWS.items():
        if not options.only or any(word in name for word in options.only):
            parallel, train = ParallelConfig(**sizes), TrainConfig(batch=BATCH)
            print(f"{name:<24}" + row(model, parallel, train), flush=True)
            if options.residual:
                named = residual(model, parallel, train).items()
                print(f"{'':<24}  " + ", ".join(f"{what} {kb(n)}" for what, n in named if n))


def row(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> str:
    ledgers = World(parallel.ranks, "threads").run(memory_pass, model, parallel, train, lambda: None, timeout=120)
    rank = max(range(parallel.ranks), key=lambda r: ledgers[r].peak)
    formula = memory(model, parallel, train, rank)
    return "".join(cell(getattr(ledgers[rank], name), getattr(formula, name)) for name in (*CATEGORIES, "peak"))


def cell(measured: int, formula: int) -> str:
    exact = "exact" if measured == formula else f"{100 * (formula / measured - 1):+.2f}"
    return f"{kb(measured):>9} |{kb(formula):>8} {exact:>6}"


def kb(nbytes: int) -> str:
    return f"{nbytes / 1000:.1f}"


if __name__ == "__main__":
    main()
