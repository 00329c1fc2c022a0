"""A model, data, loss and optimizer as you may have them: nothing here is made for a survey."""

import torch
from torch import nn

import theodolite as th


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(x)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = th.data.load("digits").scaled().flat()
    return digits.x_train, digits.y_train


def smooth(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def everything() -> dict[str, object]:
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "loss": smooth, "data": data(), "optimizer": sgd}
