"""`Fleet`: many replicas of one architecture, trained as one vectorised program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import (
    a_mapping,
    a_text,
    about,
    also_called,
    checked,
    count,
    each,
    given,
    nonnegative,
    one_of,
    one_or_each,
    place,
    positive,
    whole,
)
from theodolite.interrupts import called_within
from theodolite.problem.arguments import a_factory, a_loss, a_plain_function
from theodolite.problem.batches import BatchParser
from theodolite.problem.calling import Loss
from theodolite.problem.derivatives.second_order import quiet_vmap
from theodolite.problem.state_guard import cuda_devices, random_states_kept
from theodolite.progress import counting
from theodolite.results import Cost, Outcome
from theodolite.text import listed, nearest
from theodolite.training.fleets.data import FleetFeed, Shared
from theodolite.training.fleets.optimizers import FleetOptimizer, ReplicaSettings, fleet_optimizer, zero_state
from theodolite.training.fleets.recorder import (
    Measure,
    Record,
    Recorder,
    all_outputs,
    check_test,
    eval_mode,
    evaluation_width,
    finite_or_inf,
    full_loss,
)
from theodolite.training.fleets.route_selection import Choice, RouteName, choose_route
from theodolite.training.fleets.routes import Gradient, LoopRoute, Route
from theodolite.training.fleets.run import FleetRun, ReplicaStack, Rules, Stop
from theodolite.training.fleets.state import Factory, Stack, stack_replicas
from theodolite.training.matrix_products import fix_matrix_products
from theodolite.training.schedules import Schedule, as_schedule, as_steps, check_length
from theodolite.training.trace import FleetTrace

PerReplica = float | Sequence[float] | Tensor  # one number for all replicas, or one for each
AnySchedule = Schedule | Mapping[int, float] | float | None
Factors = Callable[[int], float | Tensor]  # step -> one factor for all replicas, or (R,)

#: Bytes that the replicas computed at once may take beside their weights.
MEMORY = 2.0**32
#: Replicas of a fleet at most.
LARGEST = 1_000_000


# What the arguments of a fleet mean, checked.


def as_seeds(name: str, seeds: Any) -> list[int]:
    """Seeds as whole numbers, none negative; a number R stands for 0 .. R-1."""
    found = one_or_each(whole)(name, seeds)
    if not isinstance(found, int):
        return found  # type: ignore[no-any-return]
    if not 0 < found <= LARGEST:
        raise ValueError(f"{name} must be one seed per replica, or a number of replicas from 1 to {LARGEST:,}. Got {found}.")
    return list(range(found))


def as_rates(rate: Any, replicas: int, name: str = "rate") -> Tensor:
    """Learning rates (R,) or one for all, in float64."""
    if rate is None:
        raise ValueError(f"{name} is missing: give a learning rate, one for all replicas or one per replica.")
    found = one_or_each(nonnegative)(name, rate)
    if isinstance(found, list) and len(found) != replicas:
        raise ValueError(f"{name} must be one number or one per replica: {replicas}. Got {len(found)}.")
    return torch.tensor(found, dtype=torch.float64).expand(replicas).clone()


def as_group_rates(rate: Any, names: Sequence[str], replicas: int) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Rates (R,) and names of the parameters of each group, by pattern; one group of all where the rate is no table."""
    if not isinstance(rate, Mapping):
        return {"*": (as_rates(rate, replicas), tuple(names))}
    found: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    left = list(names)
    for pattern, value in rate.items():
        own = [name for name in left if fnmatchcase(name, a_text("a pattern of rate", pattern))]
        if not own:
            near = listed(nearest(pattern, names, count=3))
            raise ValueError(f"rate[{pattern!r}] fits no parameter that the patterns before it left. Nearest names: {near}.")
        found[pattern] = as_rates(value, replicas, f"rate[{pattern!r}]"), tuple(own)
        left = [name for name in left if name not in own]
    if left:
        raise ValueError(f'rate has no pattern for {listed(left, 4)}. Add "*" with the rate of all others as the last one.')
    return found


