"""Everything a report can be made of says the same; and what it can't be made of is refused in a line."""

import copy
import re

import pytest
import torch
import transformers as hf
from lens.gpt import GPT
from report.stored import arrays, header, step
from torch import nn

import einsight as es
from einsight import report
from einsight.lens import Lens
from einsight.report.picture import opened

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
TOKENS = [*"abcbdefgdad"]
STEP = torch.ones(1, 1, 1, 1)
LLAMA = hf.LlamaConfig(
    vocab_size=17,
    hidden_size=12,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def llama(**settings):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def same(page, weights, part=0):
    """Whether a part's layers hold these weights [h, i, j]."""
    for layer, want in enumerate(weights):
        found = arrays(page, part, layer)["weights"]
        assert found.shape == want.shape
        assert ((found.nan_to_num() - want).abs() <= step(want) + 2e-6).all()


def test_a_lens_its_weights_and_dense_ones_make_the_same_page(tmp_path):
    model = GPT("sdpa").eval()
    with torch.no_grad(), Lens(model) as lens:
        model(IDS)
    dense = [block.attention.weights()[0] for block in model.blocks]
    same(report.html(lens, tmp_path / "lens.html", tokens=TOKENS), dense)
    same(report.html(lens[1].weights, tmp_path / "weights.html"), dense[1:2])
    same(report.html(dense[1][None], tmp_path / "dense.html"), dense[1:2])
    same(report.html(dense[1], tmp_path / "three.html"), dense[1:2])
    same(report.html(dense[1][0], tmp_path / "two.html"), [dense[1][:1]])
    same(report.html(tuple(w[None] for w in dense), tmp_path / "tuple.html"), dense)
    assert header(tmp_path / "lens.html")["parts"][0]["layers"][2]["name"] == "blocks.2.attention"


def test_hugging_faces_attentions_and_those_of_a_generation(tmp_path):
    model = llama()
    model.set_attn_implementation("eager")
    out = model(IDS, output_attentions=True)
    page = report.html(out.attentions, tmp_path / "page.html", tokens=TOKENS)
    same(page, [w[0] for w in out.attentions])
    assert arrays(page, 0, 0)["weights"].isnan().sum() == 6 * 11 * 10 / 2
    steps = model.generate(IDS, max_new_tokens=4, output_attentions=True, return_dict_in_generate=True, pad_token_id=0)
    with Lens(model) as lens:
        model.generate(IDS, max_new_tokens=4, pad_token_id=0)
    page = report.html(steps.attentions, tmp_path / "steps.html", tokens=[str(n) for n in range(15)], prompt=11)
    same(page, [lens[n].weights.dense()[0] for n in range(2)])
    about = header(page)["parts"][0]
    assert (about["i"], about["j"], about["prompt"], len(about["keys"]["text"])) == (14, 14, 11, 14)


def test_half_precision_attentions(tmp_path):
    dense = torch.softmax(torch.randn(1, 2, 7, 7), -1)
    same(report.html(dense.bfloat16(), tmp_path / "page.html"), [dense[0].bfloat16().float()])


def test_a_batch_asks_which(tmp_path, without_shape_checks):
    dense = torch.softmax(torch.randn(3, 2, 5, 5), -1)
    with pytest.raises(ValueError, match=r"source holds 3 sequences: choose the one to report on with item=0 to 2"):
        report.html(dense, tmp_path / "page.html")
    with pytest.raises(ValueError, match="item=3 is out of range: source holds 3 sequences"):
        report.html(dense, tmp_path / "page.html", item=3)
    with pytest.raises(TypeError, match="item must be the number of a sequence, not 'a'"):
        report.html(dense, tmp_path / "page.html", item="a")
    same(report.html(dense, tmp_path / "page.html", item=-1), [dense[2]])


def test_encoder_decoder_and_cross_attention(tmp_path):
    torch.manual_seed(0)
    model = nn.Transformer(12, 2, 2, 2, 8, batch_first=True).eval()
    with torch.no_grad(), Lens(model) as lens:
        model(torch.randn(1, 7, 12), torch.randn(1, 5, 12))
    page = report.html(lens, tmp_path / "page.html", tokens=[*"vwxyz"], key_tokens=[*"abcdefg"])
    parts = {part["name"]: part for part in header(page)["parts"]}
    assert {name: (part["i"], part["j"]) for name, part in parts.items()} == {
        "encoder": (7, 7),
        "decoder": (5, 5),
        "cross-attention": (5, 7),
    }
    assert parts["encoder"]["keys"]["text"] == [*"abcdefg"]
    assert parts["decoder"]["keys"]["text"] == [*"vwxyz"]
    assert parts["cross-attention"]["queries"]["text"] == [*"vwxyz"]
    same(page, [lens.cross[n].weights.dense()[0] for n in range(2)], part=2)


def test_one_text_read_in_its_last_queries(tmp_path):
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 11, 4)
    weights = es.AttentionWeights(q, k, es.causal(), offset=8)
    about = header(report.html(weights, tmp_path / "page.html", tokens=TOKENS))["parts"][0]
    assert (about["cross"], about["offset"]) == (False, 8)
    about = header(report.html(weights, tmp_path / "page.html", tokens=[*"abc"], key_tokens=TOKENS))["parts"][0]
    assert about["cross"]


