"""
Surveying your own model
========================

A small convolutional network, its loss and its data go into one call. What comes back are sentences with numbers behind
them, the measurements themselves, and a page.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# A model as you would write it
# -----------------------------
# Nothing in it knows of this package. Here :func:`theodolite.train` runs the loop; your own loop does as well.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        return self.head(torch.relu(self.conv2(x)).flatten(1))


torch.manual_seed(0)
model = Net()
digits = th.data.load("digits").scaled()
data = digits.x_train, digits.y_train
loss = nn.CrossEntropyLoss()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
print(th.train(model, loss, data, sgd, epochs=15, batch_size=64))

# %%
# The survey
# ----------
# It is given the optimizer too, so it can say what the learning rate will do. A part of the data will do for a first look.

part = data[0][:400], data[1][:400]
found = th.survey(model, loss, part, optimizer=sgd, name="a small CNN on digits")
for finding in found.findings:
    print(f"{finding.severity.value:8} {finding.sentence}")

# %%
# ``found.to_html("survey/index.html")`` writes all this as a page. For programs there are labels:

print(found.labels())

# %%
# The pictures
# ------------
# Each result is there under the name of its instrument, and the plots take results as they are.

with th.plots.style():
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
th.plots.density(found.results["density"], nodes=found.results["curvature"].values, title="The whole spectrum", ax=left)
th.plots.eigenvalues(found.results["layers"], by="layer", log=True, title="Layer by layer", ax=right)
plt.show()
