"""Bytes of the model states for each parameter: the weights, their gradients, and the optimizer's."""

from __future__ import annotations

from typing import NamedTuple

from pcourse.config import BYTES, ConfigError, ModelConfig, ParallelConfig, listed
from pcourse.split import shard_sizes

OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}  # numbers of state for each parameter
FLOAT32 = BYTES["float32"]


class StateBytes(NamedTuple):
    """Bytes of the model states: of one parameter, or of a rank."""

    parameters: int
    gradients: int
    optimizer: int


DIVIDED_FROM = StateBytes(parameters=3, gradients=2, optimizer=1)  # the ZeRO stage (Rajbhandari et al. 2020, section 5)


def bytes_per_parameter(
    dtype: str, optimizer: str = "adamw", grad_dtype: str = "same", master_weights: bool = False
) -> StateBytes:
    """What training keeps for one parameter of `dtype`, w bytes wide.

    Gradients are kept in w ("same"), in 4 bytes ("float32": autograd adds straight into float32) or in "both" (added up
    in w, copied to float32 to be reduced). AdamW keeps two numbers, SGD none: in w, or beside a master copy of the
    parameter in float32, which counts as the optimizer's. In bf16 with AdamW that makes 8 bytes; with master weights 16
    (Rajbhandari et al. 2020, section 3.1), with float32 gradients too 18, with both kinds of gradients 20.

    Raises ConfigError for a name that is not known.
    """
    _require_known("dtype", dtype, BYTES)
    _require_known("optimizer", optimizer, OPTIMIZER_COPIES)
    w = BYTES[dtype]
    gradients = {"same": w, "float32": FLOAT32, "both": w + FLOAT32}
    _require_known("grad_dtype", grad_dtype, gradients)
    copies = OPTIMIZER_COPIES[optimizer]
    return StateBytes(w, gradients[grad_dtype], FLOAT32 * (copies + 1) if master_weights else w * copies)


def model_states(parameters: int, dtype: str, optimizer: str) -> int:
    """Bytes of the parameters, their gradients and the optimizer's state, all in `dtype`.

    Raises ConfigError for a dtype or optimizer that is not known.
    """
    return sum(bytes_per_parameter(dtype, optimizer)) * parameters


def bytes_of_states(model: ModelConfig, parallel: ParallelConfig, optimizer: str) -> StateBytes:
    """Of one parameter, before ZeRO divides them."""
    gradients = parallel.grad_dtype
    if gradients == "both" and parallel.zero >= DIVIDED_FROM.gradients:
        gradients = "float32"  # those in the model's dtype live until their unit is reduced, and are temporary
    return bytes_per_parameter(model.dtype, optimizer, gradients, parallel.master_weights)


def bytes_on_a_replica(model: ModelConfig, parallel: ParallelConfig, optimizer: str) -> float:
    """Of one parameter, on average over the replicas: what ZeRO leaves."""
    return sum_on_a_replica(bytes_of_states(model, parallel, optimizer), parallel.zero, parallel.dp)


def sum_on_a_replica(each: StateBytes, zero: int, dp: int) -> float:
    """All states of one parameter, those that ZeRO divides over `dp` replicas on average."""
    return sum(n / (dp if zero >= stage else 1) for n, stage in zip(each, DIVIDED_FROM, strict=True))


def divided(parameters: int, each: StateBytes, zero: int, dp: int, replica: int = 0) -> StateBytes:
    """Bytes of the model states of a unit on one of `dp` replicas: the optimizer's are divided from ZeRO's stage 1 on,
    gradients from stage 2, parameters from stage 3.

    P parameters of 16 bytes come to 4P + 12P/N, 2P + 14P/N and 16P/N (Rajbhandari et al. 2020, figure 1).
    """
    share = shard_sizes(parameters, dp)[replica]
    return StateBytes(*(n * (share if zero >= stage else parameters) for n, stage in zip(each, DIVIDED_FROM)))


def _require_known(name: str, value, legal) -> None:
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not known; {name} can be {listed(legal)}")
