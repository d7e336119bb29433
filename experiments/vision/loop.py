"""An ordinary training loop that can be stopped after any step, and resumes to the same bits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from experiments.runner.runs import Row, save
from metafop import diagnostics
from metafop.optim import FOP
from metafop.tensorboard import Logger

STEPS_AT_ONCE = 20  # steps of one `advance`; losses are read from an accelerator after them
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # gives batches that are not trained on
COLUMNS = ("step", "epoch", "lr", "loss", "validation_loss", "validation_accuracy")


class Feed(Protocol):
    """Gives batches, epoch after epoch; its state is that of the generator that shuffles, and the place."""

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        ...

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Order:
    """The order of the examples: shuffled in each epoch, by a generator whose state is kept.

    The last examples of an epoch, which fill no batch, are left out.
    """

    def __init__(self, examples: int, batch: int, seed: int) -> None:
        self._examples, self._batch = examples, batch
        self._generator = Generator().manual_seed(seed)
        if examples < batch:
            raise ValueError(
                f"A batch of {batch} needs as many examples, got {examples}. Pass a smaller batch."
            )
        self._begun, self.epoch, self.place = self._generator.get_state(), -1, 0
        self._batches: Tensor = torch.empty(0, batch, dtype=torch.long)

    @property
    def steps(self) -> int:
        return self._examples // self._batch

    @property
    def rest(self) -> Tensor:
        """What is still to come in this epoch, (batches, batch)."""
        return self._batches[self.place :]

    def begin(self) -> None:
        """Shuffle for the next epoch."""
        self._begun = self._generator.get_state()
        self._shuffle()
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._begun, "epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begun, self.epoch, self.place = state["generator"], state["epoch"], state["place"]
        self._generator.set_state(self._begun)
        if self.epoch >= 0:
            self._shuffle()

    def _shuffle(self) -> None:
        shuffled = torch.randperm(self._examples, generator=self._generator)
        self._batches = shuffled[: self.steps * self._batch].view(self.steps, self._batch)


class InMemoryFeed:
    """A feed of images that are in memory."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int, seed: int) -> None:
        self._images, self._labels, self._order = images, labels, Order(len(images), batch, seed)

    @property
    def steps(self) -> int:
        return self._order.steps

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not len(self._order.rest):
            self._order.begin()
        batch = self._order.rest[0].to(self._images.device)
        self._order.place += 1
        return self._images[batch], self._labels[batch]

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)


class Loop:
    """Trains a model, and evaluates validation images after every epoch, or every so many steps.

    `decays` are the epochs after which the learning rate is divided by ten. Where a loss is not finite,
    training ends: the run has diverged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        feed: Feed,
        validation: Batches | None,
        test: Batches | None,
        epochs: int,
        decays: Sequence[float],
        judge_every: int = 0,
        angles_every: int = 0,
        keep_matrices: bool = False,
        half: torch.dtype | None = None,
    ) -> None:
        self._model, self._optimizer, self._feed = model, optimizer, feed
        self._validation, self._test = validation, test
        self._total, self._step = epochs * feed.steps, 0
        self._scheduler = MultiStepLR(optimizer, [round(epoch * feed.steps) for epoch in decays], gamma=0.1)
        self._judge_every = judge_every or feed.steps
        self._angles_every = angles_every if isinstance(optimizer, FOP) else 0
        self._matrices: list[dict[str, Tensor]] | None = [] if keep_matrices else None
        self._half = half
        device = next(model.parameters()).device.type
        # Numbers of half precision below 6e-8 vanish: float16 alone needs its losses scaled.
        self._scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)
        self._diverged = False

    @property
    def columns(self) -> Sequence[str]:
        if not self._angles_every:
            return COLUMNS
        weights = [name for name, p in self._model.named_parameters() if p.dim() > 1]
        return (*COLUMNS, *(f"angle/{name}" for name in weights))

    @property
    def epochs(self) -> float:
        return self._step / self._feed.steps

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def advance(self, logger: Logger) -> list[Row]:
        if self._diverged:
            return []
        rows, losses = list[dict[str, float]](), list[Tensor]()
        for _ in range(min(STEPS_AT_ONCE, self._total - self._step)):
            lr = self._optimizer.param_groups[0]["lr"]
            losses.append(self.learn(*next(self._feed)))
            rows.append({"step": self._step, "epoch": self.epochs, "lr": lr} | self._angles())
            self._step += 1
            if self._step % self._judge_every == 0:
                rows[-1] |= self._validate(logger)
        for row, loss in zip(rows, torch.stack(losses).tolist() if losses else [], strict=True):
            row["loss"] = loss
            self._diverged |= not abs(loss) < math.inf
        return list(rows)

    def learn(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take a step on one batch, and return the loss before it."""
        self._optimizer.zero_grad()
        with self._precision():
            loss = cross_entropy(self._model(images), labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._scheduler.step()
        return loss.detach()

    def _angles(self) -> dict[str, float]:
        if not self._angles_every or self._step % self._angles_every:
            return {}
        assert isinstance(self._optimizer, FOP)
        found = diagnostics.angles(*self._optimizer.inspect())
        return {name: angle.item() for name, angle in found.items() if name in self.columns}

    def _validate(self, logger: Logger) -> dict[str, float]:
        """Evaluate the validation images, and log what FOP has learned."""
        if isinstance(self._optimizer, FOP) and not self._angles_every:
            training, meta, grads = self._optimizer.inspect()
            logger.diagnostics(self._step - 1, training, meta, grads)
            if self._matrices is not None:
                learned = diagnostics.matrices(training, meta, meta.precond)
                self._matrices.append({name: p.cpu() for name, p in learned.items()})
        return self._figures("validation", self._validation)

    @torch.no_grad()
    def _figures(self, name: str, batches: Batches | None) -> dict[str, float]:
        """Return the mean loss and the accuracy on images that are not trained on, if there are any."""
        if batches is None:
            return {}
        self._model.eval()
        loss, right, count = 0.0, 0, 0
        for images, labels in batches():
            with self._precision():
                scores = self._model(images).float()
            loss += cross_entropy(scores, labels, reduction="sum").item()
            right += int((scores.argmax(1) == labels).sum())
            count += len(labels)
        self._model.train()
        return {f"{name}_loss": loss / count, f"{name}_accuracy": right / count}

    def _precision(self) -> AbstractContextManager[Any]:
        device = next(self._model.parameters()).device.type
        return nullcontext() if self._half is None else torch.autocast(device, self._half)

    @property
    def _parts(self) -> dict[str, Any]:
        """All that has a state of its own."""
        parts = {"model": self._model, "optimizer": self._optimizer, "scheduler": self._scheduler}
        return parts | {"feed": self._feed, "scaler": self._scaler}

    def state_dict(self) -> dict[str, Any]:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        return state | {"step": self._step, "diverged": self._diverged, "matrices": self._matrices}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._diverged, self._matrices = state["step"], state["diverged"], state["matrices"]
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    def finish(self, folder: Path) -> dict[str, Any]:
        """Return the figures; the test images are evaluated here, and only here."""
        save(folder / "model.pt", self._model.state_dict())
        if self._matrices is not None:
            save(folder / "matrices.pt", self._matrices)
        figures = self._figures("validation", self._validation) | self._figures("test", self._test)
        known = {name: value if abs(value) < math.inf else None for name, value in figures.items()}
        return {"diverged": self._diverged} | known
