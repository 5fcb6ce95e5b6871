"""The lab's own options: importing this package registers them. No file imports torch outside `build`."""

from spec_lab.options import attention, graphs, loggers, pruning, targets, trees, workloads
from spec_lab.options.acceptance import lossy, rejection, relaxed_thinking, strict, synthetic
from spec_lab.options.drafters import blocks, draft_model, eagle3, frozen_kv, mtp, p_eagle, simple, suffix

__all__ = [
    *("attention", "graphs", "loggers", "pruning", "targets", "trees", "workloads"),
    *("lossy", "rejection", "relaxed_thinking", "strict", "synthetic"),
    *("blocks", "draft_model", "eagle3", "frozen_kv", "mtp", "p_eagle", "simple", "suffix"),
]
