"""Edits of Hugging Face's models and in generation with a cache, and what an edit refuses."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Edit, Lens, effects
from einsight.lens.huggingface import register

hf = pytest.importorskip("transformers")
from lens.architectures import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def ids_of(n=9, b=1):
    return torch.randint(3, 53, (b, n), generator=torch.Generator().manual_seed(n))


def steps(model, ids, cache):
    """The logits of a prompt of 5 tokens, then of the rest one by one."""
    found = [model(input_ids=ids[:, :5], past_key_values=cache).logits]
    for n in range(5, ids.shape[1]):
        found.append(model(input_ids=ids[:, n : n + 1], past_key_values=cache, position_ids=torch.tensor([[n]])).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "mistral"])
@pytest.mark.parametrize("static", [False, True])
def test_generation_with_a_cache(name, attention, static):
    if attention == "sdpa" and name in ("gemma2", "gpt_oss"):
        pytest.skip("has no such implementation")
    model, _ = build(name, attention)
    ids, other = ids_of(), ids_of(10)[:, :9]
    with torch.no_grad(), Lens(model, values=True) as clean:
        model(input_ids=other)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        for edit in (
            lambda: Edit(model, layers=1, heads=[1, 2], mask=es.window(2, 0)),
            lambda: Edit(model, layers=[0, 1], heads=[0, 3], weights=clean),
            lambda: Edit(model, layers=1, weights=clean),
            lambda: Edit(model, layers=0, heads=-1, output=clean),
            lambda: Edit(model, layers=0, output=("mean", clean)),
            lambda: Edit(model, layers=1, heads=[1], bias=es.alibi(torch.tensor([1.0, 0.5, 2.0, 0.2]))),
        ):
            with edit():
                whole = model(input_ids=ids).logits
                cache = hf.StaticCache(config=model.config, max_cache_len=12) if static else hf.DynamicCache()
                windowed = {"mistral": {0, 1}, "gemma2": {0}, "gpt_oss": {0}}.get(name, set())
                if static and edit()._follows and windowed & set(edit()._layers):
                    with pytest.raises(ValueError, match="keeps only a window of keys in its cache"):
                        steps(model, ids, cache)
                    continue
                stepwise = steps(model, ids, cache)
            torch.testing.assert_close(stepwise, whole, **CLOSE)
            assert not torch.allclose(whole, plain, atol=1e-3)


def test_generate_sees_the_edit():
    model, _ = build("llama", "sdpa")
    ids = ids_of()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with Edit(model, heads=[0], output=0), Lens(model) as lens:
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        again = model(input_ids=whole).logits.argmax(-1)
    assert torch.equal(again[:, 8:-1], whole[:, 9:])
    assert [len(lens.passes(n)) for n in range(2)] == [2, 2]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5", "bert"])
def test_weights_that_eager_models_tell_are_the_edited_ones(name):
    model, inputs = build(name, "eager")
    key = "encoder_attentions" if name == "t5" else "attentions"
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)[key]
        with Edit(model, layers=1, heads=[2], mask=~es.pairs(-1, 0)), Lens(model) as lens:
            told = model(**inputs, output_attentions=True)[key]
    assert torch.equal(plain[0], told[0])
    assert torch.equal(plain[1][:, [0, 1, 3]], told[1][:, [0, 1, 3]])
    assert not told[1][:, 2, -1, 0].any()
    torch.testing.assert_close(lens[1].weights.dense(), told[1], atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(told[1].sum(-1)[0, 2, :-1], plain[1].sum(-1)[0, 2, :-1])


def test_cross_attention_is_edited_where_it_is_named():
    model, inputs = build("bart", "sdpa")
    name = "model.decoder.layers.1.encoder_attn"
    with torch.no_grad(), Edit(model, layers=name, mask=~es.pairs(slice(None), [0, 1])), Lens(model) as lens:
        model(**inputs)
    assert not lens.cross[1].weights.dense()[..., :2].any()
    assert lens.cross[0].weights.dense()[..., :2].any()
    with torch.no_grad(), Edit(model, output=0), Lens(model, values=True) as lens:
        model(**inputs)
    assert lens.cross[0].weights.dense()[..., :2].any()


def test_a_batch_under_one_clean_sequence():
    model, _ = build("llama", "sdpa")
    with torch.no_grad(), Lens(model) as clean:
        model(input_ids=ids_of())
    with torch.no_grad(), Edit(model, heads=[1], weights=clean), Lens(model) as lens:
        model(input_ids=ids_of(9, 3))
    for n in range(2):
        expected = clean[n].weights.dense()[:, 1].expand(3, -1, -1)
        torch.testing.assert_close(lens[n].weights.dense()[:, 1], expected, **CLOSE)


def refused(error, said, run, **settings):
    with pytest.raises(error, match=said), Edit(run.model, **settings):
        run()


class Run:
    def __init__(self, n=9, b=1):
        self.model, self.ids = GPT("sdpa").eval(), torch.randint(0, 17, (b, n))

    def __call__(self):
        return self.model(self.ids)


def test_what_does_not_fit_is_refused():
    run, other = Run(9), Run(7, 2)
    with Lens(other.model) as clean:
        other()
    with Lens(run.model, layers=[0]) as part:
        run()
    refused(
        LookupError,
        r"nothing was edited in layers \[5\]: no self-attention of theirs ran\. .* 2 blocks\.2",
        run,
        layers=5,
        output=0,
    )
    refused(ValueError, "heads names 4, but there are 2", run, heads=4, output=0)
    refused(ValueError, "weights= come from a run of 2 sequences, 7 queries and 7 keys, but layer", run, weights=clean)
    refused(ValueError, "needs its values: Lens\\(model, values=True\\)", run, layers=0, output=part)
    refused(ValueError, "needs its values", run, layers=0, output=("mean", part))
    with Lens(run.model, readouts={"entropy": es.Entropy()}) as read:
        run()
    refused(ValueError, "weights= is a lens that keeps only the results of its readouts=", run, weights=read)
    refused(ValueError, "weights= is a call of a lens that keeps only the results", run, weights=read[0])
    refused(ValueError, r"values=True\), without readouts=", run, output=read)
    with pytest.raises(ValueError, match="weights= is a lens that keeps only the results"):
        effects(run.model, run.ids, lambda output: output.sum(), weights=read)
    refused(ValueError, "a lens that kept no layer 'blocks.1.attention'", run, weights=part)
    shape = r"output= has shape \[5, 8\], which does not broadcast to layer 'blocks.0.attention'"
    refused(ValueError, shape, run, output=torch.ones(5, 8))
    own = es.AttentionWeights(*torch.randn(2, 1, 2, 9, 8), softcap=3.0)
    refused(ValueError, "weights= have softcap=3.0, but layer", run, heads=0, weights=own)
    refused(ValueError, "weights= takes whole weights", run, weights=own.select(heads=[0]))
    wide = es.AttentionWeights(*torch.randn(2, 1, 2, 9, 4))
    refused(ValueError, "heads of 4 dimensions, but layer .* has 8", run, heads=0, weights=wide)
    many = es.AttentionWeights(*torch.randn(2, 1, 3, 9, 8))
    refused(ValueError, "come from 3 heads, but layer", run, weights=many)
    with pytest.raises(LookupError, match="nothing was edited: the lens saw no call"), Edit(run.model, output=0):
        pass
    model, _ = build("llama", "sdpa")
    with torch.no_grad(), pytest.raises(ValueError, match=r'take the mean of a reference run: output=\("mean", lens\)'):
        cache = hf.DynamicCache()
        with Edit(model, output="mean"):
            steps(model, ids_of(), cache)


class Mixed(nn.Module):
    """Looks at itself by hand, then by PyTorch, then at other tokens."""

    def __init__(self):
        super().__init__()
        self.hand, self.own, self.cross_attn = ByHand(), Attends(), Attends()

    def forward(self, x, lens=None):
        return self.cross_attn(self.own(self.hand(x, lens)), x[:, :, :3])


class ByHand(nn.Module):
    def forward(self, x, lens):
        if lens is not None:
            lens.record(x, x)
        return (x @ x.mT).softmax(-1) @ x


class Attends(nn.Module):
    def forward(self, x, y=None):
        y = x if y is None else y
        return F.scaled_dot_product_attention(x, y, y)


def test_only_cross_attention_is_nothing_edited():
    model, x = Mixed().cross_attn, torch.randn(1, 2, 5, 8)
    model = nn.ModuleDict({"cross_attn": model})
    said = r"nothing was edited.*: no self-attention.* ran\. .* ran: none; cross-attention, .* by its name: cross_attn"
    for layers in (None, 0):
        with pytest.raises(LookupError, match=said), Edit(model, layers=layers, output=0):
            model["cross_attn"](x, x[:, :, :3])
    with Edit(model, layers="cross_attn", output=0):
        assert not model["cross_attn"](x, x[:, :, :3]).any()


def test_what_is_only_recorded_by_hand_is_not_edited():
    model, x = Mixed(), torch.randn(1, 2, 5, 8)
    for layers in (None, 0, "hand"):
        for edit_first in (False, True):
            with pytest.raises(ValueError, match="layer 'hand' is computed by hand and only recorded"):
                edit, lens = Edit(model, layers=layers, output=0), Lens(model)
                with edit if edit_first else lens, lens if edit_first else edit:
                    model(x, lens)
    with Lens(model) as lens, Edit(model, layers=1, output=0):  # numbered as the lens has it
        edited = model(x, lens)
    assert lens.names == ("hand", "own")
    with Edit(model, layers="own", output=0):
        assert torch.equal(model(x), edited)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_what_is_no_edit_is_refused():
    model = GPT("sdpa")
    make = inspect.unwrap(Edit.__init__)  # without the check of types that the tests wrap around it
    for settings, error, said in [
        ({}, ValueError, "an Edit changes something"),
        ({"layers": 1.5, "output": 0}, TypeError, "layers must be numbers or names of modules, not 1.5"),
        ({"layers": [-1], "output": 0}, ValueError, "numbered from 0"),
        ({"layers": "x", "output": 0}, KeyError, "no module is named 'x' in this GPT"),
        ({"mask": torch.ones(2, 2)}, TypeError, r"mask must be one of einsight's, such as ~es\.pairs"),
        ({"bias": torch.ones(2, dtype=torch.int64)}, TypeError, "bias must be a float tensor"),
        ({"weights": torch.ones(2)}, TypeError, "weights must be a Lens on another run, a Call or AttentionWeights"),
        ({"output": "zero"}, ValueError, 'output must be a number, "mean"'),
        ({"output": torch.ones(2, dtype=torch.int64)}, TypeError, "output must be a number, .* not a tensor of"),
        ({"output": [1]}, TypeError, r'output must be a number, "mean", .* not \[1\]'),
    ]:
        with pytest.raises(error, match=said):
            make(object.__new__(Edit), model, **settings)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
        make(object.__new__(Edit), "gpt2", output=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_can_not_be_edited_is_refused():
    run = Run()
    refused(RuntimeError, "in a transform of torch.func", lambda_of(run, lambda m, x: torch.func.vmap(m)(x)), output=0)
    twice = Run()
    twice.model.blocks[1] = twice.model.blocks[0]
    twice.model.checkpoint = True
    with pytest.raises(RuntimeError, match="is several layers: an edit can't tell which"), Edit(twice.model, output=0):
        twice().sum().backward()
    edit = Edit(run.model, output=0)
    with edit, pytest.raises(RuntimeError, match="this edit is open already"):
        run()
        edit.__enter__()


def lambda_of(run, call):
    made = copy.copy(run)
    made.__class__ = type("Other", (Run,), {"__call__": lambda self: call(self.model, self.ids[None])})
    return made


COMPILED = """
import torch
from lens.gpt import GPT
from einsight.lens import Edit
model = GPT("sdpa").eval()
compiled = torch.compile(model, backend="eager")
ids = torch.randint(0, 17, (2, 9))
plain = compiled(ids)
try:
    with Edit(model, output=0):
        compiled(ids)
