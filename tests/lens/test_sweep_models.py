"""Effects on models that let copies go side by side and on some that don't, against edits made one by one."""

import pytest
import torch
from lens.edits import IDS, close, metric, one_by_one
from lens.gpt import GPT, Block
from torch import nn

import einsight as es
from einsight.lens import Lens, effects


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


class Changed(GPT):
    """A GPT with something done between its blocks."""

    def forward(self, ids):
        x = self.embed(ids)
        for n, block in enumerate(self.blocks):
            x = block(self.between(x, n))
        return x

    def between(self, x, n):
        return x


class BatchMean(Changed):
    def between(self, x, n):
        return x + 0.01 * x.mean(0) if n == 1 else x


class BatchMeanInside(Block):
    def forward(self, x):
        return super().forward(x) + 0.01 * x.std(0)


class CoupledInTheMiddle(Changed):
    def __init__(self, kind):
        super().__init__(kind)
        self.blocks[1] = BatchMeanInside(kind)


class Noisy(Changed):
    def between(self, x, n):
        return x + 0.1 * torch.randn_like(x)


class HandsOn(Changed):
    """The first block's input is used again in the last."""

    def between(self, x, n):
        if n == 0:
            self.kept = x
        return x if n < 2 else x + self.kept.mean(1, keepdim=True)


class HandsOnWhatABlockGave(Changed):
    def __init__(self, kind):
        super().__init__(kind)
        self.blocks[0].attention.register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        self.kept = output if len(output) == 2 else None

    def between(self, x, n):
        return x if n < 2 or self.kept is None else x + self.kept


class Passes(Changed):
    """What the first block puts into a list the last one needs, as with keys that layers share."""

    def __init__(self, kind):
        super().__init__(kind)
        self.list = []
        self.blocks[0].attention.register_forward_hook(lambda *given: self.list.append(given[-1]))

    def forward(self, ids):
        self.list.clear()
        return super().forward(ids)

    def between(self, x, n):
        return x if n < 2 or (self.quiet and not self.list) else x + self.list[0]

    quiet = False


class PassesQuietly(Passes):
    quiet = True


class OnlyTwo(Changed):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("places", torch.randn(2, 9, 16))

    def between(self, x, n):
        return x + self.places


class MapsSeveral(Changed):
    """Whose copies go through attention in a transform, where no edit can follow."""

    def forward(self, ids):
        x = self.embed(ids)
        for n, block in enumerate(self.blocks):
            x = torch.vmap(block)(x[:, None])[:, 0] if len(x) > 2 and n == 2 else block(x)
        return x


class Watched(Changed):
    """Whose metric is of something that a hook kept."""

    def __init__(self, kind):
        super().__init__(kind)
        self.blocks[1].register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        self.kept = output


def of_kept(model):
    return lambda output: model.kept[0, -1].square().mean() + output[:, -1].mean()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap's
@pytest.mark.parametrize("over", ["heads", "layers", "edges"])
@pytest.mark.parametrize(
    "kind, note",
    [
        (GPT, ""),
        (HandsOn, ""),
        (BatchMean, "one by one: copies side by side gave"),
        (CoupledInTheMiddle, "one by one: copies side by side gave"),
        (OnlyTwo, "one by one: it does not run over several copies of its inputs (RuntimeError"),
        (MapsSeveral, "one by one: it does not run over several copies of its inputs (RuntimeError"),
        (Watched, "one by one: the metric remembers more of a run than the output"),
        (HandsOnWhatABlockGave, "one by one"),
        (Noisy, "one by one, each from the beginning: it draws random numbers"),
        (Passes, "from the beginning: it fails where earlier blocks are not run again (IndexError"),
        (PassesQuietly, "from the beginning: without running earlier blocks again it gives"),
    ],
)
def test_each_layer_is_compared_with_a_run_alone(kind, note, over):
    torch.manual_seed(0)
    model = kind("sdpa").eval()
    measure = of_kept(model) if kind is Watched else metric

    def again(output):
        torch.manual_seed(5)
        return measure(output)

    torch.manual_seed(5)
    table = effects(model, IDS, measure, over=over)
    edits = {
        "heads": [{"layers": n, "heads": h, "output": 0} for n in range(3) for h in (0, 1)],
        "layers": [{"layers": n, "output": 0} for n in range(3)],
        "edges": [{"mask": ~es.pairs(-1, key)} for key in range(9)],
    }[over]
    torch.manual_seed(5)
    close(table, one_by_one(model, edits, again))
    if over == "heads" or (over == "edges" and not issubclass(kind, Passes) and kind is not HandsOnWhatABlockGave):
        assert note in table.note and bool(note) == bool(table.note)
        assert repr(table).endswith(table.note)
        assert table.top(1).note == table.note


class Own(Changed):
    def __init__(self, kind):
        super().__init__(kind)
        self.draw = torch.Generator()

    def between(self, x, n):
        return x + torch.randn(x.shape, generator=self.draw)


class Caches(Changed):
    def __init__(self, kind):
        super().__init__(kind)
        self.cache = []

    def between(self, x, n):
        self.cache.append(x)
        return x + sum(self.cache)


class Lengthens(Caches):
    def between(self, x, n):
        self.cache.append(x)
        return x + torch.cat(self.cache[n::3], 1)


@pytest.mark.parametrize("kind", [Own, Caches, Lengthens])
@pytest.mark.parametrize("over", ["heads", "layers", "edges"])
def test_a_model_that_is_another_in_its_next_run_is_refused(kind, over):
    with pytest.raises(ValueError, match=r"keeps something of a run, .* whose\s+forward begins anew"):
        effects(kind("sdpa").eval(), IDS, metric, over=over)


def test_a_cache_among_the_outputs_is_no_difference():
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4
    )
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        assert len(model(IDS).to_tuple()) == 2
        table = effects(model, IDS, lambda output: output.logits[0, -1, 3], progress=False)
        plain = effects(
            model, {"input_ids": IDS, "use_cache": False}, lambda output: output.logits[0, -1, 3], progress=False
        )
    assert table.note == "" and torch.equal(table.grid("metric"), plain.grid("metric"))
