"""Effects against edits made one by one, on models that let copies go side by side and on some that don't."""

import inspect

import pytest
import torch
from lens.gpt import GPT, Block
from torch import nn

import einsight as es
from einsight.lens import Edit, Lens, effects

IDS = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(2))


def metric(output):
    return output[:, -1].square().mean()


def one_by_one(model, edits, metric=metric, ids=IDS):
    found = []
    with torch.no_grad():
        plain = float(metric(model(ids)))
        for settings in edits:
            with Edit(model, **settings):
                found.append(float(metric(model(ids))) - plain)
    return found


def close(table, expected, column="change"):
    torch.testing.assert_close(torch.tensor(table[column]), torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert max(map(abs, expected)) > 1e-3


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
    assert table.columns == ("layer", "head", "change", "metric")
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
    # The clean run; two heads together, in each layer from that layer on; a head alone, to compare.
    assert model.ran == 3 + (3 + 2 + 1) + 1
    assert all("forward" not in vars(block) for block in model.blocks)


class Loss(nn.Module):
    """Gives a mean over the batch, which no copy has for itself."""

    def __init__(self):
        super().__init__()
        self.model = GPT("sdpa")

    def forward(self, ids):
        logits = self.model(ids)
        return {"loss": logits[:, -1].square().mean(), "logits": logits, "note": object()}


class LossOfEach(Loss):
    """The same, in the shape of something that copies would have."""

    def forward(self, ids):
        output = super().forward(ids)
        return output | {"loss": output["loss"].expand(len(ids))}


class BatchSecond(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 20)
        self.embed, self.encoder = nn.Embedding(17, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.encoder(self.embed(ids.T))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(17, 16), nn.ModuleList([Block("sdpa")])

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = self.blocks[0](x)
        return x


@pytest.mark.parametrize(
    "kind, metric",
    [
        (Loss, lambda output: output["loss"]),
        (LossOfEach, lambda output: output["loss"][0]),
        (BatchSecond, lambda output: output[-1, :, :3].sum()),
        (Shared, metric),
    ],
)
def test_models_that_do_not_go_side_by_side(kind, metric):
    torch.manual_seed(0)
    model = kind().eval()
    for ids in (IDS, IDS[:1]):
        table = effects(model, ids, metric)
        with Lens(model) as lens:
            model(ids)
        edits = [{"layers": name, "heads": h, "output": 0} for name in lens.names for h in (0, 1)]
        if kind is Shared:
            edits = [{"layers": n, "heads": h, "output": 0} for n in range(3) for h in (0, 1)]
        close(table, one_by_one(model, edits, metric, ids))


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
