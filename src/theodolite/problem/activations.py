"""What goes into modules and comes out of them while a model is called: the one way to capture it.

Hooks are taken away when the `with` block ends, also by an exception, and are not carried along when a model is copied
or pickled in between, unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from theodolite.interrupts import UnbrokenContext, unbroken_call, unbroken_context


@dataclass(frozen=True)
class Call:
    """One call of a module; `output` is None where the module has yet to run."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def input(self) -> Any:
        """The first argument, however it was passed."""
        return next(iter([*self.args, *self.kwargs.values()]), None)


Visit = Callable[[Call], Any]


class Hooks(UnbrokenContext["Hooks"]):
    """Calls `visit` after each call of the named modules, or `before` it, inside a `with` block or from `open` to `close`.

    What `visit` returns, if anything, replaces the module's output (`before`: its arguments, as a pair `args, kwargs`).
    `in_copies`: copies of the modules that are made while the hooks are set are visited too.

    >>> calls = []
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with Hooks(dict(model.named_children()), lambda call: calls.append(call.name)):
    ...     _ = model(Tensor([[1.0, 2.0]]))
    >>> calls
    ['0', '1']
    """

    def __init__(self, modules: Mapping[str, nn.Module], visit: Visit, *, before: bool = False, in_copies: bool = False) -> None:
        self._modules, self._before = modules, before
        self._visit, self._in_copies = visit, in_copies
        self._handles: list[RemovableHandle] = []

    def _enter(self) -> Self:
        try:
            for name, module in self._modules.items():
                register = module.register_forward_pre_hook if self._before else module.register_forward_hook
                self._handles.append(register(_Hook(name, self._visit, self._in_copies), with_kwargs=True))
        except BaseException:  # something among them is no module
            self._leave(None)
            raise
        return self

    def _leave(self, error: BaseException | None) -> bool:
        while self._handles:
            self._handles.pop().remove()
        return False

    @unbroken_call
    def open(self) -> None:
        """Set the hooks, unless they are set."""
        if not self._handles:
            self._enter()

    @unbroken_call
    def close(self) -> None:
        """Take the hooks away; doing it again does nothing."""
        self._leave(None)


class _Hook:
    """A hook that does nothing in a copy of its model, unless it is meant to."""

    def __init__(self, name: str, visit: Visit | None, in_copies: bool = False) -> None:
        self.name, self.visit, self.in_copies = name, visit, in_copies

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Any:
        return None if self.visit is None else self.visit(Call(self.name, module, args, kwargs, output))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self if self.in_copies else _Hook(self.name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (self.name, None)


@unbroken_context
def recorded_calls(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """All calls of the named modules within the `with` block, in the order in which they end.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with recorded_calls(dict(model.named_modules())) as calls:
    ...     _ = model(Tensor([[1.0, 2.0]]))
    >>> [(call.name, tuple(call.output.shape)) for call in calls]
    [('0', (1, 3)), ('1', (1, 3)), ('', (1, 3))]
    """
    calls: list[Call] = []
    with Hooks(modules, calls.append):
        yield calls


@dataclass
class Capture:
    """Inputs and outputs of layers during a forward pass, call by call."""

    inputs: dict[str, list[Tensor]]
    outputs: dict[str, list[Tensor]]


@unbroken_context
def capturing(modules: Mapping[str, nn.Module]) -> Iterator[Capture]:
    """Inputs without their graph and outputs in theirs, by name, to differentiate with respect to the outputs afterwards.

    A call that does not turn one tensor into another (a recurrent layer's tuple, say) is passed over.
    """
    seen = Capture({name: [] for name in modules}, {name: [] for name in modules})

    def note(call: Call) -> Tensor | None:
        if not isinstance(call.input, Tensor) or not isinstance(call.output, Tensor):
            return None
        seen.inputs[call.name].append(call.input.detach())
        seen.outputs[call.name].append(call.output)
        return call.output.clone()  # what follows may work in place

    with Hooks(modules, note):
        yield seen
