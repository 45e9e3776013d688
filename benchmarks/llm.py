"""Measure offloaded generation: packed weights and a packed K/V cache, compared with the peers.

python benchmarks/llm.py --only ratio    # what MiniLM's weights, keys and values take
python benchmarks/llm.py --only cpu      # packing, and a forward pass of MiniLM
python benchmarks/llm.py --only weights  # accelerate's cpu_offload, raw and packed streaming
python benchmarks/llm.py --only cache    # DynamicCache, offloaded, compressed
python benchmarks/llm.py --only loading  # packing a model, and from_pretrained, beside plain loads
python benchmarks/llm.py --only prompt   # prompts: first and second request of a process
python benchmarks/llm.py --only fused    # products with packed weights, beside plain ones
python benchmarks/llm.py --only published  # FlexGen's schedule and InfiniGen's kind, ours

weights and cache generate with a model of random weights in the shape of the IBP paper's workload
(section 6.4: prompts of 1,920 tokens, a batch of 20, 128 new tokens), scaled by the options, with
fresh prompts for each repetition, and compare every token with the plain run's. Figures are medians
of the repetitions after one that warms up. accelerate's cpu_offload and transformers' offloaded
cache copy everything for each token, so they generate fewer; each row has how many. cuDNN's
attention is off, since it makes a plan for each new length. Without a GPU they run on the CPU,
where nothing crosses a link: reported bytes are those that a link would carry, and the workload is
a tenth as long, with 4 prompts. DFloat11 and nvCOMP are measured if they can be imported (dfloat11,
nvidia.nvcomp) and there is a GPU. Rows are printed to stderr as they come, tables at the end.

fused takes weights of an 8B model's shapes, as many as no cache holds in turn, with 1, 4 and 16
rows of input: torch's product with the plain weight, decoding followed by that, and products with
the packed weight (`fused=`).

prompt has models of its own: the shape of an 8B model with prompts of 8k and 32k tokens, and 8
layers of the paper's workload; on a CPU two narrow layers of each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

# The models, the prompts and the clock are those of the example.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from common.arguments import DTYPES, above_zero, add_device, checked_device, positive  # noqa: E402
from common.report import Steps  # noqa: E402
from llm_prompt import CASES, MODES  # noqa: E402
from textgen.models import RANDOM, SIZES  # noqa: E402
from timing import add_output, print_tables  # noqa: E402

PARTS = ("ratio", "cpu", "weights", "cache", "prompt", "loading", "fused", "published")
#: Of the paper, and what a CPU does of it: prompts, and a factor for their tokens and the new ones.
PROMPTS, CPU_PROMPTS, CPU_SCALE = 20, 4, 0.1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", help="run one part or several")
    add("--model", default="llama", choices=tuple(RANDOM), help="default: %(default)s")
    add("--size", default="small", choices=tuple(SIZES), help="as in the example; %(default)s")
    add("--layers", type=positive, metavar="N", help="layers, when not those of the size")
    add("--kv-heads", type=positive, metavar="N", help="K/V heads, when not those of the size")
    add("--dtype", default="bfloat16", choices=tuple(DTYPES), help="default: %(default)s")
    add("--prompt-tokens", type=positive, default=1920, metavar="N", help="default: %(default)s")
    add(
        "--batch",
        type=positive,
        metavar="N",
        help=f"prompts; default: {PROMPTS}, on a CPU {CPU_PROMPTS}",
    )
    add("--new-tokens", type=positive, default=128, metavar="N", help="default: %(default)s")
    add(
        "--slow-tokens",
        type=positive,
        default=32,
        metavar="N",
        help="new tokens, at most, with accelerate's cpu_offload and with\n"
        "transformers' offloaded cache; default: %(default)s",
    )
    add(
        "--scale",
        type=above_zero,
        metavar="X",
        help="times this: tokens of a prompt and new ones;\n"
        f"default: 1, on a CPU {CPU_SCALE} where neither of them is given",
    )
    add("--repetitions", type=positive, default=3, metavar="N", help="default: %(default)s")
    add("--prompt-cases", choices=tuple(CASES), nargs="+", default=list(CASES), help="default: all")
    add(
        "--prompt-modes",
        choices=MODES,
        nargs="+",
        default=list(MODES),
        help="where prompts are packed to; default: both",
    )
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="for each of these cases and modes; default: %(default)s",
    )
    add("--profile", action="store_true", help="loading: also seconds by stage and thread")
    add_device(parser)
    add_output(parser)
    return parser


def scaled(parser: argparse.ArgumentParser, given: list[str] | None = None) -> argparse.Namespace:
    """Parse arguments, and fit the workload to the device."""
    arguments = parser.parse_args(given)
    device = arguments.device = checked_device(parser, arguments.device)
    as_paper = all(
        getattr(arguments, name) == parser.get_default(name)
        for name in ("prompt_tokens", "new_tokens")
    )
    heads = SIZES[arguments.size].heads
    if arguments.kv_heads and (arguments.model == "opt" or heads % arguments.kv_heads):
        parser.error(
            f"argument --kv-heads: {arguments.kv_heads} with {arguments.model} {arguments.size}, "
            f"accepted are numbers that its {heads} heads are a multiple of; not with opt"
        )
    on_cpu = device.type == "cpu"
    if arguments.scale is None:
        arguments.scale = CPU_SCALE if on_cpu and as_paper else 1.0
    arguments.batch = arguments.batch or (CPU_PROMPTS if on_cpu else PROMPTS)
    arguments.prompt_tokens = max(2, round(arguments.prompt_tokens * arguments.scale))
    # The first token is the prompt's; a time for each token takes two more.
    arguments.new_tokens = max(3, round(arguments.new_tokens * arguments.scale))
    arguments.slow_tokens = min(max(3, arguments.slow_tokens), arguments.new_tokens)
    return arguments


def main() -> int:
    """Run the requested parts and print one table each."""
    arguments = scaled(make_parser())
    tables: dict[str, list[dict[str, Any]]] = {}
    with Steps() as steps:
        for part in arguments.only or PARTS:
            with steps.step(part):
                tables |= run(part, arguments, steps)
    print_tables(tables, arguments.json, arguments.out)
    return 0


def run(part: str, arguments: argparse.Namespace, steps: Steps) -> dict[str, list[dict[str, Any]]]:
    """Run one of PARTS."""
    if part == "ratio":
        import llm_ratio

        return llm_ratio.run()
    if part == "cpu":
        import llm_cpu

        return llm_cpu.run(arguments)
    if part == "fused":
        import llm_fused

        return llm_fused.run(arguments)
    if part == "weights":
        import llm_weights

        return llm_weights.run(arguments, steps)
    if part == "loading":
        import llm_loading

        return llm_loading.run(arguments, steps)
    if part == "prompt":
        import llm_prompt

        return llm_prompt.run(arguments, steps)
    if part == "published":
        import llm_published

        return llm_published.run(arguments, steps)
    import llm_cache

    return llm_cache.run(arguments, steps)


if __name__ == "__main__":
    raise SystemExit(main())
