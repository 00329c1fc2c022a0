"""Each network has the layers, shapes and parameter counts its source gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite import models
from theodolite.models.feedforward import hidden_widths
from theodolite.problem.parameters import select_parameters

IMAGE = (2, 3, 32, 32)
#: A small version of every family: arguments, a batch, the shape of the output.
SMALL = {
    "F-20^2": ({"inputs": 12}, (5, 3, 2, 2), (5, 10)),
    "F-20^2-BN": ({"inputs": 12}, (5, 12), (5, 10)),
    "LeNet5": ({}, IMAGE, (2, 10)),
    "LeNet5-BN": ({"image": (1, 28, 28)}, (2, 1, 28, 28), (2, 10)),
    "LeNet-mini": ({}, (2, 1, 8, 8), (2, 10)),
    "VGG11-W8": ({"classes": 7}, IMAGE, (2, 7)),
    "ResNet18-W8": ({}, IMAGE, (2, 10)),
    "ResNet20": ({"width": 4}, IMAGE, (2, 10)),
    "WRN-10-1": ({"channels": 1}, (2, 1, 16, 16), (2, 10)),
    "WRN-16-1": ({"norm": None, "bias": False}, (2, 3, 8, 8), (2, 10)),
    "WRN-10-2": ({"norm": "group", "init": "ntk"}, (2, 3, 8, 8), (2, 10)),
    "Myrtle-5": ({"width": 6}, IMAGE, (2, 10)),
    "CNN-4-6": ({"channels": 1}, (2, 1, 8, 8), (2, 10)),
    "ViT-2": ({"dim": 12, "image": (3, 8, 8), "init": "ntk"}, (2, 3, 8, 8), (2, 10)),
    "NTK-FCN-3": ({"inputs": 6, "width": 9, "outputs": 4, "bias": "all"}, (5, 6), (5, 4)),
    "NTK-CNN-3": ({"image": (3, 6, 5), "width": 4}, (2, 3, 6, 5), (2, 1)),
}
every_small = pytest.mark.parametrize(("name", "arguments", "batch", "shape"), [(n, *v) for n, v in SMALL.items()], ids=SMALL)


def layers_of(model: nn.Module) -> list[str]:
    """Names of the modules with weights of their own, as the rest of the package names them."""
    return list(select_parameters(model, None).layers)


def on_paper(build, *args, **kwargs) -> int:
    """The parameter count, without the memory: the meta device holds no numbers."""
    with torch.device("meta"):
        return models.count_parameters(build(*args, **kwargs))


@every_small
def test_shapes_and_gradients(name, arguments, batch, shape):
    model = models.build(name, seed=0, **arguments)
    out = model(torch.randn(batch))
    assert out.shape == shape
    out.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        ("F-200^2", {}, 199_210),
        ("F-200^2-100", {}, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 100 + 100 + 100 * 10 + 10),
        ("F-200^2-BN", {}, 199_210),  # norms without scale and shift
        ("F-40^2", {"inputs": 64}, 4_650),
        ("F-40^4", {"inputs": 64}, 7_930),
        ("F-40", {"inputs": 40, "outputs": 2}, 1_722),
        ("F-100-20", {}, 80_730),
        ("F-20", {"inputs": 64}, 1_510),
        ("LeNet5", {}, 62_006),
        ("LeNet5-BN", {}, 62_006),
        ("LeNet5", {"image": (1, 28, 28)}, 44_426),
        ("LeNet-mini", {}, 1_538),
        ("LeNet-mini-BN", {}, 1_538),
        ("LeNet5-(fc1-80)", {}, 456 + 2416 + 401 * 80 + 81 * 84 + 850),
        ("VGG11", {}, 9_225_610),
        ("VGG11-W48", {"classes": 100}, 28 * 48 + 7 * (9 * 48**2 + 48) + 49 * 100),
        ("ResNet18", {"norm": "batch"}, 11_173_962),
        ("ResNet18-W64", {"classes": 100}, 27 * 64 + 147 * 64**2 + 65 * 100),
        ("ResNet20", {}, 269_722),
        ("ResNet56", {}, 853_018),
        ("WRN-10-1", {}, 78_186),
        ("WRN-10-2", {}, 304_394),
        ("WRN-10-10", {}, 7_438_730),
        ("WRN-28-10", {"bias": False}, 36_479_194),
        ("GPT-2", {}, 124_439_808),
        ("BERT-base", {}, 109_514_298 - 2 * 768),  # the original less its two segment vectors
        ("stories260k", {}, 260_032),
        ("NTK-FCN-5", {"inputs": 3072}, 3072 * 1024 + 3 * 1024**2 + 1024),
        ("NTK-CNN-5", {"image": (3, 32, 32)}, 27 * 512 + 3 * 9 * 512**2 + 512 * 1024),
    ],
)
def test_parameter_counts(name, arguments, count):
    assert on_paper(models.build, name, **arguments) == count


def test_bert_large_has_the_blocks_of_its_source():
    with torch.device("meta"):
        model = models.build("BERT-large")
    assert len(model.layers) == 24
    assert model.layers[0].mlp.up.weight.shape == (4096, 1024)
    assert model.layers[0].attention.heads == 16


def test_fully_connected_is_a_plain_stack_of_named_layers():
    model = models.build("F-20^2", inputs=12, seed=0)
    assert type(model) is nn.Sequential
    assert [name for name, _ in model.named_children()] == ["flatten", "fc1", "act1", "fc2", "act2", "fc3"]
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(4, 12), torch.randint(10, (4,))))
    assert list(problem.layers) == ["fc1", "fc2", "fc3"]


def test_batchnorm_stands_after_the_activation_without_scale_and_shift():
    fcn = models.build("F-20^2-BN", inputs=12)
    assert [name for name, _ in fcn.named_children()][1:4] == ["fc1", "act1", "bn1"]
    lenet = models.build("LeNet5-BN")
    names = [name for name, _ in lenet.named_children()]
    assert names[:4] == ["conv1", "act1", "bn1", "pool1"]
    assert names[-4:] == ["fc2", "act4", "bn4", "fc3"]
    assert not any(m.affine for m in [*fcn, *lenet] if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d))
    assert layers_of(lenet) == ["conv1", "conv2", "fc1", "fc2", "fc3"]


def test_the_small_lenet_with_norms_is_the_one_without_and_norms():
    plain, normed = (models.build(name, seed=0) for name in ("LeNet-mini", "LeNet-mini-BN"))
    names = [name for name, _ in normed.named_children()]
    assert names[:7] == ["conv1", "act1", "bn1", "pool1", "conv2", "act2", "bn2"]
    assert [name for name in names if not name.startswith("bn")] == [name for name, _ in plain.named_children()]
    assert [name for name in names if name.startswith("bn")] == ["bn1", "bn2", "bn3", "bn4"]
    assert not any(m.affine for m in normed if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d))
    pairs = zip(plain.parameters(), normed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "LeNet-mini-BN" in models.names()
    assert normed(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match="already says True"):
        models.build("LeNet-mini-BN", batchnorm=False)


def test_layer_names_of_deep_networks():
    assert layers_of(models.build("VGG11-W8")) == [*(f"conv{i}" for i in range(1, 9)), "fc1"]
    expected = [*(f"conv{i}" for i in range(1, 18)), *(f"sc_conv{i}" for i in range(1, 4)), "fc1"]
    assert layers_of(models.build("ResNet18-W8")) == expected
    assert layers_of(models.build("Myrtle-5", width=4)) == ["conv1", "conv2", "conv3", "conv4", "fc1"]
    assert layers_of(models.build("NTK-CNN-3", image=(1, 4, 4), width=3)) == ["conv1", "conv2", "fc1"]
    wrn = layers_of(models.build("WRN-10-1", norm=None))
    assert wrn[:3] == ["conv1", "group1.0.conv1", "group1.0.conv2"]
    assert wrn[-2:] == ["group3.0.shortcut", "fc1"]


def test_shapes_inside_lenet5():
    model, x = models.build("LeNet5"), torch.zeros(1, 3, 32, 32)
    shapes = {}
    for name, module in model.named_children():
        x = module(x)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["conv1"] == (6, 28, 28)
    assert shapes["pool1"] == (6, 14, 14)
    assert shapes["conv2"] == (16, 10, 10)
    assert shapes["flatten"] == (400,)


def test_strides_of_resnet18_reach_four_pixels():
    model = models.build("ResNet18-W8")
    sides = []
    for i in range(1, 18):
        model.get_submodule(f"conv{i}").register_forward_hook(lambda m, a, out: sides.append(out.shape[-1]))
    model(torch.zeros(1, 3, 32, 32))
    assert sides == [32] * 5 + [16] * 4 + [8] * 4 + [4] * 4


def test_residual_networks_without_branches_are_their_shortcuts():
    model = models.build("ResNet20", seed=0).eval()
    x = torch.randn(2, 3, 8, 8)
    for name, parameter in model.named_parameters():
        if name.startswith("layer"):
            nn.init.zeros_(parameter)
    stem = model.relu(model.bn1(model.conv1(x)))
    features = model.layer3(model.layer2(model.layer1(stem)))
    assert features.shape == (2, 64, 2, 2)
    torch.testing.assert_close(features[:, 24:40], stem[:, :, ::4, ::4])  # 16 channels in the middle of 64
    assert features[:, :24].abs().max() == 0
    assert features[:, 40:].abs().max() == 0


@pytest.mark.parametrize("norm", [None, "group"])
def test_samples_do_not_mix_without_batchnorm(norm):
    model = models.build("WRN-10-1", norm=norm, seed=0).double().train()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_batch_statistics_also_in_eval_mode():
    model = models.build("WRN-10-1", norm="batch_stats", seed=0)
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(model.eval()(x), model.train()(x))


def test_activations_can_be_chosen():
    x = torch.randn(3, 6)
    model = models.fcn(6, [5], 2, activation="swish", seed=0)
    torch.testing.assert_close(model(x), model.fc2(nn.functional.silu(model.fc1(x))))
    with pytest.raises(ValueError, match=r"activation must be one of 'relu', .*'softplus'.*. Got 'sine'"):
        models.fcn(6, [5], 2, activation="sine")


@pytest.mark.parametrize("name", ["F-200^", "G-200", "F", "F-BN", "F-200^2-X"])
def test_names_of_fully_connected_networks(name):
    with pytest.raises(ValueError, match="must look like"):
        hidden_widths(name)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.fcn(0, [3]), "inputs must be a whole number"),
        (lambda: models.fcn(3, [3, 0]), r"widths\[1\]"),
        (lambda: models.lenet5((3, 10, 10)), "too small"),
        (lambda: models.cifar_resnet(21), "depth must be 6n"),
        (lambda: models.wrn(12, 1), "depth must be 6n"),
        (lambda: models.wrn(10, 1, norm="layer"), "norm must be one of 'batch'"),
        (lambda: models.cnn(()), "at least one"),
        (lambda: models.vision_transformer((3, 9, 9)), "patch must divide"),
        (lambda: models.vision_transformer(dim=10, heads=3), "heads must divide"),
        (lambda: models.ntk_fcn(3, [4, 4], depth=2), "depth must be 3"),
        (lambda: models.ntk_fcn(3, bias="some"), "bias must be one of 'none', 'hidden', 'all'"),
        (lambda: models.ntk_cnn((3, 4, 4), kernel=2), "kernel must be odd"),
        (lambda: models.ntk_cnn((3,)), "image must be"),
        (lambda: models.llama_decoder(kv_heads=3), "kv_heads must divide"),
    ],
)
def test_wrong_sizes_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
