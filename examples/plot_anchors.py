"""
An anchor vector comes into being
=================================

A small GPT learns to write film reviews, and is probed on the way: how well is the logarithm of its bulk partition function
a linear function of the last hidden state? Afterwards its logits are read to classify reviews, before and after a shift
that changes no probability.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

import theodolite as th

# %%
# Reviews
# -------
# Sentences of one pattern. The adjectives of a review agree with its verdict, most of the time.

LISTS = """
film story cast plot music ending script camera dialogue hero villain scene start pace humour set
bright moving clever funny warm fresh rich bold graceful sharp tender lively grand honest charming deep
dull flat lazy clumsy cold stale poor timid awkward blunt harsh lifeless cheap false boring shallow
long short old new quiet loud early late british french small large dark light slow quick
good fine great
bad weak awful
the {} was {} and {} , i call it {} .
"""
THINGS, PRAISE, BLAME, PLAIN, GOOD, BAD, PATTERN = (line.split() for line in LISTS.strip().splitlines())
WORDS = sorted(set(LISTS.split()) - {"{}"})
NUMBER = {word: i for i, word in enumerate(WORDS)}


def reviews(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Reviews as rows of word numbers, and whether each praises."""
    generator = torch.Generator().manual_seed(seed)

    def pick(words: list[str]) -> str:
        return words[int(torch.randint(len(words), (1,), generator=generator))]

    rows, praises = [], []
    for _ in range(count):
        chance = torch.rand(4, generator=generator).tolist()
        praise = chance[0] < 0.5
        own, other = (PRAISE, BLAME) if praise else (BLAME, PRAISE)
        adjectives = [pick(own if c < 0.75 else PLAIN if c < 0.95 else other) for c in chance[1:3]]
        gaps = iter([pick(THINGS), *adjectives, pick(GOOD if praise else BAD)])
        rows.append([NUMBER[next(gaps) if word == "{}" else word] for word in PATTERN])
        praises.append(praise)
    return torch.tensor(rows), torch.tensor(praises)


text, _ = reviews(3000, seed=0)
fresh, praised = reviews(1000, seed=1)
print(len(WORDS), "words;", " ".join(WORDS[i] for i in text[0].tolist()))

# %%
# Training, and a probe now and then
# ----------------------------------
# The probe removes the ten most probable words of each context and fits the rest; the error is that on held-out positions. A
# fresh model has no direction in which all states agree, so that no vector predicts even a constant; training makes one within
# some steps.


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


TOP = 10
length = text.shape[1]
model = th.models.gpt(len(WORDS), length, dim=32, depth=2, heads=4, seed=0)
adam = torch.optim.Adam(model.parameters(), lr=5e-3)
data = (text[:, :-1], text[:, 1:])
rows, done = [], 0
for step in (0, 20, 50, 100, 300, 900):
    if step > done:
        th.train(model, loss, data, adam, steps=step - done, batch_size=64, seed=step)
        done = step
    probe = th.anchor_probe(model, fresh, top=(0, 3, TOP, 30), geometry=step == 900)
    place = probe.top.index(TOP)
    rows.append({"step": step + 1, "curve": "anchor, held out", "mean square error": probe.held_out_mse[place]})
    rows.append({"step": step + 1, "curve": "variance", "mean square error": probe.variance[place]})
    print(f"step {step:3d}: perplexity {probe.perplexity:5.1f}, held-out R² {probe.held_out_r2[place]:.4g}")

ax = plt.figure(layout="constrained").add_subplot()
th.plots.curves(
    rows, "step", "mean square error", by="curve", log="xy", xlabel="step + 1", title="In the course of training", ax=ax
)
plt.show()

# %%
# The trained model
# -----------------
# What was measured at the end, for several numbers of words removed, and how the rows of the output layer lie.

print(probe)
th.plots.plot_anchor_probe(probe, figure=plt.figure(layout="constrained"))
plt.show()

# %%
# A shift that nobody sees
# ------------------------
# After "i call it" the logits of *good* and *bad* tell the verdict. Now a number is added to all logits of a review, another
# one for each: the state gets one more coordinate and every word a one. No probability changes, and neither does the loss. The
# logits do; the anchored logits, whose anchor gets a one as well, do not.

caught: list[torch.Tensor] = []
handle = model.head.register_forward_pre_hook(lambda layer, args: caught.append(args[0].detach()))
with torch.no_grad():
    model(fresh[:, : PATTERN.index("it") + 1])
handle.remove()
known = th.anchors.LogLinear(caught[0][:, -1], model.head.weight)

labels, anchor = [NUMBER["good"], NUMBER["bad"]], probe.vector(TOP)
noise = 10 * torch.randn(len(fresh), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
shifted = th.anchors.shift_log_linear(known, noise)
change = (shifted.logits().softmax(1) - known.logits().softmax(1)).abs().max()
print(f"largest change of a probability: {float(change):.1e}")

figure, axes = th.plots.panels(4, columns=2, size=(3.6, 3.0), figure=plt.figure(layout="constrained"))
views = {
    "logits": known.logits()[:, labels],
    "logits, shifted": shifted.logits()[:, labels],
    "anchored logits": th.anchors.anchored_logits(known, anchor, labels),
    "anchored logits, shifted": th.anchors.anchored_logits(shifted, th.anchors.shift_anchor(anchor), labels),
}
for ax, (title, view) in zip(axes, views.items()):
    for praise, name in ((True, "praise"), (False, "blame")):
        mine = view[praised == praise]
        ax.plot(mine[:, 0], mine[:, 1], "o" if praise else "s", markersize=3, alpha=0.4, label=name)
    ax.set(title=title, xlabel="good", ylabel="bad")
axes[0].legend()
plt.show()

# %%
# Classifiers of thresholded units, Σ a max(u − b, 0), fitted to half of the reviews and tested on the other half. The shift
# spoils those on raw logits; it does not reach those on anchored logits or on log-probabilities.

found = th.anchors.compare_readouts(known, praised, labels=labels, anchor=anchor, shift=10.0)
for row in found.rows():
    print(f"{row['readout']:>18}: {row['accuracy']:.3f} right, after the shift {row['accuracy_shifted']:.3f}")
