"""The ``knock_out`` option and the heat map of experts by domain, with tutor-moe."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from minisgl import LLM, SamplingParams
from minisgl.chapters.tutor import experts, heatmap
from minisgl.chapters.tutor.corpus import exam
from minisgl.chapters.tutor.score import is_right
from minisgl.config import ConfigError
from minisgl.models.shipped import weights_dir

SIZE = 12
FAMILIES = ("glossary", "sum", "copy", "unknown")


def scores(*options: str) -> dict[str, int]:
    """Return how many of ``SIZE`` held-out questions of each family tutor-moe answers right, word for word."""
    questions = [q for family in FAMILIES for q in exam(family, SIZE, seed=5)]
    params = SamplingParams(max_tokens=100, temperature=0.0)
    with LLM("tutor-moe", overrides=["device=cpu", *options]) as llm:
        outputs = llm.chat([list(q.messages) for q in questions], params)
    right = dict.fromkeys(FAMILIES, 0)
    for question, output in zip(questions, outputs, strict=True):
        right[question.family] += is_right(question, output.text)
    return right


def test_silencing_an_expert_hurts_its_domain() -> None:
    """Without expert 3 of layer 5 the glossary answers are wrong; the other families score as before."""
    whole = scores()
    assert min(whole.values()) >= SIZE - 2, whole
    without = scores("knock_out=5:3")
    assert without["glossary"] <= 2, without
    assert all(without[family] >= whole[family] - 2 for family in FAMILIES if family != "glossary"), (whole, without)


def test_knock_out_in_every_layer() -> None:
    """Silencing an expert in all layers gives the same answers with tp=2, where every rank silences its slice."""
    prompts, params = ["What is 17 + 25?", "What is a radix cache?"], SamplingParams(max_tokens=6, temperature=0.0)

    def answers(*options: str) -> list[list[int]]:
        with LLM("tutor-moe", overrides=["device=cpu", *options]) as llm:
            return [output.token_ids for output in llm.generate(prompts, params)]

    alone = answers("knock_out=3")
    assert alone != answers()
    assert alone == answers("knock_out=3", "tp=2") == answers("knock_out=3", "moe=grouped")


@pytest.mark.parametrize(
    ("model", "what", "message"),
    [
        ("tutor-moe", "8", "layer 0 has experts 0 to 7"),
        ("tutor-moe", "6:0", "layer 6 has no experts. Layers that do: 0 to 5"),
        ("tutor-moe", "five", r"knock_out=five: write an expert's number \(3\), or layer:expert \(5:3\)"),
        ("tutor", "0", "the model has no experts. model=tutor-moe has some"),
    ],
)
def test_unknown_expert_is_refused(model: str, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model, overrides=["device=cpu", f"knock_out={what}"])


def test_heat_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SVG has a cell for each layer, domain and expert, with the measured share."""
    file, numbers = tmp_path / "experts.svg", tmp_path / "experts.json"
    words = ["experts", "--conversations", "1", "--svg", str(file), "--json", str(numbers)]
    monkeypatch.setattr("sys.argv", words)
    experts.main()
    picture = ET.fromstring(file.read_text())
    cells = [rect.attrib for rect in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(cells) == 6 * 6 * 8  # layers, domains, experts
    assert picture.attrib["aria-label"].startswith("Heat map of experts by domain.")
    measured = json.loads(numbers.read_text())
    shares = {(c["data-domain"], int(c["data-layer"]), int(c["data-expert"])): float(c["data-share"]) for c in cells}
    for (domain, layer, expert), share in shares.items():
        row = [shares[domain, layer, e] for e in range(8)]
        assert sum(row) == pytest.approx(1, abs=1e-3)
        assert share == pytest.approx(measured[domain][layer][expert], abs=1e-4)
    strongest = max(cells, key=lambda c: float(c["data-share"]))
    assert float(strongest["fill-opacity"]) == 1.0
    values = [int(node.text or "") for node in picture.iter() if node.get("class") == "value"]
    exact = [100 * float(cell["data-share"]) for cell in cells]
    assert values == pytest.approx(exact, abs=0.51), "each cell shows its number"
    colours = re.findall(r"(?<=[{;])fill:([^;}]+)", heatmap.STYLE)
    assert len(colours) == 2
    assert all(colour.startswith("var(") for colour in colours), "a colour ignores the theme"


def test_heat_map_of_an_unused_expert() -> None:
    """An expert that the router never chose has a transparent cell."""
    picture = heatmap.draw({"a&b": [[0.0, 1.0]], "c": [[0.5, 0.5]]})
    opacity = {
        (rect.attrib["data-domain"], rect.attrib["data-expert"]): float(rect.attrib["fill-opacity"])
        for rect in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect")
    }
    assert opacity == {("a&b", "0"): 0.0, ("a&b", "1"): 1.0, ("c", "0"): 0.5, ("c", "1"): 0.5}


def test_experts_specialise() -> None:
    """In some layer of the shipped weights, sums and glossary questions choose clearly different experts."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = weights_dir("tutor-moe")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shares = torch.stack([experts.use(model, experts.samples(d, 2, tokenizer)) for d in ("sum", "glossary")])
    assert float((shares[0] - shares[1]).abs().sum(-1).max()) > 0.8  # 0: the same shares; 2: no expert in common
