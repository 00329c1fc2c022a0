"""Hessian products of linear stacks in closed form, against the dense Hessian by double backward in float64."""

import copy

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.operators.base import rows_of
from theodolite.operators.linear_stacks import products
from theodolite.testing.dense import dense_hessian, finite_difference_product

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky": nn.LeakyReLU(0.2),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "gelu": nn.GELU(),
    "gelu by tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(beta=2.0),
    "elu": nn.ELU(alpha=0.7),
    "none": nn.Identity(),
    "two in a row": nn.Sequential(nn.Tanh(), nn.LeakyReLU(0.3)),
}
STACK, TRACED = "closed form of a linear stack", "double backward"


def stack(activation: nn.Module, *, bias: bool = True, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5, bias=bias), activation, nn.Linear(5, 4), activation, nn.Linear(4, outputs, bias=bias)
    ).double()


def batches(*sizes: int, outputs: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 2, 3, generator=generator, dtype=torch.float64),
            torch.randint(outputs, (n,), generator=generator),
        )
        for n in sizes
    ]


def assert_exact(model, loss, data, route=STACK, params=None) -> None:
    problem = th.Problem(model, loss, data, params=params)
    op = th.hessian(problem)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    truth = dense_hessian(lambda: loss(model(x), y), problem.parameters)
    assert float((op.to_dense() - truth).norm()) <= 1e-12 * float(truth.norm())
    v = torch.randn(problem.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert float((op @ v - truth @ v).norm()) <= 1e-12 * float((truth @ v).norm())
    assert op.cost().route == f"{route}, kept graph"


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_the_dense_hessian(activation, bias):
    assert_exact(stack(activation, bias=bias), nn.CrossEntropyLoss(), batches(7, 4))


def test_gelu_agrees_with_finite_differences():
    """The dense truth is double backward too; a wrong second derivative of an activation would be in both."""
    model = stack(nn.GELU())
    ((x, y),) = batches(9)
    problem = th.Problem(model, nn.CrossEntropyLoss(), [(x, y)])
    v = torch.randn(problem.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = finite_difference_product(lambda: nn.functional.cross_entropy(model(x), y), problem.parameters, v)
    assert float((th.hessian(problem) @ v - expected).norm()) <= 1e-8 * float(expected.norm())


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64), label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_losses(loss):
    assert_exact(stack(nn.Tanh()), loss, batches(8, 8, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mean_squared_error(reduction):
    data = [(x, torch.randn(len(x), 3, generator=torch.Generator().manual_seed(4)).double()) for x, _ in batches(6, 3)]
    assert_exact(stack(nn.Softplus()), nn.MSELoss(reduction=reduction), data)


@pytest.mark.parametrize("columns", [1, 2, 8, 19])
def test_blocks_equal_single_products(columns):
    problem = th.Problem(stack(nn.SiLU()), nn.CrossEntropyLoss(), batches(5, 6))
    x = torch.randn(problem.size, columns, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = torch.stack([th.hessian(problem, closed_form=False) @ column for column in x.T], dim=1)
    torch.testing.assert_close(th.hessian(problem) @ x, expected, rtol=1e-11, atol=1e-13)


def test_single_linear_layer():
    torch.manual_seed(0)
    assert_exact(nn.Sequential(nn.Flatten(), nn.Linear(6, 3).double()), nn.CrossEntropyLoss(), batches(8))


def test_activation_before_the_first_layer_and_a_stack_inside_a_stack():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)))
    assert_exact(nn.Sequential(nn.Flatten(), nn.Sigmoid(), inner).double(), nn.CrossEntropyLoss(), batches(8))


def test_biases_left_out_have_no_place():
    assert_exact(stack(nn.Tanh()), nn.CrossEntropyLoss(), batches(8), params="*weight")
    assert_exact(stack(nn.Tanh()), nn.CrossEntropyLoss(), batches(8), params=["*weight", "3.bias"])


def test_products_do_not_touch_vectors_or_the_model():
    model = stack(nn.ReLU())
    problem = th.Problem(model, nn.CrossEntropyLoss(), batches(8))
    op = th.hessian(problem)
    x = torch.randn(problem.size, 3, dtype=torch.float64)
    kept, before = x.clone(), copy.deepcopy(model.state_dict())
    first = op @ x
    assert torch.equal(op @ x, first)
    assert torch.equal(x, kept)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def _shared_bias() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[3].bias = model[1].bias
    return model


def _shared_weight() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[5].weight = model[3].weight
    return model


def _frozen_weight() -> nn.Module:
    model = stack(nn.Tanh())
    model[3].weight.requires_grad_(False)
    return model


def _lone_parameter() -> nn.Module:
    model = stack(nn.Tanh())
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    return model


def _hooked() -> nn.Module:
    model = stack(nn.Tanh())
    model[1].register_forward_hook(lambda module, args, out: 2.0 * out)
    return model


def _activation_last() -> nn.Module:
    return nn.Sequential(stack(nn.Tanh()), nn.Tanh())


def _extra_bias() -> nn.Module:
    """As many numbers as the stack has, but not the same ones."""
    model = stack(nn.Tanh())
    model[1].bias.requires_grad_(False)
    model[1].register_parameter("bias2", nn.Parameter(torch.ones(5, dtype=torch.float64)))
    return model


def _extra_weight() -> nn.Module:
    model = stack(nn.Tanh())
    model[1].weight.requires_grad_(False)
    model[1].register_parameter("mask", nn.Parameter(torch.ones(5, 6, dtype=torch.float64)))
    return model


def _unused_child() -> nn.Module:
    model = stack(nn.Tanh())
    model[1].requires_grad_(False)
    model[1].extra = nn.Linear(6, 5).double()
    return model


class Doubled(nn.Tanh):
    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        _shared_bias,
        _shared_weight,
        _frozen_weight,
        _lone_parameter,
        _hooked,
        _activation_last,
        _extra_bias,
        _extra_weight,
        _unused_child,
        lambda: stack(Doubled()),
        lambda: stack(nn.Dropout(0.5)).eval(),
        lambda: stack(nn.PReLU()),
    ],
    ids=[
        "bias",
        "weight",
        "frozen",
        "lone",
        "hook",
        "activation last",
        "bias2",
        "mask",
        "child",
        "subclass",
        "dropout",
        "prelu",
    ],
)
def test_what_is_no_plain_stack_is_traced(make):
    torch.manual_seed(0)
    assert_exact(make(), nn.CrossEntropyLoss(), batches(8), TRACED)


