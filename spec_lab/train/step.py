"""A training step: loss, gradients, clipping and update. A GPU replays it as a CUDA graph where `make_step` allows it.

A small model's step is thousands of small kernels, which take longer to launch than to run. PyTorch itself recommends
capturing whole steps ("Whole-network capture" in its page on CUDA semantics). For that, all shapes must be those of
the first step, and nothing may synchronise with the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spec_lab.train.module_config import OptimisationConfig, Optimiser
from spec_lab.train.optimisers import Several, make_optimiser, set_learning_rate

log = logging.getLogger(__name__)

Batch = tuple[Tensor, ...]
Compile = Callable[[Any], Callable[..., Tensor]]
"""Returns a faster function for a module's loss on a GPU."""
STEPS_BEFORE_CAPTURE = 3
"""The number of eager steps before the capture. After them everything is compiled, and libraries have chosen
kernels."""


class TrainingStep(Protocol):
    """Makes one update of a training."""

    @property
    def optimiser(self) -> torch.optim.Optimizer | Several:
        """The optimiser with its moments, for checkpoints."""

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        """Make an update, and return the loss before it: a detached scalar that later steps do not overwrite."""


class LaunchedStep:
    """A step that the host launches kernel by kernel."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        loss_of: Callable[..., Tensor],
        inputs_of: Callable[..., Batch],
        optimiser: torch.optim.Optimizer | Several,
        max_grad_norm: float,
        in_16_bits: bool,
        add_up: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`loss_of(*inputs_of(*batch))` is the loss of `parameters`. With several processes each has a term of it, and
        `add_up` adds their terms and gradients. `in_16_bits`: products are computed in bfloat16."""
        self.optimiser = optimiser
        self._parameters, self._loss_of, self._inputs_of = parameters, loss_of, inputs_of
        self._add_up, self._in_16_bits = add_up, in_16_bits
        self._max_grad_norm, self._device_type = max_grad_norm, parameters[0].device.type

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        set_learning_rate(self.optimiser, learning_rate)
        self.optimiser.zero_grad(set_to_none=True)
        return self.update(batch)

    def update(self, batch: Batch) -> Tensor:
        """Run the device's part of a step, once gradients and learning rate are set up."""
        inputs = self._inputs_of(*batch)
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._in_16_bits):
            loss = self._loss_of(*inputs)
        loss.backward()
        loss = loss.detach()
        if self._add_up is not None:
            for summed in (loss, *(parameter.grad for parameter in self._parameters if parameter.grad is not None)):
                self._add_up(summed)
        nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self.optimiser.step()
        return loss


class CapturedStep:
    """A step that is launched a few times, then captured, and replayed from then on.

    If the capture fails, steps are still launched, and the log says so.
    """

    def __init__(self, launched: LaunchedStep) -> None:
        self._launched, self._num_steps = launched, 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = ()
        self._loss: Tensor | None = None

    @property
    def optimiser(self) -> torch.optim.Optimizer | Several:
        """The launched step's optimiser, whose moments a replay updates."""
        return self._launched.optimiser

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replayed from now on."""
        return self._graph is not None

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        self._hold(batch)
        self._num_steps += 1
        if self._num_steps == STEPS_BEFORE_CAPTURE + 1:
            self._capture()
        if self._graph is None:
            return self._launch(learning_rate)
        assert self._loss is not None
        set_learning_rate(self.optimiser, learning_rate)
        self._graph.replay()
        return self._loss.clone()

    def _hold(self, batch: Batch) -> None:
        """Copy a batch into the buffers of all steps. Launched steps use them too, so that the code to be captured is
        compiled for them."""
        if not self._batch:
            self._batch = tuple(torch.empty_like(tensor) for tensor in batch)
        for held, given in zip(self._batch, batch, strict=True):
            held.copy_(given)

    def _launch(self, learning_rate: float) -> Tensor:
        """Launch a step on the capturing stream, as required for a warm-up."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._launched(self._batch, learning_rate)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self) -> None:
        """Capture a step without running it. Its gradients are in the graph's memory, and every replay rewrites
        them."""
        self.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._loss = self._launched.update(self._batch)
        except RuntimeError as error:
            log.warning("the step cannot be recorded as a CUDA graph and is launched: %s", error)
            self.optimiser.zero_grad(set_to_none=True)
            return
        self._graph = graph
        log.info("the step is recorded as a CUDA graph")


def make_step(
    module: nn.Module,
    optimisation: OptimisationConfig,
    device: torch.device,
    inputs_of: Callable[..., Batch] | None = None,
    compiled: Compile = torch.compile,
    add_up: Callable[[Tensor], None] | None = None,
    in_16_bits: bool | None = None,
) -> TrainingStep:
    """Return the step of a `module` whose output for `inputs_of(*batch)`, or for the batch itself, is the loss.

    Products are computed in bfloat16 if `in_16_bits`; None means bfloat16 on a GPU only. With `add_up` a step is not
    captured, since processes wait for one another in it. A step of Muon, whose learning rate is on the host, is not
    captured either.
    """
    on_gpu, optimiser = device.type == "cuda", make_optimiser(module, optimisation, device)
    loss_of = compiled(module) if on_gpu else module
    parameters = list(module.parameters())
    in_16_bits, inputs_of = on_gpu if in_16_bits is None else in_16_bits, inputs_of or _as_it_is
    launched = LaunchedStep(parameters, loss_of, inputs_of, optimiser, optimisation.max_grad_norm, in_16_bits, add_up)
    is_recorded = on_gpu and add_up is None and optimisation.optimiser == Optimiser.adamw
    return CapturedStep(launched) if is_recorded else launched


def _as_it_is(*batch: Tensor) -> Batch:
    return batch
