"""Images to train on, with no network: scikit-learn's digits, or drawn ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

#: Every fifth image is tested.
TEST_EVERY = 5
DIGITS = 1797


class ImagesError(Exception):
    """Images cannot be had."""


@dataclass(frozen=True)
class Images:
    """Images and their classes.

    Parameters
    ----------
    name : str
        What they are.
    small : torch.Tensor
        float32 ``[N, 3, s, s]`` on the device, of the size that they come in.
    labels : torch.Tensor
        int64 ``[N]`` on the device.
    side : int
        Pixels that a model wants; a batch is enlarged to it.
    classes : int
        How many there are.
    """

    name: str
    small: torch.Tensor
    labels: torch.Tensor
    side: int
    classes: int

    @property
    def trained(self) -> torch.Tensor:
        """Ids of the images to train on, int64."""
        ids = torch.arange(len(self.labels), device=self.labels.device)
        return ids[ids % TEST_EVERY != TEST_EVERY - 1]

    @property
    def tested(self) -> torch.Tensor:
        """Ids of the other ones."""
        ids = torch.arange(len(self.labels), device=self.labels.device)
        return ids[ids % TEST_EVERY == TEST_EVERY - 1]

    def batch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images ``[B, 3, side, side]`` and labels ``[B]``."""
        images = self.small[ids]
        if images.shape[-1] != self.side:
            size = (self.side, self.side)
            images = functional.interpolate(images, size, mode="bilinear", align_corners=False)
        return images, self.labels[ids]

    def epoch(
        self, batch_size: int, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the whole batches of one shuffled pass."""
        ids = self.trained
        order = ids[torch.randperm(len(ids), generator=generator).to(ids.device)]
        for chosen in order.split(batch_size):
            if len(chosen) == batch_size:
                yield self.batch(chosen)


def load_images(name: str, n: int, side: int, seed: int, device: torch.device) -> Images:
    """Return the images that an option names.

    Parameters
    ----------
    name : {"digits", "drawn"}
        Which images.
    n : int
        How many; of digits the first ones, and all of them again when there are fewer.
    side : int
        Pixels of a batch.
    seed : int
        Of what is drawn.
    device : torch.device
        Where they are kept.
    """
    small, labels = _digits(n) if name == "digits" else draw_gratings(n, seed)
    small = (small - small.mean()) / small.std()
    return Images(name, small.to(device), labels.to(device), side, 10)


def _digits(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImagesError(
            f"--data digits needs scikit-learn ({error}); accepted without it is --data drawn"
        ) from error
    digits = load_digits()
    ids = torch.arange(n) % DIGITS
    images = torch.from_numpy(digits.images).float()[ids]
    labels = torch.from_numpy(digits.target).long()[ids]
    return images.unsqueeze(1).expand(-1, 3, -1, -1).contiguous(), labels


def draw_gratings(n: int, seed: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw waves whose direction and length are their class's, of any phase and colour, and noise.

    Parameters
    ----------
    n : int
        How many.
    seed : int
        The same images for the same seed.
    side : int
        Pixels.

    Returns
    -------
    tuple of torch.Tensor
        float32 ``[n, 3, side, side]`` and int64 ``[n]`` below 10.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    angle = (labels % 5) * (torch.pi / 5) + 0.1 * torch.randn(n, generator=generator)
    waves = 2.0 + 2.0 * (labels // 5)
    at = torch.linspace(0, 2 * torch.pi, side)
    across = (angle.cos() * waves)[:, None] * at + 2 * torch.pi * torch.rand(
        n, 1, generator=generator
    )
    down = (angle.sin() * waves)[:, None] * at
    gray = torch.sin(down[:, :, None] + across[:, None, :])
    colour = 0.3 + 0.7 * torch.rand(n, 3, 1, 1, generator=generator)
    noise = torch.randn(n, 3, side, side, generator=generator)
    return gray[:, None] * colour + 0.3 * noise, labels