def as_factors(schedule: AnySchedule | Sequence[AnySchedule], replicas: int) -> Factors:
    """What the rates are multiplied with in each step, from one schedule for all or one per replica."""
    if not isinstance(schedule, list | tuple):
        return _factor(schedule)  # type: ignore[arg-type]
    if len(schedule) != replicas:
        raise ValueError(f"schedule must be one for all replicas or a list of one per replica: {replicas}. Got {len(schedule)}.")
    each = [_factor(one) for one in schedule]
    return lambda step: torch.tensor([factor(step) for factor in each], dtype=torch.float64)


def _factor(schedule: AnySchedule) -> Schedule:
    factor = as_schedule(schedule)

    def checked(step: int) -> float:
        return 1.0 if factor is None else nonnegative(f"what schedule gives for step {step}", factor(step))

    return checked


def _outside_inference() -> torch.inference_mode:
    """Where gradients can be had, also where the caller is in inference mode."""
    return torch.inference_mode(False)


class Fleet:
    """R replicas of one architecture with own seeds, learning rates, data orders or data, trained in lockstep.

    Args:
        factory: seed -> `nn.Module`; torch's generator is seeded alike before each call. Buffers are kept per replica and must be
            changed in place, if at all.
        seeds: one per replica, or a number R for 0 .. R-1.
        loss: `(output, target) -> scalar` of one replica, or None for models that return their own `.loss`.
        optimizer: `"sgd"`, `"adam"`, `"adamw"`, `"rmsprop"`, a function of the parameters that makes one of these torch
            optimizers, or a rule with `columns` and `step`.
        rate: (or `lr`) learning rate, one for all or one per replica; a table `{glob on parameters' names: rate}` gives groups of
            parameters their own, where the first glob that fits a name holds; None where the torch optimizer brings it.
        momentum, dampening, nesterov, weight_decay, betas, eps, alpha, centered: as in torch; None keeps its default. Momentum,
            weight decay, each of the two betas and alpha (of RMSprop) may be one per replica.
        mode: `"train"` or `"eval"`, the mode of the modules in training steps. Tests run in eval mode.
        route: `"vmap"` for all replicas at once, `"loop"` for one after the other, `"auto"` for the loop where vmap refuses the
            model (LSTM, dropout, ...) or gains nothing (large convolutions, a single replica). The result says which, and why.
        gradient: `(module, parameters, buffers, batch) -> (loss, gradients by name)` of one replica, for a model with a cheaper
            gradient than autograd's; default is the module's method `fleet_gradient(parameters, buffers, batch, loss)`, if any.
        memory: bytes for activations, gradients and samples of the replicas that are computed at once; a larger fleet takes its
            steps chunk by chunk. Weights and optimizer state of all replicas come on top.
        bitwise: insist that replicas which see equal data stay bitwise equal. MKL is asked for products that do not depend on
            where a matrix lies in memory, which it grants before its first product in this process; that is said in
            `FleetTrace.matrix_products`. Equal bits are then tried before the first step; where the vectorised program does not
            keep them, each replica runs alone in the same place of memory, and `FleetTrace.cost` says so.

    Numbers agree with a plain loop to rounding. A replica never depends on its neighbours: one that diverges is frozen and
    leaves them bitwise intact. Whether replicas that see equal data stay bitwise equal depends on the matrix kernels, unless
    `bitwise` insists on it.

    >>> x = torch.ones(1, 1)
    >>> fleet = Fleet(lambda seed: nn.Linear(1, 1, bias=False), [0, 0, 0], loss=nn.MSELoss(), rate=[0.25, 0.5, 2.0])
    >>> run = fleet.train((x, 0 * x), steps=40)
    >>> run.loss.shape, run.diverged_at                       # the third rate is above 2/λ = 1
    (torch.Size([3, 40]), (None, None, 9))
    """

    @also_called(lr="rate")
    @checked(
        factory=a_factory,
        loss=a_loss,
        mode=one_of("train", "eval"),
        route=one_of("auto", "vmap", "loop"),
        gradient=a_plain_function,
        memory=positive,
        target=a_text,
    )
    @called_within(_outside_inference)
    def __init__(
        self,
        factory: Factory,
        seeds: Sequence[int] | int,
        *,
        loss: Loss,
        optimizer: str | FleetOptimizer | Callable[[Any], Optimizer] = "sgd",
        rate: PerReplica | Mapping[str, PerReplica] | None = None,
        momentum: PerReplica | None = None,
        dampening: float | None = None,
        nesterov: bool | None = None,
        weight_decay: PerReplica | None = None,
        betas: tuple[PerReplica, PerReplica] | None = None,
        eps: float | None = None,
        alpha: PerReplica | None = None,
        centered: bool | None = None,
        mode: Literal["train", "eval"] = "train",
        route: RouteName = "auto",
        gradient: Gradient | None = None,
        memory: float = MEMORY,
        bitwise: bool = False,
        target: str = "labels",
    ) -> None:
        self._memory, self._bitwise = memory, bitwise
        self._matrix_products = fix_matrix_products() if bitwise else ""  # before the factory multiplies anything
        self.seeds = as_seeds("seeds", seeds)
        self.loss, self.target, self._want = loss, target, route
        state = stack_replicas(factory, self.seeds)
        state.module.train(mode == "train")
        settings: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        settings |= {"weight_decay": weight_decay, "betas": betas, "eps": eps, "alpha": alpha, "centered": centered}
        self.rule, own_rate = fleet_optimizer(optimizer, settings, [p[0] for p in state.parameters.values()])
        if isinstance(self.rule, ReplicaSettings):
            self.rule.check(len(self.seeds))
        own_rate = None if isinstance(optimizer, type) else own_rate  # torch's default is nobody's choice
        groups = as_group_rates(rate if rate is not None else own_rate, list(state.parameters), len(self.seeds))
        rates = torch.stack([own for own, _ in groups.values()], dim=1)  # (R, G)
        dtype = next(iter(state.parameters.values())).dtype
        count = torch.zeros(len(self.seeds), dtype=torch.long, device=state.device)
        missed = {name: count.clone() for name in state.parameters}
        columns, names = zero_state(self.rule, state.parameters), tuple(names for _, names in groups.values())
        self._replicas = ReplicaStack(state, self.rule, columns, rates.to(state.device, dtype), names, count, missed)
        self._rates, self._lost = rates, torch.zeros(len(self.seeds), dtype=torch.bool)
        self._patterns = tuple(groups)
        self._gradient = gradient or _own_gradient(state.module, loss)
        self._epochs = 0  # begun so far
        self._choices: dict[Any, Choice] = {}
        self._random: list[Tensor] = []  # a state per replica, for models that draw numbers

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def module(self) -> nn.Module:
        """The architecture, for `torch.func.functional_call`; its own numbers mean nothing."""
        return self._replicas.state.module

    @property
    def parameters(self) -> Stack:
        """Trained parameters by name, (R, *shape), as they are now; not copies."""
        return {name: p.detach() for name, p in self._replicas.state.parameters.items()}

    @property
    def buffers(self) -> Stack:
        """Buffers and parameters that are not trained, (R, *shape)."""
        return dict(self._replicas.state.buffers)

    @property
    def rates(self) -> Tensor:
        """Learning rates, (R,); those of the first group where groups of parameters have their own."""
        return self._rates[:, 0].clone()

    @property
    def group_rates(self) -> dict[str, Tensor]:
        """Learning rates (R,) of each group of parameters, by its pattern."""
        return dict(zip(self._patterns, self._rates.T.clone(), strict=True))

    def model(self, replica: int, checkpoint: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A module of its own with the weights of one replica, as they are now or in one of `FleetTrace.checkpoints`."""
        r, state = place("replica", replica, len(self)), self._replicas.state
        if checkpoint is None:
            return state.replica(r)
        parameters, buffers = ({name: checkpoint[name] for name in stack} for stack in (state.parameters, state.buffers))
        return replace(state, parameters=parameters, buffers=buffers).replica(r)

    @checked(
        steps=count,
        epochs=count,
        batch_size=count,
        measure=a_mapping,
        record=a_plain_function,
        until=nonnegative,
        stop=a_plain_function,
        blow_up=positive,
        every=given,
    )
    @called_within(_outside_inference)
    def train(
        self,
        data: Any,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        shared: Shared = True,
        index: Any = None,
        drop_last: bool = False,
        order_seeds: Sequence[int] | int | None = None,
        schedule: AnySchedule | Sequence[AnySchedule] = None,
        test: Any = None,
        measure: Mapping[str, Measure] | None = None,
        record: Record | None = None,
        every: int | Sequence[int] = 1,
        checkpoints: int | Sequence[int] | None = None,
        until: float | None = None,
        stop: Stop | None = None,
        blow_up: float = 1e8,
        evaluate: bool = False,
        progress: bool | None = None,
    ) -> FleetTrace:
        """Train all replicas; a further call goes on from where they are, with the next epoch of the data.

        Args:
            data: `(inputs, targets)` seen by all. With `shared=False` every tensor has a leading replica axis, or `data` is a
                list of one `(inputs, targets)` per replica; with `shared="inputs"` only the targets have the axis.
            steps, epochs: how long; give one of them.
            index: (R, m), which samples of the data each replica trains on; None for all of them.
            batch_size: None for all data in every step. Else each replica shuffles anew in every epoch and takes all samples
                once; the last batch is short if the size does not divide, or left out with `drop_last`. The orders are those of
                `train`.
            order_seeds: of the orders, one per replica or one for all (who then see the same places); default: `seeds`.
            schedule: factor on the rates as a function of the step, or a table `{first step: factor}`; a list gives each replica
                its own.
            test: `(inputs, targets)`; loss and accuracy are taken every `every` steps, before the step, and after the last one.
            measure: columns by name, each a function `(parameters, buffers)` of one replica, taken at the same steps.
            record: `(step, fleet) -> columns (R, ...)`, for what needs all replicas, at the same steps; `fleet.outputs` and
                `fleet.parameters` are those of that step.
            every: a number of steps, or a list of steps.
            checkpoints: likewise, the steps before which the weights are kept, in `FleetTrace.checkpoints`; T is after the last,
                and kept if a number of steps is given.
            until: a replica is frozen once its loss is at most this share of its first.
            stop: `(step, losses (R,)) -> bool or bool (R,)`, replicas to freeze; in a fleet that trains in chunks it is called
                for each chunk, with NaN for the others, so judge each replica by its own loss.
            blow_up: a replica has diverged when its loss is not finite or above this many times its first. It stays frozen.
            evaluate: also compute the losses on the whole data at the end, in eval mode.
        """
        began = time.perf_counter()
        if bool(self._lost.all()):
            raise ValueError("All replicas have diverged: make a new fleet with smaller rates.")
        orders = self._order_seeds(order_seeds)
        options: dict[str, Any] = {"shared": shared, "batch_size": batch_size, "index": index, "drop_last": drop_last}
        feed = self._feed(data, len(self), order_seeds=orders, **options)
        check_length(steps, epochs)
        length = steps if steps is not None else (epochs or 0) * feed.batches
        kept = as_steps("checkpoints", checkpoints, length)
        log = _Log(as_steps("every", every, length), kept, isinstance(checkpoints, int), record)
        with about("test"):
            tested = None if test is None else self._feed(test, len(self))
            if tested is not None:
                check_test(self._replicas.state, tested, self.loss)
        recorder = Recorder(len(self), dict(measure or {}), tested, self.loss)
        with quiet_vmap(), random_states_kept(cuda_devices(self.module)):
            choice = self._choose(feed, orders)
            recorder.sample_bytes = choice.sample_bytes
            runs = self._runs(choice, feed, Rules(blow_up, until, stop), length)
            with counting("training a fleet", progress=progress, total=length) as count:
                factors = self._steps(runs, recorder, log, as_factors(schedule, len(self)), length, count)
            taken = len(factors)
            self._look(taken, runs, recorder, log, last=True)
            final = None
            if evaluate:
                losses, _ = full_loss(choice.route, self._replicas.state, feed, self.loss, choice.sample_bytes)
                final = finite_or_inf(losses).cpu()
        diverged_at = [step for run in runs for step in run.diverged_at]
        self._lost = torch.tensor([step is not None for step in diverged_at])
        columns = recorder.stacked()
        trace = FleetTrace(
            loss=torch.cat([run.losses(taken) for run in runs]),
            rates=self.rates,
            group_rates=self.group_rates,
            factors=torch.stack([torch.as_tensor(f, dtype=torch.float64).reshape(-1) for f in factors], dim=1),
            seeds=tuple(self.seeds),
            order_seeds=tuple(orders),
            epoch=tuple(self._epochs + step // feed.batches for step in range(taken)),
            diverged_at=tuple(diverged_at),
            stopped_at=tuple(step for run in runs for step in run.stopped_at),
            measured_at=tuple(recorder.steps),
            test_loss=columns.pop("test_loss", None),
            test_accuracy=columns.pop("test_accuracy", None),
            measured=columns,
            checkpoints=log.kept,
            final_loss=final,
            outcome=Outcome.DIVERGED if bool(self._lost.all()) else Outcome.FINISHED,
            matrix_products=self._matrix_products,
            cost=Cost(time.perf_counter() - began, choice.route.name, notes=choice.notes),
        )
        self._epochs += -(-taken // feed.batches)
        return trace

    @called_within(torch.no_grad)
    def outputs(self, data: Any, *, shared: Shared = True, index: Any = None, replicas: Sequence[int] | None = None) -> Tensor:
        """Outputs (R, n, ...) on `data` in eval mode, of all replicas or some; see `train` for `shared` and `index`.

        With `replicas`, data with a replica axis and `index` are those of these replicas.
        """
        state = self._replicas.state
        if replicas is not None:
            rows = each(lambda name, row: place(name, row, len(self)))("replicas", replicas)
            state = state.rows(torch.tensor(rows))
        feed = self._feed(data, state.replicas, shared=shared, index=index)
        choice = next(iter(self._choices.values()), None)
        route: Route = LoopRoute(self.module, self.loss, None) if choice is None else choice.route.for_chunk()
        width = evaluation_width(route, state.replicas, 2**20 if choice is None else choice.sample_bytes)
        with quiet_vmap(), eval_mode(self.module), random_states_kept(cuda_devices(self.module)):
            found = all_outputs(route, state, feed, width)
        if found is None:
            raise ValueError(
                "outputs needs a model whose output is one tensor with an axis over the samples. Wrap a model that returns a "
                "mapping or a tuple so that it returns the tensor wanted."
            )
        return found

    def _runs(self, choice: Choice, feed: FleetFeed, rules: Rules, length: int) -> list[FleetRun]:
        """One run for each chunk of the fleet."""
        if choice.chunk >= len(self):
            return [FleetRun(self._replicas, feed, choice.route, rules, length, self._lost, len(self))]
        runs = []
        for first in range(0, len(self), choice.chunk):
            rows = slice(first, first + choice.chunk)
            replicas, part, route = self._replicas.rows(rows), feed.part_of(rows), choice.route.for_chunk()
            runs.append(FleetRun(replicas, part, route, rules, length, self._lost[rows], len(self)))
        return runs

    def _steps(
        self, runs: list[FleetRun], recorder: Recorder, log: _Log, factors: Factors, length: int, count: Callable[[int], None]
    ) -> list[float | Tensor]:
        """Take the steps; returns the schedule's factors."""
        taken: list[float | Tensor] = []
        for step in range(length):
            if all(run.over for run in runs):
                break
            self._look(step, runs, recorder, log)
            epoch, place = divmod(step, runs[0].feed.batches)
            taken.append(factors(step))
            for run in runs:
                if not run.over:
                    run.step(step, self._epochs + epoch, place, taken[-1])
            count(1)
        return taken

    def _look(self, step: int, runs: list[FleetRun], recorder: Recorder, log: _Log, *, last: bool = False) -> None:
        """Measure and keep what is due before this step; the last look is always taken, also at frozen replicas."""
        measured = (last or log.every(step)) and (log.record is not None or recorder.measure or recorder.test is not None)
        keep = log.checkpoints(step) or (last and log.end)
        if last or keep or (measured and log.record is not None):
            for run in runs:
                run.sync()
        if measured:
            states = [(self._replicas.state, None)] if last else [(run.live.state, run.resting) for run in runs]
            recorder.read(step, states, runs[0].route)
            if log.record is not None:
                recorder.add(log.record(step, self))
        if keep:
            log.kept[step] = {name: t.clone() for name, t in {**self.parameters, **self.buffers}.items()}

    def _choose(self, feed: FleetFeed, orders: Sequence[int]) -> Choice:
        """Once per kind of batch; a loop's random states live on with it."""
        own = feed.part_of(slice(0, 1)).batch(self._epochs, 0)
        key = (own.size, tuple(own.dims), tuple(orders))
        if key not in self._choices:
            self._choices[key] = choose_route(
                self._want,
                self._replicas,
                self.loss,
                self._gradient,
                lambda rows: feed.part_of(rows).batch(self._epochs, 0),
                random=lambda: self._random_states(orders),
                memory=self._memory,
                bitwise=self._bitwise,
            )
        return self._choices[key]

    def _random_states(self, seeds: Sequence[int]) -> list[Tensor]:
        """Those of the first seeds given, wherever they are by now."""
        if not self._random:
            self._random = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        return self._random

    def _feed(self, data: Any, replicas: int, *, order_seeds: Sequence[int] = (0,), **options: Any) -> FleetFeed:
        parse = BatchParser.of(self._replicas.state.module, self.loss, self.target)
        own: dict[str, Any] = {"parse": parse, "device": self._replicas.state.device}
        return FleetFeed(data, replicas, order_seeds=order_seeds, **own, **options)

    def _order_seeds(self, seeds: Sequence[int] | int | None) -> list[int]:
        if seeds is None:
            return self.seeds
        found = one_or_each(whole)("order_seeds", seeds)
        orders = found if isinstance(found, list) else [found] * len(self)
        if len(orders) != len(self):
            raise ValueError(f"order_seeds must be one number or one per replica: {len(self)}. Got {len(orders)}.")
        return orders


@dataclass
class _Log:
    """What is taken at which steps: measurements `every`, weights at `checkpoints`."""

    every: Callable[[int], bool]
    checkpoints: Callable[[int], bool]
    end: bool  # the weights after the last step are kept too
    record: Record | None
    kept: dict[int, Stack] = field(default_factory=dict)


def _own_gradient(module: nn.Module, loss: Loss) -> Gradient | None:
    """The gradient a module brings itself."""
    if not callable(getattr(module, "fleet_gradient", None)):
        return None
    return lambda model, parameters, buffers, batch: model.fleet_gradient(parameters, buffers, batch, loss)  # type: ignore[operator]
