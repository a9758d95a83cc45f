"""Effects against edits made one by one."""

import inspect
import sys

import pytest
import torch
from lens.edits import IDS, close, metric, one_by_one
from lens.gpt import GPT, Block
from torch import nn

import einsight as es
from einsight.lens import Edit, Lens, effects

OTHER = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT("sdpa").eval()


@pytest.mark.parametrize("change", ["zero", "mean", "reference", "other", "weights"])
def test_heads(model, change):
    with Lens(model, values=True) as clean:
        model(OTHER)
    settings = {
        "zero": {},
        "mean": {"output": "mean"},
        "reference": {"output": ("mean", clean)},
        "other": {"output": clean},
        "weights": {"weights": clean},
    }[change]
    table = effects(model, IDS, metric, **settings)
    assert table.columns == ("layer", "name", "head", "change", "metric")
    assert table["name"] == [f"blocks.{n}.attention" for n in range(3) for _ in range(2)] and not table.note
    assert (table["layer"], table["head"]) == ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    close(
        table,
        one_by_one(model, [{"layers": n, "heads": h, **(settings or {"output": 0})} for n in range(3) for h in (0, 1)]),
    )
    assert table.grid("change").shape == (3, 2)
    assert len(table.sort("change").top(2)) == 2


def test_layers(model):
    table = effects(model, (IDS,), metric, over="layers", layers=[2, 0])
    assert table["layer"] == [2, 0]
    close(table, one_by_one(model, [{"layers": n, "output": 0} for n in (2, 0)]))


def test_edges(model):
    table = effects(model, {"ids": IDS}, metric, over="edges")
    assert (table["query"], table["key"]) == ([8] * 9, list(range(9)))
    close(table, one_by_one(model, [{"mask": ~es.pairs(-1, key)} for key in range(9)]))
    table = effects(model, IDS, metric, over="edges", queries=[2, -1], keys=[1, 5], layers=[1])
    assert list(zip(table["query"], table["key"], strict=True)) == [(2, 1), (8, 1), (8, 5)]
    close(table, one_by_one(model, [{"layers": 1, "mask": ~es.pairs(q, k)} for q, k in ((2, 1), (8, 1), (8, 5))]))


class Counted(GPT):
    ran = 0

    def __init__(self):
        super().__init__("sdpa")
        for block in self.blocks:
            block.attention.register_forward_hook(self._count)

    def _count(self, *_):
        self.ran += 1


def test_nothing_is_run_again_that_does_not_change():
    model = Counted().eval()
    effects(model, IDS, metric)
    # The clean run, twice; two heads together, in each layer from that layer on; for each of these few layers a
    # whole run of a head alone, to compare.
    assert model.ran == 2 * 3 + (3 + 2 + 1) + 3 * 3
    model.ran = 0
    model.blocks = nn.ModuleList(Block("sdpa") for _ in range(12))
    for block in model.blocks:
        block.attention.register_forward_hook(model._count)
    effects(model.eval(), IDS, metric)
    # Three whole runs; in the other layers a run through its own block and the one before.
    assert model.ran == 2 * 12 + sum(range(1, 13)) + 3 * 12 + 9 * 2
    assert all("forward" not in vars(block) for block in model.blocks)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_published_models(attention):
    pytest.importorskip("transformers")
    from lens.architectures import build

    model, inputs = build("llama", attention)
    inputs = {**inputs, "labels": inputs["input_ids"]}

    def metric(output):
        return output.loss

    table = effects(model, inputs, metric, progress=False)
    found = []
    with torch.no_grad():
        plain = float(model(**inputs).loss)
        for n in range(2):
            for head in range(4):
                with Edit(model, layers=n, heads=head, output=0):
                    found.append(float(model(**inputs).loss) - plain)
    close(table, found)


def logits_of(output):
    return output.logits[0, -1, 3] - output.logits[0, -1, 4]


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("over", ["heads", "layers"])
def test_layers_have_the_numbers_and_names_that_the_lens_and_edits_give(name, over):
    pytest.importorskip("transformers")
    from lens.architectures import build

    model, inputs = build(name, "sdpa")
    with torch.no_grad(), Lens(model) as lens:
        model(**inputs)
    cross = lens.cross.names[1]
    for layers, expected in [
        (None, lens.names),
        ([2, -1], [lens.names[2], lens.names[3]]),
        ("decoder" if name == "t5" else "model.decoder", lens.names[2:]),
        (cross, [cross]),
        ([cross, 1], [cross, lens.names[1]]),
    ]:
        table = effects(model, inputs, logits_of, over, layers=layers)
        heads = [{"heads": h} for h in range(4)] if over == "heads" else [{}]
        assert table["name"] == [name for name in expected for _ in heads]
        found = []
        with torch.no_grad():
            plain = float(logits_of(model(**inputs)))
            for layer in expected:
                for head in heads:
                    with Edit(model, layers=layer, output=0, **head):
                        found.append(float(logits_of(model(**inputs))) - plain)
        close(table, found)
        if layers is None:
            assert table["layer"] == [n for n in range(4) for _ in heads]
    if over == "heads":
        with pytest.raises(ValueError, match="self- and cross-attention have the same numbers"):
            effects(model, inputs, logits_of, layers=[*lens.names, *lens.cross.names]).grid("change")


