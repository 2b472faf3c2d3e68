"""What papers print about memory, and our formulas beside it; `python -m pcourse.cost.published_memory` prints both.

GB are 10⁹ bytes. Every number of ours comes from the functions that the ledger is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.activations import FLAG, kept_by_layer, sizes, total_kept
from pcourse.cost.memory import activations, divided
from pcourse.cost.states import StateBytes, bytes_per_parameter

GB = 1e9
MIXED = bytes_per_parameter("bfloat16", master_weights=True)  # 2 + 2 + 12 = 16, Adam with K = 12


def state_gb(parameters: float, zero: int = 0, dp: int = 1, each: StateBytes = MIXED) -> float:
    """GB of the model states on the first of `dp` ranks."""
    return sum(divided(int(parameters), each, zero, dp)) / GB


# Rajbhandari et al., ZeRO, arXiv:1910.02054v3, table 1: GB on a device, by degree of data parallelism; for each size
# of model the stages P_os, P_os+g and P_os+g+p. Where a number has no decimals the table cuts them off.
ZERO_1_SIZES = (7.5e9, 128e9, 1e12)
ZERO_1 = {
    1: (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000),
    4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
}
# The same, figure 1: 7.5·10⁹ parameters on 64 devices; none, P_os, P_os+g, P_os+g+p.
ZERO_FIGURE_1 = (120, 31.4, 16.6, 1.9)
# The same, table 2: 10⁹ parameters that fit 32 GB by theory, by the degree of model parallelism, 64 replicas of each.
ZERO_2_DEVICE_GB, ZERO_2_DP = 32, 64
ZERO_2 = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 500),
    8: (16, 60.8, 115.2, 1000),
    16: (32, 121.6, 230.4, 2000),
}


def zero_table_1(dp: int) -> tuple[float, ...]:
    return tuple(state_gb(size, zero, dp) for size in ZERO_1_SIZES for zero in (1, 2, 3))


def zero_table_2(model_parallel: int) -> tuple[float, ...]:
    each = (state_gb(1e9, zero, ZERO_2_DP) for zero in range(4))
    return tuple(model_parallel * ZERO_2_DEVICE_GB / gb for gb in each)


# Megatron-LM, docs/user-guide/features/dist_optimizer.md: bytes a parameter; whole, and on d ranks as (fixed, over d).
# Its fp16 row copies to float32 only the gradients of a rank's shard: 4 + 16/d where `grad_dtype="both"` has 8 + 12/d.
MEGATRON = {
    "16-bit parameters, 16-bit gradients": (("bfloat16", "both", True), 20, (4, 16)),
    "16-bit parameters, fp32 gradients": (("bfloat16", "float32", True), 18, (6, 12)),
    "fp32 parameters, fp32 gradients": (("float32", "same", False), 16, (8, 8)),
}


def megatron(dtype: str, grad_dtype: str, master_weights: bool) -> tuple[int, tuple[int, int]]:
    """Bytes a parameter: whole; and with ZeRO-1, the part that every rank has and the part that is divided."""
    each = bytes_per_parameter(dtype, "adamw", grad_dtype, master_weights)
    return sum(each), (each.parameters + each.gradients, each.optimizer)


# Hugging Face, The Ultra-Scale Playbook, "Memory for weights/grads/optimizer states": GB in fp32, or in bf16 with
# master weights; and in bf16 with fp32 gradients as well.
PLAYBOOK = {1e9: (16, 20), 7e9: (112, 140), 70e9: (1120, 1400), 405e9: (6480, 8100)}


def playbook(parameters: float) -> tuple[float, float]:
    both = bytes_per_parameter("bfloat16", grad_dtype="both", master_weights=True)
    return state_gb(parameters, each=bytes_per_parameter("float32")), state_gb(parameters, each=both)


# Korthikanti et al. 2022, arXiv:2205.05198, table 3: sequence 2048, vocabulary 51200.
@dataclass(frozen=True)
class Korthikanti:
    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    batch: int
    micro_batch: int
    chunks: int  # interleaved, with m = 3

    @property
    def model(self) -> ModelConfig:
        names = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        return ModelConfig(**names, sequence=2048, vocab=51200, dropout=0.1, dtype="bfloat16")

    def layer(self, sequence_parallel: bool = False, recompute: str = "none", tp: int | None = None) -> int:
        """Bytes of one layer, ours."""
        own = sizes(self.model, self.micro_batch, tp=tp or self.tp, sequence_parallel=sequence_parallel)
        return total_kept(kept_by_layer(self.model, own, recompute))

    def theirs(self, sequence_parallel: bool = False, recompute: str = "none", tp: int | None = None) -> float:
        """Bytes of one layer by their table 2: equations 1, 2, 4, 6 and section 5."""
        t, s, b, h, a = tp or self.tp, 2048, self.micro_batch, self.hidden, self.heads
        if recompute == "full":
            return 2 * s * b * h
        scores = 5 * a * s / h / t if recompute == "none" else 0
        return s * b * h * ((34 / t if sequence_parallel else 10 + 24 / t) + scores)

    def beyond(self, sequence_parallel: bool = False, recompute: str = "none", tp: int | None = None) -> dict[str, int]:
        """What ours keeps beyond theirs, by name."""
        t = tp or self.tp
        stream = self.micro_batch * 2048 // (t if sequence_parallel else 1)
        named = {"mean and deviation of two norms": 4 * 2 * stream} if recompute != "full" else {}
        if recompute == "none":
            named["causal mask"] = FLAG * 2048**2
            if self.micro_batch == 1:  # the projection is read where it is, and stays
                named["q before it is scaled"] = 2 * 2048 * self.hidden // t
        return named

    def first_stage(self, **policy) -> float:
        """GB of activations on the first rank, all micro-batches in flight, embedding and all."""
        schedule = "interleaved" if self.chunks > 1 else "1f1b"
        m = self.batch // self.micro_batch
        parallel = ParallelConfig(
            tp=self.tp, pp=self.pp, schedule=schedule, chunks=self.chunks, micro_batches=m, **policy
        )
        return activations(self.model, parallel, TrainConfig(batch=self.batch)).total / GB


KORTHIKANTI = (
    Korthikanti("22B", 64, 6144, 48, tp=8, pp=1, batch=4, micro_batch=4, chunks=1),
    Korthikanti("175B", 96, 12288, 96, tp=8, pp=8, batch=64, micro_batch=1, chunks=3),
    Korthikanti("530B", 128, 20480, 105, tp=8, pp=35, batch=280, micro_batch=1, chunks=3),
    Korthikanti("1T", 160, 25600, 128, tp=8, pp=64, batch=512, micro_batch=1, chunks=1),
)
POLICIES = {
    "tp": {},
    "tp, sp": {"sequence_parallel": True},
    "tp, selective": {"recompute": "selective"},
    "tp, sp, selective": {"sequence_parallel": True, "recompute": "selective"},
    "tp, full": {"recompute": "full"},
}
# Figure 7 shows these as bars, in % of tensor parallelism alone; the numbers follow from their table 2. The text says
# "nearly half" for each of the first two, "under 20%" for both together and "10%" for full recompute.
KORTHIKANTI_FIGURE_7 = {
    "22B": (66.8, 49.4, 16.1, 7.6),
    "175B": (62.0, 56.5, 18.5, 8.7),
    "530B": (58.3, 61.9, 20.2, 9.5),
    "1T": (58.3, 61.9, 20.2, 9.5),
}


def figure_7(row: Korthikanti) -> tuple[float, ...]:
    whole = row.layer()
    return tuple(100 * row.layer(**policy) / whole for name, policy in POLICIES.items() if name != "tp")


# Numbers often quoted for models by their size, worked out. P: 7·10⁹ and 13·10⁹; layers, hidden and heads are Llama's.
SEVEN, THIRTEEN = 7e9, 13e9
SEVEN_PARAMETERS = 6_738_415_616  # Llama 2 7B: 2Vh + L(4h² + 3hf + 2h) + h with f = 11008
GPT_7B = ModelConfig(layers=32, hidden=4096, heads=32, sequence=4096, vocab=32000, dropout=0.1, dtype="bfloat16")


def layers_gb(model: ModelConfig) -> float:
    """GB that all layers keep of one sequence."""
    return model.layers * total_kept(kept_by_layer(model, sizes(model))) / GB


def crossover_tokens(parameters: float, hidden: int, layers: int, ranks: int) -> float:
    """Tokens in a step at which ZeRO-3 and tensor parallelism over the same ranks send as much.

    ZeRO-3 sends 3P(N-1)/N elements a step whatever the batch; tensor parallelism 8h(N-1)/N a token and layer.
    """
    share = (ranks - 1) / ranks
    return 3 * parameters * share / (8 * hidden * layers * share)


def main() -> None:
    print("Model states, GB: ours | printed. ZeRO, arXiv:1910.02054v3, table 1 (P_os, P_os+g, P_os+g+p of each size)")
    print(f"{'N':>5}" + "".join(f"{f'P={size / 1e9:g}e9':>24}{'':24}" for size in ZERO_1_SIZES))
    for dp, printed in ZERO_1.items():
        print(f"{dp:>5}" + _cells(zero_table_1(dp), printed))
    print("\nthe same, figure 1: 7.5B on 64 devices; none, P_os, P_os+g, P_os+g+p")
    print(f"{'':>5}" + _cells([state_gb(7.5e9, zero, 64) for zero in range(4)], ZERO_FIGURE_1))
    print("\nthe same, table 2, theory: 10⁹ parameters on 32 GB devices, by model parallelism; columns as in figure 1")
    for degree, printed in ZERO_2.items():
        print(f"{degree:>5}" + _cells(zero_table_2(degree), printed))
    print("\nBytes a parameter: ours | printed. Megatron-LM, dist_optimizer.md; d ranks share the optimizer")
    for name, (how, whole, (fixed, shared)) in MEGATRON.items():
        ours, (our_fixed, our_shared) = megatron(*how)
        note = "" if (our_fixed, our_shared) == (fixed, shared) else "   (it copies only a shard's gradients to fp32)"
        print(f"  {name:<36} {ours} | {whole}    {our_fixed}+{our_shared}/d | {fixed}+{shared}/d{note}")
    print("\nModel states, GB: ours | printed. Ultra-Scale Playbook: fp32 or bf16; bf16 with fp32 gradients too")
    for parameters, printed in PLAYBOOK.items():
        print(f"{parameters / 1e9:>4g}B" + _cells(playbook(parameters), printed))
    _print_korthikanti()
    _print_sizes()


def _print_korthikanti() -> None:
    row = KORTHIKANTI[0]
    print(
        f"\nActivations of one layer, MB: ours | arXiv:2205.05198, table 2. The {row.name} model, b=4, 16 bits, dropout"
    )
    for name, policy in {"none": {"tp": 1}, **POLICIES}.items():
        ours, theirs = row.layer(**policy), row.theirs(**policy)
        beyond = ", ".join(f"{what} {n / 1e6:.2f}" for what, n in row.beyond(**policy).items())
        print(f"  {name:<20}{ours / 1e6:>10.2f} | {theirs / 1e6:>9.2f}   {f'beyond: {beyond}' if beyond else ''}")
    print("\nIn % of tensor parallelism alone: ours | figure 7, by their table 2")
    for row in KORTHIKANTI:
        print(f"{row.name:>5}" + _cells(figure_7(row), KORTHIKANTI_FIGURE_7[row.name], ".1f"))
    print("  (" + "; ".join(list(POLICIES)[1:]) + ")")
    print("\nActivations on a GPU of the first stage, GB, by our formulas: " + "; ".join(POLICIES))
    for row in KORTHIKANTI:
        print(f"{row.name:>5}" + "".join(f"{row.first_stage(**policy):>9.1f}" for policy in POLICIES.values()))


def _print_sizes() -> None:
    recipes = {
        "all in bf16": bytes_per_parameter("bfloat16"),
        "master weights": MIXED,
        "and fp32 gradients": bytes_per_parameter("bfloat16", grad_dtype="float32", master_weights=True),
        "and both": bytes_per_parameter("bfloat16", grad_dtype="both", master_weights=True),
    }
    print("\nModel states with AdamW, GB, by our formulas (weights alone: 7B 14, 13B 26)")
    for name, each in recipes.items():
        seven, thirteen = (state_gb(size, each=each) for size in (SEVEN, THIRTEEN))
        print(f"  {name:<20}{sum(each):>3} bytes   7B {seven:6.1f}   13B {thirteen:6.1f}")
    for size, ranks in ((SEVEN, (1, 2, 4)), (THIRTEEN, (8,))):
        for zero in (1, 2, 3):
            each = "  ".join(f"{state_gb(size, zero, n):.1f} on {n}" for n in ranks)
            print(f"  ZeRO-{zero} of {size / 1e9:g}B: {each}")
    tokens = crossover_tokens(THIRTEEN, hidden=5120, layers=40, ranks=8)
    print(f"  13B on 8 GPUs: ZeRO-3 sends as much as tp=8 at {tokens / 1e3:.1f} thousand tokens a step, then less")
    weights = 2 * SEVEN_PARAMETERS / GB
    print(f"\nActivations of 7B's layers, one sequence, GB, by our formulas (weights {weights:.1f})")
    for sequence in (2048, 3072, 4096, 8192):
        explicit = GPT_7B.but(sequence=sequence)
        both = layers_gb(explicit.but(attention="fused")), layers_gb(explicit)
        print(
            f"  s={sequence:<6} {both[0]:7.1f} without score matrices ({both[0] / weights:.2f}×)   {both[1]:7.1f} with"
        )


def _cells(ours, printed, form: str = ".2f") -> str:
    return "".join(f"{a:>9{form}} |{b:>6g}" for a, b in zip(ours, printed, strict=True))


if __name__ == "__main__":
    main()
