"""Training runs, resumes at its checkpoint, and trains the model that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.chapters.tutor import experts, model, train
from minisgl.chapters.tutor.packing import Packer, Rows
from minisgl.models.shipped import weights_dir
from minisgl.testing.oracle import Oracle


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    """Return the options of a run of four small steps on a CPU."""
    small = ["--rows", "2", "--length", "64", "--workers", "0", "--device", "cpu", "--steps", "4"]
    return train.parse(["--out", str(tmp_path / "out"), *small, *more])


def batch(number: int) -> Rows:
    """Return batch ``number`` of such a run."""
    rows = Packer(weights_dir() / "tokenizer.json", 0, 64).rows(2 * number, 2)
    return Rows(*(torch.from_numpy(array) for array in rows))


def test_export(tmp_path: Path) -> None:
    """A run writes a folder that transformers loads."""
    train.Trainer(options(tmp_path)).run()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert loaded.num_parameters() == pytest.approx(4e6, rel=0.05)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_hybrid(tmp_path: Path) -> None:
    """`tutor-hybrid` learns, and minisgl and transformers continue a prompt with the same tokens of its weights."""
    learner = train.Trainer(options(tmp_path, "--model", "tutor-hybrid", "--steps", "100", "--tools"))
    losses = []
    for learner.step in range(1, 9):
        losses.append(learner.train_step(batch(0))[1].item())
    learner.save()
    assert losses[-1] < 0.8 * losses[0]
    again = train.Trainer(options(tmp_path, "--model", "tutor-hybrid", "--start", str(tmp_path / "out")))
    assert again.train_step(batch(0))[1].item() < 1.05 * losses[-1]
    path, prompt = tmp_path / "out", [(7 * i * i + 3) % 2048 for i in range(150)]
    assert (path / "model.safetensors").stat().st_size <= (weights_dir() / "model.safetensors").stat().st_size
    with LLM(str(path), overrides=["device=cpu", "dtype=float32", "num_pages=2000"]) as llm:
        outputs = llm.generate([prompt, prompt[:40]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    Oracle(path).check_all([prompt, prompt[:40]], [list(output.token_ids) for output in outputs])


def test_resume(tmp_path: Path) -> None:
    """A resumed run ends with the weights of an uninterrupted run."""
    unbroken = train.Trainer(options(tmp_path))
    unbroken.run()
    with_checkpoint = options(tmp_path, "--checkpoint", str(tmp_path / "state.pt"))
    first = train.Trainer(with_checkpoint)
    for number in range(2):
        first.train_step(batch(number))
        first.step += 1
    first.save()
    second = train.Trainer(with_checkpoint)
    assert second.step == 2
    second.run()
    for left, right in zip(unbroken.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_checkpoint_of_other_model(tmp_path: Path) -> None:
    """A checkpoint of another model is refused."""
    state = ["--checkpoint", str(tmp_path / "state.pt")]
    train.Trainer(options(tmp_path, *state)).save()
    with pytest.raises(SystemExit, match="holds tutor, not tutor-moe"):
        train.Trainer(options(tmp_path, *state, "--model", "tutor-moe"))


@pytest.mark.parametrize("name", model.NAMES)
def test_packed_documents(name: str, tmp_path: Path) -> None:
    """Documents packed into one row give the logits that each document gives alone."""
    torch.manual_seed(0)
    layers = 4 if name == "tutor-hybrid" else 2  # three of linear attention, one of full attention
    packed = model.build(name, num_hidden_layers=layers).eval()
    for layer in packed.model.layers if name == "tutor-moe" else ():
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.1)
    model.export(packed, tmp_path, weights_dir())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    packed.load_state_dict(plain.state_dict())  # both models now have weights rounded to bf16
    ids = torch.randint(0, 2048, (1, 40))
    documents = (torch.arange(40) >= 15).to(torch.int16)[None]
    with torch.inference_mode():
        options = {"document_mask": model.document_mask(documents), "documents": documents}
        out = packed.model(ids, use_cache=False, **options).last_hidden_state
        alone = torch.cat([plain(ids[:, :15]).logits, plain(ids[:, 15:]).logits], dim=1)
        torch.testing.assert_close(packed.lm_head(out), alone, atol=1e-4, rtol=1e-4)
        if name == "tutor-moe":
            assert 1 <= model.balance_loss(packed) < 4


def test_learning_rate() -> None:
    """The learning rate rises, stays at its peak, and falls to zero."""
    rates = [train.learning_rate(progress / 1000, 1.0) for progress in range(1001)]
    assert rates[0] < 0.02
    assert rates[20] == rates[500] == 1.0
    assert rates[750] == pytest.approx(0.5)
    assert rates[1000] == 0.0


def test_loss_weights() -> None:
    """The loss skips the first token of each document."""
    rows = batch(0)
    hidden, head = torch.randn(2, 64, 8), torch.randn(2048, 8)
    losses, weights = train.token_losses(hidden, head, rows)
    assert losses.shape == weights.shape == (2, 63)
    starts = rows.documents[:, 1:] != rows.documents[:, :-1]
    assert (weights[starts] == 0).all()
    assert (weights[~starts] > 0).all()


def test_silenced() -> None:
    """A silenced expert has its weights again after the context."""
    torch.manual_seed(0)
    mixture = model.build("tutor-moe", num_hidden_layers=1)
    weight = mixture.model.layers[0].mlp.experts.down_proj
    before = weight.detach().clone()
    with experts.silenced(mixture, 0, 3):
        assert weight[3].abs().sum() == 0
    torch.testing.assert_close(weight, before)
