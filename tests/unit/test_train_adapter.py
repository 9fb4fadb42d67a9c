"""Examples are what they say, gradients are right, and PEFT reads a trained adapter."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from sglang_ext.scripts.quality import train_adapter
from sglang_ext.scripts.quality.tasks import Prose, training_topics
from sglang_ext.scripts.quality.train_adapter import (
    MAX_TOKENS,
    STAGES,
    LowRank,
    add_adapter,
    answer_loss,
    collate,
    make_example,
    save_adapter,
)
from sglang_ext.scripts.server import load_encoder
from sglang_ext.scripts.workload import python_topics


@pytest.fixture(scope="module")
def tiny(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small layers with the real tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = json.loads((Path(model_path) / "config.json").read_text())
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(small).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_path, local_files_only=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.99])
def test_an_example_asks_several_questions_and_marks_exactly_the_answers(
    model_path: str, progress: float
) -> None:
    encode = load_encoder(model_path)
    decode = _decoder(model_path)
    prose = Prose(training_topics(python_topics()), lambda text: len(encode(text)))
    for seed in range(5):
        example = make_example(prose, encode, random.Random(seed), progress)
        assert len(example.ids) == len(example.is_answer) <= MAX_TOKENS
        text = decode(example.ids)
        answers = decode([i for i, own in zip(example.ids, example.is_answer, strict=True) if own])
        assert text.count("Answer:") >= 3 or len(example.ids) == MAX_TOKENS
        assert "Question:" not in answers
        assert answers.strip()


def test_contexts_grow_with_time(model_path: str) -> None:
    encode = load_encoder(model_path)
    prose = Prose(training_topics(python_topics()), lambda text: len(encode(text)))
    sizes = []
    for until, *_ in STAGES:
        rng = random.Random(1)
        made = [make_example(prose, encode, rng, until - 0.01) for _ in range(20)]
        sizes.append(sum(len(example.ids) for example in made))
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.6 * sizes[-1]


def test_gradients_of_the_factors_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False)
    base = layer.weight.detach().clone()
    change = LowRank(layer, rank=2, scale=2.0)
    change.b.data.normal_()
    change.apply()
    x = torch.randn(7, 6)
    layer(x).square().sum().backward()
    change.take_gradient()
    a, b = change.a.detach().clone(), change.b.detach().clone()
    a.requires_grad_(), b.requires_grad_()
    (x @ (base + 2.0 * b @ a).T).square().sum().backward()
    assert torch.allclose(change.a.grad, a.grad, rtol=1e-4, atol=1e-5)
    assert torch.allclose(change.b.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert layer.weight.grad is None


def test_the_loss_is_that_of_the_answers_alone(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    example = train_adapter.Example([5, 6, 7, 8, 9], [False, False, True, False, True])
    longer = train_adapter.Example([5, 6, 7, 8, 9, 10, 11], [False] * 6 + [True])
    with torch.no_grad():
        got = answer_loss(model, collate([example, longer]), "cpu")
        expected = []
        for one in (example, longer):
            logits = model(torch.tensor([one.ids])).logits[0].log_softmax(-1)
            places = [i for i, own in enumerate(one.is_answer) if own]
            expected += [-logits[i - 1, one.ids[i]] for i in places]
    assert torch.allclose(got, torch.stack(expected).mean(), atol=1e-4)


def test_a_trained_adapter_merged_by_peft_is_the_trained_model(tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    changes = add_adapter(model, 4, None)
    for change in changes.values():
        change.a.data = change.a.data.to(torch.bfloat16).float()
        change.b.data.normal_(std=0.05)
        change.b.data = change.b.data.to(torch.bfloat16).float()
        change.apply()
    save_adapter(changes, 4, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(other, str(tmp_path)).merge_and_unload()
    theirs = dict(merged.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.allclose(theirs[name].float(), weight.float(), atol=2e-2, rtol=2e-2), name
    again = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    add_adapter(again, 4, tmp_path)
    for (name, weight), (_, loaded) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(weight, loaded), name


def test_training_lowers_the_loss_and_writes_scores(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    words = ["--model", str(tiny), "--out", str(tmp_path), "--minutes", "0.08", "--workers", "0"]
    words += ["--micro-tokens", "2048", "--batch-examples", "4", "--eval-prompts", "1"]
    assert train_adapter.main([*words, "--device", "cpu", "--rank", "4"]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["steps"] >= 1
    assert {row["task"] for row in scores["full_prefill"]} == set(train_adapter.TASKS)
    encode = load_encoder(str(tiny))
    prose = Prose(training_topics(python_topics()), lambda text: len(encode(text)))
    rng = random.Random(9)
    batch = collate([make_example(prose, encode, rng, 0.0) for _ in range(8)])
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    with torch.no_grad():
        before = float(answer_loss(model, batch, "cpu"))
        add_adapter(model, 4, tmp_path)
        assert float(answer_loss(model, batch, "cpu")) < before


def _decoder(path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True).decode
