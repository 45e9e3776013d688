"""Greedy steps of a model over caches, by forward passes, by captured steps, and what imitates one.

On the CPU nothing is captured. What stands for a graph there runs a forward pass at each replay, as
if it were being captured: so the tokens go where the count in device memory says, which such a step
lowers by itself, and the cache counts them as those of a graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bitslab.integrations.transformers import KVCompCache, captured_steps
from tests.integrations.transformers.models import model_of, prompt_of

#: A prompt of PROMPT tokens leaves a window unpacked, and BLOCK tokens later a block is packed.
WINDOW, BLOCK = 16, 32
PROMPT = 4 + BLOCK + WINDOW
SIZES: dict[str, Any] = {"window": WINDOW, "block_tokens": BLOCK, "error": 0.3, "offload": False}


def stepped_model(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Return a model whose attention reads packed tokens."""
    model: Any = copy.deepcopy(model_of(name)).to(device, dtype)
    model.set_attn_implementation("bitslab")
    return model


def pack(cache: Any) -> None:
    """Pack what is due in a cache outside of steps, and wait for it."""
    for layer in cache.layers:
        layer.pack_due()
        layer._reader.finish_packing()
        for history in layer.histories:
            while history.packs:
                history.pack_on(wait=True)


class Decoding:
    """A batch that is decoded greedily: a cache, and the next token of each sequence.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    batch : int
        Sequences.
    padding : int
        Tokens of padding on the left of the last one.
    length : int
        Tokens of the prompt.
    """

    def __init__(
        self,
        model: Any,
        batch: int = 1,
        padding: int = 0,
        length: int = PROMPT,
        **options: Any,
    ) -> None:
        self.model = model
        prompt = prompt_of(batch=batch, length=length).to(model.device)
        self.mask = torch.ones_like(prompt)
        self.mask[-1, :padding] = 0
        self.padded = padding > 0
        self.cache: Any = KVCompCache(model.config, **{**SIZES, **options})
        with torch.no_grad():
            given = self.mask if self.padded else None
            out = model(prompt, attention_mask=given, past_key_values=self.cache)
        pack(self.cache)
        self.ids = out.logits[:, -1:].argmax(-1)
        self.at = self.mask.sum(1, keepdim=True)
        self.logits: list[torch.Tensor] = []

    def copied(self) -> Decoding:
        """Return another one that is as far, with a copy of the cache, of the same codecs."""
        found = copy.copy(self)
        found.cache, found.logits = copy.deepcopy(self.cache), [*self.logits]
        found.ids, found.at = self.ids.clone(), self.at.clone()
        return found

    def forward(self) -> torch.Tensor:
        """Return the logits of the next tokens, behind a forward pass without a mask."""
        with torch.no_grad():
            found: torch.Tensor = self.model(
                self.ids, position_ids=self.at, past_key_values=self.cache
            ).logits
        return found

    def take(self, logits: torch.Tensor) -> None:
        """Go on with the likeliest tokens."""
        self.logits.append(logits[:, -1].clone())
        self.ids.copy_(logits[:, -1:].argmax(-1))
        self.at.add_(1)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)

    def eager(self, n: int) -> None:
        """Decode tokens by forward passes."""
        for _ in range(n):
            with torch.no_grad():
                mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
                out = self.model(
                    self.ids,
                    attention_mask=mask if self.padded else None,
                    position_ids=self.at,
                    past_key_values=self.cache,
                )
            self.take(out.logits)

    @contextmanager
    def steps(self, room: int) -> Iterator[Any]:
        """Enter a block of steps."""
        mask = self.mask if self.padded else None
        with self.cache.captured_steps(room, attention_mask=mask) as steps:
            yield steps

    def all_logits(self) -> torch.Tensor:
        """Return all logits, ``[tokens, B, vocabulary]``."""
        return torch.stack(self.logits)

    def tokens(self) -> torch.Tensor:
        """Return the tokens that were decoded, ``[tokens, B]``."""
        return self.all_logits().argmax(-1)


def pair(model: Any, batch: int = 1, padding: int = 0, **options: Any) -> list[Decoding]:
    """Return two decodings of the same prompt."""
    found = Decoding(model, batch, padding, **options)
    return [found, found.copied()]


def open_block(cache: Any, tokens: Any = 4, **options: Any) -> None:
    """Open a block of steps, and leave it at once."""
    with cache.captured_steps(tokens, **options):
        pass


class Imitation:
    """What stands for a graph on the CPU, in which a step is captured at once: see above.

    Parameters
    ----------
    steps : CapturedSteps
        Of the block.
    run : callable
        What is captured.

    Attributes
    ----------
    step : CapturedStep
        Its `replay` is what calls that of this graph.
    logits : torch.Tensor
        What the last replay returned.
    resets : int
        How often the graph was reset.
    """

    def __init__(
        self, steps: Any, run: Callable[[], torch.Tensor], patch: pytest.MonkeyPatch
    ) -> None:
        self._steps, self._run, self._patch = steps, run, patch
        self.logits, self.resets = torch.empty(0), 0
        with patch.context() as patched:
            patched.setattr(captured_steps, "recorded", self._recorded)
            with steps.capture() as self.step:
                run()

    @contextmanager
    def _recorded(self, device: torch.device) -> Iterator[Imitation]:
        count = self._steps._count.short_by
        before = count.clone()
        with self._patch.context() as patch:
            patch.setattr(captured_steps, "capturing", lambda device: True)
            try:
                yield self
            finally:
                count.copy_(before)

    def replay(self) -> None:
        """Run it as if it were captured and replayed."""
        with self._patch.context() as patch:
            patch.setattr(captured_steps, "capturing", lambda device: True)
            patch.setattr(self._steps, "_recording", captured_steps._Capture())
            self.logits = self._run()

    def reset(self) -> None:
        """Take note of it."""
        self.resets += 1
