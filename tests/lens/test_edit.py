"""Edits against the same thing done by hand, with dense weights: values and gradients."""

import contextlib
import copy

import pytest
import torch
from lens.gpt import GPT
from torch import nn

import einsight as es
from einsight.lens import Edit, Lens

IDS = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(2))
HEAD1 = torch.tensor([False, True])[None, :, None, None]


def by_hand(model, ids, score=None, weigh=None, put=None, keep=None):
    """The GPT with dense weights: `score(layer, scores)`, `weigh(layer, weights)`, `put(layer, output)` change them."""
    x = model.embed(ids)
    for n, block in enumerate(model.blocks):
        layer = block.attention
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer.qkv(block.norm(x)).chunk(3, -1))
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), -torch.inf)
        weights = torch.softmax(scores if score is None else score(n, scores), -1)
        weights = weights if weigh is None else weigh(n, weights)
        if keep is not None:
            keep.append((weights.detach(), (weights @ v).detach()))
        y = weights @ v
        y = y if put is None else put(n, y)
        x = x + layer.output(y.transpose(1, 2).flatten(2))
    return x


def run(model, ids, context=contextlib.nullcontext, hand=None):
    model.zero_grad()
    with context():
        output = model(ids) if hand is None else by_hand(model, ids, **hand)
        output.square().sum().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(ours, theirs, plain):
    """To rounding: twice what the hand-written model is off from the model in the same run without edits, and more
    than the edit itself by far."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6 * b.abs().max().item() + 1e-7, rtol=1e-5)
    assert not torch.allclose(ours[0], plain[0], atol=1e-3)


def only(layer, heads=HEAD1):
    """What stands in a layer's heads, else what stood there."""
    return lambda change: lambda n, t: torch.where(heads, change(t), t) if n == layer else t


def at_last(t):
    made = t.clone()
    made[:, :, -1, 2:4] = -torch.inf
    return made


@pytest.fixture(params=["sdpa", "einsight", "checkpointed", "reentrant"])
def model(request):
    torch.manual_seed(0)
    checkpoint = {"checkpointed": False, "reentrant": True}.get(request.param)
    made = GPT("einsight" if request.param == "einsight" else "sdpa", checkpoint).eval()
    with torch.no_grad():
        for block in made.blocks:
            block.attention.qkv.weight.mul_(3)  # far from uniform
    return made


def test_knockout(model):
    def edit():
        return Edit(model, layers=1, heads=[1], mask=~es.pairs(queries=[-1], keys=[2, 3]))

    hand = {"score": only(1)(at_last)}
    assert_same(run(model, IDS, edit), run(model, IDS, hand=hand), run(model, IDS))


def test_steering_every_head(model):
    bias = torch.randn(9, 9, requires_grad=True)

    def edit():
        return Edit(model, layers=["blocks.0.attention", 2], bias=bias)

    ours = run(model, IDS, edit)
    ours.append(bias.grad.clone())
    bias.grad = None
    theirs = run(model, IDS, hand={"score": lambda n, t: t + bias if n != 1 else t})
    theirs.append(bias.grad.clone())
    assert_same(ours, theirs, run(model, IDS))


@pytest.mark.parametrize("heads", [[1], None])
def test_patching_a_pattern(model, heads):
    with Lens(model) as clean:
        model(OTHER)
    kept = []
    by_hand(model, OTHER, keep=kept)

    def edit():
        return Edit(model, layers=range(1, 3), heads=heads, weights=clean)

    chosen = HEAD1 if heads else torch.tensor(True)
    hand = {"weigh": lambda n, w: torch.where(chosen, kept[n][0], w) if n >= 1 else w}
    assert_same(run(model, IDS, edit), run(model, IDS, hand=hand), run(model, IDS))


def test_patching_weights_of_ones_own(model):
    query, key = torch.randn(2, 1, 2, 9, 8)
    weights = es.AttentionWeights(query, key, es.window(3, 2), scale=8**-0.5, bias=es.alibi(torch.tensor([1.0, 0.5])))

    def edit():
        return Edit(model, layers=1, heads=1, weights=weights)

    hand = {"weigh": only(1)(lambda w: weights.dense())}
    assert_same(run(model, IDS, edit), run(model, IDS, hand=hand), run(model, IDS))


