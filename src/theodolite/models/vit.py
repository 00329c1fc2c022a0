"""A small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.arguments import positive_integers
from theodolite.models.attention import Block, check_heads
from theodolite.models.initialisation import LAYER_INITS, construct


class ViT(nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks `layers`, norm, and a linear head on the class token.

    The class token and the positions start at N(0, 0.02²) whatever the initialisation of the layers.
    """

    def __init__(
        self, image: tuple[int, int, int], patch: int, dim: int, depth: int, heads: int, hidden: int, classes: int
    ) -> None:
        super().__init__()
        channels, height, width = image
        self.patches = nn.Conv2d(channels, dim, patch, stride=patch)
        self.token = nn.Parameter(0.02 * torch.randn(dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + (height // patch) * (width // patch), dim))
        self.layers = nn.ModuleList(Block(dim, heads, hidden, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, patches, dim)
        x = torch.cat([self.token.expand(len(x), 1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def vision_transformer(
    image: tuple[int, int, int] = (3, 32, 32),
    patch: int = 4,
    dim: int = 192,
    depth: int = 4,
    heads: int = 3,
    classes: int = 10,
    *,
    mlp_ratio: float = 4,
    init: str = "xavier",
    seed: int | None = None,
) -> ViT:
    """A ViT for images (channels, height, width) cut into squares of `patch` pixels; ViT-4 has depth 4 and patch 4.

    >>> model = vision_transformer((1, 8, 8), patch=2, dim=64, depth=1, heads=4)
    >>> sum(p.numel() for p in model.parameters())  # patches 320, token 64, positions 17·64, block 12·64² + 13·64, ...
    52234
    """
    positive_integers(patch=patch, dim=dim, depth=depth, heads=heads, classes=classes)
    check_heads(dim, heads)
    if image[1] % patch or image[2] % patch:
        raise ValueError(f"patch must divide the image. Got patch {patch} for {image[1]}×{image[2]} pixels.")
    hidden = round(mlp_ratio * dim)
    return construct(lambda: ViT(image, patch, dim, depth, heads, hidden, classes), init, seed, (*LAYER_INITS, "normal_0.02"))
