"""Hugging Face's masks as rules: the same pairs, one interval of keys per query, and no [queries × keys] memory."""

import pytest
import torch

pytest.importorskip("transformers")

from lens.tiny import Exactly, assert_as_good, build, exactly, inputs
from transformers import masking_utils as hf

import einsight as es
from einsight.lens.huggingface import register
from einsight.lens.huggingface.handed import HandedMask
from einsight.lens.huggingface.masks import make_mask

register()
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1], [-1, -1, -1, 0, 0, 0, 0, -1, 1, 1, -1]])
LEFT = torch.tensor([[1] * 11, [0, 0, 0] + [1] * 8])
RIGHT = torch.tensor([[1] * 11, [1] * 7 + [0] * 4])
causal, everywhere = hf.causal_mask_function, hf.bidirectional_mask_function
window = hf.sliding_window_causal_mask_function(3)
chunks = hf.chunked_causal_mask_function(4, torch.tensor([0, 3]))
packed = hf.packed_sequence_mask_function(IDS)
FUNCTIONS = {
    "causal": causal,
    "everywhere": everywhere,
    "window": window,
    "window both ways": hf.sliding_window_bidirectional_mask_function(2),
    "chunks": chunks,
    "packed": hf.and_masks(hf.remap_positions_for_packed_sequence(causal, POSITIONS), packed),
    "packed, window": hf.and_masks(hf.remap_positions_for_packed_sequence(window, POSITIONS), packed),
    "blocks": hf.or_masks(causal, hf.blockwise_overlay(BLOCKS)),
    "offsets": hf.add_offsets_to_mask_function(window, 2, 2),
}
# i queries and j keys, where they stand
SHAPES = {
    "whole": (11, 11, 0, 0),
    "one token": (1, 9, 8, 0),
    "several tokens": (4, 10, 6, 0),
    "sliding cache": (2, 5, 8, 5),
    "static cache, prefill": (5, 11, 0, 0),
    "static cache, one token": (1, 11, 6, 0),
}


def both(function, i, j, q_offset, kv_offset, padding=None, **how):
    """Ours, and the library's as a tensor."""
    place = dict(batch_size=2, q_length=i, kv_length=j, q_offset=q_offset, kv_offset=kv_offset)
    padding = None if padding is None else padding[:, : q_offset + i].bool()
    how = dict(mask_function=function, attention_mask=padding, **place, **how)
    return make_mask(**how), hf.sdpa_mask(**how, allow_is_causal_skip=False)


def seen(mask):
    """The mask written out, as True where a query may see a key."""
    return mask + 0 == 0


