"""Types of a graph's nodes, where a relation's edges have one at each end."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, ArgumentTypeError

#: Spaces with a row for each type of the nodes at one end of edges, and the nodes of that end.
TYPE_SPACES = {"src_type": "src", "dst_type": "dst"}


@dataclass(frozen=True)
class NodeTypes:
    """Nodes that stand type after type, and the types that relations lead from and to.

    Attributes
    ----------
    bounds : tuple of int
        The first node of each type, and the number of nodes; any sequence of integers is taken.
    src, dst : tuple of int
        For each relation the type of its edges' sources, and of their destinations; any where it
        has no edge.
    """

    bounds: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("bounds", "src", "dst"):
            given = getattr(self, name)
            try:
                numbers = tuple(map(operator.index, given))
            except TypeError as error:
                raise ArgumentTypeError(
                    f"{name}: {given!r:.60}, expected a sequence of int"
                ) from error
            object.__setattr__(self, name, numbers)

    @classmethod
    def of_names(
        cls, counts: Mapping[str, int], relations: Iterable[tuple[str, str, str]]
    ) -> NodeTypes:
        """Return those of nodes by type, and of relations by the names of their ends' types."""
        numbers = {name: i for i, name in enumerate(counts)}
        # A relation of types that are not there has no edges.
        ends = [[numbers.get(end, 0) for end in (src, dst)] for src, _, dst in relations]
        bounds = (0, *itertools.accumulate(counts.values()))
        return cls(bounds, tuple([src for src, _ in ends]), tuple([dst for _, dst in ends]))

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], num_relations: int) -> NodeTypes | None:
        """Return what `numbers` was made of; None for no numbers."""
        if not numbers:
            return None
        cut = len(numbers) - 2 * num_relations
        ends = tuple(numbers[cut : cut + num_relations]), tuple(numbers[cut + num_relations :])
        return cls(tuple(numbers[:cut]), *ends)

    def numbers(self) -> list[int]:
        """Return bounds and both ends' types in one list."""
        return [*self.bounds, *self.src, *self.dst]

    @property
    def count(self) -> int:
        """How many types there are."""
        return len(self.bounds) - 1

    def check(self, sizes: tuple[int, ...], num_relations: int) -> None:
        """Raise an error unless they are those of a graph of these sizes."""
        rising = all(a <= b for a, b in itertools.pairwise(self.bounds))
        if not rising or self.bounds[:1] != (0,) or {self.bounds[-1]} != set(sizes):
            raise ArgumentError(
                f"node_types has bounds {self.bounds}; accepted are rising ones from 0 to the "
                f"number of nodes, which is {' and '.join(map(str, sizes))}"
            )
        for name, types in (("src", self.src), ("dst", self.dst)):
            known = all(0 <= t < self.count for t in types)
            if len(types) != num_relations or not known:
                raise ArgumentError(
                    f"node_types.{name} is {types}; accepted are {num_relations} types from 0 to "
                    f"{self.count - 1}, one for each relation"
                )

    def of_nodes(self, device: torch.device) -> torch.Tensor:
        """Return the type of each node, int64 ``[N]``."""
        counts = torch.tensor(self.bounds, device=device).diff()
        types = torch.arange(self.count, device=device)
        return types.repeat_interleave(counts, output_size=self.bounds[-1])

    def of_relations(self, space: str, device: torch.device) -> torch.Tensor:
        """Return the type at one end of each relation's edges, int64 ``[R]``."""
        return torch.tensor(
            self.src if space == "src_type" else self.dst, dtype=torch.int64, device=device
        )

    def misplaced(self, src: torch.Tensor, dst: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Return for each end how many edges have another type there than their relation: [2]."""
        of_nodes = self.of_nodes(src.device)
        wrong = [
            (of_nodes[nodes] != self.of_relations(space, src.device)[kinds]).sum()
            for space, nodes in (("src_type", src), ("dst_type", dst))
        ]
        return torch.stack(wrong)

    def check_placed(self, misplaced: Sequence[int]) -> None:
        """Raise an error unless no edge is misplaced."""
        for end, count in zip(("source", "destination"), misplaced, strict=True):
            if count:
                raise ArgumentError(
                    f"node_types: {count} edges have a {end} of another type than their relation; "
                    "accepted are relations whose edges have nodes of one type at each end"
                )