def test_many_outputs_and_rows_of_tokens_are_traced():
    assert_exact(stack(nn.Tanh(), outputs=40), nn.CrossEntropyLoss(), batches(8, outputs=40), TRACED)
    torch.manual_seed(0)
    tokens = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = [(x, torch.zeros(len(x), 2, 2, dtype=torch.float64)) for x, _ in batches(6)]  # (B, T, n) rows
    assert_exact(tokens, nn.MSELoss(), data, TRACED)


def test_a_changed_model_is_noticed():
    model = stack(nn.ReLU())
    op = th.hessian(th.Problem(model, nn.CrossEntropyLoss(), batches(8)))
    v = torch.ones(op.shape[0], dtype=torch.float64)
    op @ v
    with torch.no_grad():
        model[1].weight.add_(1.0)
    with pytest.raises(th.errors.StaleOperatorError):
        op @ v


def test_what_is_not_kept_is_traced():
    model, data = stack(nn.Tanh()), batches(8, 8)
    problem = th.Problem(model, nn.CrossEntropyLoss(), data)
    v = torch.ones(problem.size, dtype=torch.float64)
    expected = th.hessian(problem, closed_form=False) @ v
    never, tight = th.hessian(problem, keep="never"), th.hessian(problem, memory_budget=0)
    for op in (never, tight):
        for _ in range(2):
            torch.testing.assert_close(op @ v, expected, rtol=1e-12, atol=1e-14)
    assert never.cost().route == "double backward, recomputed graph"
    assert tight.cost().route == "double backward, recomputed graph"


