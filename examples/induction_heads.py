"""Find the heads that copy: on random tokens said twice, they look at what came after the first time.

python examples/induction_heads.py
"""

import torch

from einsight.lens import Lens
from einsight.models import load

model, tokenizer = load()
half = torch.randint(1000, 40000, (1, 200), generator=torch.Generator().manual_seed(0))
tokens = torch.cat([half, half], 1)

with torch.inference_mode(), Lens(model) as lens:
    model(tokens)

heads = lens.heads(tokens)
print(heads.sort("induction").top(5))

# What the best of them looks at, three tokens into the repetition.
best = next(iter(heads.sort("induction")))
weights, keys = lens[best["layer"]].weights.select(heads=[best["head"]], queries=[203]).topk(3)
for weight, key in zip(weights.flatten().tolist(), keys.flatten().tolist(), strict=True):
    print(f"query 203 → key {key}: {weight:.2f}")
