"""Tokens as people read them."""

import pytest

from einsight.report.text import Piece, apart, readable, texts


@pytest.mark.parametrize(
    ("tokens", "read"),
    [
        (["The", "Ġcat", "Ċ", "Ċ", "sat", "."], ["The", " cat", "\n", "\n", "sat", "."]),
        (["▁The", "▁cat", "<0x0A>", "s"], [" The", " cat", "\n", "s"]),
        (["[CLS]", "the", "light", "##house", ".", "[SEP]"], ["[CLS]", " the", " light", "house", " .", " [SEP]"]),
        (["the</w>", "light", "house</w>"], ["the ", "light", "house "]),
        (["already", " decoded", "\n", "é", "日本"], ["already", " decoded", "\n", "é", "日本"]),
        (["Ġ##", "##"], [" ##", "##"]),
        (["caf", "é"], ["caf", "é"]),  # a byte for é, alone, would be no text
        (["<s>", "Ġ<｜end｜>", "ĠÃ©"], ["<s>", "Ġ<｜end｜>", " é"]),
        ([], []),
    ],
)
def test_spellings(tokens, read):
    assert [piece.text for piece in readable(tokens)] == read


def test_split_characters_are_joined():
    owl = ["Ġ", "ðŁ", "¦", "ī", "!"]  # U+1F989 in three tokens
    assert readable(owl) == [Piece(" "), *[Piece("🦉", n, 3) for n in range(3)], Piece("!")]
    assert readable(["▁a", "<0xF0>", "<0x9F>", "<0xA6>", "<0x89>"])[1:] == [Piece("🦉", n, 4) for n in range(4)]
    # Without a space the bytes themselves tell.
    assert [piece.text for piece in readable(["æĹ¥", "æľ¬"])] == ["日", "本"]


def test_a_cut_that_never_ends():
    assert readable(["Ġa", "ðŁ"]) == [Piece(" a"), Piece("�")]
    assert [piece.text for piece in readable(["Ġa", "ðŁ", "Ġb"])] == [" a", "� b", "� b"]


def test_what_a_real_tokenizer_makes_of_it(smol):
    tokenizer = smol[1]
    said = "Über naïve\n\tcafés — 日本語 🦉 fin"
    pieces = readable(tokenizer.convert_ids_to_tokens(tokenizer(said)["input_ids"]))
    assert "".join(piece.text for piece in pieces if piece.part == 0) == said
    assert any(piece.of > 1 for piece in pieces)


def test_a_tokenizers_output(smol):
    encoded = smol[1](["one", "two three"], padding=False)
    assert texts(encoded, item=1) == ["two", "Ġthree"]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("a text", r"tokens must be a list of strings, .*convert_ids_to_tokens\(ids\), .*not str"),
        (7, "not int"),
        ([1, 2], r"tokens must hold strings, but holds 1: write tokenizer.convert_ids_to_tokens\(ids\)"),
        (type("Slow", (), {"input_ids": [1]})(), "doesn't know its tokens"),
    ],
)
def test_refusals(tokens, said):
    with pytest.raises(TypeError, match=said):
        texts(tokens)


@pytest.mark.parametrize(
    ("tokens", "between"),
    [
        (["The", "owl", "saw", "."], True),
        (["The", "Ġowl"], False),
        (["[CLS]", "the", "[SEP]"], True),
        (["a", " ", "b"], False),
        (["日", "本", "語", "です"], False),
        (["سلام", "دنیا"], True),
        (["one"], False),
        ([], False),
    ],
)
def test_plain_words_get_spaces_between_them(tokens, between):
    assert apart(readable(tokens)) == between


@pytest.mark.parametrize(
    ("tokens", "whole", "count"),
    [
        (["👨", "\u200d", "👩"], "👨\u200d👩", 3),
        (["👨\u200d", "👩\u200d", "👧"], "👨\u200d👩\u200d👧", 3),
        (["❤", "\ufe0f"], "❤\ufe0f", 2),
        (["👍", "🏽"], "👍🏽", 2),
        (["1\ufe0f", "\u20e3"], "1\ufe0f\u20e3", 2),
    ],
)
def test_an_emoji_in_several_tokens_is_shown_whole(tokens, whole, count):
    assert readable([" a", *tokens, "b"]) == [Piece(" a"), *(Piece(whole, n, count) for n in range(count)), Piece("b")]


def test_what_is_no_emoji_is_not_joined():
    for tokens in (["a", "\u200d", "b"], ["👨", "👩"], ["می", "\u200c", "خواهم"], ["1", "\u20e3"]):
        assert [piece.of for piece in readable(tokens)] == [1] * len(tokens)
