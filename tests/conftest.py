"""Shapes written in signatures are checked on every call of the test-suite."""

from jaxtyping import install_import_hook

install_import_hook("einsight", "beartype.beartype").install()
