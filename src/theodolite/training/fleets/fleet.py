"""`Fleet`: many replicas of one architecture, trained as one vectorised program."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.problem.calling import Loss
from theodolite.progress import counting
from theodolite.results import Cost, Outcome
from theodolite.training.fleets.choice import RouteName, choose_route, quiet_vmap
from theodolite.training.fleets.crew import Crew
from theodolite.training.fleets.data import FleetBatch, FleetFeed, Shared
from theodolite.training.fleets.measures import Gauges, Measure, check_test, finite_or_inf, full_loss
from theodolite.training.fleets.optimizers import FleetOptimizer, fleet_optimizer, zero_state
from theodolite.training.fleets.routes import Gradient, Route
from theodolite.training.fleets.run import FleetRun, Rules, Stop
from theodolite.training.fleets.state import Factory, Stack, stack_replicas
from theodolite.training.fleets.trace import FleetTrace
from theodolite.training.schedules import Schedule, as_schedule


class Fleet:
    """R replicas of one architecture with own seeds, learning rates, data orders or data, trained in lockstep.

    Parameters
    ----------
    factory : seed -> `nn.Module`; torch's generator is seeded alike before each call. Buffers are kept per replica and must
        be changed in place, if at all.
    seeds : one per replica, or a number R for 0 .. R-1.
    loss : `(output, target) -> scalar` of one replica, or None for models that return their own `.loss`.
    optimizer : `"sgd"`, `"adam"`, `"adamw"`, a function of the parameters that makes one of these torch optimizers, or a rule
        with `columns` and `step`.
    rate : learning rate, one for all or one per replica; None where the torch optimizer brings it.
    momentum, dampening, nesterov, weight_decay, betas, eps : as in torch; None keeps its default.
    mode : `"train"` or `"eval"`, the mode of the modules in training steps. Tests run in eval mode.
    route : `"vmap"` for all replicas at once, `"loop"` for one after the other, `"auto"` for the loop where vmap refuses the
        model (LSTM, dropout, ...) or gains nothing (large convolutions, a single replica). The result says which, and why.
    gradient : `(module, parameters, buffers, batch) -> (loss, gradients by name)` of one replica, for a model with a cheaper
        gradient than autograd's; default is the module's method `fleet_gradient(parameters, buffers, batch, loss)`, if any.

    Numbers agree with a plain loop to rounding. A replica never depends on its neighbours: one that diverges is frozen and
    leaves them bitwise intact. Replicas that see equal data stay bitwise equal where matrix kernels do not depend on where a
    matrix starts in memory: sizes that fill whole cache lines, or any size with the environment variable
    `MKL_CBWR=AUTO,STRICT` set before torch starts.

    >>> x = torch.ones(1, 1)
    >>> fleet = Fleet(lambda seed: nn.Linear(1, 1, bias=False), [0, 0, 0], loss=nn.MSELoss(), rate=[0.25, 0.5, 2.0])
    >>> run = fleet.train((x, 0 * x), steps=40)
    >>> run.loss.shape, run.diverged_at                       # the third rate is above 2/λ = 1
    (torch.Size([3, 40]), (None, None, 9))
    """

    def __init__(
        self,
        factory: Factory,
        seeds: Sequence[int] | int,
        *,
        loss: Loss,
        optimizer: str | FleetOptimizer | Callable[[Any], Optimizer] = "sgd",
        rate: float | Sequence[float] | Tensor | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        mode: Literal["train", "eval"] = "train",
        route: RouteName = "auto",
        gradient: Gradient | None = None,
        target: str = "labels",
    ) -> None:
        if mode not in ("train", "eval"):
            raise ValueError(f"mode must be 'train' or 'eval'. Got {mode!r}.")
        self.seeds = _seeds("seeds", range(seeds) if isinstance(seeds, int) else seeds)
        self.loss, self.target, self._want = loss, target, route
        state = stack_replicas(factory, self.seeds)
        state.module.train(mode == "train")
        settings: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        settings |= {"weight_decay": weight_decay, "betas": betas, "eps": eps}
        self.rule, own_rate = fleet_optimizer(optimizer, settings, [p[0] for p in state.parameters.values()])
        rates = _rates(rate if rate is not None else own_rate, len(self.seeds))
        dtype = next(iter(state.parameters.values())).dtype
        count = torch.zeros(len(self.seeds), dtype=torch.long, device=state.device)
        memory = zero_state(self.rule, state.parameters)
        self._crew = Crew(state, memory, rates.to(state.device, dtype), count)
        self._rates, self._lost = rates, torch.zeros(len(self.seeds), dtype=torch.bool)
        self._gradient = gradient or _own_gradient(state.module, loss)
        self._epochs = 0  # begun so far
        self._routes: dict[Any, tuple[Route, tuple[str, ...]]] = {}

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def module(self) -> nn.Module:
        """The architecture, for `torch.func.functional_call`; its own numbers mean nothing."""
        return self._crew.state.module

    @property
    def parameters(self) -> Stack:
        """Trained parameters by name, (R, *shape), as they are now; not copies."""
        return {name: p.detach() for name, p in self._crew.state.parameters.items()}

    @property
    def buffers(self) -> Stack:
        """Buffers and parameters that are not trained, (R, *shape)."""
        return dict(self._crew.state.buffers)

    @property
    def rates(self) -> Tensor:
        """Learning rates, (R,)."""
        return self._rates.clone()

    def model(self, replica: int) -> nn.Module:
        """A module of its own with the weights of one replica."""
        return self._crew.state.replica(range(len(self))[replica])

    def train(
        self,
        data: Any,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        shared: Shared = True,
        order_seeds: Sequence[int] | int | None = None,
        schedule: Schedule | Mapping[int, float] | None = None,
        test: Any = None,
        measure: Mapping[str, Measure] | None = None,
        every: int = 1,
        until: float | None = None,
        stop: Stop | None = None,
        blow_up: float = 1e8,
        evaluate: bool = False,
        progress: bool | None = None,
    ) -> FleetTrace:
        """Train all replicas; a further call goes on from where they are, with the next epoch of the data.

        Parameters
        ----------
        data : `(inputs, targets)` seen by all. With `shared=False` every tensor has a leading replica axis, or `data` is a list
            of one `(inputs, targets)` per replica; with `shared="inputs"` only the targets have the axis.
        steps, epochs : how long; give one of them.
        batch_size : None for all data in every step. Else each replica shuffles anew in every epoch and takes all samples once;
            the last batch is short if the size does not divide. The orders are those of `train`.
        order_seeds : of the orders, one per replica or one for all (who then see the same batches); default: `seeds`.
        schedule : factor on the rates as a function of the step, or a table `{first step: factor}`.
        test : `(inputs, targets)`; loss and accuracy are taken every `every` steps, before the step, and after the last one.
        measure : columns by name, each a function `(parameters, buffers)` of one replica, taken at the same steps.
        until : a replica is frozen once its loss is at most this share of its first.
        stop : `(step, losses (R,)) -> bool or bool (R,)`, replicas to freeze.
        blow_up : a replica has diverged when its loss is not finite or above this many times its first. It stays frozen.
        evaluate : also compute the losses on the whole data at the end, in eval mode.
        """
        began = time.perf_counter()
        if bool(self._lost.all()):
            raise ValueError("All replicas have diverged: make a new fleet with smaller rates.")
        orders = self._order_seeds(order_seeds)
        feed = self._feed(data, shared, batch_size, orders)
        length = _length(steps, epochs, feed.batches, every)
        gauges = Gauges(len(self), dict(measure or {}), self._test(test), self.loss)
        with quiet_vmap(), torch.random.fork_rng(devices=[]):
            route, notes = self._route(feed, orders)
            run = FleetRun(self._crew, feed, route, self.rule, Rules(blow_up, until, stop), length, self._lost)
            with counting("training a fleet", progress=progress, total=length) as count:
                factors = self._steps(run, gauges, as_schedule(schedule), length, every, count)
            run.sync()
            if gauges.needed:
                gauges.read(len(factors), self._crew.state, route, None)
            final = finite_or_inf(full_loss(route, self._crew.state, feed.whole, self.loss)[0]).cpu() if evaluate else None
        self._lost = torch.tensor([step is not None for step in run.diverged_at])
        columns = gauges.stacked()
        trace = FleetTrace(
            loss=run.losses(len(factors)),
            rates=self.rates,
            factors=tuple(factors),
            seeds=tuple(self.seeds),
            order_seeds=tuple(orders),
            epoch=tuple(self._epochs + step // feed.batches for step in range(len(factors))),
            diverged_at=tuple(run.diverged_at),
            stopped_at=tuple(run.stopped_at),
            measured_at=tuple(gauges.steps),
            test_loss=columns.pop("test_loss", None),
            test_accuracy=columns.pop("test_accuracy", None),
            measured=columns,
            final_loss=final,
            outcome=Outcome.DIVERGED if bool(self._lost.all()) else Outcome.FINISHED,
            cost=Cost(time.perf_counter() - began, route.name, notes=notes),
        )
        self._epochs += -(-len(factors) // feed.batches)
        return trace

    def _steps(
        self, run: FleetRun, gauges: Gauges, schedule: Schedule | None, length: int, every: int, count: Callable[[int], None]
    ) -> list[float]:
        """Take the steps; returns the schedule's factors."""
        factors: list[float] = []
        for step in range(length):
            if run.over:
                break
            if gauges.needed and step % every == 0:
                gauges.read(step, run.live.state, run.route, run.resting)
            epoch, place = divmod(step, run.feed.batches)
            factors.append(1.0 if schedule is None else _factor(schedule(step), step))
            run.step(step, self._epochs + epoch, place, factors[-1])
            count(1)
        return factors

    def _route(self, feed: FleetFeed, orders: Sequence[int]) -> tuple[Route, tuple[str, ...]]:
        """Chosen once per kind of batch; a loop's random states live on with it."""
        batch = feed.batch(self._epochs, 0)
        key = (batch.size, tuple(batch.dims), tuple(orders))
        if key not in self._routes:
            self._routes[key] = choose_route(self._want, self._crew, self.loss, self._gradient, batch, random_seeds=orders)
        return self._routes[key]

    def _feed(self, data: Any, shared: Shared, batch_size: int | None, orders: Sequence[int]) -> FleetFeed:
        return FleetFeed(
            data,
            len(self),
            shared=shared,
            batch_size=batch_size,
            order_seeds=orders,
            own_loss=self.loss is None,
            target=self.target,
            device=self._crew.state.device,
        )

    def _test(self, test: Any) -> FleetBatch | None:
        if test is None:
            return None
        whole = self._feed(test, True, None, [0]).whole
        check_test(self._crew.state, whole, self.loss)
        return whole

    def _order_seeds(self, seeds: Sequence[int] | int | None) -> list[int]:
        if seeds is None:
            return self.seeds
        orders = [seeds] * len(self) if isinstance(seeds, int) else _seeds("order_seeds", seeds)
        if len(orders) != len(self):
            raise ValueError(f"order_seeds must be one number or one per replica: {len(self)}. Got {len(orders)}.")
        return orders


