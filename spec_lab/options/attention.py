"""The attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.config.groups import AttentionConfig
from spec_lab.config.option import option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.core.kernel_set import KernelSet
    from spec_lab.core.layer_protocols import AttentionBackend


@option("attention", "auto")
class AutoAttention(AttentionConfig):
    """attention=triton on a CUDA device where nothing speaks against it, else attention=torch (`build.auto`)."""


@option("attention", "torch")
class TorchAttentionOption(AttentionConfig):
    """The reference backend, for any device, or the one with which `kernels=` replaces it."""

    def build(self, run: Run, kernels: KernelSet, max_positions: int) -> AttentionBackend:
        from spec_lab.attention.torch_backend import TorchAttention
        from spec_lab.attention.torch_tree import TorchTreeAttention
        from spec_lab.core.kernel_set import Op

        make = kernels.get(Op.ATTENTION, TorchAttention) if run.sizes is None else TorchTreeAttention
        return make(run.cache.page_size, max_positions, kernels.get(Op.ROPE_WRITE, None))


@option("attention", "triton")
class TritonAttentionOption(AttentionConfig):
    """Paged kernels, on a GPU or in Triton's interpreter."""

    def build(self, run: Run, kernels: KernelSet, max_positions: int) -> AttentionBackend:
        import torch

        from spec_lab.attention.long_prompts import attend_by_cudnn
        from spec_lab.build.kernels import refuse_wrong_dots
        from spec_lab.build.models import resolve_device, resolve_dtype
        from spec_lab.core.kernel_set import Op

        device = resolve_device(run.device)
        dtype = resolve_dtype(run.dtype, device)
        refuse_wrong_dots(dtype)
        from spec_lab.attention.triton_backend import TritonAttention

        # cuDNN's attention for long prompts needs 16 bits.
        has_cudnn = device.type == "cuda" and torch.backends.cudnn.is_available()
        library = attend_by_cudnn if has_cudnn and dtype != torch.float32 else None
        return TritonAttention(run.cache.page_size, max_positions, kernels.get(Op.ROPE_WRITE, None), library)
