"""Which of three documents did each token of an answer draw on? The weight on each, in the layers that copy.

python examples/which_document.py
"""

import functools
import operator

import torch

import einsight as es
from einsight.lens import Lens
from einsight.models import load

DOCUMENTS = {
    "lighthouse": "The lighthouse of Norvik was built in 1874 by Ingrid Halvorsen.",
    "bridge": "The bridge of Tarn spans 312 metres and carries the railway to Osk.",
    "library": "The library of Pell keeps 90000 books in a former salt mine.",
}
ANSWER = " The bridge spans 312 metres. The lighthouse was built by Ingrid Halvorsen. The books are in a salt mine."

model, tokenizer = load()
pieces = [*DOCUMENTS.values(), ANSWER]
ids = [tokenizer(" " + piece.strip())["input_ids"] for piece in pieces]
tokens = torch.tensor([functools.reduce(operator.iadd, ids, [])])
# Each key's document; -1 for the answer's own tokens and the very first token, where heads rest their gaze.
source = torch.tensor([n if n < 3 else -1 for n, piece in enumerate(ids) for _ in piece])
source[0] = -1
start = tokens.shape[1] - len(ids[-1])

mass = es.Mass(source, 3, queries=slice(start, None))
with torch.inference_mode(), Lens(model, readouts=mass, layers=range(16, 24)) as lens:
    model(tokens)

# [layers, b, h, tokens, documents] → the mean over layers and heads, as shares.
drawn = torch.stack([call.results for call in lens]).mean((0, 2))[0]
drawn = drawn / drawn.sum(-1, keepdim=True)
print(f"{'token':14}" + "".join(f"{name:>12}" for name in DOCUMENTS))
for token, row in zip(ids[-1], drawn.tolist(), strict=True):
    print(f"{tokenizer.decode([token]).strip():14}" + "".join(f"{share:12.2f}" for share in row))
for sentence, name in zip(ANSWER.split("."), ("bridge", "lighthouse", "library"), strict=False):
    tokens_of = len(tokenizer(" " + sentence.strip())["input_ids"])
    share, drawn = drawn[:tokens_of].mean(0), drawn[tokens_of + 1 :]
    found = list(DOCUMENTS)[int(share.argmax())]
    print(f"{sentence.strip()!r}: mostly {found} ({float(share.max()):.2f})")
    assert found == name
