"""Writes what verl's SFT trainer needs to be tried: a tokenizer, a model of two random layers, thirty-two chats."""

from __future__ import annotations

import random

import pandas
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

words = ["<pad>", "<end>", "<user>", "<assistant>", *(f"w{i}" for i in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
tokenizer.save_pretrained("tokenizer")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), num_key_value_heads=1, **sizes)).save_pretrained("model")

chats = []
for _ in range(32):
    answer = [f"w{i * i % 60}" for i in range(min(100, int(random.lognormvariate(2.5, 1)) + 2))]
    chats.append([{"role": "user", "content": "w0"}, {"role": "assistant", "content": " ".join(answer)}])
pandas.DataFrame({"messages": chats}).to_parquet("train.parquet")
