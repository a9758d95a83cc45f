"""What the induction heads do: without them, tokens said twice are no easier the second time.

python examples/ablate_induction.py
"""

import random
from contextlib import ExitStack

import torch
import torch.nn.functional as F

from einsight.lens import Edit, Lens
from einsight.models import load

model, _ = load()
half = torch.randint(1000, 40000, (1, 64), generator=torch.Generator().manual_seed(0))
tokens = torch.cat([half, half], 1)


def loss(heads=()) -> float:
    """Of the second time, in nats per token, with what some heads put out replaced by its mean over the positions."""
    with torch.inference_mode(), ExitStack() as edits:
        for layer in {layer for layer, _ in heads}:
            chosen = [head for other, head in heads if other == layer]
            edits.enter_context(Edit(model, layers=layer, heads=chosen, output="mean"))
        logits = model(tokens, use_cache=False).logits
    return F.cross_entropy(logits[0, 64:-1], tokens[0, 65:]).item()


with torch.inference_mode(), Lens(model) as lens:
    model(tokens, use_cache=False)
table = lens.heads(tokens)


def strongest(kind: str, count: int) -> list[tuple[int, int]]:
    return [(row["layer"], row["head"]) for row in table.sort(kind).top(count)]


# A head that looks back at the last token tells induction heads in later layers what came before each token.
induction, previous = strongest("induction", 1), strongest("previous", 1)
plain = loss()
print(f"nothing ablated: loss {plain:.2f}")
for name, heads in (("induction", induction), ("previous token", previous), ("both", induction + previous)):
    named = ", ".join(f"{layer}.{head}" for layer, head in heads)
    print(f"{name} ({named}): {loss(heads) - plain:+.2f}")
kinds = strongest("induction", 10) + strongest("previous", 10)
others = [head for head in zip(table["layer"], table["head"], strict=True) if head not in kinds]
draw = random.Random(0)
changes = sorted(loss(draw.sample(others, 10)) - plain for _ in range(5))
print(f"ten random heads of other kinds, five times: {', '.join(f'{change:+.2f}' for change in changes)}")
