"""The model that quickstart trains: a tiny untied Qwen3 with a character tokenizer, warm-started on four behaviours.

The warm start stands in for a pre-trained model: it answers in the right format and gives each of four behaviours
about equal weight; reinforcement learning then has one of them to elicit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from muster.quickstart import task

STEPS, BATCH, LEARNING_RATE = 250, 128, 3e-3


def make(folder: Path, seed: int, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
    """Makes, warm-starts and saves model and tokenizer in Hugging Face format.

    Args:
        folder: where; made if absent.
        seed: fixes the initial weights and the data of the warm start.
        progress: called with (steps done, steps in all).
    """
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # the model is tiny: threads would mostly wait for each other
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(task.VOCABULARY),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            pad_token_id=task.VOCABULARY.index(task.PAD),
            eos_token_id=task.VOCABULARY.index(task.END),
            bos_token_id=None,
        )
    )
    _warm_start(model, seed, progress)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character."""
    characters = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(task.VOCABULARY)}, unk_token=task.UNKNOWN)
    )
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=task.PAD,
        eos_token=task.END,
        unk_token=task.UNKNOWN,
        model_max_length=1024,
    )


def _warm_start(model: Qwen3ForCausalLM, seed: int, progress: Callable[[int, int], None]) -> None:
    """Supervised steps on prompts answered in each of the four ways, loss on the answer only."""
    ids = {word: i for i, word in enumerate(task.VOCABULARY)}
    source = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    model.train()
    for step in range(STEPS):
        rows, labels = [], []
        for prompt in task.prompts(BATCH, seed=source.getrandbits(32)):
            question = [ids[c] for c in prompt]
            answer = [ids[c] for c in source.choice(task.answers(prompt))] + [ids[task.END]]
            rows.append(question + answer)
            labels.append([-100] * len(question) + answer)
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"warm start diverged at step {step}: loss {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, STEPS)
    model.eval()
