"""See inside any PyTorch model without touching it, change one thing, and watch it train."""

from einsight.lens.call import Call
from einsight.lens.clip import qk_clip
from einsight.lens.edit import Edit
from einsight.lens.heads import Heads
from einsight.lens.lens import Lens
from einsight.lens.monitor import Monitor
from einsight.lens.sweep import effects

__all__ = ["Call", "Edit", "Heads", "Lens", "Monitor", "effects", "qk_clip"]
