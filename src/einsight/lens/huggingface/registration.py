"""The name "einsight" among Hugging Face's attention implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from einsight.lens.huggingface.attention import attention
from einsight.lens.huggingface.masks import make_mask

NAME = "einsight"


def register() -> None:
    """Make "einsight" one of the attention implementations of Hugging Face's transformers.

    After it, `attn_implementation="einsight"` where a model is made or loaded, or
    `model.set_attn_implementation("einsight")`, lets its attention be computed by `einsight.attention`: in training
    and generation, with padding, packed sequences, caches and masks of one's own. Nothing of the size
    [queries × keys] is held, but for `output_attentions=True` at call time, which gives the weights [b, h, i, j] of
    each layer: those before dropout, 0 in the rows of padding that may see nothing (where "eager" has them uniform).
    A second call changes nothing.

    Raises:
        ImportError: transformers is not installed, or older than 5.0.

    A model whose code computes its attention itself, without looking up an implementation, raises ValueError where
    it is made or set to "einsight": it would go on as before, or break.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from einsight.lens import huggingface
    >>> huggingface.register()
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
    ...     vocab_size=11, attn_implementation="einsight")
    >>> model = LlamaForCausalLM(config)
    >>> model(torch.tensor([[1, 2, 3]]), output_attentions=True).attentions[0].shape
    torch.Size([1, 2, 3, 3])
    """
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface, PreTrainedModel
    except ImportError as error:
        raise ImportError('register needs transformers 5.0 or newer: pip install "einsight[look]"') from error
    # torch.compile can't trace rules: it calls both as they are, between the graphs of the rest.
    AttentionInterface.register(NAME, torch.compiler.disable(attention))
    # Without a mask function of the same name, models would be given no mask at all, and padding would be seen.
    AttentionMaskInterface.register(NAME, torch.compiler.disable(make_mask))
    for method in ("get_correct_attn_implementation", "set_attn_implementation"):
        original = getattr(PreTrainedModel, method)
        if not getattr(original, "refuses_for_einsight", False):
            setattr(PreTrainedModel, method, _refusing(original))


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method, but for models that would not use the implementation it is asked to set."""

    @functools.wraps(original)
    def checked(self: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted == NAME and not self._can_set_attn_implementation():
            raise ValueError(
                f'{type(self).__name__} computes its attention itself and can\'t have attn_implementation="einsight"; '
                'leave it "eager". To see inside it: einsight.lens.Lens(model)'
            )
        return original(self, wanted, *args, **kwargs)

    vars(checked)["refuses_for_einsight"] = True
    return checked
