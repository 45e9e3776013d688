"""Codec names: built in, registered, and offered by installed packages."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.codecs import registry
from bitslab.integrations.embedding import CachedEmbeddingBag


@pytest.fixture(autouse=True)
def registry_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))


def codec_class(name: Any) -> type[bitslab.RowCodec]:
    return type("Other", (bitslab.RawCodec,), {"name": name})


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, entry: str, code: str
) -> None:
    """Put a package that offers a codec on the path."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[bitslab.codecs]\n{entry}\n")
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize(
    ("name", "cls"), [("ibp", bitslab.InvariantCodec), ("raw", bitslab.RawCodec)]
)
def test_built_in_codecs_have_names(name: str, cls: type) -> None:
    assert bitslab.get_codec(name) is cls
    assert name in bitslab.codec_names()


def test_registered_codec_is_found_and_used() -> None:
    cls = bitslab.register_codec(codec_class("mine"))
    assert bitslab.get_codec("mine") is cls
    assert "mine" in bitslab.codec_names()
    assert bitslab.compress(torch.ones(3, 4), "mine").codec.name == "mine"


def test_registering_the_same_class_twice_is_harmless() -> None:
    cls = codec_class("mine")
    assert bitslab.register_codec(cls) is bitslab.register_codec(cls)


@pytest.mark.parametrize("name", ["ibp", "raw"])
def test_built_in_codec_cannot_be_replaced(name: str) -> None:
    with pytest.raises(bitslab.ArgumentError, match=f"{name!r}: taken by bitslab"):
        bitslab.register_codec(codec_class(name))
    assert bitslab.get_codec(name).__module__.startswith("bitslab.")


def test_registered_codec_cannot_be_replaced() -> None:
    bitslab.register_codec(codec_class("mine"))
    with pytest.raises(bitslab.ArgumentError, match="'mine': taken by"):
        bitslab.register_codec(codec_class("mine"))


@pytest.mark.parametrize("given", [int, "ibp", None, bitslab.InvariantCodec.fit], ids=str)
def test_only_row_codecs_can_be_registered(given: Any) -> None:
    with pytest.raises(bitslab.ArgumentTypeError, match="subclass of RowCodec"):
        bitslab.register_codec(given)


@pytest.mark.parametrize("name", ["", "auto", None, 3], ids=repr)
def test_codec_needs_a_name_of_its_own(name: Any) -> None:
    with pytest.raises(bitslab.ArgumentTypeError, match="needs a name"):
        bitslab.register_codec(codec_class(name))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(bitslab.ArgumentError, match="'zip' is not known; known are csr, "):
        bitslab.get_codec("zip")


def test_known_codecs_are_used_without_a_look_at_what_is_installed(monkeypatch: Any) -> None:
    def looked() -> Any:
        raise AssertionError("the packages that are installed were read")

    monkeypatch.setattr(registry, "_entry_points", looked)
    with bitslab.CompressedTable.from_tensor(ROWS) as table:
        assert torch.equal(table[:], ROWS)
    with pytest.raises(AssertionError, match="were read"):
        registry.is_codec_name("mine")
    assert not registry.is_codec_name(None)


def test_name_must_be_a_string() -> None:
    with pytest.raises(bitslab.ArgumentTypeError, match="expected a name, got int"):
        bitslab.get_codec(3)  # type: ignore[arg-type]


GOOD = """
    import bitslab

    class Offered(bitslab.RawCodec):
        name = "offered"
"""


def test_entry_point_is_found_on_first_use(tmp_path: Path, monkeypatch: Any) -> None:
    install(tmp_path, monkeypatch, "offers_good", "offered = offers_good:Offered", GOOD)
    assert "offered" in bitslab.codec_names()
    assert "offered" not in registry._classes, "listing the names has imported the package"
    assert bitslab.get_codec("offered").__module__ == "offers_good"
    assert bitslab.compress(torch.ones(3), "offered").codec.name == "offered"


ROWS = torch.arange(64.0).reshape(16, 4)


def open_as_table(path: Path, codec: Any) -> bitslab.CompressedTable:
    if isinstance(codec, str):
        codec = bitslab.get_codec(codec).fit(ROWS)
    bitslab.compress(ROWS, codec).save(path)
    return bitslab.CompressedTable.from_file(path)


