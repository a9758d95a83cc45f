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


def test_ablate_induction():
    shown = run("ablate_induction.py")
    changes = {
        name: float(change) for name, change in re.findall(r"^(\w[\w ]*) \([\d., ]+\): ([-+.\d]+)$", shown, re.M)
    }
    random = [float(change) for change in shown.splitlines()[-1].split(": ")[1].split(", ")]
    assert "induction (18.6)" in shown and "previous token (16.0)" in shown
    assert changes["induction"] > 2 and changes["previous token"] > 4 and changes["both"] > 4
    assert sorted(random)[2] < 0.3 and max(random) < changes["induction"]


def test_divergence():
    plain, fast, clipped = run("divergence.py").split("learning rate ")[1:]
    assert "ALARM" not in plain and "nan" not in plain
    alarm, end = fast.splitlines()[1:]
    assert "ALARM" in alarm and end.endswith("loss nan")
    assert int(alarm.split()[1][:-1]) < int(end.split()[1][:-1])
    assert "nan" not in clipped and "step 59: loss" in clipped
