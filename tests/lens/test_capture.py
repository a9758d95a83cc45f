"""What the lens sees, and that nothing changes by it, in models that aren't Hugging Face's."""

import contextlib
import copy
import inspect
import io
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Lens


def same_with_and_without(model, *inputs, exact=True, **settings):
    """Outputs, gradients and random state are those of the model alone; returns the lens."""

    def step(context):
        model.zero_grad()
        torch.manual_seed(5)
        with context:
            output = model(*inputs, **settings)
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:
                output.square().sum().backward()
        return [output, *(p.grad.clone() for p in model.parameters() if p.grad is not None)], torch.get_rng_state()

    plain, state = step(contextlib.nullcontext())
    lens = Lens(model)
    seen, state_seen = step(lens)
    assert torch.equal(state, state_seen)
    for a, b in zip(plain, seen, strict=True):
        torch.testing.assert_close(a, b) if not exact else None
        assert not exact or torch.equal(a, b)
    return lens


@pytest.mark.parametrize("kind", ["sdpa", "einsight"])
@pytest.mark.parametrize("training", [True, False])
def test_hand_written_gpt(kind, training):
    model = GPT(kind).train(training)
    lens = same_with_and_without(model, torch.randint(0, 17, (2, 9)))
    assert lens.names == ("blocks.0.attention", "blocks.1.attention", "blocks.2.attention")
    assert lens["blocks.1.attention"].index == 1
    assert lens[1].module is model.blocks[1].attention
    torch.testing.assert_close(lens[1].weights.dense(), model.blocks[1].attention.weights())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "float", "per head", "both"])
def test_multihead_attention(need_weights, batch_first, masks):
    layer = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=batch_first).train()
    x = torch.randn((2, 7, 12) if batch_first else (7, 2, 12))
    causal = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    settings = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal},
        "float": {"attn_mask": torch.randn(7, 7)},
        "per head": {"attn_mask": torch.randn(6, 7, 7)},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[masks]
    lens = same_with_and_without(layer, x, x, x, need_weights=need_weights, **settings)
    with torch.no_grad():
        _, weights = layer.eval()(x, x, x, need_weights=True, average_attn_weights=False, **settings)
    torch.testing.assert_close(lens[0].weights.dense(), weights, atol=1e-6, rtol=1e-5)


def test_multihead_attention_unbatched_and_cross():
    layer = nn.MultiheadAttention(12, 3, kdim=8, vdim=10)
    query, key, value = torch.randn(5, 12), torch.randn(7, 8), torch.randn(7, 10)
    for need_weights in (True, False):
        lens = same_with_and_without(layer, query, key, value, need_weights=need_weights)
        assert (len(lens), len(lens.cross)) == (0, 1)
        _, weights = layer(query, key, value, average_attn_weights=False)
        torch.testing.assert_close(lens.cross[0].weights.dense()[0], weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_of_inputs_made_apart(need_weights):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.cross_attn = (nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))
            self.norm = nn.LayerNorm(12)

        def forward(self, x):
            self.attn(*(self.norm(x) for _ in range(3)), need_weights=need_weights)
            return self.cross_attn(x, x + 1, x, need_weights=need_weights)

    with Lens(Block()) as lens:
        lens.model(torch.randn(2, 5, 12))
    assert lens.names == ("attn",)
    assert lens.cross[0].name == "cross_attn"