def test_chosen_layers_keep_their_numbers(tmp_path):
    model = GPT("sdpa").eval()
    with torch.no_grad(), Lens(model, layers=[0, 2]) as lens:
        model(IDS)
    about = header(report.html(lens, tmp_path / "page.html"))["parts"][0]
    assert [layer["number"] for layer in about["layers"]] == [0, 2]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "torch", "einsight"])
def test_the_output_matrix_is_found(tmp_path, kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = hf.GPT2Model(hf.GPT2Config(vocab_size=17, n_embd=12, n_layer=2, n_head=6, n_positions=32)).eval()
        matrix = model.h[1].attn.c_proj.weight.mT
    elif kind == "llama":
        model = llama()
        matrix = model.model.layers[1].self_attn.o_proj.weight
    elif kind == "bert":
        sizes = {"hidden_size": 12, "num_attention_heads": 6, "intermediate_size": 8, "num_hidden_layers": 2}
        model = hf.BertModel(hf.BertConfig(vocab_size=17, **sizes)).eval()
        matrix = model.encoder.layer[1].attention.output.dense.weight
    else:
        layer = nn.MultiheadAttention(12, 6, batch_first=True) if kind == "torch" else es.nn.MultiHeadAttention(12, 6)
        matrix = layer.out_proj.weight if kind == "torch" else layer.out.weight
        model = Twice(layer)
    given = torch.randn(1, 11, 12) if kind in ("torch", "einsight") else IDS
    with torch.no_grad(), Lens(model, values=True) as lens:
        model(given)
    page = report.html(lens, tmp_path / "page.html")
    assert header(page)["parts"][0]["kept"] == ["value", "write"]
    value = lens[1].value[0]
    value = value.repeat_interleave(6 // len(value), 0)
    heads = matrix.unflatten(1, (6, 2)).transpose(0, 1)
    want = torch.einsum("hme,hje->hjm", heads, value).norm(dim=-1)
    assert torch.allclose(arrays(page, 0, 1)["write"].view(6, 11), want, rtol=3e-3, atol=1e-6)


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = copy.deepcopy(layer), layer

    def forward(self, x):
        for layer in (self.first, self.second):
            x = layer(x, x, x, need_weights=False)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
        return x


def test_the_residual_stream(tmp_path, without_shape_checks):
    model = llama()
    with Lens(model, values=True) as lens:
        out = model(IDS, output_hidden_states=True)
    page = report.html(lens, tmp_path / "page.html", hidden_states=out.hidden_states)
    assert header(page)["parts"][0]["kept"] == ["stream", "value", "write"]
    assert torch.allclose(arrays(page, 0, 1)["stream"], out.hidden_states[1][0].norm(dim=-1), rtol=3e-3)
    for wrong in (out.hidden_states[:1], [h[:, 1:] for h in out.hidden_states], ["a"] * 3):
        with pytest.raises(ValueError, match=r"hidden_states must be a tensor \[b, i, m\] for each layer"):
            report.html(lens, tmp_path / "page.html", hidden_states=wrong)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("text", TypeError, "source must be a Lens, an AttentionWeights, dense weights .*; not str"),
        (
            None,
            TypeError,
            r"source must be a Lens.*; not NoneType: .*attn_implementation=\"eager\" and .*a Lens around",
        ),
        ((), ValueError, r"source is an empty tuple; expected a tensor \[b, h, i, j\] for each layer. .*eager"),
        ([], ValueError, "source is an empty list"),
        ((None, None), TypeError, r"attentions\[0\] must be weights \[b, h, i, j\], not None. .*\"eager\""),
        (((), ()), ValueError, r"attentions\[0\] is an empty tuple; expected a tensor .* for each layer. .*eager"),
        (((None,), (None,)), ValueError, r"attentions\[0\] holds None; expected a tensor"),
        (
            ((STEP, STEP), (STEP,)),
            ValueError,
            r"attentions\[1\] must hold as many layers as attentions\[0\], 2, not 1",
        ),
        (((STEP,), STEP), ValueError, r"attentions\[1\] must hold as many layers as attentions\[0\], 1, not Tensor"),
        (((STEP[0],),), TypeError, r"attentions\[0\]\[0\] must be weights \[b, h, i, j\], not \[1, 1, 1\]"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"source must be weights .*, not torch.int64 \[2, 3\]"),
        (torch.ones(3), TypeError, r"not torch.float32 \[3\]"),
        (torch.ones(1, 2, 0, 3), ValueError, r"source is empty: \[1, 2, 0, 3\]"),
        (torch.ones(4, 4), ValueError, "rows that sum to 1, .*; the sums here go from 4 to 4"),
        (
            -torch.eye(4),
            ValueError,
            r"which are 0 or more, but holds -1 at head 0, query 0, key 0. .*scores.softmax\(-1\)",
        ),
        (
            (torch.eye(3), torch.tensor([[1.0, 0, 0], [1.5, -0.5, 0], [0, 0, 1]])),
            ValueError,
            r"attentions\[1\] must hold "
            "weights, which are 0 or more, but holds -0.5 at head 0, query 1, key 1",
        ),
        (
            torch.eye(3) / torch.tensor([[1.0], [0], [1]]),
            ValueError,
            "source must hold weights, but holds NaN at head 0, query 1, ",
        ),
        (torch.full((2, 2), torch.inf), ValueError, "the sums here go from inf to inf"),
        ((torch.eye(4), "a"), TypeError, r"attentions\[1\] must be weights .*, not str"),
    ],
)
def test_refused_sources(tmp_path, source, error, said, without_shape_checks):
    with pytest.raises(error, match=said):
        report.html(source, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_lens_that_saw_nothing(tmp_path):
    model = GPT("sdpa")
    with pytest.warns(UserWarning), Lens(model) as lens:
        pass
    with pytest.raises(LookupError, match="the lens saw no call of attention"):
        report.html(lens, tmp_path / "page.html")
    with Lens(model, readouts=es.Entropy()) as lens:
        model(IDS)
    with pytest.raises(LookupError, match="the lens keeps only results when it is opened with readouts"):
        report.html(lens, tmp_path / "page.html")


@pytest.mark.parametrize("write", [report.html, report.png])
def test_tokens_that_do_not_match(tmp_path, write):
    dense, wide = torch.eye(5)[None], torch.full((5, 7), 1 / 7)
    with pytest.raises(ValueError, match="tokens are 9, but the source has 5 queries and 5 keys"):
        write(dense, tmp_path / "page", tokens=[*"123456789"])
    with pytest.raises(
        ValueError, match="key_tokens are 6, but the source has 5 queries and 7 keys of cross-attention"
    ):
        write(wide, tmp_path / "page", tokens=[*"12345"], key_tokens=[*"123456"])
    with pytest.raises(TypeError, match="tokens must be a list of strings"):
        write(dense, tmp_path / "page", tokens="12345")


@pytest.mark.parametrize("prompt", [0, 6, True, "3"])
def test_refused_prompts(tmp_path, prompt, without_shape_checks):
    said = re.escape(f"prompt must be how many of the 5 tokens the prompt has, not {prompt!r}")
    with pytest.raises(ValueError, match=said):
        report.html(torch.eye(5), tmp_path / "page.html", prompt=prompt)


@pytest.mark.parametrize("write", [report.html, report.png])
def test_unwritable_paths(tmp_path, write, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"path: there is no folder {re.escape(str(tmp_path / 'no'))}"):
        write(torch.eye(5), tmp_path / "no" / "page")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        write(torch.eye(5), tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"path: .*page can't be written to"):
        write(torch.eye(5), tmp_path / "page")


def test_images_of_any_form():
    numbers = torch.arange(6.0).view(2, 3) / 5
    want = (numbers * 255).round().byte()
    for given in (numbers, numbers[None], numbers[..., None], numbers[None, None], numbers * 255, numbers.tolist()):
        assert torch.equal(pixels(opened(given)), want)
    assert torch.equal(pixels(opened(numbers * 4 - 2)), want)  # normalised: spread over what can be shown
    assert torch.equal(pixels(opened(torch.full((2, 3), -1.0))), torch.zeros(2, 3).byte())
    image = opened(numbers)
    assert opened(image) is image


def pixels(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(2, 3)


def test_layers_of_cross_attention_that_were_not_chosen_are_left_out(tmp_path):
    model = nn.Transformer(8, 2, 2, 2, 8, batch_first=True).eval()
    with torch.no_grad(), Lens(model, layers=[1]) as lens:
        model(torch.randn(1, 7, 8), torch.randn(1, 4, 8))
    parts = header(report.html(lens, tmp_path / "page.html"))["parts"]
    assert [[layer["number"] for layer in part["layers"]] for part in parts] == [[1], [1]]


def test_without_an_output_matrix_nothing_is_written_by_heads(tmp_path):
    class Attend(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    with Lens(Attend(), values=True) as lens:
        lens.model(torch.randn(1, 2, 5, 4))
    assert header(report.html(lens, tmp_path / "page.html"))["parts"][0]["kept"] == ["value"]


def test_queries_that_see_nothing(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    page = report.html(es.AttentionWeights(q, q, es.lengths(0)), tmp_path / "page.html")
    assert [layer["number"] for layer in header(page)["parts"][0]["layers"]] == [0]


def test_images_and_grids(tmp_path):
    picture = torch.rand(3, 40, 60)
    vit = torch.softmax(torch.randn(1, 2, 25, 25), -1)
    about = header(report.html(vit[:, :, :, :], tmp_path / "page.html", image=picture, grid=(4, 6)))
    assert about["parts"][0]["patches"] == {"start": 1, "rows": 4, "columns": 6}
    assert about["parts"][0]["keys"]["text"][:2] == ["class", "patch 0,0"]
    assert (about["picture"]["width"], about["picture"]["height"]) == (60, 40)
    assert header(report.html(vit, tmp_path / "page.html", image=picture))["parts"][0]["patches"]["columns"] == 5
    # In a text the patches are the run of equal tokens.
    named = ["[CLS]", *(f"p{n}" for n in range(24))]
    about = header(report.html(vit, tmp_path / "page.html", tokens=named, image=picture, grid=(4, 6)))
    assert about["parts"][0]["patches"]["start"] == 1
    with pytest.raises(ValueError, match="the 12 patches of the image stand nowhere among the tokens"):
        report.html(vit, tmp_path / "page.html", tokens=named, image=picture, grid=(3, 4))
    with pytest.raises(FileNotFoundError, match="image: there is no file"):
        report.html(vit, tmp_path / "page.html", image=tmp_path / "none.png", grid=(4, 6))
    tokens = ["look", *["<image>"] * 12, *[" word"] * 12]
    tokens[-1] = " end"
    about = header(report.html(vit, tmp_path / "page.html", tokens=tokens, image=picture, grid=(3, 4)))
    assert about["parts"][0]["patches"] == {"start": 1, "rows": 3, "columns": 4}


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"grid": (9, 9)}, ValueError, "grid=9 × 9 has 81 patches, but the source has 7 queries and 7 keys"),
        ({"grid": (2, 0)}, ValueError, r"grid must be \(rows, columns\), .*, not \(2, 0\)"),
        ({"grid": 3}, ValueError, "grid must be"),
        ({"image": torch.rand(3, 8, 8)}, ValueError, r"image needs grid=\(rows, columns\), .* which is no square"),
        ({"image": "README.md", "grid": (2, 3)}, ValueError, "image: README.md is no image that Pillow can read"),
        ({"image": 7.5j, "grid": (2, 3)}, TypeError, "image must be a path, a PIL image or an array of numbers"),
        (
            {"image": [[1], [2, 3]], "grid": (2, 3)},
            TypeError,
            "image must be a path, a PIL image or an array of numbers",
        ),
        ({"image": torch.rand(2, 8, 8), "grid": (2, 3)}, ValueError, r"image must be \[rows, columns\]"),
        ({"image": torch.full((8, 8), torch.nan), "grid": (2, 3)}, ValueError, "image must hold finite numbers"),
    ],
)
def test_refused_images(tmp_path, settings, error, said, without_shape_checks):
    with pytest.raises(error, match=said):
        report.html(torch.eye(7), tmp_path / "page.html", **settings)
    assert not list(tmp_path.iterdir())
