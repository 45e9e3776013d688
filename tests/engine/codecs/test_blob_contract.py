"""Every codec of whole tensors keeps the contract.

A codec is tested by its line in CASES; a shipped one that has none fails a test. What a lossy codec
decodes is compared by its `bounds`, everything else bit for bit.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

import bitslab
import bitslab.engine.codecs
from bitslab.engine.codecs import (
    Blob,
    BlobCodec,
    BoundedVectorCodec,
    ChainCodec,
    CsrCodec,
    InvariantBlobCodec,
    Lz4Codec,
    RleCodec,
    VectorLzCodec,
    ZfpCodec,
    ZvcCodec,
)
from bitslab.engine.codecs.blob import ALIGN_BYTES, HEADER_BYTES
from bitslab.engine.kernels.blob_format import ZVC_BITS_FIRST_FORM
from tests import pairwise
from tests.engine.codecs.contract import edge_rows
from tests.helpers import DTYPES, bits_of, dtype_id, same_bits
from tests.simt.module import guarded


@dataclass(frozen=True)
class Case:
    """How a codec is tested.

    Parameters
    ----------
    cls : type
        The codec's class.
    options : mapping
        Of its `fit`.
    dtypes : list of torch.dtype
        Those that it is tested with; all others are refused.
    """

    cls: type[BlobCodec]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)

    def fit(self, t: torch.Tensor) -> BlobCodec:
        return self.cls.fit(t, **self.options)


CASES: dict[str, Case] = {
    "zvc": Case(ZvcCodec),
    "ibp-blob": Case(InvariantBlobCodec),
    "zvc+ibp": Case(ChainCodec),
    "csr": Case(CsrCodec),
    "rle": Case(RleCodec),
    "lz4": Case(Lz4Codec),
    "zfp": Case(
        ZfpCodec,
        {"block_bits": 48},
        (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    ),
    "vlz": Case(VectorLzCodec),
    "vlzq": Case(
        BoundedVectorCodec,
        {"error_bound": 0.01},
        (torch.float32, torch.float16, torch.bfloat16),
    ),
}

SHAPES = [(), (0,), (3, 0, 2), (1,), (31,), (5, 7), (2, 3, 4097)]
FILL = 0xA5


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Half zeros, else what arithmetic would change and numbers that are close in size."""
    n = max(1, torch.Size(shape).numel())
    generator = torch.Generator().manual_seed(seed + n)
    kept = torch.rand(n, generator=generator) < 0.5
    edges = bits_of(edge_rows(dtype, n, 1)).view(n, -1)
    if dtype.is_floating_point:
        usual = torch.randn(n, generator=generator).abs().to(dtype)
        edges[n // 8 :] = bits_of(usual).view(n, -1)[n // 8 :]
    edges[~kept] = 0
    return edges.flatten().view(dtype)[: torch.Size(shape).numel()].view(shape)


def assert_comes_back(codec: BlobCodec, t: torch.Tensor, decoded: torch.Tensor) -> None:
    assert decoded.dtype == t.dtype and decoded.shape == t.shape
    if codec.error_bound is None:
        assert same_bits(decoded, t)
        return
    finite = t.isfinite()
    assert same_bits(decoded[~finite], t[~finite])
    errors = (decoded[finite].double() - t[finite].double()).abs()
    assert bool((errors <= codec.bounds(t)[finite]).all())


def small(case: Case) -> tuple[BlobCodec, torch.Tensor, Blob]:
    """A codec, a tensor of few bytes, and its blob without unused bytes."""
    t = tensor_of(case.dtypes[0] if torch.float32 not in case.dtypes else torch.float32, (5, 7))
    codec = case.fit(t)
    return codec, t, codec.encode(t).trimmed()


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.drawn(85)
@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_tensors_of_every_shape_come_back(case: Case, dtype: torch.dtype) -> None:
    codec = case.fit(tensor_of(dtype, (100, 100))) if dtype in case.dtypes else small(case)[0]
    if dtype not in case.dtypes:
        assert not codec.takes(dtype)
        with pytest.raises(bitslab.ArgumentTypeError, match=f"t: dtype {dtype} is not"):
            codec.encode(tensor_of(dtype, (5, 7)))
        return
    assert codec.takes(dtype)
    for shape in SHAPES:
        t = tensor_of(dtype, shape)
        most = codec.max_encoded_bytes(t.shape, dtype)
        memory = torch.full((most + 2 * ALIGN_BYTES,), FILL, dtype=torch.uint8)
        blob = codec.encode(t, memory[ALIGN_BYTES:-ALIGN_BYTES])
        assert blob.data.data_ptr() == memory.data_ptr() + ALIGN_BYTES
        assert (memory[:ALIGN_BYTES] == FILL).all() and (memory[-ALIGN_BYTES:] == FILL).all()
        assert HEADER_BYTES <= blob.nbytes <= most
        assert (blob.shape, blob.dtype, blob.raw_nbytes) == (t.shape, t.dtype, t.nbytes)
        assert_comes_back(codec, t, codec.decode(blob))
        again = codec.encode(t)
        assert torch.equal(again.trimmed().data, blob.trimmed().data), "the same bytes again"
        assert_comes_back(codec, t, codec.decode(again.trimmed()))


@every_case
def test_what_does_not_shrink_keeps_its_bounds(case: Case) -> None:
    for dtype in case.dtypes:
        generator = torch.Generator().manual_seed(3)
        noise = torch.randint(0, 256, (1000 * dtype.itemsize,), generator=generator)
        noise = noise % 2 if dtype == torch.bool else noise
        t = noise.to(torch.uint8).view(dtype)
        codec = case.fit(tensor_of(dtype, (100, 100)))
        blob = codec.encode(t)
        assert blob.nbytes <= codec.max_encoded_bytes(t.shape, dtype) == blob.data.shape[0]
        if codec.error_bound is None:
            assert same_bits(codec.decode(blob), t)


@every_case
def test_swaps_of_one_size_have_the_same_bytes_and_checks(case: Case) -> None:
    for dtype in case.dtypes:
        codec = case.fit(tensor_of(dtype, (100, 100)))
        for n in (0, 1, 31, 70_000 // dtype.itemsize):
            t = tensor_of(dtype, (n + 3,))[3:]  # at no address of its own
            flat = codec.for_flat(n, dtype, t.device)
            assert flat.max_bytes == codec.max_encoded_bytes(t.shape, dtype)
            memory = torch.full((flat.max_bytes + ALIGN_BYTES,), FILL, dtype=torch.uint8)
            flat.encode(t, memory[: flat.max_bytes])
            assert (memory[flat.max_bytes :] == FILL).all()
            blob = codec.encode(t).trimmed()
            data = memory[: blob.data.shape[0]].clone()
            assert torch.equal(data, blob.data)
            found = flat.decode(data)
            assert found.is_contiguous() and same_bits(found, codec.decode(blob))
            shape = torch.Size([1, n, 1])
            memory.fill_(FILL)
            flat.encode(t.as_strided(shape, (7, 1, 3), t.storage_offset()), memory)
            assert torch.equal(memory[: data.shape[0]], data)
            shaped = flat.decode(data, shape)
            assert shaped.shape == shape and shaped.is_contiguous()
            assert same_bits(shaped.view(-1), found)
            if n == 1:
                assert same_bits(flat.decode(data, torch.Size([])), found.view(()))
    codec, t, blob = small(case)
    flat = codec.for_flat(t.numel(), t.dtype, t.device)
    for n in range(0, blob.data.shape[0], ALIGN_BYTES):
        with pytest.raises(bitslab.CorruptedDataError):
            flat.decode(guarded(blob.data[:n]))


@every_case
def test_swaps_of_a_codec_that_is_derived_are_by_its_own_methods(case: Case) -> None:
    calls: list[str] = []

    class Derived(case.cls):  # type: ignore[misc, name-defined]
        def encode(self, *args: Any, **options: Any) -> Blob:
            calls.append("encode")
            blob: Blob = super().encode(*args, **options)
            return blob

        def decode(self, *args: Any, **options: Any) -> torch.Tensor:
            calls.append("decode")
            t: torch.Tensor = super().decode(*args, **options)
            return t

    t = tensor_of(torch.float32, (50,))
    codec = Derived.from_config(case.fit(t).to_config())
    assert type(codec) is Derived
    flat = codec.for_flat(50, t.dtype, t.device)
    data = torch.zeros(flat.max_bytes, dtype=torch.uint8)
    flat.encode(t, data)
    assert_comes_back(codec, t, flat.decode(data))
    assert calls == ["encode", "decode"]


@every_case
def test_strides_of_any_kind(case: Case) -> None:
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    base = tensor_of(dtype, (12, 10, 9))
    codec = case.fit(base)
    views = {
        "transposed": base.permute(2, 0, 1),
        "every second": base[::2, 1::3],
        "column": base[:, 3, 4],
        "expanded": base[:1].expand(7, 10, 9),
        "storage offset": base.view(-1)[1:],
        "channels last": base[None].to(memory_format=torch.channels_last),
    }
    for name, t in views.items():
        assert name and codec.encode(t).shape == t.shape
        assert_comes_back(codec, t, codec.decode(codec.encode(t)))
        # `out` with strides of its own: nothing but its elements is written.
        memory = torch.zeros((*t.shape, 2), dtype=dtype)
        out = memory[..., 0]
        assert codec.decode(codec.encode(t), out) is out
        assert_comes_back(codec, t, out)
        assert not memory[..., 1].view(-1).any()
    if torch.complex64 in case.dtypes:
        lazy = tensor_of(torch.complex64, (5, 7)).nan_to_num()
        codec = case.fit(lazy)
        for t in (lazy.conj(), lazy.conj().imag):
            if codec.takes(t.dtype):
                assert torch.equal(codec.decode(codec.encode(t)), t)


@every_case
def test_a_tensor_with_gradients_and_a_leaf(case: Case) -> None:
    t = tensor_of(torch.float32, (20,)).nan_to_num().requires_grad_()
    codec = case.fit(t.detach())
    decoded = codec.decode(codec.encode(t))
    assert not decoded.requires_grad
    assert_comes_back(codec, t.detach(), decoded)


@every_case
def test_sizes_are_known_without_reading_more_than_the_header(case: Case) -> None:
    codec, t, blob = small(case)
    assert blob.used_bytes.dtype == torch.int64 and blob.used_bytes.dim() == 0
    assert int(blob.used_bytes) == blob.nbytes == blob.data.shape[0]
    assert int.from_bytes(blob.data[8:16].numpy().tobytes(), "little") == t.numel()
    assert int.from_bytes(blob.data[16:20].numpy().tobytes(), "little") == codec.form
    assert int.from_bytes(blob.data[20:24].numpy().tobytes(), "little") == t.element_size()


# Bad arguments

Bad = tuple[Callable[[Any], Any], type[Exception], list[str]]

BAD_TENSORS: dict[str, Bad] = {
    "list": (lambda t: t.tolist(), bitslab.ArgumentTypeError, ["t:", "list"]),
    "sparse": (lambda t: t.to_sparse(), bitslab.ArgumentTypeError, ["t:", "sparse"]),
    "meta": (lambda t: t.to("meta"), bitslab.ArgumentTypeError, ["t:", "meta", "cpu"]),
}
BAD_BUFFERS: dict[str, Bad] = {
    "short": (lambda o: o[:-1], bitslab.ArgumentError, ["out:", "bytes"]),
    "dtype": (lambda o: o.view(torch.int8), bitslab.ArgumentTypeError, ["out:", "int8", "uint8"]),
    "strided": (
        lambda o: torch.cat([o, o])[::2],
        bitslab.ArgumentTypeError,
        ["out:", "contiguous"],
    ),
    "misaligned": (
        lambda o: torch.cat([o, o])[1:],
        bitslab.ArgumentError,
        ["out:", f"multiple of {ALIGN_BYTES}"],
    ),
    "list": (lambda o: o.tolist(), bitslab.ArgumentTypeError, ["out:", "list"]),
}
BAD_OUTPUTS: dict[str, Bad] = {
    "shape": (lambda o: o.view(7, 5), bitslab.ArgumentError, ["out:", "[7, 5]", "[5, 7]"]),
    "dtype": (lambda o: o.double(), bitslab.ArgumentTypeError, ["out:", "float64", "float32"]),
    "overlapping": (
        lambda o: o[:1].expand(5, 7),
        bitslab.ArgumentError,
        ["out:", "share memory"],
    ),
    "list": (lambda o: o.tolist(), bitslab.ArgumentTypeError, ["out:", "list"]),
}


def assert_refused(call: Callable[[], Any], bad: Bad) -> None:
    with pytest.raises(bad[1]) as caught:
        call()
    for text in bad[2]:
        assert text in str(caught.value)


@every_case
def test_bad_arguments_are_refused_and_nothing_is_written(case: Case) -> None:
    codec, t, blob = small(case)
    for bad in BAD_TENSORS.values():
        assert_refused(partial(codec.encode, bad[0](t)), bad)
    most = codec.max_encoded_bytes(t.shape, t.dtype)
    for bad in BAD_BUFFERS.values():
        given = bad[0](torch.full((most,), FILL, dtype=torch.uint8))
        assert_refused(partial(codec.encode, t, given), bad)
        assert (torch.as_tensor(given).view(-1) == torch.as_tensor(given).view(-1)[0]).all()
    for bad in BAD_OUTPUTS.values():
        given = bad[0](torch.full(t.shape, 7.0))
        assert_refused(partial(codec.decode, blob, given), bad)
        assert (torch.as_tensor(given) == 7).all()
    for budget in (0, -1):
        with pytest.raises(bitslab.ArgumentError, match=f"sm_budget: {budget}"):
            codec.encode(t, sm_budget=budget)
    with pytest.raises(bitslab.ArgumentTypeError, match="sm_budget: expected an int"):
        codec.decode(blob, sm_budget=True)
    with pytest.raises(bitslab.ArgumentTypeError, match="blob: expected a Blob"):
        codec.decode(blob.data)  # type: ignore[arg-type]
    for data in (blob.data.view(torch.int8), blob.data[::2], blob.data[None]):
        with pytest.raises(bitslab.ArgumentTypeError, match="blob: data is"):
            codec.decode(Blob(data, blob.shape, blob.dtype))
    moved = torch.cat([blob.data, blob.data])[1:]
    with pytest.raises(bitslab.ArgumentError, match="begins at no multiple"):
        codec.decode(Blob(moved, blob.shape, blob.dtype))


@every_case
def test_buffers_that_overlap_are_refused(case: Case) -> None:
    codec, t, blob = small(case)
    memory = torch.zeros(4096, dtype=torch.uint8)
    inside = memory[:140].view(torch.float32).view(5, 7)
    with pytest.raises(bitslab.ArgumentError, match="out: shares memory"):
        codec.encode(inside, memory)
    assert not memory.any()
    memory[: len(blob.data)] = blob.data
    with pytest.raises(bitslab.ArgumentError, match="out: shares memory"):
        codec.decode(Blob(memory, blob.shape, blob.dtype), inside)
    assert torch.equal(memory[: len(blob.data)], blob.data)


# Damage


def assert_refused_or_contained(
    codec: BlobCodec, data: torch.Tensor, t: torch.Tensor, exact: bool = False
) -> bool:
    """Decode damaged data; return whether it was refused. `exact`: it has to be, or be right."""
    memory = torch.full((t.numel() + 2,), 7.0, dtype=t.dtype)
    out = memory[1:-1].view(t.shape)
    try:
        codec.decode(Blob(data, t.shape, t.dtype), out)
    except bitslab.CorruptedDataError as error:
        assert str(error).startswith("blob: ")
        assert (memory == 7).all(), "nothing was written"
        return True
    assert memory[0] == memory[-1] == 7
    assert not exact or same_bits(out, t)
    return False


@every_case
def test_truncated_blobs_are_refused(case: Case) -> None:
    codec, t, blob = small(case)
    for n in range(blob.data.shape[0]):
        # A forbidden page lies behind those whose end may be one.
        data = guarded(blob.data[:n]) if n % ALIGN_BYTES == 0 else blob.data[:n].clone()
        assert assert_refused_or_contained(codec, data, t), n


#: Up to these bytes of a blob, so many bits of each are flipped; of those behind them, one.
FLIPPED_BITS = {HEADER_BYTES: 8, 256: 3}


@every_case
def test_every_flipped_bit_is_refused_or_harmless_to_others(case: Case) -> None:
    t = tensor_of(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0], (9, 61))
    codec = case.fit(t)
    blob = codec.encode(t).trimmed()
    data = guarded(torch.cat([blob.data, torch.zeros(-len(blob.data) % 16, dtype=torch.uint8)]))
    rng = random.Random(f"flipped {pairwise.seed}")
    refused = 0
    for place in range(blob.data.shape[0]):
        # Every bit of the header; the seed draws more of what says where things are than behind it.
        most = next((n for end, n in FLIPPED_BITS.items() if place < end), 1)
        for bit in rng.sample(range(8), 8 if pairwise.FULL else most):
            data[place] ^= 1 << bit
            # What the header says is checked in every form.
            found = assert_refused_or_contained(codec, data, t, exact=place < 24)
            refused += found
            data[place] ^= 1 << bit
    assert refused >= 8 * 20
    assert_comes_back(codec, t, codec.decode(Blob(data, t.shape, t.dtype)))


@every_case
def test_noise_is_refused_or_harmless_to_others(case: Case) -> None:
    codec, t, blob = small(case)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        data = torch.randint(0, 256, blob.data.shape, generator=generator).to(torch.uint8)
        data = guarded(torch.cat([data, data[: -len(data) % 16]]))
        assert assert_refused_or_contained(codec, data, t), "the header is noise"
        data[:HEADER_BYTES] = blob.data[:HEADER_BYTES]
        assert_refused_or_contained(codec, data, t)


@every_case
def test_blobs_of_another_tensor_or_form_are_refused(case: Case) -> None:
    codec, t, blob = small(case)
    for other in (t[:-1], t.view(torch.int16) if codec.takes(torch.int16) else t[:0]):
        with pytest.raises(bitslab.CorruptedDataError, match="blob: "):
            codec.decode(Blob(codec.encode(t).data, other.shape, other.dtype))
    data = blob.data.clone()
    data[16] += 1
    with pytest.raises(bitslab.CorruptedDataError, match="form"):
        codec.decode(Blob(data, t.shape, t.dtype))


# The object


@every_case
def test_configuration_pickles_and_copies(case: Case) -> None:
    codec, t, blob = small(case)
    config = json.loads(json.dumps(codec.to_config()))
    others = [
        type(codec).from_config(config),
        pickle.loads(pickle.dumps(codec)),
        copy.deepcopy(codec),
    ]
    for other in others:
        assert other == codec and hash(other) == hash(codec)
        assert torch.equal(other.encode(t).trimmed().data, blob.data)
        assert same_bits(other.decode(blob), codec.decode(blob))
    assert codec.describe().startswith(codec.name) and codec.name in repr(codec)
    assert codec.profile_bytes >= 0
    damaged: tuple[Any, ...] = ([], None, {"surprise": 1})
    for config in damaged:
        with pytest.raises(bitslab.CorruptedDataError, match="config"):
            type(codec).from_config(config)


@every_case
def test_unknown_options_are_refused(case: Case) -> None:
    with pytest.raises(TypeError):
        case.cls.fit(tensor_of(torch.float32, (100, 10)), **{**case.options, "surprise": 1})


@every_case
def test_threads_may_share_a_codec(case: Case) -> None:
    tensors = [tensor_of(torch.float32, (200 + i, 1000), i) for i in range(4)]
    codec = case.fit(tensors[0])
    with ThreadPoolExecutor(4) as pool:
        blobs = list(pool.map(codec.encode, tensors))
        decoded = list(pool.map(codec.decode, blobs))
    for t, found in zip(tensors, decoded, strict=True):
        assert_comes_back(codec, t, found)


# The list


def shipped_classes() -> list[type[BlobCodec]]:
    """All concrete codecs of the package, whether or not anything imports their module."""
    for module in pkgutil.walk_packages(bitslab.engine.codecs.__path__, "bitslab.engine.codecs."):
        importlib.import_module(module.name)

    def below(cls: Any) -> Iterator[type[BlobCodec]]:
        for subclass in cls.__subclasses__():
            yield subclass
            yield from below(subclass)

    ours = {c for c in below(BlobCodec) if c.__module__.startswith("bitslab.")}
    return sorted((c for c in ours if not inspect.isabstract(c)), key=lambda c: c.__name__)


@pytest.mark.parametrize("cls", shipped_classes(), ids=lambda c: c.__name__)
def test_shipped_codec_is_registered_and_tested(cls: type[BlobCodec]) -> None:
    assert bitslab.get_codec(cls.name) is cls
    assert cls in {case.cls for case in CASES.values()}, f"{cls.__name__} needs a line in CASES"


def test_names_and_forms_are_unique() -> None:
    classes = shipped_classes()
    assert len({cls.name for cls in classes}) == len({cls.form for cls in classes}) == len(classes)
    assert ZVC_BITS_FIRST_FORM not in {cls.form for cls in classes}
