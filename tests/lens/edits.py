"""Edits made one by one, which effects are compared with."""

import torch

from einsight.lens import Edit

IDS = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(1))


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