def test_extra_keys_of_multihead_attention():
    layer = nn.MultiheadAttention(12, 3, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x = torch.randn(2, 5, 12)
    lens = same_with_and_without(layer, x, x, x)
    _, weights = layer(x, x, x, average_attn_weights=False)
    assert weights.shape[-1] == 7
    torch.testing.assert_close(lens[0].weights.dense(), weights)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(training):
    layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    lens = same_with_and_without(model, torch.randn(2, 6, 16), src_key_padding_mask=padding)
    assert lens.names == ("layers.0.self_attn", "layers.1.self_attn")
    assert torch.equal(lens[0].weights.dense()[1, ..., 4:], torch.zeros(4, 6, 2))


def test_inference_fast_path_agrees_off_padding():
    layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    x = torch.randn(2, 6, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        plain = model(x, src_key_padding_mask=padding)
        with Lens(model) as lens:
            seen = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(plain[~padding], seen[~padding])
    assert len(lens) == 2


def test_transformer_with_a_decoder():
    model = nn.Transformer(16, 4, 2, 2, 20, batch_first=True)
    lens = same_with_and_without(model, torch.randn(2, 6, 16), torch.randn(2, 5, 16))
    assert (len(lens), len(lens.cross)) == (4, 2)
    assert lens.cross[1].name == "decoder.layers.1.multihead_attn"
    assert lens.cross[1].weights.shape == (2, 4, 5, 6)


def test_any_number_of_dimensions():
    class Model(nn.Module):
        def forward(self, *tensors):
            return F.scaled_dot_product_attention(*tensors)

    for shape in [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)]:
        q, k, v = (torch.randn(shape) for _ in range(3))
        mask = torch.rand(*shape[:-2], 5, 5) > 0.3
        mask[..., 0] = True
        with Lens(Model()) as lens:
            output = lens.model(q, k, v, mask)
        weights = torch.softmax((q @ k.mT / 2).masked_fill(~mask, -torch.inf), -1)
        torch.testing.assert_close(weights @ v, output)
        torch.testing.assert_close(lens[0].weights.dense().reshape(weights.shape), weights)


def test_repeated_heads_are_kept_once():
    class Model(nn.Module):
        def forward(self, q, k, v):
            k, v = (t.repeat_interleave(3, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    with Lens(Model(), values=True) as lens:
        lens.model(q, k, v)
    assert torch.equal(lens[0].key, k) and torch.equal(lens[0].value, v)
    torch.testing.assert_close(lens[0].weights.dense(), es.AttentionWeights(q, k, es.causal()).dense())


def test_values_only_when_asked_for():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 4))
    with Lens(model) as lens, Lens(model, values=True, keep_on="cpu") as other:
        model(ids)
    assert lens[0].value is None
    assert other[0].value.shape == (1, 2, 4, 8)


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(first):
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (1, 4))
    with Lens(model) as lens:
        for inference in (first, not first):
            with torch.inference_mode(inference):
                model(ids)
    for call in lens.passes(1):
        assert not call.query.is_inference()
        weights = es.AttentionWeights(call.query.requires_grad_(), call.key, call.mask)
        weights.entropy().sum().backward()


class Attend(nn.Module):
    def forward(self, *tensors, **settings):
        return F.scaled_dot_product_attention(*tensors, **settings)


@pytest.mark.parametrize("inference", [True, False])
def test_a_mask_that_is_written_to(inference):
    with torch.inference_mode(inference), Lens(Attend()) as lens:
        q, mask = torch.randn(1, 2, 5, 4), torch.rand(1, 1, 5, 5) > 0.3
        mask[..., 0] = True
        seen = [mask.clone()]
        lens.model(q, q, q, mask)
        for change in (lambda: mask.fill_(True).tril_(), lambda: mask[..., 3].fill_(False)):
            change()
            seen.append(mask.clone())
            lens.model(q, q, q, mask)
    for call, expected in zip(lens.passes(0), seen, strict=True):
        assert torch.equal(call.weights.dense() > 0, expected.expand(1, 2, 5, 5))


def test_padding_behind_a_single_query():
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 6, 8)
    keep = torch.arange(6)[None] < 4
    with Lens(Attend()) as lens:
        for _ in range(2):
            lens.model(q, k, k, keep)
    assert len(lens.passes(0)) == 2
    expected = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~keep, -torch.inf), -1)
    torch.testing.assert_close(lens[0].weights.dense(), expected)
    with Lens(Attend()) as lens:  # room in a static cache
        for n in (4, 5):
            cache = torch.where(torch.arange(6)[:, None] < n, k, 0)
            lens.model(q, cache, cache, torch.arange(6)[None] < n)
    assert lens[0].weights.shape == (2, 2, 2, 5)