def test_kept_for_some_batches_only():
    problem = th.Problem(stack(nn.Tanh()), nn.CrossEntropyLoss(), batches(8, 8, 8))
    whole = th.hessian(problem)
    v = torch.ones(problem.size, dtype=torch.float64)
    expected = whole @ v
    part = th.hessian(problem, memory_budget=whole.cost().peak_bytes // 2)
    for _ in range(2):
        torch.testing.assert_close(part @ v, expected, rtol=1e-12, atol=1e-14)
    assert part.cost().route == f"{STACK}, kept graph for 1 of 3 batches"


@pytest.mark.parametrize("columns", [1, 2, 8, 16, 17])
def test_columns_become_contiguous_rows(columns):
    x = torch.arange(40.0 * columns).reshape(40, columns)
    assert torch.equal(rows_of(x), x.T)
    assert rows_of(x).is_contiguous()
    rows = x.T.contiguous()
    assert rows_of(rows.T).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("room", [1 << 24, 300, 1], ids=["together", "in portions", "one by one"])
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU()])
@pytest.mark.parametrize("layers", [None, ["3"], ["1", "5"]], ids=["all", "middle", "ends"])
def test_layer_blocks_equal_those_of_the_dense_hessian(activation, layers, room, monkeypatch):
    monkeypatch.setattr(products, "LOCKSTEP_ROOM", room)
    model, data = stack(activation), batches(7, 4)
    problem = th.Problem(model, nn.CrossEntropyLoss(), data)
    blocks = th.layer_hessians(problem, layers)
    truth = th.hessian(problem, closed_form=False).to_dense()
    generator = torch.Generator().manual_seed(6)
    columns = {
        name: torch.randn(block.shape[0], 1 + i, generator=generator, dtype=torch.float64)
        for i, (name, block) in enumerate(reversed(list(blocks.items())))
    }
    for name, image in blocks.products(columns).items():
        places = blocks.positions(name)
        expected = truth[places][:, places] @ columns[name]
        assert float((image - expected).norm()) <= 1e-12 * float(expected.norm())
    assert blocks.cost().route == f"{STACK}, kept graph"


@pytest.mark.parametrize("measure", [lambda p: th.hessian(p), lambda p: th.layer_hessians(p)["1"]], ids=["hessian", "layer"])
def test_data_changed_in_place_are_noticed(measure):
    ((x, y),) = batches(8)
    op = measure(th.Problem(stack(nn.Tanh()), nn.CrossEntropyLoss(), [(x, y)]))
    v = torch.ones(op.shape[0], dtype=torch.float64)
    op @ v
    x.mul_(2.0)
    with pytest.raises(th.errors.StaleOperatorError, match="data were changed"):
        op @ v


def test_data_made_in_inference_mode():
    ((x, y),) = batches(8)
    with torch.inference_mode():
        data = [(x + 0.0, y)]
    expected = th.hessian(th.Problem(stack(nn.Tanh()), nn.CrossEntropyLoss(), batches(8))).to_dense()
    assert torch.equal(th.hessian(th.Problem(stack(nn.Tanh()), nn.CrossEntropyLoss(), data)).to_dense(), expected)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()])
def test_flatten_between_the_layers(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), activation, nn.Flatten(), nn.Linear(8, 3)).double()
    assert_exact(model, nn.CrossEntropyLoss(), batches(6), TRACED)  # tokens: (B, T, n)
    problem = th.Problem(model, nn.CrossEntropyLoss(), batches(6))
    truth = th.hessian(problem).to_dense()
    for name, block in th.layer_hessians(problem).items():
        places = problem.selection.positions(problem.layers[name].weights)
        torch.testing.assert_close(block.to_dense(), truth[places][:, places], rtol=1e-10, atol=1e-12)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), activation, nn.Flatten(), nn.Linear(4, 3)).double()
    assert_exact(flat, nn.CrossEntropyLoss(), batches(6))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()])
