"""Evict three quarters of a KV cache as the layers finish, by the attention each key received.

After a long prompt that ends in a question, each layer keeps a quarter of its keys: the last ones, and those that the
last 8 queries looked at most (as SnapKV does, Li et al. 2024, arXiv:2404.14469). How well the model then predicts the
answer is compared with keeping random keys, or only the last ones.

    python examples/evict_kv_cache.py
"""

import inspect
import pathlib

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaForCausalLM

import einsight as es
from einsight.lens import Call, Lens
from einsight.models import load

# Newer versions of transformers renamed the argument.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
RECENT, KEEP, NEIGHBOURS = 8, 0.25, 13


def keys_to_keep(call: Call, policy: str) -> torch.Tensor:
    """The places [b, g, n] of the keys that stay, in order."""
    b, g, j, _ = call.key.shape
    n = int(j * KEEP)
    if policy == "received":
        # What follows a key that was looked at is looked at next.
        score = F.max_pool1d(call.results, NEIGHBOURS, 1, NEIGHBOURS // 2)
    elif policy == "random":
        score = torch.rand(b, g, j)
    else:  # the recent window
        score = torch.arange(j, dtype=torch.float32).expand(b, g, j).clone()
    score[..., -RECENT:] = torch.inf
    return score.topk(n).indices.sort().values


def loss(model, tokens: torch.Tensor, prompt: int, policy: str) -> float:
    """Mean loss of the tokens behind the prompt, given what the policy left of the prompt's cache."""
    cache = DynamicCache(config=model.config)

    def evict(call: Call) -> None:
        layer = cache.layers[call.index]
        places = keys_to_keep(call, policy)[..., None].expand(-1, -1, -1, call.key.shape[3])
        layer.keys, layer.values = call.key.gather(2, places), call.value.gather(2, places)

    received = es.Received(queries=slice(-RECENT, None), per_group=True)
    if policy == "everything":
        model(tokens[:, :prompt], **{CACHE: cache})
    else:
        with Lens(model, readouts=received, on_call=evict):
            model(tokens[:, :prompt], **{CACHE: cache})
    total, places = 0.0, torch.arange(prompt, tokens.shape[1])
    # The first token behind the prompt is fed, not judged: its prediction had the whole cache.
    for place in places[:-1].tolist():
        step = model(
            tokens[:, place : place + 1],
            **{CACHE: cache},
            position_ids=torch.tensor([[place]]),
        )
        total += float(F.cross_entropy(step.logits[0], tokens[0, place + 1 : place + 2]))
    return total / (len(places) - 1)


def main() -> None:
    torch.manual_seed(0)
    model, tokenizer = load()
    facts = "".join(f"The code of the {colour} box is {number}. " for colour, number in FACTS.items())
    filler = pathlib.Path(__file__).with_name("passage.txt").read_text().replace("\n", " ")
    losses: dict[str, list[float]] = {"everything": [], "received": [], "recent": [], "random": []}
    for colour, number in FACTS.items():
        prompt, answer = f"{facts}{filler} The code of the {colour} box is", f" {number}."
        tokens = torch.tensor([tokenizer(prompt)["input_ids"] + tokenizer(answer)["input_ids"]])
        start = len(tokenizer(prompt)["input_ids"])
        with torch.inference_mode():
            for policy, found in losses.items():
                found.append(loss(model, tokens, start, policy))
    print(f"{start} tokens of prompt, {KEEP:.0%} of the cache kept, {len(FACTS)} answers to predict")
    for policy, found in losses.items():
        print(f"{policy:10}  loss {sum(found) / len(found):.3f}")


FACTS = {"red": 4417, "green": 9032, "blue": 1288, "black": 7561}

if __name__ == "__main__":
    main()
