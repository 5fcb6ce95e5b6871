"""The lab's own options: importing this package registers them. No file imports torch outside `build`."""

from spec_lab.options import attention, engines, graphs, loggers, plans, pruning, targets, trees, workloads  # noqa: F401
from spec_lab.options.acceptance import imposed, lossless, lossy  # noqa: F401
from spec_lab.options.drafters import blocks, draft_model, eagle3, frozen_kv, mtp, simple, suffix  # noqa: F401
from spec_lab.workloads import checkers  # noqa: F401