@pytest.mark.parametrize("output", [0, 0.5, "mean", "reference", "other", "tensor"])
def test_outputs(model, output):
    with Lens(model, values=True) as clean:
        model(OTHER)
    kept, tensor = [], torch.randn(9, 8)
    by_hand(model, OTHER, keep=kept)
    given = {"reference": ("mean", clean), "other": clean, "tensor": tensor}.get(output, output)
    change = {
        0: torch.zeros_like,
        0.5: lambda y: torch.full_like(y, 0.5),
        "mean": lambda y: y.mean(2, keepdim=True).expand_as(y),
        "reference": lambda y: kept[2][1].mean((0, 2), keepdim=True).expand_as(y),
        "other": lambda y: kept[2][1],
        "tensor": lambda y: tensor.expand_as(y),
    }[output]

    def edit():
        return Edit(model, layers=[2], heads=1, output=given)

    assert_same(run(model, IDS, edit), run(model, IDS, hand={"put": only(2)(change)}), run(model, IDS))


def test_edits_compose_and_the_lens_sees_them(model):
    with Lens(model) as clean:
        model(OTHER)
    kept, seen = [], []
    by_hand(model, OTHER, keep=kept)
    bias = torch.randn(2, 9, 9)

    @contextlib.contextmanager
    def edits():
        with Lens(model) as outside, Edit(model, layers=1, heads=1, weights=clean), Edit(model, layers=1, bias=bias):
            cut = Edit(model, layers=1, mask=~es.pairs(queries=[-1], keys=[2, 3]))
            with cut, Edit(model, layers=1, heads=0, output=0), Lens(model) as inside:
                yield
        seen[:] = outside, inside

    ours = run(model, IDS, edits)
    found = []

    def weigh(n, weights):
        if n == 1:
            weights = torch.where(HEAD1, kept[1][0], weights)
            weights = at_last((weights.clamp(min=1e-30)).log() + bias).masked_fill(weights == 0, -torch.inf).softmax(-1)
        found.append(weights.detach())
        return weights

    hand = {"weigh": weigh, "put": only(1, ~HEAD1)(torch.zeros_like)}
    assert_same(ours, run(model, IDS, hand=hand), run(model, IDS))
    for lens in seen:
        for n in range(3):
            torch.testing.assert_close(lens[n].weights.dense(), found[n], atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:edited layers are checkpointed")  # rightly: no backward is to follow
def test_what_is_not_edited_keeps_its_bits(model):
    plain = run(model, IDS)
    with Lens(model) as before:
        model(IDS)
    state, edit = torch.get_rng_state(), Edit(model, layers=2, heads=[0], output=0)
    with edit, Lens(model) as during:
        model(IDS)
    assert torch.equal(torch.get_rng_state(), state)
    for n in range(3):
        assert torch.equal(before[n].query, during[n].query)
    heads = []
    model.blocks[2].attention.output.register_forward_pre_hook(lambda _, args: heads.append(args[0].clone()))
    with edit:
        model(IDS)
    model(IDS)
    assert torch.equal(heads[0][..., 8:], heads[1][..., 8:]) and not heads[0][..., :8].any()
    assert all(torch.equal(a, b) for a, b in zip(run(model, IDS), plain, strict=True))


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    x, bias = torch.randn(2, 5, 12), torch.randn(5, 5)
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (x @ layer.in_proj_weight.T).chunk(3, -1))
    scores = q @ k.mT / 2
    scores[:, 1] += bias
    scores[:, 1, -1, 0] = -torch.inf
    weights = scores.softmax(-1)
    output = weights @ v
    output[:, 2] = 0
    expected = layer.out_proj(output.transpose(1, 2).flatten(2))
    with (
        Edit(layer, heads=1, bias=bias, mask=~es.pairs(-1, 0)),
        Edit(layer, heads=2, output=0),
        Lens(layer) as lens,
    ):
        found, told = layer(x, x, x, need_weights=need_weights, average_attn_weights=False)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lens[0].weights.dense(), weights, atol=1e-6, rtol=1e-5)
    if need_weights:
        torch.testing.assert_close(told, weights, atol=1e-6, rtol=1e-5)


