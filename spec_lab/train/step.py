"""A training step: loss, gradients, clipping and update. A GPU replays it as a CUDA graph where it can.

A small head's step is thousands of small kernels, which take longer to launch than to run. PyTorch itself recommends
capturing whole steps ("Whole-network capture" in its page on CUDA semantics). For that, all shapes must be those of the
first step, and nothing may synchronise with the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spec_lab.train.config import Optimisation, Optimiser
from spec_lab.train.group import Processes
from spec_lab.train.optimisers import make_optimisers, set_learning_rate

log = logging.getLogger(__name__)

Batch = tuple[Tensor, ...]
STEPS_BEFORE_CAPTURE = 3
"""The number of eager steps before the capture. After them everything is compiled, and libraries have chosen
kernels."""


class Step:
    """Updates the weights of a loss module: `inputs_of(*batch)` are its inputs, computed without gradients.

    Gradients and losses of several processes are added. Such a step is not captured, since processes wait for one
    another in it. Nor is one of Muon, whose learning rate is on the host. If a capture fails, steps go on being
    launched, and the log says so.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs_of: Callable[..., Batch],
        loss_of: Callable[..., Tensor],
        knobs: Optimisation,
        group: Processes,
        in_16_bits: bool,
    ) -> None:
        """`loss_of` is `module` or a faster form of it; products are computed in bfloat16 if `in_16_bits`."""
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._inputs_of, self._loss_of, self._group = inputs_of, loss_of, group
        self._in_16_bits, self._max_grad_norm = in_16_bits, knobs.max_grad_norm
        device = self._parameters[0].device
        self.optimisers = make_optimisers(module, knobs, device)
        is_captured = device.type == "cuda" and group.size == 1 and knobs.optimiser == Optimiser.adamw
        self._stream = torch.cuda.Stream(device) if is_captured else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_steps, self._held, self._loss = 0, (), torch.zeros(())

    _held: Batch

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed from now on."""
        return self._graph is not None

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        """Make an update, and return the loss before it: a detached scalar that later steps do not overwrite."""
        set_learning_rate(self.optimisers, learning_rate)
        if (stream := self._stream) is None:
            return self._launched(batch)
        # Launched steps use the buffers of the capture too, so that what is captured was compiled for them.
        self._held = self._held or tuple(torch.empty_like(tensor) for tensor in batch)
        for held, given in zip(self._held, batch, strict=True):
            held.copy_(given)
        self._num_steps += 1
        if self._num_steps == STEPS_BEFORE_CAPTURE + 1:
            self._capture(stream)
        if self._graph is not None:
            self._graph.replay()
            return self._loss.clone()
        if self._stream is None:  # the capture has just failed
            return self._launched(batch)
        stream.wait_stream(torch.cuda.current_stream())  # a warm-up must run on the capturing stream
        with torch.cuda.stream(stream):
            loss = self._launched(self._held)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _launched(self, batch: Batch) -> Tensor:
        self._forget_gradients()
        return self._update(batch)

    def _forget_gradients(self) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)

    def _update(self, batch: Batch) -> Tensor:
        """Run the device's part of a step."""
        inputs = self._inputs_of(*batch)
        with torch.autocast(self._parameters[0].device.type, dtype=torch.bfloat16, enabled=self._in_16_bits):
            loss = self._loss_of(*inputs)
        loss.backward()
        loss = loss.detach()
        for summed in (loss, *(parameter.grad for parameter in self._parameters if parameter.grad is not None)):
            self._group.add_up(summed)
        nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Capture a step without running it. Its gradients are in the graph's memory, and every replay rewrites
        them."""
        self._forget_gradients()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                self._loss = self._update(self._held)
        except RuntimeError as error:
            log.warning("the step cannot be recorded as a CUDA graph and is launched: %s", error)
            self._forget_gradients()
            self._stream = None
        else:
            self._graph = graph
            log.info("the step is recorded as a CUDA graph")
