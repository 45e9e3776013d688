"""Bytes that a transformer layer keeps for its backward pass, from its shape alone.

The terms are those of llm-analysis and of Korthikanti et al. (Reducing Activation Recomputation in
Large Transformer Models, section 4): with layer norms, GELU, eager attention, dropout and two bytes
an element they add up to ``s b h (34 + 5 a s / h)``, and to ``s b h (10 + 24 / t + 5 a s / (h t))``
with tensor parallelism of t. Here norms, activations and attention are chosen, since models differ.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError

Norm = Literal["layer", "rms", "t5"]
Activation = Literal["gelu", "gelu_new", "relu", "swiglu"]
Attention = Literal["fused", "eager"]
#: How a tensor is split by tensor parallelism: always, or by sequence parallelism alone.
Split = Literal["tensor", "sequence"]

#: Tensors of the width of the MLP that an activation makes its block keep, its result included.
#: gelu_new is the one of GPT-2 that is made of single operations.
MLP_TENSORS = {"gelu": 2, "gelu_new": 5, "relu": 1, "swiglu": 4}
NORMS = ("layer", "rms", "t5")
ATTENTIONS = ("fused", "eager")
#: Statistics and casts are in float32.
FLOAT_BYTES = 4


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is kept.

    Parameters
    ----------
    name : str
        What it is.
    elements : int
        How many elements, without any parallelism.
    element_bytes : int
        Bytes of each.
    split : str
        "tensor" for one that each rank of a tensor parallel group has a part of; "sequence" for
        one that each has as a whole, but for sequence parallelism.
    """

    name: str
    elements: int
    element_bytes: int
    split: Split

    @property
    def nbytes(self) -> int:
        """Bytes without any parallelism."""
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class TransformerLayer:
    """The shape of a layer.

    Parameters
    ----------
    hidden : int
        Width of the residual stream.
    heads : int
        Heads of attention.
    kv_heads : int, optional
        Heads of keys and values; `heads` when left out.
    head_dim : int, optional
        Width of a head; ``hidden / heads`` when left out.
    intermediate : int, optional
        Width of the MLP; four times `hidden` when left out.
    norm : str
        "layer" (GPT, BERT), "rms" (Llama) or "t5": how its norms are written decides what they
        keep.
    activation : str
        "gelu", "gelu_new", "relu" or "swiglu".
    attention : str
        "fused" (FlashAttention, SDPA), or "eager", which keeps what is quadratic in the sequence.
    float_softmax : bool
        Whether eager attention's softmax is in float32, as Llama's is.
    fused_qkv : bool
        Whether one matrix makes queries, keys and values, and fused attention copies two of them
        out of it (GPT-2 of transformers on a CPU).
    dropout, attention_dropout, activation_dropout : bool
        Where dropout is used: behind attention and MLP, on attention's weights, in the MLP.
    cross_attention : bool
        Whether it has attention to an encoder's output besides (T5's decoder).

    Raises
    ------
    ArgumentError
        For a size below 1, or a name that is not known.

    Examples
    --------
    >>> from bitslab.activations.layer_sizes import TransformerLayer
    >>> layer = TransformerLayer(hidden=8192, heads=64)
    >>> round(layer.saved_bytes(batch=1, sequence=1024) / (1024 * 8192), 1)
    32.0
    """

    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    norm: Norm = "layer"
    activation: Activation = "gelu"
    attention: Attention = "fused"
    float_softmax: bool = False
    fused_qkv: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    activation_dropout: bool = False
    cross_attention: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("int") and value is not None:
                _check_size(field.name, value)
        for name, accepted in (
            ("norm", NORMS),
            ("activation", tuple(MLP_TENSORS)),
            ("attention", ATTENTIONS),
        ):
            if getattr(self, name) not in accepted:
                raise ArgumentError(
                    f"{name}: {getattr(self, name)!r}, accepted are {', '.join(accepted)}"
                )

    def kept(
        self, batch: int, sequence: int, dtype_bytes: int = 2, mask_bytes: int = 1
    ) -> list[KeptTensor]:
        """Return the tensors that a forward pass keeps.

        Parameters
        ----------
        batch, sequence : int
            Sequences of a micro-batch, and tokens of each.
        dtype_bytes : int
            Bytes of an element.
        mask_bytes : int
            Bytes of an element of a dropout mask: 1 on a GPU, `dtype_bytes` on a CPU.
        """
        _check_size("batch", batch)
        _check_size("sequence", sequence)
        tokens = batch * sequence
        kept: list[KeptTensor] = []

        def add(name: str, elements: int, n_bytes: int, split: Split) -> None:
            kept.append(KeptTensor(name, elements, n_bytes, split))

        def add_dropout(place: str) -> None:
            if self.dropout:
                add(f"{place} dropout mask", tokens * self.hidden, mask_bytes, "sequence")

        blocks = ["attention", *["cross attention"] * self.cross_attention]
        for place in blocks:
            kept += self._norm(place, tokens, dtype_bytes)
            kept += self._attention(place, batch, sequence, dtype_bytes, mask_bytes)
            add_dropout(place)
        kept += self._norm("MLP", tokens, dtype_bytes)
        wide = tokens * (self.intermediate or 4 * self.hidden)
        add("MLP", MLP_TENSORS[self.activation] * wide, dtype_bytes, "tensor")
        if self.activation_dropout:
            add("MLP inner dropout mask", wide, mask_bytes, "tensor")
            add("MLP inner dropout output", wide, dtype_bytes, "tensor")
        add_dropout("MLP")
        return kept

    def _norm(self, place: str, tokens: int, dtype_bytes: int) -> list[KeptTensor]:
        n, half = tokens * self.hidden, dtype_bytes < FLOAT_BYTES
        kept = [KeptTensor(f"{place} norm output", n, dtype_bytes, "sequence")]
        if self.norm == "layer":
            kept.append(KeptTensor(f"{place} norm input", n, dtype_bytes, "sequence"))
            statistics = 2
        else:
            # Written in single operations: the input as float32, and the normalised input.
            kept.append(KeptTensor(f"{place} norm input", n, FLOAT_BYTES, "sequence"))
            kept.append(KeptTensor(f"{place} normalised", n, dtype_bytes, "sequence"))
            if self.norm == "t5" and half:
                kept.append(KeptTensor(f"{place} norm raw input", n, dtype_bytes, "sequence"))
            statistics = 1
        kept.append(
            KeptTensor(f"{place} norm statistics", statistics * tokens, FLOAT_BYTES, "sequence")
        )
        return kept

    def _attention(
        self, place: str, batch: int, sequence: int, dtype_bytes: int, mask_bytes: int
    ) -> list[KeptTensor]:
        tokens, head_dim = batch * sequence, self.head_dim or self.hidden // self.heads
        fused = self.attention == "fused"
        queries = tokens * self.heads * head_dim
        # Eager attention repeats keys and values for all heads that share them.
        one = tokens * (self.kv_heads or self.heads) * head_dim if fused else queries
        sizes = {"queries": queries, "keys": one, "values": one, "output": queries}
        if self.fused_qkv and fused:
            sizes["copies"] = queries + one
        kept = [KeptTensor(f"{place} {k}", n, dtype_bytes, "tensor") for k, n in sizes.items()]
        square = batch * self.heads * sequence * sequence
        if fused:
            n = tokens * self.heads
            return [*kept, KeptTensor(f"{place} log-sums", n, FLOAT_BYTES, "tensor")]
        kept.append(KeptTensor(f"{place} weights", square, dtype_bytes, "tensor"))
        if self.float_softmax and dtype_bytes < FLOAT_BYTES:
            kept.append(KeptTensor(f"{place} softmax", square, FLOAT_BYTES, "tensor"))
        if self.attention_dropout:
            kept.append(KeptTensor(f"{place} weights' dropout mask", square, mask_bytes, "tensor"))
            kept.append(KeptTensor(f"{place} dropped weights", square, dtype_bytes, "tensor"))
        return kept

    def saved_bytes(
        self,
        batch: int,
        sequence: int,
        *,
        dtype_bytes: int = 2,
        mask_bytes: int = 1,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
    ) -> float:
        """Return the bytes that one rank keeps of a forward pass through the layer.

        Parameters
        ----------
        batch, sequence, dtype_bytes, mask_bytes : int
            As for `kept`.
        tensor_parallel : int
            Ranks that share the layer.
        sequence_parallel : bool
            Whether they share norms and dropout as well.
        """
        _check_size("tensor_parallel", tensor_parallel)
        total = 0.0
        for tensor in self.kept(batch, sequence, dtype_bytes, mask_bytes):
            is_split = tensor.split == "tensor" or sequence_parallel
            total += tensor.nbytes / (tensor_parallel if is_split else 1)
        return total


def _check_size(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name}: {value!r}, expected an int from 1")