def test_edges_of_cross_attention():
    pytest.importorskip("transformers")
    from lens.architectures import build

    model, inputs = build("bart", "sdpa")
    with pytest.raises(ValueError, match=r"layers have \[\(7, 7\), \(11, 11\)\] queries and keys"):
        effects(model, inputs, logits_of, over="edges")
    name = "model.decoder.layers.1.encoder_attn"
    table = effects(model, inputs, logits_of, over="edges", layers=name)
    found = []
    with torch.no_grad():
        plain = float(logits_of(model(**inputs)))
        for key in range(11):
            with Edit(model, layers=name, mask=~es.pairs(-1, key)):
                found.append(float(logits_of(model(**inputs))) - plain)
    close(table, found)


def test_only_cross_attention():
    model = Looks().eval()
    x = torch.randn(2, 5, 16)
    with pytest.raises(LookupError, match=r"cross-attention did: name it with layers=, of cross_attn"):
        effects(model, x, lambda output: output.square().mean())
    assert effects(model, x, lambda output: output.square().mean(), layers="cross_attn")["head"] == [0, 1]


class Looks(nn.Module):
    """Attention to learned tokens."""

    def __init__(self):
        super().__init__()
        self.cross_attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.tokens = nn.Parameter(torch.randn(3, 16))

    def forward(self, x):
        tokens = self.tokens.expand(len(x), -1, -1)
        return self.cross_attn(x, tokens, tokens, need_weights=False)[0]


def test_refusals(model):
    bare = inspect.unwrap(effects)
    lens = Lens(model)
    for settings, error, said in [
        ({"over": "tokens"}, ValueError, 'over must be "heads", "layers" or "edges", not \'tokens\''),
        ({"over": "edges", "output": 0}, ValueError, "output= and weights= are for heads and layers"),
        ({"output": 0, "weights": lens}, ValueError, "are two ways to change a head"),
        ({"layers": [5]}, ValueError, r"layers names \[5\], but the model ran 3 self-attention layers"),
        ({"metric": lambda output: output}, ValueError, r"metric must give one number, not a tensor \[2, 9, 16\]"),
        ({"metric": lambda output: "much"}, TypeError, "metric must give a number, not 'much'"),
        ({"over": "edges", "queries": 9}, ValueError, "queries names 9"),
        ({"queries": 3}, ValueError, "queries= and keys= choose edges"),
    ]:
        with pytest.raises(error, match=said):
            bare(model, IDS, **{"metric": metric, **settings})
    with pytest.raises(ValueError, match=r"in training mode, .* model\.eval\(\)"):
        effects(GPT("sdpa"), IDS, metric)
    with pytest.raises(LookupError, match="no self-attention ran"):
        effects(nn.Linear(3, 3).eval(), torch.randn(1, 3), lambda output: output.sum())
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
        bare("gpt2", IDS, metric)


def test_a_forward_of_a_blocks_own_is_put_back(model):
    expected = effects(model, IDS, metric)["change"]
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda x: forward(x)
    own = model.blocks[0].forward
    assert effects(model, IDS, metric)["change"] == expected
    assert model.blocks[0].forward is own


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap's
def test_what_cannot_be_looked_at_is_refused():
    class Mapped(nn.Module):
        def forward(self, x):
            return torch.vmap(nn.functional.scaled_dot_product_attention)(x, x, x)

    said = r"effects can't be told of calls of attention in a transform of torch\.func"
    with pytest.raises(RuntimeError, match=said):
        effects(Mapped().eval(), torch.randn(2, 1, 2, 5, 4), lambda output: output.sum())


def test_weights_where_a_layer_tells_no_values():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x)[0]

    model, x = Layer().eval(), torch.randn(2, 5, 16)
    with torch.no_grad(), Lens(model) as clean:
        model(x + 1)
    with pytest.raises(ValueError, match=r"layer 'attn' tells no values: call nn\.MultiheadAttention with need_"):
        effects(model, x, lambda output: output.sum(), weights=clean)


def test_without_rich_there_is_no_bar(model, monkeypatch):
    expected = effects(model, IDS, metric, progress=True)["change"]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert effects(model, IDS, metric, progress=True)["change"] == expected