def _seeds(name: str, seeds: Sequence[int]) -> list[int]:
    numbers = [int(seed) for seed in seeds]
    if any(seed < 0 for seed in numbers):
        raise ValueError(f"{name} must not be negative. Got {min(numbers)}.")
    return numbers


def _rates(rate: Any, replicas: int) -> Tensor:
    if rate is None:
        raise ValueError("rate is missing: give a learning rate, one for all replicas or one per replica.")
    rates = torch.as_tensor(rate, dtype=torch.float64).detach().cpu()
    if rates.ndim > 1 or (rates.ndim == 1 and len(rates) != replicas):
        raise ValueError(f"rate must be one number or one per replica: {replicas}. Got shape {tuple(rates.shape)}.")
    if not bool((torch.isfinite(rates) & (rates >= 0)).all()):
        raise ValueError(f"rate must be finite and not negative. Got {rates.tolist()}.")
    return rates.expand(replicas).clone()


def _factor(factor: float, step: int) -> float:
    found = float(factor)
    if not 0.0 <= found < math.inf:
        raise ValueError(f"schedule must give finite factors that are not negative. Got {found} at step {step}.")
    return found


def _own_gradient(module: nn.Module, loss: Loss) -> Gradient | None:
    """The gradient a module brings itself."""
    if not callable(getattr(module, "fleet_gradient", None)):
        return None
    return lambda model, parameters, buffers, batch: model.fleet_gradient(parameters, buffers, batch, loss)  # type: ignore[operator]


def _length(steps: int | None, epochs: int | None, batches: int, every: int) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError(f"Give steps or epochs, one of them. Got steps={steps!r}, epochs={epochs!r}.")
    for name, value in (("steps", steps), ("epochs", epochs), ("every", every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a positive integer. Got {value!r}.")
    return steps if steps is not None else (epochs or 0) * batches
