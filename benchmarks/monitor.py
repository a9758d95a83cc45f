"""What the training monitor costs: steps with it beside steps without, taken in turn, by the processor's time.

    python benchmarks/monitor.py [rounds]

A decoder of 6 layers at 1,024 tokens, ours and transformers' Llama (sdpa). "every step" is a watched step beside a
plain one; "every 20 steps" one watched step and 19 that the monitor lets pass beside 20 plain ones. On a machine that
others use, run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import einsight as es
from einsight.lens import Monitor

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 512, 6, 8, 4096, 1024


def ours() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    config = es.nn.DecoderConfig(
        vocab_size=VOCABULARY,
        embed_dim=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=WIDTH * 8 // 3,
        max_length=LENGTH,
    )
    return es.nn.Decoder(config), lambda model, tokens: model(tokens)


def llama() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config), lambda model, tokens: model(tokens, use_cache=False).logits


def main(rounds: int) -> None:
    for name, make in (("einsight.nn.Decoder", ours), ("transformers' Llama", llama)):
        torch.manual_seed(0)
        model, logits = make()
        adam = torch.optim.AdamW(model.parameters(), 1e-4)
        tokens = torch.randint(VOCABULARY, (1, LENGTH + 1))
        passing = Monitor(model, every=10**9)
        with passing:
            pass
        kinds = {"plain": contextlib.nullcontext(), "watched": Monitor(model), "passing": passing}
        spent: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):
            for kind, context in kinds.items():
                start = time.process_time()
                with context:
                    loss = F.cross_entropy(logits(model, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    adam.zero_grad(set_to_none=True)
                    loss.backward()
                adam.step()
                if turn:
                    spent[kind].append(time.process_time() - start)
        # Each beside the plain step of its own turn: what the machine does in between concerns both.
        ratio = {
            kind: statistics.median(a / b for a, b in zip(times, spent["plain"], strict=True))
            for kind, times in spent.items()
        }
        plain = statistics.median(spent["plain"])
        print(
            f"{name}: a step {plain:.2f} s; every step {ratio['watched']:.3f} ×, "
            f"every 20 steps {(ratio['watched'] + 19 * ratio['passing']) / 20:.3f} ×",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
