"""Random numbers of torch are the caller's: what the library draws is of generators of its own.

A measurement that drew from torch's would change the dropout, and so the losses, of a training that
it is part of.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "core"
DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "poisson"),
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_"),
}
FILES = sorted(path.relative_to(CORE).as_posix() for path in CORE.rglob("*.py"))


def draws_of_the_callers(source: str) -> list[str]:
    """Return calls that draw random numbers and are given no generator, and seeds of torch."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        call = ast.unparse(node.func)
        given = any(keyword.arg == "generator" for keyword in node.keywords)
        in_place = node.func.attr in DRAWS and node.func.attr.endswith("_")
        if call in ("torch.manual_seed", "torch.cuda.manual_seed", "np.random.seed"):
            found.append(call)
        elif (in_place or call.removeprefix("torch.") in DRAWS) and not given:
            found.append(call)
    return found


@pytest.mark.parametrize("package", sorted({name.partition("/")[0] for name in FILES}))
def test_no_random_number_of_the_caller_is_drawn(package: str) -> None:
    files = [name for name in FILES if name.partition("/")[0] == package]
    found = {name: draws_of_the_callers((CORE / name).read_text()) for name in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    ["torch.randperm(3)", "x.normal_()", "torch.empty(3).random_(0, 2)", "torch.manual_seed(1)"],
)
def test_such_a_call_is_found(source: str) -> None:
    assert draws_of_the_callers(source)
    assert not draws_of_the_callers("torch.randint(3, (2,), generator=drawn)")
