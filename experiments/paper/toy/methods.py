"""The methods that are compared: gradient descent, Adam, and FOP by order and safeguard."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from experiments.paper.toy.surfaces import Surface
from metafop import SGD, Adam, Bounded, Dense, Normalized, Online, Preconditioner, Training, safeguards
from metafop.functional import plain


class Method(NamedTuple):
    """An optimizer, a family of P, and what learns P. If that is None, M stays the identity."""

    label: str
    online: Callable[[Training], Online] | None = None
    family: Preconditioner = Dense()
    optimizer: SGD | Adam = SGD()

    def training(self, surface: Surface) -> Training:
        return Training(plain(surface.loss), self.optimizer, {"x": self.family})

    def learner(self, surface: Surface) -> Any:
        """Return what takes the steps, a `Training` or an `Online`: they are called alike."""
        training = self.training(surface)
        return self.online(training) if self.online else training

    def begin(self, surface: Surface, lr: float, meta_lr: Any, point: Tensor) -> tuple[Any, Any]:
        """Return the meta of the learner, and the state that it starts from."""
        training, params = self.training(surface), {"x": point}
        meta, carry = training.init_meta(params, lr=lr), training.init(params)
        if self.online is None:
            return meta, carry
        online = self.online(training)
        return online.init_meta(meta, lr=meta_lr), online.init(meta, carry)


learn = partial(Online, meta_optimizer=SGD())  # with the library's default guard, scale_free
exact = partial(learn, guards=())
osgm = partial(learn, guards=(safeguards.feedback,))
METHODS = {
    "gd": Method("gradient descent"),
    "adam": Method("Adam", optimizer=Adam()),
    "paper": Method("FOP, paper's order", partial(exact, order="paper", credit="gradient")),
    "exact": Method("FOP, exact order", exact),
    "exact_null": Method("exact + null step", partial(exact, null_step=True)),
    "bounded": Method("exact + ‖P‖ ≤ 10 ‖I‖", exact, Bounded(Dense(), limit=10.0)),
    "normalized": Method("exact + normalized P", exact, Normalized(Dense())),
    "clip": Method("exact + clip at 1", partial(learn, guards=(safeguards.clip(1.0),))),
    "feedback": Method("exact + OSGM feedback", osgm),
    "feedback_null": Method("OSGM feedback + null step", partial(osgm, null_step=True)),
    "safe": Method("FOP, safeguarded (default)", learn),
    "safe_null": Method("safeguarded + null step", partial(learn, null_step=True)),
}
