"""Hugging Face's models: computed by Einsight (`register`), and their own attention seen by the lens."""

from einsight.lens.huggingface.registration import register
from einsight.lens.huggingface.seen import attach as attach  # for the lens
from einsight.lens.huggingface.seen import detach as detach

__all__ = ["register"]
