"""What a lens keeps, of which layers, passes and threads, and what it refuses."""

import copy
import inspect
import io
import threading

import pytest
import torch
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Lens
from einsight.lens.store import PIECE, Store


def test_values_only_when_asked_for():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (1, 4))
    with Lens(model) as lens, Lens(model, values=True, keep_on="cpu") as other:
        model(ids)
    assert lens[0].value is None
    assert other[0].value.shape == (1, 2, 4, 8)


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
    with pytest.raises(TypeError, match="layers must be numbers or the name of the module that they are in, not 3"):
        bare(Lens._chosen)(lens, 3)
    with pytest.raises(LookupError, match="the lens saw no call of attention"):
        Lens(model).heads(ids)
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


def test_what_is_large_has_room_of_its_own():
    large, small = torch.zeros(PIECE // 8 + 1), torch.ones(3)
    store = Store()
    kept = store.keep(large), store.keep(small)
    assert torch.equal(kept[0], large) and torch.equal(kept[1], small)
    assert kept[0].untyped_storage().nbytes() == 4 * large.numel()
    assert kept[1].untyped_storage().nbytes() == PIECE