def looks(mask):
    """Zeros to ask the plan with."""
    b, _, i, j = mask.shape
    return torch.zeros(b, 2, i, 8), torch.zeros(b, 1, j, 8), torch.zeros(b, 1, j, 8)


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["", "left", "right"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_known_functions(name, shape, padding):
    ours, theirs = both(FUNCTIONS[name], *SHAPES[shape], padding)
    assert isinstance(ours, HandedMask) and ours.shape == theirs.shape
    assert torch.equal(seen(ours), theirs)  # written out
    # Every rule is one interval of keys per query: what the fast engines need.
    plan = es.plan(*looks(ours), ours.rule, offset=ours.offset, engine="auto")
    assert "not one interval" not in str(plan), ours.rule
    assert plan.visits == theirs.sum() * 2 or plan.engine != "native"


@pytest.mark.parametrize("shape", SHAPES)
def test_unknown_functions(shape):
    def odd(b, h, q, kv):
        return ((q - kv) % 2 == 0) & (kv <= q)

    ours, theirs = both(odd, *SHAPES[shape], LEFT)
    assert torch.equal(seen(ours), theirs)

    keep = torch.rand(11, 11, generator=torch.Generator().manual_seed(0)) < 0.7

    def by_scalars(b, h, q, kv):
        return keep[q, kv] if q.ndim == 0 else pytest.fail("asked for more than one pair")

    ours, theirs = both(hf.and_masks(causal, by_scalars), *SHAPES[shape], use_vmap=True)
    assert torch.equal(seen(ours), theirs)


def test_causal_is_the_default():
    assert torch.equal(seen(make_mask(2, 3, 5, 2)), hf.sdpa_mask(2, 3, 5, 2, allow_is_causal_skip=False))


@pytest.mark.parametrize("function", [causal, window, everywhere], ids=["causal", "window", "everywhere"])
def test_a_token_that_sees_its_whole_cache_needs_no_mask(function):
    assert both(function, 1, 3, 2, 0)[0].rule is None


def test_models_may_do_with_it_what_they_do_with_tensors():
    """Looking and moving keep the rule; the rest is done on what eager's mask would be."""
    place = dict(batch_size=2, q_length=11, kv_length=11, mask_function=window, attention_mask=LEFT.bool())
    ours, theirs = make_mask(**place, dtype=torch.bfloat16), hf.eager_mask(**place, dtype=torch.bfloat16)
    assert ours.ndim == 4 and ours.dtype == torch.bfloat16 and ours.size(-1) == len(ours[0, 0, 0]) == 11
    for same in (ours, ours.to("cpu"), ours.detach(), ours.to(torch.float32), ours.contiguous(), ours.clone()):
        assert isinstance(same, HandedMask) and same.rule is ours.rule and same.shape == theirs.shape
        with torch._C.DisableTorchFunctionSubclass():
            assert same.untyped_storage().nbytes() <= 4
    assert ours.is_contiguous() is False
    assert torch.equal(ours[:, :, 2:5], theirs[:, :, 2:5])
    assert torch.equal(ours + 1, theirs + 1)
    assert torch.equal(torch.cat([ours, torch.ones(2, 1, 11, 2)], -1), torch.cat([theirs, torch.ones(2, 1, 11, 2)], -1))
    assert torch.equal(ours.masked_fill(theirs == 0, 3), theirs.masked_fill(theirs == 0, 3))
    assert make_mask(2, 11, 11, mask_function=causal, attention_mask=ours) is ours


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "t5"])
def test_a_users_own_mask(name, kind):
    given, _ = inputs(name)
    given = {"input_ids": given["input_ids"]} | ({"decoder_input_ids": given["input_ids"]} if name == "t5" else {})
    draw = torch.Generator().manual_seed(2)
    allowed = (torch.rand(3, 1, 11, 11, generator=draw) < 0.6) | torch.eye(11, dtype=torch.bool)
    bias = torch.randn(3, 1, 11, 11, generator=draw).masked_fill(~allowed, torch.finfo(torch.float32).min)
    lowest = torch.zeros(3, 1, 11, 11).masked_fill(~allowed, torch.finfo(torch.float32).min)
    mask, added = (allowed, lowest) if kind == "bool" else (bias, bias)  # eager knows no boolean masks
    with torch.no_grad():
        ours = build(name, "einsight")(**given, attention_mask=mask)[0]
        eager = build(name, "eager")(**given, attention_mask=added)[0]
        with Exactly():
            model, given = exactly(build(name, "eager"), given)
            exact = model(**given, attention_mask=added.double())[0]
    assert_as_good(ours, eager, exact)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_packed_sequences(name):
    """Documents in one row are what they are in rows of their own."""
    ids, model = inputs(name)[0]["input_ids"][1:2], build(name, "einsight")
    eager, exact = build(name, "eager"), build(name, "eager").double()
    with torch.no_grad():
        packed = model(ids, position_ids=POSITIONS[:1], use_cache=False).logits
        apart = [eager(part, use_cache=False).logits for part in ids.split([3, 4, 4], 1)]
        with Exactly():
            right = [exact(part, use_cache=False).logits for part in ids.split([3, 4, 4], 1)]
    assert_as_good(packed, torch.cat(apart, 1), torch.cat(right, 1))


def test_nothing_quadratic_is_held(monkeypatch):
    """No tensor of [i, j] numbers is made on the way through a model whose attention runs natively."""
    from torch.utils._python_dispatch import TorchDispatchMode

    i, largest = 700, [0]

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.untyped_storage().nbytes())
            return result

    model = build("mistral", "einsight")
    ids = torch.randint(3, 53, (2, i), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids)
    real[0, :50] = 0
    with torch.no_grad(), Watching():
        model(ids, attention_mask=real)
    assert largest[0] < i * i, "one byte for each pair would be this much"


def test_refuses_masks_of_numbers():
    model = build("llama", "einsight")
    with pytest.raises(TypeError, match=r"attention_mask must be .* LlamaAttention handed a tensor of torch.int64"):
        model(torch.tensor([[3, 4]]), attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.int64))
