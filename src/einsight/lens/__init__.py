"""See inside any PyTorch model without touching it."""

from einsight.lens.call import Call
from einsight.lens.heads import Heads
from einsight.lens.lens import Lens

__all__ = ["Call", "Heads", "Lens"]