def test_what_is_kept_lies_side_by_side():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 4))
    with Lens(model) as lens:
        model(ids)
    assert len({tensor.untyped_storage().data_ptr() for call in lens for tensor in (call.query, call.key)}) == 1


def test_layers_chosen():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 4))
    with Lens(model, layers=range(0, 3, 2)) as lens:
        model(ids)
    assert [call.index for call in lens] == [0, 2]
    assert len(lens) == 3
    with pytest.raises(LookupError, match=r"layer 1 was not kept: .* layers=range\(0, 3, 2\)"):
        lens[1]


def test_layers_that_are_not_there():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 4))
    with pytest.warns(UserWarning, match=r"layers=\[99\], and 3 were seen, numbered from 0"), Lens(model, layers=[99]):
        model(ids)
    with pytest.raises(ValueError, match=r"numbered from 0, and how many there are is not known .* not \[-1\]"):
        Lens(model, layers=[0, -1])


def test_readouts_on_the_way_keep_nothing_else():
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (2, 6))
    with Lens(model, readouts={"recv": es.Received(queries=slice(-2, None)), "top": es.TopK(2)}) as lens:
        model(ids)
    with Lens(model) as kept:
        model(ids)
    assert lens[1].query.numel() == lens[1].key.numel() == 0
    expected = kept[1].weights.received(queries=slice(-2, None))
    torch.testing.assert_close(lens[1].results["recv"], expected)
    assert torch.equal(lens[1].results["top"].indices, kept[1].weights.topk(2).indices)
    with pytest.raises(LookupError, match="keeps only results"):
        lens.heads(ids)
    with pytest.raises(LookupError, match="keeps only results"):
        _ = lens[1].weights
    with pytest.raises(ValueError, match="values=True keeps values and readouts= keeps only results"):
        Lens(model, readouts=es.Entropy(), values=True)


def test_on_call_runs_before_the_layer_returns():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 5))
    order = []
    for block in model.blocks:
        block.attention.output.register_forward_pre_hook(lambda *_: order.append("output"))
    calls = []

    def look(call):
        order.append("call")
        calls.append((call.index, call.name, call.module, call.query.shape, call.value.shape, call.mask, call.results))

    with Lens(model, readouts=es.Entropy(), on_call=look):
        model(ids)
    saved = []
    with Lens(model, on_call=saved.append) as lens:
        model(ids)
    assert saved[0].value.shape == (1, 2, 5, 8) and lens[0].value is None
    order = order[:6]
    assert order == ["call", "output"] * 3
    index, name, module, query, value, mask, results = calls[2]
    assert (index, name, module) == (2, "blocks.2.attention", model.blocks[2].attention)
    assert query == value == (1, 2, 5, 8)
    assert torch.equal(mask.dense(5, 5), torch.ones(5, 5).tril().bool())
    assert results.shape == (1, 2, 5)


def test_several_passes():
    model = GPT("sdpa")
    a, b = torch.randint(0, 17, (1, 5)), torch.randint(0, 17, (1, 7))
    with Lens(model) as lens:
        model(a)
        model(b)
    assert [call.query.shape[2] for call in lens.passes(0)] == [5, 7]
    assert lens[0].weights.shape == (1, 2, 7, 7)
    assert len(lens) == 3


def test_a_module_used_twice_is_two_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = GPT("sdpa").blocks[0]

        def forward(self, x):
            return self.inner(self.inner(x))

    model = Twice()
    with Lens(model) as lens:
        model(torch.randn(1, 5, 16))
        model(torch.randn(1, 5, 16))
    assert lens.names == ("inner.attention", "inner.attention (2)")
    assert len(lens.passes(1)) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_count_once(reentrant):
    model = GPT("sdpa", checkpoint=reentrant).train()
    x = torch.randint(0, 17, (2, 6))
    lens = same_with_and_without(model, x)
    assert len(lens) == 3
    assert [len(lens.passes(n)) for n in range(3)] == [1, 1, 1]


