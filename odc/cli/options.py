"""The options that `odc train`, `odc compare` and `odc train-mm` share, each written once."""

from __future__ import annotations

from typing import Annotated

from typer import Option

_MODEL, _WORK, _OPTIMIZER, _RUNTIME = "Model and data", "Work", "Optimizer", "Runtime"

Tokenizer = Annotated[str | None, Option(help="auto, bytes or bpe. [default: auto]", rich_help_panel=_MODEL)]
Vocab = Annotated[int | None, Option(help="Tokens of the trained BPE. [default: 4096]", rich_help_panel=_MODEL)]
Precision = Annotated[str | None, Option(help="fp32 or bf16. [default: fp32]", rich_help_panel=_MODEL)]
Checkpointing = Annotated[
    bool | None,
    Option("--activation-checkpointing", help="Recompute blocks in backward.", rich_help_panel=_MODEL),
]
Cache = Annotated[
    str | None, Option(help="Folder for tokenizers and ids. [default: ~/.cache/odc]", rich_help_panel=_MODEL)
]

Ranks = Annotated[int | None, Option(help="Processes on this machine. [default: 2]", rich_help_panel=_WORK)]
PerNode = Annotated[
    int | None, Option(help="Ranks of one declared node, for hybrid arms. [default: 2]", rich_help_panel=_WORK)
]
Device = Annotated[
    str | None, Option(help="cpu, or cuda: this machine's devices in turn. [default: cpu]", rich_help_panel=_WORK)
]
Steps = Annotated[int | None, Option(help="Optimizer steps. [default: 10]", rich_help_panel=_WORK)]
MinibatchSize = Annotated[
    int | None, Option(help="Samples of one step, over all ranks. [default: 8]", rich_help_panel=_WORK)
]
MaxTokens = Annotated[int | None, Option(help="Most tokens of one microbatch. [default: 4096]", rich_help_panel=_WORK)]
Long = Annotated[
    str | None,
    Option(help="Documents over --max-tokens: error, split or drop. [default: error]", rich_help_panel=_WORK),
]
Seed = Annotated[int | None, Option(help="Of weights and sample order. [default: 0]", rich_help_panel=_WORK)]

Lr = Annotated[float | None, Option(help="Peak learning rate. [default: 3e-4]", rich_help_panel=_OPTIMIZER)]
Warmup = Annotated[int | None, Option(help="Steps of linear warm-up. [default: 0]", rich_help_panel=_OPTIMIZER)]
MinLr = Annotated[
    float | None, Option(help="Fraction of --lr that the cosine ends at. [default: 0.1]", rich_help_panel=_OPTIMIZER)
]
WeightDecay = Annotated[float | None, Option(help="Of AdamW. [default: 0.1]", rich_help_panel=_OPTIMIZER)]
Clip = Annotated[
    float | None, Option(help="Largest gradient norm; 0: no clipping. [default: 1]", rich_help_panel=_OPTIMIZER)
]

Reproducible = Annotated[
    bool | None, Option("--reproducible", help="fp64 accumulators under the odc arms.", rich_help_panel=_RUNTIME)
]
Accumulate = Annotated[
    str | None, Option(help="server, direct or per_source. [default: server]", rich_help_panel=_RUNTIME)
]
Timeout = Annotated[
    float | None,
    Option("--timeout", help="Seconds to wait for a rank without progress. [default: 600]", rich_help_panel=_RUNTIME),
]
Slow = Annotated[
    str | None,
    Option(help="RANK:FACTOR, with commas: emulate slower devices by sleeping.", rich_help_panel=_RUNTIME),
]
