"""A small pre-LN GPT that knows nothing of ranks: the model that every split starts from and is proved against.

Its sizes match the formulas of the papers: P = L(12h² + 13h) + (V + s)h + 2h parameters with tied weights, f = 4h and
as many key/value heads as heads (learned positions, biases everywhere but on the output). Shapes are written as
`[batch, sequence, hidden]`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pcourse.config import ModelConfig
from pcourse.dropout import Dropout

DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class GPT(nn.Module):
    """tokens `[b, s]` → logits `[b, s, V]`; `loss` gives the summed cross-entropy of its targets."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, site=3 * i + 1) for i in range(config.layers))
        self.head = Head(config)
        self.token_loss = CrossEntropy()

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens, targets):
        """The cross-entropy summed over all targets but those of -100; divide by their number for the mean."""
        return self.token_loss(self(tokens), targets)


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = Dropout(config.dropout, site=0)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, site: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, site)
        self.dropout1 = Dropout(config.dropout, site + 1)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout2 = Dropout(config.dropout, site + 2)

    def forward(self, x):
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Causal self-attention. `qkv` holds the rows of all queries, then of all keys, then of all values."""

    def __init__(self, config: ModelConfig, site: int):
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.head_width
        self.fused = config.attention == "fused"
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * config.kv_heads) * self.width)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.dropout = Dropout(config.dropout, site)

    def forward(self, x):
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, -1, self.width).transpose(1, 2)
        y = self.attend(*qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1))
        return self.out(y.transpose(1, 2).reshape(b, s, -1))

    def attend(self, q, k, v):
        """Queries `[b, a, s, h/a]`, keys and values `[b, kv_heads, s, h/a]` → `[b, a, s, h/a]`."""
        if self.heads != self.kv_heads:  # each key/value head serves a group of query heads
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q / math.sqrt(self.width)) @ k.transpose(2, 3)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return self.dropout(scores.masked_fill(future, -math.inf).softmax(-1)) @ v


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Head(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.output = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x):
        return self.output(self.norm(x))


class CrossEntropy(nn.Module):
    """logits `[b, s, V]`, targets `[b, s]` → the sum over tokens, in float32 or better."""

    def forward(self, logits, targets):
        logits = logits.flatten(0, 1)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def build(config: ModelConfig, seed: int = 0, device="cpu") -> GPT:
    """The unsplit model with the same weights on every rank, whatever a rank drew before.

    Weights are normal with deviation 0.02, the two that write into the residual stream 0.02/√(2L) (GPT-2, section
    2.3), biases 0, LayerNorms 1.
    """
    with torch.device("meta"):  # no memory yet, and nothing drawn from the generator that thread ranks share
        model = GPT(config).to(DTYPE[config.dtype])
    model.to_empty(device=device)
    if config.tied:
        model.head.output.weight = model.embed.tokens.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            deviation = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
            p.copy_(torch.randn(p.shape, generator=generator) * deviation)
    return model
