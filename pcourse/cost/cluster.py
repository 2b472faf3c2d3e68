"""A described cluster: how fast its ranks compute and its links carry. Every time that comes from it is a prediction.

What it leaves out: links that several ranks share (each pair of ranks has one of its own in each direction), traffic
of collectives beside that of messages, stragglers, and kernels whose efficiency depends on their shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real

from pcourse.config import ConfigError

RING_STEPS = {"all_reduce": 2, "barrier": 2}  # times n - 1; once for every other collective


@dataclass(frozen=True)
class Link:
    """`bandwidth` in bytes per second one way, `latency` in seconds."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self):
        _require(self, "bandwidth", self.bandwidth, above=0)
        _require(self, "latency", self.latency, least=0)

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.4g} GB/s and {self.latency * 1e6:.4g} µs"


@dataclass(frozen=True)
class Cluster:
    """Ranks of `peak_flops` FLOP/s, of which compute reaches the share `efficiency`.

    Neighbouring ranks share a node, `ranks_per_node` of them (None: all); `link` joins two ranks of a node, `network`
    two of different nodes. `slow_motion` is how many times slower than that the paced clock runs.
    """

    name: str
    peak_flops: float
    efficiency: float
    link: Link
    ranks_per_node: int | None = None
    network: Link | None = None
    slow_motion: float = 1.0

    def __post_init__(self):
        _require(self, "peak_flops", self.peak_flops, above=0)
        _require(self, "efficiency", self.efficiency, above=0, most=1)
        _require(self, "slow_motion", self.slow_motion, above=0)
        for name, optional in (("link", False), ("network", True)):
            value = getattr(self, name)
            if not isinstance(value, Link) and not (optional and value is None):
                raise ConfigError(f"{name}={value!r} must be a Link(bandwidth, latency)")
        if (self.ranks_per_node is None) != (self.network is None):
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node!r} and network={self.network!r} go together: "
                "give both, or neither for a cluster of one node"
            )
        whole = isinstance(self.ranks_per_node, Integral) and not isinstance(self.ranks_per_node, bool)
        if self.ranks_per_node is not None and not (whole and self.ranks_per_node >= 1):
            raise ConfigError(f"ranks_per_node={self.ranks_per_node!r} must be a whole number, 1 or more")

    def compute_seconds(self, flops: float, kind: str = "", rank: int = 0, share: float = 1) -> float:
        """Seconds of a compute: FLOPs ÷ (peak · efficiency), whatever its kind and on every rank. They are those of
        the share alone."""
        return flops / (self.peak_flops * self.efficiency)

    def link_between(self, rank_a: int, rank_b: int) -> Link:
        """The link that joins two ranks."""
        if self.ranks_per_node is None or rank_a // self.ranks_per_node == rank_b // self.ranks_per_node:
            return self.link
        return self.network

    def transfer_seconds(self, sender: int, receiver: int, nbytes: float) -> tuple[float, float]:
        """Seconds in which a message of `nbytes` occupies its link, and those that it is under way after them."""
        link = self.link_between(sender, receiver)
        return nbytes / link.bandwidth, link.latency

    def collective_seconds(self, operation: str, wire_bytes: float, members: tuple[int, ...]) -> float:
        """Seconds of a collective over the ring of `members`, each of whom sends `wire_bytes`.

        Steps · latency + wire ÷ bandwidth on the slowest link of the ring; 2(n - 1) steps for an all-reduce, n - 1 for
        reduce-scatter, all-gather and the others (Thakur et al. 2005; formulas B.5). A ring of one takes no time.
        """
        steps = RING_STEPS.get(operation, 1) * (len(members) - 1)
        if steps == 0:
            return 0.0
        ring = zip(members, (*members[1:], members[0]), strict=True)
        links = {self.link_between(a, b) for a, b in ring}
        return max(steps * link.latency + wire_bytes / link.bandwidth for link in links)

    def slower(self, factor: float) -> Cluster:
        """The same cluster in slower motion."""
        return replace(self, slow_motion=self.slow_motion * factor)

    def pace_text(self) -> str:
        """How slow the motion is, in words."""
        return f"slow_motion={self.slow_motion:.4g}"

    def __str__(self) -> str:
        nodes = f", nodes of {self.ranks_per_node} ranks joined by {self.network}" if self.network else ""
        return (
            f"{self.name} ({self.peak_flops / 1e12:.4g} TFLOP/s at {self.efficiency:.0%}, links of {self.link}{nodes})"
        )


def _require(config, name: str, value, *, above: float | None = None, least: float | None = None, most=math.inf):
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (above is not None and value <= above) or (least is not None and value < least) or value > most:
        limits = f"above {above:g}" if above is not None else f"{least:g} or more"
        limits += f" and at most {most:g}" if most < math.inf else ""
        raise ConfigError(f"{name}={value!r} of {type(config).__name__} must be a finite number, {limits}")
