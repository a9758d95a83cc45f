"""Train a small decoder from scratch on English that every Python carries, and let it write.

    python examples/train_decoder.py                      # well under ten minutes on two cores
    python examples/train_decoder.py --folder runs/mine   # go on from its last checkpoint, bit for bit
    python examples/train_decoder.py --help

The text is Python's own documentation (`pydoc_data.topics`, some 700 kB), read as bytes. What a model has
learned shows beside a bigram model, which knows for each byte what follows it how often.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import einsight as es


@dataclass(frozen=True)
class Settings:
    """One training run; two runs with the same settings on the same machine are the same to the last bit."""

    steps: int = 600
    batch: int = 16
    length: int = 256
    width: int = 160
    layers: int = 4
    heads: int = 4
    rate: float = 2e-3
    warm_up: int = 60
    decay: float = 0.1
    clip: float = 1.0
    every: int = 150  # steps between checkpoints
    seed: int = 0

    def config(self) -> es.nn.DecoderConfig:
        return es.nn.DecoderConfig(
            vocab_size=256,
            embed_dim=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            hidden_dim=self.width * 8 // 3,
            max_length=self.length,
        )


def text() -> tuple[Tensor, Tensor]:
    """The bytes to learn from and, the last tenth, those to be judged by."""
    from pydoc_data.topics import topics

    data = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens [b, i] and the tokens that follow them."""
    index = starts[:, None] + torch.arange(length + 1)
    return data[index][:, :-1], data[index][:, 1:]


def batch(data: Tensor, step: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """The batch of a step: it depends on nothing else, so a run that was interrupted meets the same ones."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - settings.length, (settings.batch,), generator=generator)
    return windows(data, starts, settings.length)


def loss_of(model: es.nn.Decoder, tokens: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy in nats per byte."""
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


@torch.no_grad()
def validation_loss(model: es.nn.Decoder, data: Tensor, length: int) -> float:
    """Over the whole of the text kept back, window by window."""
    total, windowed = 0.0, torch.arange(0, len(data) - length, length)
    for starts in windowed.split(16):
        total += loss_of(model, *windows(data, starts, length)).item() * len(starts)
    return total / len(windowed)


def bigram_loss(train: Tensor, valid: Tensor) -> float:
    """Of the model that knows each byte's followers; 0.1 is added to every count."""
    counts = torch.full((256, 256), 0.1, dtype=torch.float64)
    counts.index_put_((train[:-1], train[1:]), torch.ones(1, dtype=torch.float64), accumulate=True)
    return -(counts / counts.sum(1, keepdim=True)).log()[valid[:-1], valid[1:]].mean().item()


def rate_at(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a tenth (Loshchilov & Hutter 2017, arXiv:1608.03983)."""
    if step < settings.warm_up:
        return settings.rate * (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    return settings.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def optimiser(model: es.nn.Decoder, settings: Settings) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); norms don't decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95))


def save(path: Path, model: es.nn.Decoder, adam: torch.optim.AdamW, step: int, settings: Settings) -> None:
    """Model, optimiser and step in one safetensors file, which replaces the last one at once or not at all."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for n, state in adam.state_dict()["state"].items():
        tensors.update({f"adam.{n}.{name}": tensor for name, tensor in state.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    save_file(tensors, beside, metadata={"step": str(step), "settings": json.dumps(asdict(settings))})
    os.replace(beside, path)


def load(path: Path, model: es.nn.Decoder, adam: torch.optim.AdamW, settings: Settings) -> int:
    """The step that a checkpoint was written after; its contents go into model and optimiser."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SystemExit(f"{path} is not a whole checkpoint ({error}); remove it to start anew") from error
    theirs = json.loads(metadata["settings"])
    differ = [
        f"{name} is {theirs.get(name)}, not {ours}"
        for name, ours in asdict(settings).items()
        if theirs.get(name) != ours
    ]
    if differ:
        raise SystemExit(f"{path} is of a run with other settings: {'; '.join(differ)}. Choose another --folder")
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, n, what = name.split(".")
            state.setdefault(int(n), {})[what] = tensor
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    adam.load_state_dict({"state": state, "param_groups": adam.state_dict()["param_groups"]})
    return int(metadata["step"])


def train(settings: Settings, folder: Path) -> es.nn.Decoder:
    """Train, from the folder's checkpoint if it holds one, and say how it goes."""
    learnt, judged = text()
    torch.manual_seed(settings.seed)
    model = es.nn.Decoder(settings.config())
    adam = optimiser(model, settings)
    path = folder / "checkpoint.safetensors"
    first = load(path, model, adam, settings) if path.exists() else 0
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {len(learnt):,} bytes, {torch.get_num_threads()} threads, from step {first}")
    start, busy = time.perf_counter(), time.process_time()
    for step in range(first, settings.steps):
        for group in adam.param_groups:
            group["lr"] = rate_at(step, settings)
        loss = loss_of(model, *batch(learnt, step, settings))
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        adam.step()
        done = step + 1
        if done % 10 == 0 or done == settings.steps:
            each = (time.perf_counter() - start) / (done - first)
            speed, left = settings.batch * settings.length / each, each * (settings.steps - done)
            print(
                f"\rstep {done}/{settings.steps}  loss {loss.item():.3f}  {speed:,.0f} tokens/s  {_clock(left)} left  ",
                end="",
                flush=True,
            )
        if done % settings.every == 0 or done == settings.steps:
            save(path, model, adam, done, settings)
            print(
                f"\rstep {done}/{settings.steps}  validation loss {validation_loss(model, judged, settings.length):.3f}"
                + " " * 40,
                flush=True,
            )
    taken, busy = time.perf_counter() - start, time.process_time() - busy
    print(f"{_clock(taken)} minutes, {_clock(busy)} of processor time")
    ours, bigram = validation_loss(model, judged, settings.length), bigram_loss(learnt, judged)
    print(f"validation loss {ours:.3f} nats per byte; a bigram model's is {bigram:.3f}")
    return model


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def write(model: es.nn.Decoder, prompt: str, length: int = 400) -> str:
    """The prompt, continued."""
    new = model.generate([list(prompt.encode())], length, temperature=0.8, top_p=0.95, seed=0)
    return prompt + bytes(new[0].tolist()).decode(errors="replace")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/decoder"), help="where its checkpoint is kept")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    chosen = vars(parser.parse_args(arguments))
    folder = chosen.pop("folder")
    model = train(Settings(**chosen), folder)
    print(write(model, "The "))


if __name__ == "__main__":
    main()
