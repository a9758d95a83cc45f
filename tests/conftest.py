"""Shapes written in signatures are checked on every call of the test-suite."""

import pytest
from jaxtyping import install_import_hook

install_import_hook("einsight", "typechecking.check")


@pytest.fixture(scope="session")
def smol():
    """The default model and its tokenizer, from the user's cache folder."""
    pytest.importorskip("transformers")
    from einsight import models

    return models.load()
