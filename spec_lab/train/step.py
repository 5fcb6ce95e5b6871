"""A training step: loss, gradients, clipping and an update, which a GPU records once as a CUDA graph and then replays.

A small model's step is thousands of small kernels, which the host takes longer to launch than the GPU to run. Recording
whole steps is PyTorch's own advice ("Whole-network capture", its page on CUDA semantics). All shapes are those of the
first step, and nothing asks the device for a number.
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
"""Makes what computes a module's loss faster on a GPU."""
STEPS_BEFORE_CAPTURE = 3
"""Steps that are launched kernel by kernel: by then all is compiled, and libraries have chosen their kernels."""


class TrainingStep(Protocol):
    """Takes the training of a module one update further."""

    @property
    def optimiser(self) -> torch.optim.Optimizer | Several:
        """The optimiser with its moments, for checkpoints."""

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        """Return the loss before the update, a scalar without its graph that no later step writes over."""


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
        """`loss_of(*inputs_of(*batch))` is the loss that `parameters` are moved by; of several processes each has a
        term of it, which `add_up` adds. `in_16_bits`: products are computed in bfloat16."""
        self.optimiser = optimiser
        self._parameters, self._loss_of, self._inputs_of = parameters, loss_of, inputs_of
        self._add_up, self._in_16_bits = add_up, in_16_bits
        self._max_grad_norm, self._device_type = max_grad_norm, parameters[0].device.type

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        set_learning_rate(self.optimiser, learning_rate)
        self.optimiser.zero_grad(set_to_none=True)
        return self.update(batch)

    def update(self, batch: Batch) -> Tensor:
        """Do everything that the device does, gradients and learning rate being set."""
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
    """A launched step that is recorded after a few times, and replayed from then on.

    What cannot be recorded goes on being launched, which the log says.
    """

    def __init__(self, launched: LaunchedStep) -> None:
        self._launched, self._num_steps = launched, 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = ()
        self._loss: Tensor | None = None

    @property
    def optimiser(self) -> torch.optim.Optimizer | Several:
        """The launched step's, whose moments a replay moves."""
        return self._launched.optimiser

    @property
    def is_recorded(self) -> bool:
        """Steps are replayed from now on."""
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
        """Put a batch where all steps read theirs, the launched ones too: what they compile is what is recorded."""
        if not self._batch:
            self._batch = tuple(torch.empty_like(tensor) for tensor in batch)
        for held, given in zip(self._batch, batch, strict=True):
            held.copy_(given)

    def _launch(self, learning_rate: float) -> Tensor:
        """Take a step on the stream that records, as what is warmed up must have been."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._launched(self._batch, learning_rate)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self) -> None:
        """Record a step without running it. Its gradients are the graph's own memory, written anew at every replay."""
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
    """Return the step of a `module` whose output for `inputs_of(*batch)`, or for the batch as it is, is the loss.

    Products are computed in bfloat16 if `in_16_bits`, which is so on a GPU where it is None.
    With `add_up` a step is launched and not recorded: processes wait for one another in it. So is Muon's, whose rate is
    the host's.
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
