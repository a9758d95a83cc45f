"""The table of heads, against the weights it speaks of; and the known heads of a real model."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from lens.architectures import build
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Lens
from einsight.lens.heads import COLUMNS, Heads, table
from einsight.lens.rules import Rule


def repeated(tokens=100):
    half = torch.randint(1000, 40000, (1, tokens), generator=torch.Generator().manual_seed(0))
    return torch.cat([half, half], 1)


def test_known_heads_of_the_default_model(smol):
    model, tokenizer = smol
    ids = repeated()
    with torch.inference_mode(), Lens(model) as lens:
        model(ids)
    heads = lens.heads(ids, tokenizer)
    assert len(heads) == 270
    for kind, layer, head, value in [
        ("induction", 18, 6, 0.92),
        ("previous", 16, 0, 0.90),
        ("first", 18, 8, 0.999),
    ]:
        top = next(iter(heads.sort(kind)))
        assert (top["layer"], top["head"]) == (layer, head)
        assert top[kind] == pytest.approx(value, abs=0.01)


class Fixed(nn.Module):
    """Attention with given queries and keys."""

    def forward(self, q, k, **settings):
        return es.attention(q, k, k, **settings)


class Words:
    """A tokenizer for ids below 10, of which 0 is special, 1 and 2 are punctuation."""

    all_special_ids = (0,)

    def decode(self, ids):
        return {0: "<s>", 1: ",", 2: " ."}.get(ids[0], f" word{ids[0]}")


def by_definition(weights, ids, causal, i):
    """The columns of one head [i, j] and one sequence, as their definitions say."""
    pairs = {name: [] for name in COLUMNS}
    for p in range(i):
        row = weights[p]
        visible = p + 1 if causal else i
        pairs["entropy"].append(-sum(float(w * w.log()) for w in row if w > 0))
        if visible > 1:
            pairs["relative"].append(pairs["entropy"][-1] / math.log(visible))
        if p > 0:
            pairs["first"].append(float(row[0]))
            pairs["previous"].append(float(row[p - 1]))
        pairs["itself"].append(float(row[p]))
        if int(ids[p]) in ids[:p].tolist():
            pairs["duplicate"].append(float(sum(row[j] for j in range(p) if ids[j] == ids[p])))
            pairs["induction"].append(float(sum(row[j] for j in range(1, p + 1) if ids[j - 1] == ids[p])))
        pairs["near"].append(float(sum(row[j] for j in range(i) if abs(j - p) <= 32)))
        pairs["special"].append(float(sum(row[j] for j in range(i) if ids[j] == 0)))
        pairs["punctuation"].append(float(sum(row[j] for j in range(i) if ids[j] in (1, 2))))
        pairs["distance"].append(float(sum(row[j] * abs(j - p) for j in range(i))))
    return {name: sum(values) / len(values) for name, values in pairs.items() if values}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("rule", ["plain", "dense"])
def test_every_column(causal, padding, sink, rule):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 41, 8), torch.randn(2, 2, 41, 8)
    ids = torch.randint(0, 10, (2, 41))
    real = torch.ones(2, 41, dtype=torch.bool)
    if padding != "none":
        real[1, : 5 if padding == "left" else None] = False
        if padding == "right":
            real[1] = True
            real[1, -5:] = False
    mask = es.causal() & es.padding(real) if causal else es.padding(real)
    with Lens(Fixed()) as lens:
        lens.model(q, k, mask=mask, sink=sink)
    call = lens[0]
    call.rule = Rule(causal=causal, keep=None if padding == "none" else real)
    if rule == "dense":
        call.rule = Rule(other=mask)
    heads = table([call], {"input_ids": ids, "attention_mask": real.long()}, Words())
    dense = call.weights.dense()
    for head in range(4):
        told = [
            by_definition(dense[b, head][real[b]][:, real[b]], ids[b, real[b]], causal, int(real[b].sum()))
            for b in range(2)
        ]
        count = [int(real[b].sum()) for b in range(2)]
        row = list(heads)[head]
        assert (row["layer"], row["head"]) == (0, head)
        # Of two sequences the table tells the mean over all queries; checked where each query counts.
        for name in ("entropy", "itself", "near", "special", "punctuation", "distance"):
            expected = sum(t[name] * n for t, n in zip(told, count, strict=True)) / sum(count)
            assert row[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        for name in ("first", "previous"):
            expected = sum(t[name] * (n - 1) for t, n in zip(told, count, strict=True)) / (sum(count) - 2)
            assert row[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    for b in range(2):
        alone = table([one(call, b)], {"input_ids": ids[b], "attention_mask": real[b].long()}, Words())
        for head, row in enumerate(alone):
            expected = by_definition(dense[b, head][real[b]][:, real[b]], ids[b, real[b]], causal, int(real[b].sum()))
            for name, value in expected.items():
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def one(call, b):
    """A call with one of its batch items alone."""
    from dataclasses import replace

    rule = call.rule
    keep = None if rule.keep is None else rule.keep[b : b + 1]
    other = rule.other
    if other is not None:
        other = other.dense(41, 41)
        other = other[b : b + 1] if other.ndim == 4 else other
    return replace(
        call, query=call.query[b : b + 1], key=call.key[b : b + 1], rule=replace(rule, keep=keep, other=other)
    )


def test_windows_and_biases_go_the_direct_way():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    ids, bias = torch.randint(0, 6, (1, 20)), torch.randn(2, 20, 20)
    with Lens(Fixed()) as lens:
        lens.model(q, k, mask=es.window(4, 0), bias=bias)
    weights = lens[0].weights.dense()
    heads = lens.heads(ids)
    for head, row in enumerate(heads):
        expected = by_definition(weights[0, head], ids[0], True, 20)
        for name in ("entropy", "first", "previous", "itself", "induction", "duplicate", "distance"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    assert "special" not in heads.columns


@pytest.mark.parametrize("causal", [True, False])
def test_padding_that_a_module_copies_for_each_head(causal):
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 20, batch_first=True), 2, enable_nested_tensor=False
    )
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    mask = torch.ones(6, 6).triu(1).bool() if causal else None
    with Lens(model) as lens:
        model(torch.randn(2, 6, 16), mask=mask, src_key_padding_mask=padding)
    assert lens[0].rule.other is None and lens[0].rule.causal == causal
    assert torch.equal(lens[0].rule.keep, ~padding)
    assert len(lens.heads(torch.randint(0, 17, (2, 6)))) == 8


def test_a_mask_for_each_head():
    model = nn.MultiheadAttention(12, 3, batch_first=True)
    x, hidden = torch.randn(2, 6, 12), torch.rand(6, 6, 6) > 0.5
    hidden[..., 0] = False
    with Lens(model) as lens:
        model(x, x, x, attn_mask=hidden)
    heads = lens.heads(torch.randint(0, 17, (2, 6)))
    entropy, visible = lens[0].weights.entropy(), (~hidden).sum(-1).unflatten(0, (2, 3))
    told = visible > 1
    relative = torch.where(told, entropy / visible.clamp(min=2).log(), 0)
    expected = relative.sum((0, 2)) / told.sum((0, 2))
    torch.testing.assert_close(
        torch.tensor(heads["relative"]), expected.double(), atol=1e-5, rtol=1e-5, check_dtype=False
    )


def test_what_cannot_be_told_is_nan_and_sorts_last():
    q = torch.randn(1, 2, 3, 4)
    with Lens(Fixed()) as lens:
        lens.model(q, q, mask=es.causal())
    heads = lens.heads(torch.tensor([5, 6, 7]))
    assert all(math.isnan(value) for value in heads["induction"])
    assert len(heads.sort("induction").top(5)) == 2
    assert "–" in repr(heads)


def test_the_table():
    heads = Heads({"layer": [0, 0, 1], "head": [0, 1, 0], "first": [0.1, 0.5, 0.3]})
    assert heads.sort("first")["head"] == [1, 0, 0]
    assert heads.sort("first", descending=False).top(1)["first"] == [0.1]
    assert list(heads)[2] == {"layer": 1, "head": 0, "first": 0.3}
    assert heads.to_dict() == {"layer": [0, 0, 1], "head": [0, 1, 0], "first": [0.1, 0.5, 0.3]}
    torch.testing.assert_close(heads.grid("first"), torch.tensor([[0.1, 0.5], [0.3, torch.nan]]), equal_nan=True)
    assert repr(heads.top(1)) == "layer  head  first\n    0     0  0.100"
    with pytest.raises(KeyError, match="no column 'mood'; there are layer, head, first"):
        heads.sort("mood")
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=60)
    with console.capture() as shown:
        console.print(heads)
    assert "0.500" in shown.get()


def test_pandas(monkeypatch):
    import sys

    heads = Heads({"layer": [0], "head": [0]})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas\(\) needs pandas: pip install pandas"):
        heads.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    assert heads.to_pandas() == ("frame", {"layer": [0], "head": [0]})


def test_a_long_table_is_cut_where_it_is_shown():
    lines = repr(Heads({"layer": list(range(30)), "head": [0] * 30})).splitlines()
    assert len(lines) == 22
    assert (lines[20].split(), lines[21].split()) == (["19", "0"], ["…", "…"])


def test_refusals():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (2, 6))
    with Lens(model) as lens:
        model(ids)
    with pytest.raises(ValueError, match=r"has 2 sequences of 6 queries and 6 keys, but tokens are \[1, 6\]"):
        lens.heads(ids[:1])
    with pytest.raises(TypeError, match=r"tokens must be token ids .* not torch.float32 \[2, 6\]"):
        lens.heads(ids.float())


def test_rollout():
    model, ids = GPT("sdpa").eval(), torch.randint(0, 17, (2, 6))
    with Lens(model) as lens:
        model(ids)
    product = torch.eye(6).expand(2, 6, 6)
    for call in lens:
        product = (call.weights.dense().mean(1) + torch.eye(6)) / 2 @ product
    torch.testing.assert_close(lens.rollout([-1, 2]), product[:, [-1, 2]])
    torch.testing.assert_close(lens.rollout(3), product[:, 3:4])
    torch.testing.assert_close(lens.rollout(slice(None)).sum(-1), torch.ones(2, 6))
    with Lens(model, layers=[0]) as lens:
        model(ids)
    with pytest.raises(LookupError, match="rollout needs every layer"):
        lens.rollout(0)


def test_the_class_token_of_a_vision_model():
    pytest.importorskip("transformers")
    from lens.architectures import build

    model, inputs = build("vit", "sdpa")
    with torch.no_grad(), Lens(model) as lens:
        model(**inputs)
    row = lens[1].weights.rows([0])
    with torch.no_grad():
        attentions = build("vit", "eager")[0](**inputs, output_attentions=True).attentions
    torch.testing.assert_close(row[:, :, 0], attentions[1][:, :, 0], atol=2e-6, rtol=1e-4)
    assert lens.rollout(0).shape == (2, 1, 10)


def test_no_layers_is_no_table():
    model, ids = GPT("sdpa"), torch.randint(0, 17, (2, 6))
    with Lens(model) as lens:
        model(ids)
    with pytest.raises(ValueError, match="layers names none; None, the default, is all of them"):
        lens.heads(ids, layers=[])
    with pytest.raises(ValueError, match="layers names none"):
        lens.rollout(-1, layers=[])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_drafts_that_were_refused_are_left_out():
    model, _ = build("llama", "sdpa")
    ids, cache = torch.randint(3, 53, (1, 12)), hf.DynamicCache()
    with torch.no_grad(), Lens(model) as lens:
        model(input_ids=ids[:, :6], past_key_values=cache)
        model(input_ids=ids[:, 6:], past_key_values=cache)  # a draft
    with torch.no_grad(), Lens(model) as short:
        model(input_ids=ids[:, :8])
    assert lens[0].query.shape[2] == 12
    for name, column in short.heads(ids[:, :8]).to_dict().items():
        assert lens.heads(ids[:, :8])[name] == pytest.approx(column, abs=1e-5, nan_ok=True), name
    with pytest.raises(ValueError, match="1 sequences of 12 queries"):
        lens.heads(ids[:, :6])  # these were no draft's
    with pytest.raises(ValueError, match="1 sequences of 8 queries"):
        short.heads(ids[:, :7])


def test_padding_under_a_mask_that_is_no_rule():
    """What sees nothing is in no mean, though a mask of blocks doesn't say that it is padding."""

    class Blocks(nn.Module):
        def forward(self, q, k):
            blocks = torch.arange(9)[None] // 4
            keep = torch.arange(9) >= torch.tensor([[0], [3]])
            return es.attention(q, k, k, es.causal() & es.documents(blocks.expand(2, -1)) & es.padding(keep))

    q, k = torch.randn(2, 2, 2, 9, 8)
    ids = torch.randint(0, 5, (2, 9))
    with Lens(Blocks()) as lens:
        lens.model(q, k)
    real = (torch.arange(9) >= torch.tensor([[0], [3]])).long()
    told = lens.heads({"input_ids": ids, "attention_mask": real})
    assert lens[0].rule.other is not None
    assert lens.heads(ids).to_dict() == told.to_dict()
