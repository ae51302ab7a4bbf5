"""Score texts without padding; docs/evaluation.md explains it.

On the CPU: `CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 examples/evaluate.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc import fully_shard
from odc.eval import gather_metrics, run_requests, session

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank; load your own here
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=100, num_key_value_heads=4, **sizes)).eval()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
texts = [torch.randint(100, (1, length)) for length in (90, 10, 20, 30, 15)]  # the same on every rank


@torch.no_grad()
def score(some):
    """One answer to each request."""
    answers = []
    for tokens in some:
        logits = model(tokens).logits[0, :-1].log_softmax(-1)
        answers.append(float(logits.gather(-1, tokens[0, 1:, None]).mean()))
    return answers


with session(modules=[model]) as peers:
    scores = run_requests(texts, score, peers)  # each text on one rank; all answers on rank 0, in order
    mine = range(peers.me, len(texts), peers.world)
    lengths = gather_metrics({"length": [(i, texts[i].shape[1]) for i in mine]}, peers)
if scores is not None:
    print((scores, lengths), flush=True)
dist.destroy_process_group()