except RuntimeError as error:
    assert "in compiled code: edit the model before it is compiled" in str(error), error
else:
    raise SystemExit("was not refused")
assert torch.equal(compiled(ids), plain)
"""


def test_compiled_code_is_refused():
    ran = subprocess.run([sys.executable, "-c", COMPILED], cwd="tests", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def in_text(name, mask, ids, cache, prompt=5):
    """The logits and the second layer's weights step by step, and those of one run over the whole text."""
    model, _ = build(name, "sdpa")
    with torch.no_grad(), Edit(model, layers=1, heads=[1], mask=mask), Lens(model) as lens:
        whole = model(input_ids=ids).logits
        assert not lens[1].weights.dense()[:, 1, prompt:, 6].any()
    made = cache(model)
    with torch.no_grad(), Edit(model, layers=1, heads=[1], mask=mask):
        return steps(model, ids, made), whole


CACHES = {
    "dynamic": lambda model: hf.DynamicCache(config=model.config),
    "static": lambda model: hf.StaticCache(config=model.config, max_cache_len=16),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "mistral", "starcoder2"])
def test_keys_are_positions_in_the_text(name, cache):
    """Of a mask that names keys, also where a cache has dropped some or has room for more."""
    ids = ids_of(12, 2)
    for mask in (es.where(lambda b, h, p, j: (j != 6) | (p < 5)), es.where(lambda b, h, p, j: (j != 6) & (j != p - 3))):
        found, whole = in_text(name, mask, ids, CACHES[cache])
        torch.testing.assert_close(found, whole, **CLOSE)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_negative_keys_count_from_the_last_token(name, cache):
    model, _ = build(name, "sdpa")
    ids = ids_of(9)
    with torch.no_grad(), Edit(model, layers=1, mask=~es.pairs(-1, -2)), Lens(model) as lens:
        made = CACHES[cache](model)
        model(input_ids=ids[:, :6], past_key_values=made)
        for n in range(6, 9):
            model(input_ids=ids[:, n : n + 1], past_key_values=made, position_ids=torch.tensor([[n]]))
    dense = lens[1].weights.dense()[0, 0]
    for n in range(5, 9):
        assert dense[n, n - 1] == 0 and dense[n, n - 2] > 0 and dense[n, n] > 0


@pytest.mark.parametrize("attention", ["sdpa", "einsight"])
def test_an_edit_opened_within_a_generation(attention):
    register()
    ids = ids_of(9)
    for name in ("llama", "mistral"):
        model, _ = build(name, "sdpa")
        model.set_attn_implementation(attention)
        cache = CACHES["dynamic"](model)
        with torch.no_grad():
            model(input_ids=ids[:, :8], past_key_values=cache)
            for what, setting in (("mask", ~es.pairs(-1, 7)), ("bias", torch.tensor([20.0] + [0.0] * 8))):
                kept, edit = copy.deepcopy(cache), Edit(model, layers=1, **{what: setting})
                if name == "mistral":
                    said = f"{what}= speaks of positions in the text, but layer .* keeps only a window of 4 keys"
                    with pytest.raises(ValueError, match=said), edit:
                        model(input_ids=ids[:, 8:], past_key_values=kept)
                    continue
                with edit, Lens(model) as lens:
                    model(input_ids=ids[:, 8:], past_key_values=kept)
                seen = lens[1].weights.dense()
                assert not seen[..., 7].any() if what == "mask" else (seen[..., 0] > 0.9).all()
