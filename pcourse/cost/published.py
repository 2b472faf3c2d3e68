"""What papers print about pipelines, and the simulator beside it; `python -m pcourse.cost.published` prints both."""

from __future__ import annotations

from dataclasses import dataclass

from pcourse.cost.simulate import simulate
from pcourse.parallel.schedules import make_schedule


@dataclass(frozen=True)
class ZeroBubbleRow:
    """Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241: profiled times of table 9 (milliseconds) and the
    bubble rates of table 5 that the authors computed from them."""

    model: str
    stages: int
    micro_batches: int
    times: tuple[float, float, float, float]  # forward, backward-input, backward-weight, transfer
    bubbles: dict[str, float]

    def simulated(self) -> dict[str, float]:
        return {
            name: simulate(make_schedule(name, self.stages, self.micro_batches), *self.times).bubble
            for name in self.bubbles
        }


ZERO_BUBBLE = tuple(
    ZeroBubbleRow(model, p, m, times, dict(zip(("1f1b", "zb-h1", "zb-h2"), bubbles, strict=True)))
    for model, p, m, times, bubbles in (
        ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
        ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
        ("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
        ("6.2B", 8, 32, (29.802, 29.428, 19.53, 0.577), (0.1898, 0.1045, 0.0559)),
        ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
        ("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
        ("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    )
)

# Huang et al., GPipe, arXiv:1811.06965, table 2: a Transformer's speed on so many TPUs with 32 micro-batches, that of
# 2 TPUs with one micro-batch being 1. It was measured: messages and uneven stages are in it, and not in `speed_up`.
GPIPE_MICRO_BATCHES = 32
GPIPE = {2: 1.8, 4: 3.4, 8: 6.3}


def speed_up(stages: int) -> float:
    """GPipe's speed over one device that does all the work, by the simulator."""
    step = simulate(make_schedule("gpipe", stages, GPIPE_MICRO_BATCHES), 1, 1, 1).step_seconds
    return GPIPE_MICRO_BATCHES * stages * 3 / step


def main() -> None:
    print("bubble rate, simulated from the profiled times of table 9 | as printed in table 5 (arXiv:2401.10241)")
    print(f"{'model':<6} {'p':>3} {'m':>4}" + "".join(f"{name:>18}" for name in ZERO_BUBBLE[0].bubbles))
    for row in ZERO_BUBBLE:
        pairs = zip(row.simulated().values(), row.bubbles.values(), strict=True)
        cells = "".join(f"{ours:>9.4f} | {printed:.4f}" for ours, printed in pairs)
        print(f"{row.model:<6} {row.stages:>3} {row.micro_batches:>4}{cells}")
    print("\nGPipe with 32 micro-batches, speed: simulated | measured by its authors (arXiv:1811.06965, table 2)")
    for stages, printed in GPIPE.items():
        ours = speed_up(stages)
        print(f"{stages} stages {ours:>9.2f} | {printed:.1f}   {printed / ours - 1:+.1%}")


if __name__ == "__main__":
    main()
