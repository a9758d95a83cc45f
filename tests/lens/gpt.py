"""A small GPT, as people write it themselves."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import einsight as es


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.qkv, self.output = kind, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.last = q.detach(), k.detach()
        dropout = 0.1 if self.training else 0.0
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            y = es.attention(q, k, v, es.causal(), dropout=dropout)
        return self.output(y.transpose(1, 2).flatten(2))

    def weights(self):
        """Those of the last call, as taught."""
        q, k = self.last
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        return torch.softmax((q @ k.mT / 8**0.5).masked_fill(future, -torch.inf), -1)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention = Attention(kind)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class GPT(nn.Module):
    def __init__(self, kind, checkpoint=None):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(3)])
        self.checkpoint = checkpoint

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else checkpoint(block, x, use_reentrant=self.checkpoint)
        return x
