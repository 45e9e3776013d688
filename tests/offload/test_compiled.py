"""torch.compile of models whose weights stream: hooks between the graphs, no operator of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab.offload import offload_weights
from tests.helpers import same_bits
from tests.offload.models import Blocks, logits, tiny_llama, token_ids

# torch.compile looks at the gradients of all inputs of a graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]

LAYERS = 10


class Recorder:
    """A backend that runs graphs as they are and tells what is in them."""

    def __init__(self) -> None:
        self.graphs = 0
        #: Operators of each graph that ran, by passes over it.
        self.ran: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        nodes = [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
        operators = [n.target if isinstance(n.target, str) else n.target.__name__ for n in nodes]

        def run(*args: Any) -> Any:
            self.ran.append(operators)
            return graph.forward(*args)

        return run

    def operators(self) -> list[str]:
        """Return all operators that ran in graphs, sorted, and forget them."""
        found = sorted(name for names in self.ran for name in names)
        self.ran.clear()
        return found


@pytest.mark.parametrize("keep", [None, "packed", "all"])
def test_graphs_hold_the_operators_of_the_model_and_none_of_the_hooks(keep):
    x = torch.randn(5, 64)
    plain, streamed = Blocks(count=2), Blocks(count=2)
    expected = plain(x).detach()
    offload_weights(streamed, execution_device="cpu", min_bytes=0, keep=keep)
    passes = []
    for model in (plain, streamed):
        recorder = Recorder()
        compiled = torch.compile(model, backend=recorder)
        with torch.no_grad():
            for _ in range(2):
                assert same_bits(compiled(x), expected)
                passes.append((recorder.operators(), recorder.graphs))
        torch.compiler.reset()
    (all_of_plain, _), again, (all_of_streamed, graphs), last = passes
    assert all_of_plain.count("linear") == 4 and all_of_streamed == all_of_plain
    # Nothing was compiled again, or ran uncompiled, in the second pass.
    assert again == (all_of_plain, 1) and last == (all_of_streamed, graphs)


def test_graphs_of_a_language_model_hold_none_of_the_hooks_operators():
    model = tiny_llama(layers=2)
    expected = logits(model)
    passes = []
    for packed in (False, True):
        if packed:
            offload_weights(model, execution_device="cpu", min_bytes=0)
        recorder = Recorder()
        assert same_bits(logits(torch.compile(model, backend=recorder)), expected)
        passes.append(recorder.operators())
        torch.compiler.reset()
    plain, streamed = passes
    # The look-up in the embedding is made between graphs as well: it decodes rows.
    assert set(streamed) <= set(plain) - {"embedding"} and "embedding" in plain
    for name in ("linear", "scaled_dot_product_attention", "rsqrt"):
        assert streamed.count(name) == plain.count(name) > 0


def test_gradients_flow_through_compiled_blocks():
    model = Blocks(count=2)
    x = torch.randn(5, 64)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    compiled = torch.compile(model, backend="aot_eager")
    wanted, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(wanted).square().sum().backward()
    compiled(found).square().sum().backward()
    assert torch.equal(torch.as_tensor(found.grad), torch.as_tensor(wanted.grad))


def test_a_deep_model_with_a_cache_is_compiled_wholly_under_a_limit_above_its_layers():
    model = tiny_llama(layers=LAYERS)
    recorder = Recorder()
    expected = logits(model)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    compiled = torch.compile(model, backend=recorder)
    # Each layer is a graph of its own, one more variant of the same code: the default is 8.
    limits = {"recompile_limit": 4 * LAYERS, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits), torch.no_grad():
        graphs = []
        for _ in range(2):
            assert same_bits(compiled(token_ids(), use_cache=True).logits, expected)
            graphs.append(recorder.graphs)
            assert recorder.operators().count("scaled_dot_product_attention") == LAYERS
    assert graphs[0] == graphs[1] > LAYERS
