"""The examples run, and show what they promise."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

HERE = pathlib.Path(__file__).parents[1] / "examples"


def run(name):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, HERE / name], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_induction_heads():
    shown = run("induction_heads.py")
    first = shown.splitlines()[1].split()
    assert first[:2] == ["18", "6"]
    assert "query 203 → key 4: 0.9" in shown


def test_evict_kv_cache():
    losses = {policy: float(loss) for policy, loss in re.findall(r"(\w+) +loss ([\d.]+)", run("evict_kv_cache.py"))}
    assert losses["received"] < losses["recent"]
    assert losses["received"] < losses["random"]


def test_which_document():
    assert run("which_document.py").count("mostly") == 3


def test_vision_map():
    assert "right: 4 of 4" in run("vision_map.py")