def slab_cache(_path: Path, codec: Any) -> bitslab.SlabCache:
    table = bitslab.CompressedTable.from_tensor(ROWS, codec="raw")
    return bitslab.SlabCache(table, 4096, "cpu", codec=codec)


#: What holds rows that kernels gather, made with a codec by name or fitted.
HOLDERS: dict[str, Callable[[Path, Any], Any]] = {
    "CompressedTable": lambda _, c: bitslab.CompressedTable.from_tensor(ROWS, codec=c),
    "CompressedTable of a file": open_as_table,
    "SlabCache": slab_cache,
    "CompressedFeature": lambda _, c: bitslab.CompressedFeature.from_tensor(ROWS, codec=c),
    "CachedEmbeddingBag": lambda _, c: CachedEmbeddingBag(16, 4, cache_ratio=1.0, codec=c),
}


@pytest.mark.parametrize("fitted", [False, True], ids=["by name", "fitted"])
@pytest.mark.parametrize("base", ["RawCodec", "InvariantCodec"])
@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_tables_say_which_codecs_they_accept(
    tmp_path: Path, monkeypatch: Any, make: Any, base: str, fitted: bool
) -> None:
    module = f"offers_{base.lower()}"
    code = GOOD.replace("RawCodec", base)
    install(tmp_path, monkeypatch, module, f"offered = {module}:Offered", code)
    codec: Any = bitslab.get_codec("offered").fit(ROWS) if fitted else "offered"
    assert bitslab.compress(ROWS, codec).codec.name == "offered"
    with pytest.raises(bitslab.ArgumentError, match="codec 'offered' .* accept 'auto', 'ibp' and"):
        make(tmp_path / "rows.bitslab", codec)


def test_tables_refuse_a_codec_before_it_is_fitted(monkeypatch: Any) -> None:
    cls = bitslab.register_codec(codec_class("mine"))
    monkeypatch.setattr(cls, "fit", classmethod(lambda *_, **__: pytest.fail("fitted")))
    with pytest.raises(bitslab.ArgumentError, match="codec 'mine'"):
        bitslab.CompressedTable.from_tensor(ROWS, codec="mine")


def test_entry_point_of_one_package_seen_twice_is_harmless(
    tmp_path: Path, monkeypatch: Any
) -> None:
    for folder in ("a", "b"):
        install(tmp_path / folder, monkeypatch, "offers_twice", "twice = offers_twice:Offered", "")
    assert "twice" in bitslab.codec_names()


@pytest.mark.parametrize(
    ("entry", "code", "message"),
    [
        ("{m} = {m}:Missing", "", "'{m}:Missing' cannot be loaded: AttributeError"),
        ("{m} = {m}:Offered", "import no_such_package", "cannot be loaded: ModuleNotFoundError"),
        ("{m} = {m}:Offered", GOOD, "'{m}:Offered' calls itself 'offered'"),
        ("{m} = {m}:Offered", "Offered = 3", "subclass of RowCodec, got 3"),
    ],
    ids=["no-such-class", "import-fails", "other-name", "no-codec"],
)
def test_broken_entry_point_says_what_is_wrong(
    tmp_path: Path, monkeypatch: Any, request: Any, entry: str, code: str, message: str
) -> None:
    module = "broken_" + request.node.callspec.id.replace("-", "_")
    install(tmp_path, monkeypatch, module, entry.format(m=module), code)
    with pytest.raises(bitslab.BitslabError, match=message.format(m=module)):
        bitslab.get_codec(module)
    assert bitslab.get_codec("ibp") is bitslab.InvariantCodec, "others are not affected"


def test_entry_point_cannot_take_a_built_in_name(tmp_path: Path, monkeypatch: Any) -> None:
    install(tmp_path, monkeypatch, "takes_ibp", "ibp = takes_ibp:Offered", GOOD)
    assert bitslab.get_codec("ibp") is bitslab.InvariantCodec
    with pytest.raises(bitslab.ArgumentError, match="'ibp': taken by .*takes_ibp:Offered needs"):
        bitslab.codec_names()


def test_two_packages_cannot_share_a_name(tmp_path: Path, monkeypatch: Any) -> None:
    for module in ("first_one", "second_one"):
        install(tmp_path / module, monkeypatch, module, f"both = {module}:Offered", GOOD)
    with pytest.raises(bitslab.ArgumentError, match="'both': taken by .*needs another name"):
        bitslab.get_codec("both")
