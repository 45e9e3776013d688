"""Launchers know the parameters that the .cu texts have, and give each of them its value."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.engine.codecs import Lz4Codec
from bitslab.engine.codecs.base import first_bad_id
from bitslab.engine.codecs.vectors import decode_body, encode_body
from bitslab.engine.kernels import cpu, cuda
from bitslab.engine.kernels.cpu import (
    append,
    attend,
    bags,
    blob_copy,
    blobs,
    ids,
    join,
    packed_linear,
    segment_sums,
    slots,
    typed_products,
)
from bitslab.engine.kernels.cuda.frames import BoundKernel
from bitslab.engine.kernels.cuda.map import FindIds
from bitslab.engine.kernels.cuda.parameters import Kind, Parameters, in_order, kinds_of
from bitslab.engine.kernels.cuda.slots import GiveSlots
from bitslab.engine.kernels.cuda.source import kernels_of
from bitslab.engine.kernels.cuda.variants import all_variants

FOLDER = Path(cuda.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("*.cu"))

#: The twin of each kernel. Kernels that share one differ in how they divide the work.
TWINS: dict[str, Any] = {
    "agreed_masks": cpu.agreed_masks,
    "append_token": append.append_token,
    "attend_tiles": attend.attend,
    "check_ids": first_bad_id,
    "choose_slots": slots.choose_slots,
    "claim_slots": slots.claim_slots,
    "copy_blob": blob_copy.copy_blob,
    "copy_rows": cpu.copy_rows,
    "count_bits": cpu.count_bits,
    "count_ids": ids.count_ids,
    "count_csr": cpu.encode_csr,
    "count_rle": cpu.encode_rle,
    "count_slots": slots.count_slots,
    "count_values": cpu.frequent_values,
    "count_zeros": cpu.count_zeros,
    "dot_entries": segment_sums.dot_entries,
    "decode_csr": cpu.decode_csr,
    "decode_long_rows": cpu.decode_rows,
    "decode_rle": cpu.decode_rle,
    "decode_rows": cpu.decode_rows,
    "decode_short_rows": cpu.decode_rows,
    "decode_tiles": cpu.decode_tiles,
    "decode_zfp": cpu.decode_zfp,
    "decode_zvc": cpu.decode_zvc,
    "encode_rows": cpu.encode_rows,
    "encode_short_rows": cpu.encode_rows,
    "encode_tiles": cpu.encode_tiles,
    "encode_zfp": cpu.encode_zfp,
    "encode_zvc": cpu.encode_zvc,
    "exchange_rows": slots.exchange_rows,
    "find_ids": cpu.map_find,
    "find_parts": Lz4Codec.read,
    "find_places": decode_body,
    "write_bodies": encode_body,
    "quantise_rows": encode_body,
    "place_bodies": encode_body,
    "multiply_gradient": typed_products.multiply_gradient,
    "multiply_packed": packed_linear.multiply_packed,
    "multiply_rows": typed_products.multiply_rows,
    "number_rows": encode_body,
    "measure_pieces": encode_body,
    "find_rows": encode_body,
    "count_codes": encode_body,
    "begin_chunks": encode_body,
    "open_bodies": decode_body,
    "read_streams": decode_body,
    "write_rows": decode_body,
    "check_parts": Lz4Codec.read,
    "finish_parts": Lz4Codec.read,
    "frequent_by_position": cpu.frequent_values,
    "gather_long_rows": cpu.gather_rows,
    "gather_rows": cpu.gather_rows,
    "gather_short_rows": cpu.gather_rows,
    "give_slots": slots.give_slots,
    "index_exceptions": packed_linear.multiply_packed,
    "insert_ids": cpu.map_insert,
    "join_rows": join.join_rows,
    "keep_slots": slots.keep_slots,
    "measure_tiles": cpu.measure_tiles,
    "move_parts": Lz4Codec.write,
    "move_tiles": cpu.encode_tiles,
    "order_ids": ids.order_ids,
    "pack_csr": cpu.encode_csr,
    "pack_rle": cpu.encode_rle,
    "pack_tiles": cpu.encode_tiles,
    "pack_blob": cpu.encode_rows,
    "pack_zfp": cpu.encode_zfp,
    "packed_words": cpu.packed_words,
    "packed_words_of_short_rows": cpu.packed_words,
    "place_parts": Lz4Codec.write,
    "place_rows": cpu.encode_csr,
    "pool_bags": bags.pool_bags,
    "pool_long_bags": bags.pool_bags,
    "reset_order": ids.reset_order,
    "rewrite_rows": cpu.rewrite_rows,
    "rows_of_keys": ids.rows_of_keys,
    "sizes_by_option": cpu.sizes_by_option,
    "softmax_segments": segment_sums.softmax_segments,
    "softmax_segments_gradient": segment_sums.softmax_segments_gradient,
    "sound_offsets": bags.sound_offsets,
    "sum_segments": segment_sums.sum_segments,
    "survey_edges": segment_sums.survey_edges,
    "top_values": cpu.frequent_values,
    "unpack_rest": blobs.check_header,
}


def uncommented(file: str) -> str:
    text = (FOLDER / file).read_text().replace("\\\n", " ")
    return re.sub(r"//.*", "", text)


def plain_type(name: str) -> str:
    """Return what a typedef of integers stands for."""
    return TYPEDEFS.get(name, name)


TYPEDEFS: dict[str, str] = {
    name: kind for kind, name in re.findall(r"typedef ([\w ]+) (\w+);", uncommented("bits.cuh"))
}


def signatures(file: str) -> dict[str, list[tuple[str, str]]]:
    """Return name and type (``"*"``: a pointer) of the parameters of each kernel of a .cu text."""
    text = uncommented(f"{file}.cu")
    macros = dict(re.findall(r"^#define (\w+_PARAMETERS) (.*)$", text, re.MULTILINE))
    head = r'extern "C" __global__ void __launch_bounds__\([^()]*\)\s+(\w+)\(([^()]*)\)\s*\{'
    found = {}
    for kernel, inside in re.findall(head, text):
        listed = re.sub(r"\w+_PARAMETERS", lambda found: macros[found.group()], inside)
        listed = re.sub(r"\b(const|volatile|__restrict__)\b", " ", listed)
        found[kernel] = [parameter(each) for each in listed.split(",")]
    assert len(found) == text.count("__global__"), f"a kernel of {file}.cu is written otherwise"
    return found


def parameter(declared: str) -> tuple[str, str]:
    match = re.fullmatch(r"\s*(\w+(?:\s+\w+)*?)\s*(\*?)\s*(\w+)\s*", declared)
    assert match, declared
    kind, pointer, name = match.groups()
    return name, pointer or plain_type(kind)


KERNELS = {kernel: (file, listed) for file in FILES for kernel, listed in signatures(file).items()}


def declared_in(file: str) -> dict[str, type[Parameters]]:
    """Return the classes of parameters of a launcher, by kernel."""
    module = importlib.import_module(f"bitslab.engine.kernels.cuda.{file}")
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    mine = [c for c in classes if issubclass(c, Parameters) and c.__module__ == module.__name__]
    assert len({c.kernel for c in mine}) == len(mine)
    return {c.kernel: c for c in mine}


@pytest.mark.parametrize("kernel", KERNELS)
def test_parameters_are_those_of_the_text(kernel):
    file, expected = KERNELS[kernel]
    declared = declared_in(file)[kernel]
    assert kernel == re.sub(r"(?<!^)([A-Z])", r"_\1", declared.__name__).lower()
    found = [(name, plain_type(kind.c_type)) for name, kind in kinds_of(declared).items()]
    assert found == expected


@pytest.mark.parametrize("file", FILES)
def test_each_file_has_a_launcher_for_all_its_kernels_and_no_others(file):
    kernels = {kernel for kernel, (home, _) in KERNELS.items() if home == file}
    assert set(declared_in(file)) == kernels
    compiled = {name for v in all_variants() if v.file == file for name in kernels_of(v)}
    assert compiled == kernels


def test_each_kernel_has_a_twin_and_each_twin_a_kernel():
    assert set(TWINS) == set(KERNELS)
    for module in (bags, ids, slots):  # the others have functions that kernels/cpu/__init__.py has
        jitted = {
            name
            for name, each in vars(module).items()
            if hasattr(each, "py_func") and each.py_func.__module__ == module.__name__
        }
        used = {each.__name__ for each in TWINS.values() if each.__module__ == module.__name__}
        assert {name for name in jitted - used if name[0] != "_"} <= {"sound_offset"}


SIZES = {"int": 4, "u32": 4, "i64": 8, "*": 8}


def value_at(address: int, kind: Kind) -> int:
    return int.from_bytes(
        ctypes.string_at(address, SIZES[kind.c_type]), "little", signed=kind.lowest < 0
    )


def bound(parameters: type[Parameters], **fixed) -> tuple[BoundKernel, list[Any]]:
    """Return a kernel whose start keeps what the GPU would read."""
    started = []

    def start(address, grid, block, shared_bytes, frame):
        places = (ctypes.c_void_p * len(kinds_of(parameters))).from_address(frame)
        kinds = kinds_of(parameters).items()
        values = {
            name: value_at(place, kind) for (name, kind), place in zip(kinds, places, strict=True)
        }
        started.append((address, grid, block, shared_bytes, values))

    return BoundKernel(start, 77, parameters, 256, 512, fixed), started


@pytest.mark.parametrize(
    "fixed",
    [
        (),
        ("n_rows", "slot_of", "keys", "counting", "claims", "mailbox"),
        ("mailbox", "counting", "ids"),
        tuple(kinds_of(GiveSlots)),
    ],
    ids=["none", "some", "in-another-order", "all"],
)
def test_a_launch_gives_each_parameter_its_value(fixed):
    lowest = {name: kind.lowest for name, kind in kinds_of(GiveSlots).items()}
    highest = {
        name: 2**47 if kind.c_type == "*" else kind.highest
        for name, kind in kinds_of(GiveSlots).items()
    }
    launch, started = bound(GiveSlots, **{name: highest[name] for name in fixed})
    for values, blocks in ((lowest, 5), (highest, (7, 2, 1))):
        launch(blocks, *(values[name] for name in values if name not in fixed))
        given = {**values, **{name: highest[name] for name in fixed}}
        grid = blocks if isinstance(blocks, tuple) else (blocks, 1, 1)
        assert started.pop() == (77, grid, (256, 1, 1), 512, given)


def test_tensors_none_and_truth_are_given_as_numbers():
    keys = torch.zeros(3, dtype=torch.int64)
    launch, started = bound(GiveSlots, keys=keys, slot_of=None, counting=True)
    launch(1, *range(20))
    values = started[0][-1]
    assert (values["keys"], values["slot_of"], values["counting"]) == (keys.data_ptr(), 0, 1)
    mask, entries = (1 << 32) - 1, torch.zeros(8, 2, dtype=torch.int64)
    named: dict[str, Any] = {
        "entries": entries,
        "bucket_mask": mask,
        "ids": 1,
        "id_bytes": 8,
        "n": -1,
    }
    launch, started = bound(FindIds)
    launch(1, *in_order(FindIds, {"locations": None, **named}))
    assert started[0][-1] == {**named, "entries": entries.data_ptr(), "locations": 0}


def test_launches_from_within_a_start_have_memory_of_their_own():
    """As a finaliser does that runs amid a launch."""
    seen: list[int | None] = []

    def start(address, grid, block, shared_bytes, frame):
        place = (ctypes.c_uint64 * 6).from_address(frame)[4]
        if len(seen) < 3:
            seen.append(None)
            launch(1, 0, 0, 0, 0, len(seen) * 11, 0)
        seen.append(ctypes.c_int64.from_address(place).value)

    launch = BoundKernel(start, 1, FindIds, 32, 0, {})
    launch(1, 0, 0, 0, 0, 99, 0)
    assert seen[3:] == [33, 22, 11, 99]


def test_what_no_kernel_takes_is_refused_by_name():
    with pytest.raises(TypeError, match="find_ids has no parameter nothing"):
        bound(FindIds, nothing=3)
    for name, value in (("bucket_mask", -1), ("id_bytes", 1 << 31), ("n", 1 << 63)):
        with pytest.raises(ValueError, match=f"find_ids: {name}: {value}"):
            bound(FindIds, **{name: value})
    with pytest.raises(TypeError, match=r"find_ids: .*'ids', 'm'"):
        in_order(
            FindIds, {"entries": 0, "bucket_mask": 0, "id_bytes": 0, "n": 0, "locations": 0, "m": 0}
        )
