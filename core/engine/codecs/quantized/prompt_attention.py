"""Attention of a prompt's last queries to some of its tokens, coded or as they came."""

from __future__ import annotations

import math

import numpy as np
import torch

from ....errors import ArgumentError
from ...kernels.tile_format import TILE_BLOCK
from ...kernels.uploads import uploaded

#: Tokens, queries and values that are looked at, at the most; of many heads at least some tokens.
_TOKENS = 2048
_LEAST_TOKENS = 512
_QUERIES = 64
_VALUES = 1 << 22
#: Bytes that a fit takes; what the sample leaves of them decides at how many scales is measured at
#: once. For each value of the sample: itself and in float32, and how far it is from a center. For
#: each at a scale, while attention is measured: codes, whether they are some, and what they are
#: decoded to, beside the logits; while both sides are decoded, or codes are counted.
_FIT_BYTES = 256 << 20
_SAMPLE_BYTES = 16
_MEASURED_BYTES = 9
_DECODED_BYTES = 20


class PromptAttention:
    """Attention of a prompt's last queries to some of its tokens, coded or as they came.

    All first and last tokens that are not coded are kept, and tiles between them are drawn evenly;
    where a tile stands for several, its logits are raised by the logarithm of their number. The
    first tokens of a sequence behind padding are not coded either. Queries
    that see no coded token, as those of padding, get outputs of 0: they count for nothing, neither
    as an error nor among the outputs that it is relative to.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor,
        *,
        tile_tokens: int,
        raw_tokens: tuple[int, int],
        scaling: float | None,
        softcap: float | None,
        first_valid: torch.Tensor | None,
        sink_logits: torch.Tensor | None = None,
    ) -> None:
        _check_shapes(keys, values, queries, sink_logits)
        batch, heads, tokens, dim = keys.shape
        sinks, window = raw_tokens
        between = tokens - sinks - window
        tiles = between // tile_tokens
        looked_at = min(_TOKENS, max(_VALUES // (heads * dim), _LEAST_TOKENS))
        if tiles:
            most = max(max(looked_at - sinks - window, _LEAST_TOKENS) // tile_tokens, 1)
            drawn = np.arange(min(tiles, most)) * tiles // min(tiles, most)
            chosen = (sinks + drawn[:, None] * tile_tokens + np.arange(tile_tokens)).ravel()
            tail = sinks + tiles * tile_tokens
            share = tiles / len(drawn)
        else:
            tail = sinks + max(between, 0) // TILE_BLOCK * TILE_BLOCK
            chosen, share = np.arange(sinks, tail), 1.0
        if not len(chosen):
            raise ArgumentError(
                f"keys: {tokens} tokens, accepted are {sinks} sinks, a window of {window}, and "
                f"{TILE_BLOCK} or more between them"
            )
        lines = min(max(_VALUES // (heads * min(tokens, looked_at) * dim), 1), batch)
        device = keys.device
        drawn_lines = np.arange(lines) * batch // lines
        raw_at = np.r_[0:sinks, tail:tokens]
        together = np.concatenate((drawn_lines, chosen, raw_at)).astype(np.int64)
        self._lines, drawn_tokens, raw = torch.split(
            uploaded(torch.from_numpy(together), device), [lines, len(chosen), len(raw_at)]
        )
        self._all_lines = lines == batch
        self._scaling = dim**-0.5 if scaling is None else scaling
        self._softcap = softcap
        self._heads = heads
        count = min(queries.shape[2], _QUERIES)
        last = self._of_lines(queries)[:, :, queries.shape[2] - count :].float()
        # Heads that share keys are further rows.
        groups = queries.shape[1] // heads
        self._query = last.reshape(lines * heads, groups * count, dim) * self._scaling
        self._sinks = self._of_rows(sink_logits, groups, count, lines)
        at = torch.arange(tokens - count, tokens, device=device).repeat(groups)
        first = None if first_valid is None else first_valid.to(device)[self._lines].long()
        self._seen_of_drawn = self._seen(drawn_tokens, at, first, sinks) + math.log(share)
        measured = self._seen_of_drawn.isfinite().any(dim=2, keepdim=True)
        self._measures = measured.any()
        seen_of_raw = self._seen(raw, at, first).masked_fill(~measured, -math.inf)
        #: Those that are coded, ``[B, H, T, dim]``.
        self.keys = self._drawn(keys, drawn_tokens)
        self.values = self._drawn(values, drawn_tokens)
        self._raw_values = self._drawn(values, raw).float().flatten(0, 1)
        self._raw_logits = self._logits(self._drawn(keys, raw).float().flatten(0, 1), seen_of_raw)
        if first is not None and sinks:
            own = first[:, None] + torch.arange(sinks, device=device)
            behind = at[:, None] >= own[:, None]  # [lines, queries, sinks]
            counts = ((own >= sinks) & (own < tail))[:, None] & behind
            seen = torch.zeros(counts.shape, device=device).masked_fill(~counts, -math.inf)
            seen = seen.repeat_interleave(heads, dim=0).masked_fill(~measured, -math.inf)
            index = own.clamp(max=tokens - 1)[:, None, :, None].expand(-1, heads, -1, dim)
            of_keys, of_values = (
                self._of_lines(kept).gather(2, index).float().flatten(0, 1)
                for kept in (keys, values)
            )
            self._raw_logits = torch.cat([self._raw_logits, self._logits(of_keys, seen)], dim=2)
            self._raw_values = torch.cat([self._raw_values, of_values], dim=1)

    def measure_plain(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compute the plain outputs, of the coded tokens in float32."""
        self._values = values[None]
        self._shares = self._softmax(keys[None])
        self._plain = self._output(self._shares, self._values)
        norm = torch.linalg.vector_norm(self._plain).clamp(min=1e-30)
        self._norm = norm.masked_fill(~self._measures, math.nan)  # an error of 0 would be kept

    @property
    def measures(self) -> bool:
        """Whether any query sees a coded token, else errors are NaN; a GPU is waited for."""
        return bool(self._measures)

    def at_once(self, step_bytes: int) -> int:
        """Return at how many scales errors are measured together, for the sake of memory.

        Parameters
        ----------
        step_bytes : int
            Bytes of steps and centers for each value, beside those of its code.
        """
        each, tokens = self.keys.numel(), self.keys.shape[2] + self._raw_logits.shape[2]
        rows, dim = math.prod(self._query.shape[:2]), self._query.shape[2]
        logits = 4 * rows * (tokens + 6 * dim)  # and outputs
        taken = _SAMPLE_BYTES * each + logits + self._seen_of_drawn.nbytes
        at_scale = max(
            (_MEASURED_BYTES + step_bytes) * each + logits, (_DECODED_BYTES + step_bytes) * each
        )
        return max(1, (_FIT_BYTES - taken) // at_scale)

    def _of_lines(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the sequences that are looked at."""
        return kept if self._all_lines else kept[self._lines]

    def _drawn(self, kept: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return some tokens of the sequences that are looked at."""
        return self._of_lines(kept).index_select(2, tokens)

    def errors(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> torch.Tensor:
        """Return the relative errors when these are attended to, None for those as they came.

        Parameters
        ----------
        keys, values : torch.Tensor
            float32 ``[n, B, H, T, dim]``: n variants.
        """
        shares = self._shares if keys is None else self._softmax(keys)
        output = self._output(shares, self._values if values is None else values)
        # In float64, so that one variant has the same error by itself and beside others.
        far = torch.linalg.vector_norm(output - self._plain, dim=(1, 2, 3), dtype=torch.float64)
        relative: torch.Tensor = far / self._norm
        return relative

    def _seen(
        self,
        tokens: torch.Tensor,
        at: torch.Tensor,
        first: torch.Tensor | None,
        own_tokens: int = 0,
    ) -> torch.Tensor:
        """Return 0 where a query sees a token, else -inf; ``[B * H or 1, queries, tokens]``.

        Sequences begin at `first`, int64 ``[lines]``, and behind so many of their own tokens.
        """
        hidden = (tokens > at[:, None])[None]
        if first is not None:
            padding = tokens < first[:, None] + own_tokens
            hidden = hidden | padding.repeat_interleave(self._heads, dim=0)[:, None]
        return torch.zeros(hidden.shape, dtype=torch.float32, device=tokens.device).masked_fill(
            hidden, -math.inf
        )

    def _of_rows(
        self, sink_logits: torch.Tensor | None, groups: int, count: int, lines: int
    ) -> torch.Tensor:
        """Return the logit beside those of the tokens, ``[B * H or 1, queries or 1, 1]``.

        The least number takes no share, but where no token is seen: all of it.
        """
        least = torch.finfo(torch.float32).min
        if sink_logits is None:
            return self._query.new_full((1, 1, 1), least)
        of_heads = sink_logits.to(self._query.device).float().clamp(min=least)
        rows = of_heads.view(self._heads, groups).repeat_interleave(count, dim=1)
        return rows.repeat(lines, 1)[:, :, None]

    def _logits(
        self, keys: torch.Tensor, seen: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[n * B * H, queries, T]`` for keys ``[n * B * H, T, dim]``, in `out` if given.

        `seen` is added where a query sees a token or not.
        """
        across = keys.transpose(1, 2)
        query = _repeated(self._query, len(keys))
        if seen.shape[0] > 1:
            seen = _repeated(seen, len(keys))
        if self._softcap is None:
            return torch.baddbmm(seen, query, across, out=out)
        logits = torch.bmm(query, across, out=out).div_(self._softcap)
        return logits.tanh_().mul_(self._softcap).add_(seen)

    def _softmax(self, keys: torch.Tensor) -> torch.Tensor:
        """Return shares ``[n, B * H, queries, T]`` of the coded tokens, then of the others."""
        n, coded = len(keys), keys.shape[3]
        _, queries, raw = self._raw_logits.shape
        # One buffer: of many queries logits take more than the values.
        logits = keys.new_empty(n, self._raw_logits.shape[0], queries, coded + raw)
        self._logits(keys.flatten(0, 2), self._seen_of_drawn, logits.flatten(0, 1)[..., :coded])
        logits[..., coded:] = self._raw_logits
        most = torch.maximum(logits.amax(dim=3, keepdim=True), self._sinks)
        logits -= most
        logits.exp_()
        logits /= logits.sum(dim=3, keepdim=True) + (self._sinks - most).exp_()
        return logits

    def _output(self, shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return ``[n, B * H, queries, dim]``."""
        n, coded = max(len(shares), len(values)), values.shape[3]
        if len(values) < n:  # not repeated, for the sake of memory
            parts = [torch.bmm(each[..., :coded], values[0].flatten(0, 1)) for each in shares]
            output = torch.cat(parts)
            shares = shares.flatten(0, 1)
        else:
            shares = _repeated(shares.flatten(0, 1), n * shares.shape[1])
            output = torch.bmm(shares[..., :coded], values.flatten(0, 2))
        raw = _repeated(self._raw_values, len(shares))
        output = torch.baddbmm(output, shares[..., coded:], raw)
        return output.view(n, -1, *output.shape[1:])


def _repeated(matrices: torch.Tensor, count: int) -> torch.Tensor:
    """Return matrices ``[n, ...]`` again and again, ``[count, ...]`` in all."""
    if len(matrices) == count:
        return matrices
    return matrices.expand(count // len(matrices), *matrices.shape).flatten(0, 1)


def _check_shapes(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    sink_logits: torch.Tensor | None,
) -> None:
    """Raise where keys, values, queries and sinks are not those of one attention."""
    if keys.dim() != 4 or not keys.numel():
        raise ArgumentError(f"keys: {list(keys.shape)}, expected [B, H, T, dim], none of them 0")
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ArgumentError(
            f"values: {values.dtype} {list(values.shape)}, expected {keys.dtype} "
            f"{list(keys.shape)}, as the keys have"
        )
    batch, heads, tokens, dim = keys.shape
    if (
        queries.dim() != 4
        or queries.shape[0] != batch
        or queries.shape[1] % heads
        or not 1 <= queries.shape[2] <= tokens
        or queries.shape[3] != dim
    ):
        raise ArgumentError(
            f"queries: {list(queries.shape)}, expected [{batch}, a multiple of {heads}, 1 to "
            f"{tokens}, {dim}]"
        )
    if sink_logits is not None and sink_logits.shape != queries.shape[1:2]:
        raise ArgumentError(
            f"sink_logits: {list(sink_logits.shape)}, expected [{queries.shape[1]}], one a query "
            "head"
        )
