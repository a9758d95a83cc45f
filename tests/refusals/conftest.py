"""What is refused here is refused by the package itself, in the same words wherever the suite runs."""

import pytest

from einsight.engines import native


@pytest.fixture(autouse=True)
def without_a_compiled_engine(monkeypatch: pytest.MonkeyPatch, without_shape_checks: None) -> None:
    """Refusals name the engines that can do what was asked."""
    monkeypatch.setattr(native.operations, "kernel", None)