def test_nested_lenses():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 5))
    with Lens(model) as outer:
        with Lens(model, layers=[1]) as inner, Lens(model.blocks[2]) as part:
            model(ids)
        model(ids[:, :3])
    assert [call.query.shape[2] for call in outer.passes(1)] == [5, 3]
    assert [call.query.shape[2] for call in inner.passes(1)] == [5]
    assert part.names == ("attention",)


def test_another_models_calls_are_not_ours():
    model, other, ids = GPT("sdpa"), GPT("sdpa"), torch.randint(0, 17, (1, 5))
    with Lens(model) as lens, Lens(other) as second:
        model(ids)
    with pytest.raises(LookupError, match="saw no call"):
        second[0]
    assert len(lens) == 3


test_another_models_calls_are_not_ours = pytest.mark.filterwarnings("ignore:the lens saw no call")(
    test_another_models_calls_are_not_ours
)


def test_two_threads():
    model = GPT("sdpa").eval()
    inputs = [torch.randint(0, 17, (1, n)) for n in (4, 6)]
    found, barrier = {}, threading.Barrier(2)

    def work(ids):
        with torch.no_grad(), Lens(model) as lens:
            barrier.wait()
            for _ in range(20):
                model(ids)
            barrier.wait()
        found[ids.shape[1]] = {call.query.shape[2] for call in lens.passes(2)}, len(lens.passes(2)), len(lens)

    threads = [threading.Thread(target=work, args=(ids,)) for ids in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {4: ({4}, 20, 3), 6: ({6}, 20, 3)}


def test_closed_in_another_thread():
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (1, 4))
    lens, first, done = Lens(model), threading.Event(), threading.Event()
    found = []

    def work():
        lens.__enter__()
        model(ids)
        first.set()
        done.wait(20)
        model(ids)  # in no lens
        with Lens(model) as second:
            model(ids)
        found.append([len(second.passes(0)), len(second)])

    thread = threading.Thread(target=work)
    thread.start()
    first.wait(20)
    lens.__exit__(None, None, None)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    done.set()
    thread.join()
    assert len(lens.passes(0)) == 1 and found == [[1, 3]]


def test_copied_and_saved_in_a_lens():
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (1, 4))
    with Lens(model) as lens:
        output = model(ids)
        copied, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        assert torch.equal(copied(ids), output)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert torch.equal(copied(ids), output) and torch.equal(loaded(ids), output)
    with Lens(copied) as other:
        copied(ids)
    assert len(lens.passes(0)) == len(other.passes(0)) == 1


def test_what_else_is_refused():
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (1, 6))
    with Lens(model) as lens:
        model(ids)
    bare = inspect.unwrap  # without the check of types that the tests wrap around them
    for wrong in (slice(0, 2), None, 1.0, True):
        with pytest.raises(TypeError, match="a layer is chosen by its number or name, one at a time, not"):
            bare(Lens._find)(lens, wrong, False)
    for arguments, error, said in [
        ({"readouts": 3}, TypeError, r"a readout must be one of einsight's, such as Entropy\(\), not 3"),
        ({"readouts": [es.Entropy]}, TypeError, "a readout must be an instance"),
        ({"keep_on": "foo"}, ValueError, "keep_on must be a device that is there, such as 'cpu', not 'foo'"),
    ]:
        with pytest.raises(error, match=said):
            Lens(model, **arguments)
    for query, error, said in [
        (1.5, TypeError, "query must be an int"),
        (9, ValueError, "query names 9, but there are"),
    ]:
        with pytest.raises(error, match=said):
            bare(Lens.rollout)(lens, query)
    with pytest.raises(TypeError, match=r"tokens must be token ids .* not 'text'; write tokenizer\(text\)"):
        lens.heads("text")
    with pytest.raises(TypeError, match=r"tokens must be token ids .* not None"):
        lens.heads(None)
    with pytest.raises(ValueError, match="top takes how many rows, 0 or more, not -1"):
        lens.heads(ids).top(-1)


def test_an_exception_leaves_no_trace():
    from torch.overrides import _get_current_function_mode_stack

    model = GPT("sdpa")

    def fail(call):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), Lens(model, on_call=fail):
        model(torch.randint(0, 17, (1, 5)))
    assert _get_current_function_mode_stack() == []
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with Lens(model) as lens:
        model(torch.randint(0, 17, (1, 5)))
    assert len(lens) == 3


