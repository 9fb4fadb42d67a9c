"""Trains the adapter with which a small model solves the tasks, by full causal attention only.

Knows low-rank adapters, the tasks and how to make many examples of them. Knows nothing of PIC or
SGLang: the model never sees reused KV, so what reuse loses and recomputation regains is not
trained for.

An example is one context with several questions, asked one after the other; the loss is on the
answers. Contexts grow while time passes, to at most 32 passages and 4k tokens: a chain of lookups
is learned many times faster where it is short. The learning rate follows the time that is left.
The weights are written as PEFT reads them, and beside them the scores of full prefill on prompts
over prose that no example had.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from sglang_ext.scripts.quality.rating import rate
from sglang_ext.scripts.quality.scores import first_line
from sglang_ext.scripts.quality.tasks import (
    PUZZLES,
    SYSTEM,
    TASKS,
    TOOL_SYSTEM,
    Prose,
    TaskPrompt,
    ask,
    held_out_topics,
    make_context,
    make_prompts,
    make_tools,
    training_topics,
)
from sglang_ext.scripts.server import load_encoder
from sglang_ext.scripts.workload import python_topics

MAX_CHUNKS = 32
CHUNK_TOKENS = (10, 220)
STAGES = ((0.30, 3, 100, 450), (0.60, 4, 160, 1600), (1.0, 6, 250, 3900))
"""Until which share of the time contexts have how many chunks and tokens: least, least, most."""
NUM_QUESTIONS = (3, 8)
MAX_TOKENS = 4096
SHARE_TOOLS, SHARE_AGENT = 0.08, 0.05
WEIGHTS_OF_TASKS = dict.fromkeys(PUZZLES, 3) | {"passage": 2, "multi_value": 1}
"""How often a kind of question is taken: chains are learned last."""
POOL_SIZE = 256
WARMUP_STEPS = 30
EVAL_CHUNKS = (8, 16)
ALPHA_BY_RANK = 2
WEIGHTS = "adapter_model.safetensors"
EVAL_CHUNK_LEN = 90
EVAL_SEED = 7
MAX_ANSWER = 28


Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Example:
    """A context with questions and answers.

    Attributes:
        ids: Token ids.
        is_answer: For each token whether it belongs to an answer.
    """

    ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True, slots=True)
class Training:
    """How an adapter is trained.

    Attributes:
        minutes: Wall-clock time of the training steps.
        rank: Of the adapter.
        learning_rate: The highest.
        micro_tokens: Tokens of a pass, padding included.
        batch_examples: Examples of a step.
        seed: Of the examples.
        workers: Processes that make examples.
    """

    minutes: float
    rank: int = 16
    learning_rate: float = 1e-3
    micro_tokens: int = 49152
    batch_examples: int = 192
    seed: int = 1
    workers: int = 12


def make_example(prose: Prose, encode: Encode, rng: random.Random, progress: float) -> Example:
    """One example; its size is spread evenly over the logarithm, within its stage.

    Args:
        prose: Where sentences come from.
        encode: Text to token ids.
        rng: Of the random choices.
        progress: Share of the time that has passed, which chooses the stage.
    """
    stages = [stage for stage in STAGES if progress < stage[0]] or [STAGES[-1]]
    _, least_chunks, least, most = stages[0]
    num_tokens = math.exp(rng.uniform(math.log(least), math.log(most)))
    most_chunks = min(MAX_CHUNKS, max(least_chunks, num_tokens / 16))
    num_chunks = round(math.exp(rng.uniform(math.log(least_chunks), math.log(most_chunks))))
    chunk_len = round(min(max(num_tokens / num_chunks, CHUNK_TOKENS[0]), CHUNK_TOKENS[1]))
    num_questions = rng.randint(*NUM_QUESTIONS)
    kind = rng.random()
    system = SYSTEM
    if kind < SHARE_TOOLS:
        system = TOOL_SYSTEM
        context = make_tools(prose, rng, num_chunks, chunk_len, num_questions)
    else:
        lens = [max(8, round(chunk_len * rng.uniform(0.5, 1.5))) for _ in range(num_chunks)]
        if kind < SHARE_TOOLS + SHARE_AGENT:
            lens = [round(num_chunks * chunk_len * share) for share in (0.7, 0.2, 0.07, 0.03)]
        kinds = rng.choices(tuple(WEIGHTS_OF_TASKS), tuple(WEIGHTS_OF_TASKS.values()), k=2)
        tasks = [rng.choice(kinds) for _ in range(num_questions)]
        context = make_context(prose, rng, tasks, lens, has_distractors=rng.random() < 0.6)
    ids: list[int] = []
    for chunk in (system, *context.passages):
        ids += encode(chunk)
    is_answer = [False] * len(ids)
    for question, answer in context.questions:
        for text, is_given in ((ask(question), False), (f" {answer}\n\n", True)):
            tokens = encode(text)
            ids += tokens
            is_answer += [is_given] * len(tokens)
    return Example(ids[:MAX_TOKENS], is_answer[:MAX_TOKENS])


class Batch(NamedTuple):
    """Examples of like length, padded to the right."""

    ids: Tensor
    """`[num_examples, width]` int32."""
    is_answer: Tensor
    """`[num_examples, width]` bool."""


class _Examples(IterableDataset[Batch]):
    """Endless passes of examples of like length; each worker has a seed of its own."""

    def __init__(self, model: str, training: Training, progress: Any) -> None:
        self._model = model
        self._training = training
        self._progress = progress

    def __iter__(self) -> Iterator[Batch]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        rng = random.Random(f"{self._training.seed}/{0 if worker is None else worker.id}")
        encode = load_encoder(self._model)
        prose = Prose(training_topics(python_topics()), lambda text: len(encode(text)))
        while True:
            progress = self._progress.value
            pool = [make_example(prose, encode, rng, progress) for _ in range(POOL_SIZE)]
            passes = list(_in_passes(pool, self._training.micro_tokens))
            rng.shuffle(passes)
            yield from map(collate, passes)


def _in_passes(pool: Sequence[Example], micro_tokens: int) -> Iterator[list[Example]]:
    part: list[Example] = []
    for example in sorted((item for item in pool if any(item.is_answer)), key=_length):
        if part and (len(part) + 1) * _length(example) > micro_tokens:
            yield part
            part = []
        part.append(example)
    if part:
        yield part


def collate(examples: Sequence[Example]) -> Batch:
    """One batch of examples."""
    width = max(map(_length, examples))
    ids = torch.zeros((len(examples), width), dtype=torch.int32)
    is_answer = torch.zeros((len(examples), width), dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : _length(example)] = torch.tensor(example.ids, dtype=torch.int32)
        is_answer[row, : _length(example)] = torch.tensor(example.is_answer)
    return Batch(ids, is_answer)


def _length(example: Example) -> int:
    return len(example.ids)


class LowRank:
    """A change of one linear layer's weight: `W + scale · B A`, rounded to the weight's dtype.

    The layer runs with the changed weight as it will be used afterwards, rounding included. The
    weight's own gradient is turned into those of A and B once a step: on a model this small the
    extra products of a LoRA layer cost more than the model.

    Source: LoRA (arXiv:2106.09685).
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        out_features, in_features = layer.weight.shape
        device = layer.weight.device
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, in_features, device=device))
        self.b = nn.Parameter(torch.zeros(out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self._layer = layer
        self._base = layer.weight.detach().clone()

    @torch.no_grad()
    def apply(self) -> None:
        """Give the layer its changed weight."""
        change = self.scale * (self.b @ self.a)
        self._layer.weight.copy_(self._base.float() + change)

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Turn the layer's gradient into those of A and B."""
        gradient = self._layer.weight.grad
        assert gradient is not None
        gradient = self.scale * gradient.float()
        self.a.grad, self.b.grad = self.b.T @ gradient, gradient @ self.a.T
        self._layer.weight.grad = None


def add_adapter(model: Any, rank: int, start: Path | None) -> dict[str, LowRank]:
    """Let every linear layer but the head learn a low-rank change; returns them by PEFT's names."""
    for weight in model.parameters():
        weight.requires_grad_(False)
    found: dict[str, LowRank] = {}
    known = load_file(start / WEIGHTS) if start else {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        layer.weight.requires_grad_(True)
        change = found[f"base_model.model.{name}"] = LowRank(layer, rank, ALPHA_BY_RANK)
        if known:
            change.a.data.copy_(known[f"base_model.model.{name}.lora_A.weight"])
            change.b.data.copy_(known[f"base_model.model.{name}.lora_B.weight"])
        change.apply()
    return found


def save_adapter(changes: Mapping[str, LowRank], rank: int, folder: Path) -> None:
    """Write an adapter as PEFT reads it, bfloat16."""
    weights: dict[str, Tensor] = {}
    for name, change in changes.items():
        weights[f"{name}.lora_A.weight"] = change.a.detach().to(torch.bfloat16).cpu().contiguous()
        weights[f"{name}.lora_B.weight"] = change.b.detach().to(torch.bfloat16).cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS)
    targets = sorted({name.rpartition(".")[2] for name in changes})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA_BY_RANK * rank,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(
        json.dumps(config, indent=1) + "\n", encoding="utf-8"
    )


def train(
    model: Any,
    changes: Sequence[LowRank],
    batches: Iterator[Batch],
    training: Training,
    device: str,
    shown_progress: Any,
) -> int:
    """Adapt `model` in place; returns the steps taken."""
    weights = [weight for change in changes for weight in (change.a, change.b)]
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[Tensor] = []
    model.train()
    batch = next(batches)  # the clock starts when there are examples
    began_s, steps, num_tokens, waited_s = time.monotonic(), 0, 0, 0.0
    while (progress := (time.monotonic() - began_s) / 60 / training.minutes) < 1:
        shown_progress.value = progress
        rate_now = training.learning_rate * min(1.0, (steps + 1) / WARMUP_STEPS)
        rate_now *= 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate_now
        num_examples = 0
        while num_examples < training.batch_examples:
            own = len(batch.ids)
            loss = answer_loss(model, batch, device)
            torch.autograd.backward(loss * own / training.batch_examples)
            losses.append(loss.detach())
            num_examples += own
            num_tokens += batch.ids.numel()
            asked_s = time.monotonic()
            batch = next(batches)
            waited_s += time.monotonic() - asked_s
        for change in changes:
            change.take_gradient()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        for change in changes:
            change.apply()
        steps += 1
        if steps % 25 == 0:
            mean = float(torch.stack(losses).float().mean())
            losses = []
            elapsed_s = time.monotonic() - began_s
            say(
                f"step {steps} {elapsed_s:.0f} s, {waited_s:.0f} s of it waiting for examples, "
                f"{num_tokens / 1e6:.1f} M tokens, loss {mean:.4f}"
            )
    return steps


def answer_loss(model: Any, batch: Batch, device: str) -> Tensor:
    """Mean cross entropy of the answer tokens."""
    ids = batch.ids.to(device, non_blocking=True).long()
    is_answer = batch.is_answer.to(device, non_blocking=True)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][is_answer[:, 1:]])
    return F.cross_entropy(logits.float(), ids[:, 1:][is_answer[:, 1:]])