def test_batches_of_different_form(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 3)).double()
    ((x, y),) = batches(6)
    data = [(x[:, 0], y), {"input": x[:, 1], "labels": y}]
    both = th.Problem(model, nn.CrossEntropyLoss(), data)
    alike = th.Problem(model, nn.CrossEntropyLoss(), [(x[:, 0], y), (x[:, 1], y)])
    op, truth = th.hessian(both), th.hessian(alike).to_dense()
    for _ in range(2):
        torch.testing.assert_close(op.to_dense(), truth, rtol=1e-11, atol=1e-13)
    assert op.cost().route == f"{STACK}, else double backward, kept graph"
    for name, block in th.layer_hessians(both).items():
        places = both.selection.positions(both.layers[name].weights)
        for _ in range(2):
            torch.testing.assert_close(block.to_dense(), truth[places][:, places], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_are_traced(register):
    model = stack(nn.Tanh())
    scale = (lambda m, gi, go: (0.5 * gi[0],)) if "pre" not in register else (lambda m, go: (0.5 * go[0],))
    getattr(model[2], register)(scale)
    with pytest.warns(th.errors.DerivativeWarning, match="not that of the loss"):
        problem = th.Problem(model, nn.CrossEntropyLoss(), batches(8))
    op = th.hessian(problem).trusted()
    op @ torch.ones(problem.size, dtype=torch.float64)
    assert op.cost().route == f"{TRACED}, kept graph"


def test_a_model_changed_before_the_first_product_is_measured_as_it_is():
    v = torch.ones(74, dtype=torch.float64)
    model = stack(nn.Tanh())
    op = th.hessian(th.Problem(model, nn.CrossEntropyLoss(), batches(8)))
    model[2] = nn.Softplus()
    expected = th.hessian(th.Problem(model, nn.CrossEntropyLoss(), batches(8)), closed_form=False) @ v
    torch.testing.assert_close(op @ v, expected, rtol=1e-11, atol=1e-13)


def test_a_forward_replaced_in_the_class_is_traced(monkeypatch):
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 1.5 * plain(self, x))
    assert_exact(stack(nn.Tanh()), nn.CrossEntropyLoss(), batches(8), TRACED)


@pytest.mark.parametrize("closed_form", [True, False])
def test_autocast_around_the_call_changes_nothing(closed_form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 2))
    data = [(torch.randn(20, 30), torch.randint(2, (20,)))]
    problem = th.Problem(model, nn.CrossEntropyLoss(), data)
    v = torch.randn(problem.size)
    expected = th.hessian(problem, closed_form=closed_form) @ v
    blocks = {name: torch.ones(block.shape[0], 1) for name, block in th.layer_hessians(problem).items()}
    layerwise = th.layer_hessians(problem, closed_form=closed_form).products(blocks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(th.hessian(problem, closed_form=closed_form) @ v, expected)
        inside = th.layer_hessians(problem, closed_form=closed_form).products(blocks)
    assert all(torch.equal(inside[name], layerwise[name]) for name in blocks)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layer_without_units():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 0), nn.Tanh(), nn.Linear(0, 3)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), batches(8))
    expected = th.hessian(problem, closed_form=False).to_dense()
    torch.testing.assert_close(th.hessian(problem).to_dense(), expected, rtol=1e-12, atol=1e-14)


def test_vectors_that_require_grad_give_plain_images():
    problem = th.Problem(stack(nn.ReLU()), nn.CrossEntropyLoss(), batches(8))
    images = th.layer_hessians(problem).products({"1": torch.ones(30, 1, dtype=torch.float64, requires_grad=True)})
    assert not images["1"].requires_grad
