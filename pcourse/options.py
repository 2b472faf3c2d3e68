"""The configs as options of the command line: one option for each field, with the field's own default."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from types import NoneType
from typing import get_args, get_type_hints

from pcourse.config import (
    ATTENTION,
    BUILT,
    DTYPES,
    GRAD_DTYPES,
    OPTIMIZERS,
    PARTITIONS,
    RECOMPUTE,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)

GROUPS = {"the model": ModelConfig, "how it is split": ParallelConfig, "how it is trained": TrainConfig}

HELP = {
    "layers": "transformer layers",
    "hidden": "width of the model",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values; none: as many as heads",
    "ffn": "width inside the feed-forward part; none: 4 times hidden",
    "vocab": "tokens that the model knows",
    "sequence": "tokens in a sequence",
    "dropout": "share of values that dropout sets to 0",
    "tied": "use one matrix for the embedding and the output",
    "attention": "how scores are computed",
    "dtype": "numbers of weights and activations",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel replicas",
    "cp": "context-parallel ranks",
    "sequence_parallel": "split the sequence where tensor parallelism leaves it whole",
    "schedule": "order of forwards and backwards in the pipeline",
    "micro_batches": "pieces into which the batch is cut",
    "chunks": "model chunks per pipeline rank",
    "partition": "what the pipeline's stages have equal shares of",
    "zero": "ZeRO stage: what data-parallel ranks share out",
    "recompute": "which activations are computed again in backward",
    "recompute_every": "recompute one layer in so many",
    "reshard": "free gathered parameters after forward",
    "grad_dtype": "numbers in which gradients are summed",
    "master_weights": "keep float32 weights beside those that compute",
    "batch": "sequences in a step, over all ranks",
    "steps": "steps that are reported",
    "warmup": "steps before them that are not",
    "optimizer": "what turns gradients into updates",
    "learning_rate": "size of the updates; none: a sane one for the optimizer",
    "weight_decay": "share of the weights taken off per unit of learning rate",
    "clip": "largest norm of the gradient; none: no limit",
    "seed": "where weights, text and dropout start from",
}

LEGAL = {
    "attention": ATTENTION,
    "dtype": DTYPES,
    "grad_dtype": GRAD_DTYPES,
    "optimizer": OPTIMIZERS,
    "partition": PARTITIONS,
    "recompute": RECOMPUTE,
    "zero": (0, 1, 2, 3),
}


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """An option for every field of the three configs."""
    for title, config in GROUPS.items():
        group = parser.add_argument_group(title)
        hints = get_type_hints(config)
        for field in fields(config):
            _add_option(group, field, hints[field.name], built=config is not ParallelConfig or field.name in BUILT)


def configs_from(arguments: argparse.Namespace) -> tuple[ModelConfig, ParallelConfig, TrainConfig]:
    """The three configs that the options describe. Raises ConfigError as they do."""
    given = vars(arguments)
    return tuple(
        config(**{field.name: given[field.name] for field in fields(config) if field.name in given})
        for config in GROUPS.values()
    )


def _add_option(group, field: Field, hint, built: bool) -> None:
    flag = "--" + field.name.replace("_", "-")
    words = HELP[field.name] if built else f"{HELP[field.name]} (not in this version)"
    # An option that is left out stays out of the namespace, so that the default is the config's own.
    common = {"dest": field.name, "default": argparse.SUPPRESS}
    if hint is bool:
        words += f" [{'yes' if field.default else 'no'}]"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=words, **common)
        return
    words += f" [{'none' if field.default is None else field.default}]"
    reader = _Reader(hint)
    metavar = "|".join(map(str, LEGAL.get(field.name, ()))) or reader.metavar
    group.add_argument(flag, type=reader, metavar=metavar, help=words, **common)


class _Reader:
    """Reads a value from the command line: "none" where None is a value, else a number or a word."""

    def __init__(self, hint):
        kinds = get_args(hint) or (hint,)
        self.optional = NoneType in kinds
        self.kind = next(kind for kind in kinds if kind is not NoneType)
        self.metavar = {int: "N", float: "X", str: "NAME"}[self.kind]
        words = {int: "a whole number", float: "a number", str: "a word"}[self.kind]
        self.expects = f"{words} or none" if self.optional else words

    def __call__(self, text: str):
        if self.optional and text == "none":
            return None
        try:
            return self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.expects}") from None
