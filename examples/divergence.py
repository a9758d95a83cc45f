"""A training run made to diverge: the monitor's alarm comes before the loss is no number, and QK-clip keeps it one.

python examples/divergence.py

Two layers of attention, as many train them: products in float16, where a score above 65,504 is ∞.
"""

import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from einsight.lens import Monitor, qk_clip

RATE, STEPS, LENGTH = 0.05, 60, 64
data = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Model(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList([nn.MultiheadAttention(width, 4, bias=False, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for layer in self.layers:
            y = norm(x)
            x = x + norm(layer(y, y, y, attn_mask=future)[0])
        return self.head(norm(x))


def train(rate: float, clip: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    descent, monitor = torch.optim.SGD(model.parameters(), rate, momentum=0.9), Monitor(model)
    draw, alarmed = torch.Generator().manual_seed(1), False
    for step in range(STEPS):
        starts = torch.randint(len(data) - LENGTH - 1, (8,), generator=draw)
        text = data[starts[:, None] + torch.arange(LENGTH + 1)]
        with monitor:
            with torch.autocast("cpu", torch.float16):
                logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
            descent.zero_grad()
            loss.backward()
        if not alarmed and (alarms := monitor.alarms()):
            alarmed = True
            print(f"  step {step}: loss {loss.item():.2f}, ALARM {alarms[0]}")
        if not math.isfinite(loss.item()):
            print(f"  step {step}: loss {loss.item()}")
            return
        descent.step()
        if clip:
            qk_clip(model, monitor, tau=50.0)
    largest = max(float(scores.max()) for scores in monitor.max_score().values())
    print(f"  step {STEPS - 1}: loss {loss.item():.2f}, largest score {largest:.0f}")


print(f"learning rate {RATE}")
train(RATE, clip=False)
print(f"learning rate {30 * RATE:g}")
train(30 * RATE, clip=False)
print(f"learning rate {30 * RATE:g} and QK-clip")
train(30 * RATE, clip=True)
