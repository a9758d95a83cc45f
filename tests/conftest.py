"""Shapes written in signatures are checked on every call of the test-suite."""

import os
from collections.abc import Iterator

import jaxtyping
import pytest

collect_ignore = ["sanitized.py"]  # a plugin for the sanitizers, which needs a kernel of its own

if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads its functions' sources, and the hook changes them
    jaxtyping.install_import_hook("einsight", "typechecking.check")


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """For the package's own refusals, which the check would come before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def smol():
    """The default model and its tokenizer, from the user's cache folder."""
    pytest.importorskip("transformers")
    from einsight import models

    return models.load()
