"""Names of layers, and what a lens says where there is nothing to see."""

from __future__ import annotations

import re
from itertools import takewhile

from torch import nn

_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.?")
_CROSS = re.compile(r"cross|encoder_attn|enc_?dec|encoderdecoder|multihead_attn$", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


def clean(name: str) -> str:
    """A module's name without those of wrappers."""
    return _WRAPPERS.sub("", name).strip(".")


def numbered(name: str, count: int) -> str:
    """The name of a layer whose module was used `count` times before."""
    return f"{name} ({count + 1})" if count else name


def says_cross(name: str) -> bool:
    """Whether a name is one of cross-attention's."""
    return _CROSS.search(".".join(name.split(".")[-2:])) is not None


def common(names: list[str]) -> str:
    """The innermost module that all of the layers are in."""
    parts = [name.split(".") for name in names]
    shared = [step[0] for step in takewhile(lambda step: len(set(step)) == 1, zip(*parts, strict=False))]
    return ".".join(shared)


def missed(count: dict[str, int]) -> str:
    calls = "; ".join(f"{n} {reason}" for reason, n in count.items())
    return f"the lens did not see these calls of attention, which ran as without it: {calls}"


def nothing_seen(model: nn.Module) -> str:
    alike = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _ATTENTION.search(type(module).__name__)
    ]
    listed = ", ".join(alike[:6]) + (f" and {len(alike) - 6} more" if len(alike) > 6 else "")
    return (
        "the lens saw no call of attention. "
        + (f"These modules look like it: {listed}. " if alike else "No module looks like attention. ")
        + "Either the model was not run in the lens, or it computes attention in a way that can't be seen: by "
        "hand (as Bloom and Longformer do), in another thread, in TorchScript, through torch.ops.aten, or by "
        "einsight.attention in compiled code. "
        'Ways out: load the model with attn_implementation="sdpa", if it has one (Falcon does not heed it when it is '
        "set later); use F.scaled_dot_product_attention or "
        "einsight.attention in its code; or call lens.record(query, key, value, mask, name=…) there"
    )