def test_never_silently_empty():
    class BloomAttention(nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, -1) @ x

    model = nn.Sequential(BloomAttention(), BloomAttention())
    said = r"saw no call of attention\. These modules look like it: 0 \(BloomAttention\)"
    with pytest.warns(UserWarning, match=said), Lens(model) as lens:
        model(torch.randn(1, 3, 4))
    with pytest.raises(LookupError, match=r"Ways out: .* call lens\.record"):
        lens[0]


def test_record_attention_written_by_hand():
    class Attention(nn.Module):
        lens = None

        def forward(self, x):
            x = x[:, None]
            if self.lens is not None:
                self.lens.record(x, x, x, es.causal(), scale=1.0, name="by hand")
            return torch.softmax((x @ x.mT).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf), -1) @ x

    model = Attention()
    with Lens(model) as lens:
        model.lens = lens
        x = torch.randn(2, 3, 4)
        output = model(x)
    torch.testing.assert_close(lens["by hand"].weights.dense() @ x[:, None], output)
    with Lens(model) as lens, pytest.raises(ValueError, match="offset is needed"):
        lens.record(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4), mask=es.causal(), name="x")


test_record_attention_written_by_hand = pytest.mark.filterwarnings("ignore:the lens saw no call")(
    test_record_attention_written_by_hand
)


def test_refusals():
    model = GPT("sdpa")
    bare = inspect.unwrap(Lens.__init__)  # without the check of types that the tests wrap around it
    for arguments, said in [
        (("gpt2",), r"model must be a torch\.nn\.Module, not str"),
        ((model, 3), "layers must be a range, list or set of layer numbers, not 3"),
        ((model, "3"), "layers must be a range, list or set of layer numbers, not '3'"),
    ]:
        with pytest.raises(TypeError, match=said):
            bare(object.__new__(Lens), arguments[0], layers=[*arguments, None][1])
    with pytest.raises(TypeError, match="on_call must be a function of a Call, not 1"):
        bare(object.__new__(Lens), model, on_call=1)
    with Lens(model) as lens:
        model(torch.randint(0, 17, (1, 5)))
    with pytest.raises(IndexError, match="layer 3 is out of range: the lens saw 3 self-attention layers"):
        lens[3]
    with pytest.raises(IndexError, match="layer 0 is out of range: the lens saw 0 cross-attention layers"):
        lens.cross[0]
    with pytest.raises(KeyError, match=r"no self-attention layer 'x' was kept; there are blocks\.0\.attention"):
        lens["x"]


def test_one_item_of_keys_for_all():
    class Layer(nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

    layer, query, key, value = Layer(), torch.randn(2, 3, 5, 7), torch.randn(1, 3, 11, 7), torch.randn(1, 3, 11, 7)
    with Lens(layer) as lens:
        output = layer(query, key, value)
    call = lens.cross[0] if lens.cross.names else lens[0]
    torch.testing.assert_close(call.weights @ value.expand(2, -1, -1, -1), output)


def test_repr():
    model = nn.TransformerDecoderLayer(16, 2, 20, batch_first=True)
    lens = Lens(model)
    assert repr(lens) == "Lens(TransformerDecoderLayer: nothing seen yet)"
    with lens:
        model(torch.randn(3, 5, 16), torch.randn(3, 7, 16))
    assert (
        repr(lens)
        == "Lens(TransformerDecoderLayer: 1 self-attention and 1 cross-attention layers, 1 pass, b=3, i=5, j=7)"
    )
    with lens:
        model(torch.randn(2, 5, 16), torch.randn(2, 7, 16))
    assert repr(lens).endswith("2 passes, the last with b=2, i=5, j=7)")
    with Lens(model, readouts=es.Entropy()) as lens:
        model(torch.randn(3, 5, 16), torch.randn(3, 7, 16))
    assert repr(lens).endswith("layers, 1 pass)")
