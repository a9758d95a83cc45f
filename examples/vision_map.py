"""Where a vision transformer looks: the class token's weights on the patches, drawn in the terminal.

A small ViT learns, in some seconds, to tell the pattern of a square that lies anywhere in a noisy picture; then the
lens shows that its class token looks at the square.

    python examples/vision_map.py
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

from einsight.lens import Lens

SIDE, PATCH = 32, 4
NAMES = ("horizontal stripes", "vertical stripes", "a chessboard", "plain")


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise with a square of 8 × 8 pixels on it, the square's pattern, and its place (row, column) in patches."""
    y, x = torch.meshgrid(torch.arange(8) % 2, torch.arange(8) % 2, indexing="ij")
    patterns = torch.stack([y, x, y ^ x, torch.ones(8, 8)]).float() * 3
    kind, place = torch.randint(0, 4, (count,)), torch.randint(0, SIDE // PATCH - 1, (count, 2))
    pixels = torch.randn(count, 1, SIDE, SIDE) * 0.3
    for n, (row, column) in enumerate((place * PATCH).tolist()):
        pixels[n, 0, row : row + 8, column : column + 8] += patterns[kind[n]]
    return pixels, kind, place


torch.manual_seed(0)
config = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=SIDE,
    patch_size=PATCH,
    num_channels=1,
    num_labels=4,
)
model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for _ in range(120):
    pixels, kind, _ = pictures(64)
    loss = model(pixels, labels=kind).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
pixels, kind, place = pictures(4)
with torch.inference_mode(), Lens(model) as lens:
    guess = model(pixels).logits.argmax(-1)
print(f"right: {int((guess == kind).sum())} of 4")

grid = SIDE // PATCH
seen = lens.rollout(0)[:, 0, 1:].unflatten(-1, (grid, grid))  # the class token's, without itself
for picture, n, (row, column) in zip(seen, kind.tolist(), place.tolist(), strict=True):
    print(f"\n{NAMES[n]} at row {row}, column {column}; the class token looks at")
    for line in picture / picture.max():
        print(" ".join("·░▒█"[min(int(v * 4), 3)] for v in line.tolist()))
    share = picture[row : row + 2, column : column + 2].sum() / picture.sum()
    print(f"{float(share):.0%} of its gaze is on the square, which covers {4 / grid**2:.0%}")