@contextmanager
def compiled_layers(model: Any, device: str) -> Iterator[None]:
    """Run the layers compiled, which halves the time on a GPU."""
    layers = model.model.layers
    if not device.startswith("cpu"):
        model.model.layers = nn.ModuleList(
            torch.compile(layer, dynamic=True)  # type: ignore[misc]
            for layer in layers
        )
    try:
        yield
    finally:
        model.model.layers = layers


def answer_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[TaskPrompt], device: str, batch_size: int = 64
) -> list[str]:
    """Greedy answers of full prefill, first line only."""
    answers: list[str] = []
    for start in range(0, len(prompts), batch_size):
        part = [
            [i for text in prompt.chunks for i in tokenizer.encode(text, add_special_tokens=False)]
            for prompt in prompts[start : start + batch_size]
        ]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in part], device=device)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in part], device=device)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=MAX_ANSWER,
                do_sample=False,
                pad_token_id=0,
            )
        answers += [first_line(text) for text in tokenizer.batch_decode(out[:, width:])]
    return answers


def evaluate(model: Any, path: str, device: str, num_prompts: int) -> list[dict[str, Any]]:
    """Scores of full prefill by task and number of chunks, over held-out prose."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    encode = load_encoder(path)
    prose = Prose(held_out_topics(python_topics()), lambda text: len(encode(text)))
    model.eval()
    rows = []
    for task in TASKS:
        for num_chunks in EVAL_CHUNKS:
            prompts = make_prompts(task, prose, num_prompts, num_chunks, EVAL_CHUNK_LEN, EVAL_SEED)
            answers = answer_prompts(model, tokenizer, prompts, device)
            scores = [rate(p.task, a, p.answer) for p, a in zip(prompts, answers, strict=True)]
            score = sum(scores) / len(scores)
            rows.append({"task": task, "chunks": num_chunks, "n": num_prompts, "score": score})
            say(
                f"{task:12} {num_chunks:3} chunks {score:.3f}  {answers[0]!r} {prompts[0].answer!r}"
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Train an adapter for a model folder and write it with its scores."""
    parser = argparse.ArgumentParser(prog="train_adapter", description=main.__doc__)
    parser.add_argument("--model", required=True, help="model folder to adapt")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and scores")
    parser.add_argument("--start", type=Path, help="adapter folder to go on from")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--micro-tokens", type=int, default=49152)
    parser.add_argument("--batch-examples", type=int, default=192)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--eval-prompts", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    training = Training(
        args.minutes,
        args.rank,
        args.learning_rate,
        args.micro_tokens,
        args.batch_examples,
        args.seed,
        args.workers,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, local_files_only=True
    ).to(args.device)
    changes = add_adapter(model, training.rank, args.start)
    steps = 0
    if training.minutes > 0:
        context = get_context("fork")  # no worker touches the GPU
        progress = context.Value("d", 0.0)
        examples = DataLoader(
            _Examples(args.model, training, progress),
            batch_size=None,
            num_workers=training.workers,
            prefetch_factor=2 if training.workers else None,
            multiprocessing_context=context if training.workers else None,
        )
        with compiled_layers(model, args.device):
            own = list(changes.values())
            steps = train(model, own, iter(examples), training, args.device, progress)
    save_adapter(changes, training.rank, args.out)
    rows = evaluate(model, args.model, args.device, args.eval_prompts)
    about = {"training": asdict(training), "steps": steps, "full_prefill": rows}
    (args.out / "scores.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return 0


def say(text: str) -> None:
    """One line of progress."""
    print(f"train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