def test_readouts_of_einsight_are_those_of_the_edited_weights():
    class Layer(nn.Module):
        def forward(self, x):
            return es.attention(x, x, x, es.causal(), readouts={"first": es.Diagonal(-3), "all": es.Weights()})

    model, x = Layer(), torch.randn(1, 2, 4, 8)
    _, plain = model(x)
    with Edit(model, heads=0, mask=~es.pairs(-1, 0)):
        _, seen = model(x)
    assert seen["first"][0, 0, -1] == 0 and seen["all"][0, 0, -1, 0] == 0
    torch.testing.assert_close(seen["all"][:, 1], plain["all"][:, 1])


def test_dropout_stays():
    class Layer(nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = torch.eye(8)[None, None]
    with Edit(Layer(), mask=es.causal()) as edit:
        output = edit.model(x)[0, 0]
    weights = es.AttentionWeights(x, x, es.causal()).dense()[0, 0]
    dropped = output == 0
    torch.testing.assert_close(output, torch.where(dropped, 0, 2 * weights))
    assert 0 < (dropped & (weights > 0)).sum() < 36


def test_padding_has_no_part_in_a_mean():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 1, batch_first=True)
    x, padding = torch.randn(2, 5, 6), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with Lens(layer, values=True) as clean:
        layer(x, x, x, key_padding_mask=padding, need_weights=False)
    own = clean[0].weights @ clean[0].value
    expected = torch.stack([own[0].mean(1), own[1, :, :3].mean(1)])
    with Edit(layer, output="mean"):
        found = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(found[:, 0], layer.out_proj(expected[:, 0]))
    with Edit(layer, output=("mean", clean)):
        found = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    everything = torch.cat([own[0, 0], own[1, 0, :3]]).mean(0)
    torch.testing.assert_close(found[1, 2], layer.out_proj(everything))


def test_leaves_no_trace():
    model = GPT("sdpa").eval()
    plain = model(IDS)
    with pytest.raises(ValueError, match="layers names none, so that nothing would be edited"):
        Edit(model, layers=[], output=0)
    with pytest.raises(ValueError, match="heads names none"), Edit(model, heads=[], output=0):
        model(IDS)
    with pytest.raises(ValueError, match="pairs' keys names 99"), Edit(model, mask=~es.pairs(0, 99)):
        model(IDS)
    assert torch.equal(model(IDS), plain)
    assert torch.overrides._get_current_function_mode_stack() == []
    with Edit(model, output=0):
        copied = copy.deepcopy(model)
        assert torch.equal(copied(IDS), plain)
        model(IDS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_outside_of_the_edit_is_foretold_where_it_recomputes(reentrant):
    model = GPT("sdpa", reentrant).eval()
    said = r"checkpointed \(blocks.1.attention\), and no backward ran within the edit"
    with pytest.warns(UserWarning, match=said), Edit(model, layers=1, mask=es.window(2, 0)):
        model(IDS)
    with Edit(model, layers=1, mask=es.window(2, 0)):
        model(IDS).sum().backward()
    if not reentrant:  # which has a warning of its own there
        with torch.no_grad(), Edit(model, layers=1, mask=es.window(2, 0)):
            model(IDS)


def test_weights_of_one_call_of_another_run():
    model = GPT("sdpa").eval()
    with Lens(model) as clean:
        model(OTHER)
    with torch.no_grad():
        with Edit(model, layers=1, weights=clean[1]):
            got = model(IDS)
        with Edit(model, layers=1, weights=clean):
            assert torch.equal(got, model(IDS))


def test_outputs_of_a_run_that_kept_no_values(model):
    with Lens(model) as clean:
        model(OTHER)
    said = r"output= of another run needs its values: Lens\(model, values=True\)"
    with pytest.raises(ValueError, match=said), Edit(model, layers=1, output=clean):
        model(IDS)
