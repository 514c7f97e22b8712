"""Models from GGUF files compared with transformers, which reads the same file with the package ``gguf``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard
from minisgl.llm import LLM
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.quantization.ggml.checkpoint import GgufCheckpoint
from minisgl.plugins.quantization.ggml.header import BLOCKS
from minisgl.plugins.quantization.ggml.types import dequantize
from minisgl.sampling_params import SamplingParams
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.gguf_files import _tensors, tiny_gguf
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks
from minisgl.tokenizer.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
import transformers  # noqa: E402

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
BIG = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-f32": ("llama", "F32", {}),
    "llama-q8": ("llama", "Q8_0", {}),
    "llama-tied": ("llama", "Q4_0", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", "F16", {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-biases": ("llama", "Q4_1", {"attention_bias": True}),
    "llama-linear-rope": ("llama", "F32", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", "BF16", {"sliding_window": None}),
    "qwen2": ("qwen2", "Q8_0", {}),
    "qwen2-q4k": ("qwen2", "Q4_K", BIG),
    "qwen3": ("qwen3", "Q4_1", {}),
    "qwen3-yarn": ("qwen3", "F32", {"rope_parameters": YARN}),
    "qwen3-q6k": ("qwen3", "Q6_K", {**BIG, "head_dim": 64}),
    "qwen3-moe": ("qwen3_moe", "Q8_0", {"moe_intermediate_size": 64}),
}
TOKENIZED = {"tokenizer": True, "vocab_size": 384}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let views be made in a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    manager = PluginManager.load()
    manager.load_all("quantization")
    return manager


def logits(path: Path, ids: torch.Tensor, manager: PluginManager, **options: Any) -> torch.Tensor:
    """Return minisgl's logits of one prompt, with the weights of a GGUF file dequantised."""
    if "quantization_config" in json.loads((path / "config.json").read_text("utf-8")):
        options["quantization_options"] = manager.configs["quantization"]["gguf"](weights="dequantized")
    model = PagedModel(path, max_seq_len=len(ids), max_running_requests=1, manager=manager, **options)
    return model.run([(0, 0, ids)])[0]


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_gguf(kind: int) -> None:
    """Every type's numbers are equal, bit by bit, to those of the package ``gguf``, for random bytes."""
    block = BLOCKS[kind]
    columns = 4 * max(block.elements, 32)
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (7, columns // block.elements * block.size), dtype=np.uint8)
    raw = data.view({"F32": np.float32, "F16": np.float16}.get(block.name, np.uint8))
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind)).astype(np.float32)
    got = dequantize(block.name, torch.from_numpy(data), columns).numpy()
    np.testing.assert_array_equal(got, want)
    assert block == (gguf.GGMLQuantizationType(kind).name, *gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("case", CASES)
def test_logits_match_the_dequantised_checkpoint(case: str, tmp_path: Path, manager: PluginManager) -> None:
    """The logits are those of transformers with the numbers that the GGUF file stores, within rounding."""
    architecture, kind, overrides = CASES[case]
    checkpoint = tiny_checkpoint(architecture, tmp_path / "checkpoint", **overrides)
    file = tiny_gguf(checkpoint, tmp_path / "model.gguf", kind)
    view = resolve_model(str(file))
    ids = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1))
    _store_dequantised(checkpoint, file)
    torch.testing.assert_close(logits(view, ids, manager), Oracle(checkpoint, "float32").logits(ids), atol=1e-4, rtol=0)


def _store_dequantised(checkpoint: Path, file: Path) -> None:
    """Replace the matrices of a checkpoint by the numbers of a GGUF file, read by the package ``gguf``."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    is_llama = config["model_type"] in ("llama", "mistral")
    stored = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist())))
        for t in gguf.GGUFReader(file).tensors
    }
    for name, old in weights.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        (full,) = _tensors({re.sub(r"\.experts\.\d+", ".experts.0", name): old})
        new = stored[full] if expert is None else stored[full][int(expert[1])]
        part = name.split(".")[-2]
        if is_llama and part in heads:
            new = new.reshape(heads[part], -1, 2, *old.shape[1:]).swapaxes(1, 2).reshape(old.shape)
        weights[name] = np.ascontiguousarray(new.astype(np.float32))
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_file(
    architecture: str, tmp_path: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of transformers' own reader of GGUF files, sizes and order of heads included."""
    options = TOKENIZED | ({"head_dim": 128} if architecture == "qwen3" else {})  # it reads no other of qwen3
    file = tiny_gguf(tiny_checkpoint(architecture, tmp_path / "c", **options), tmp_path / "model.gguf", "Q8_0")
    ids = torch.arange(5, 65)
    # It asks for accelerate, but does not need it on a CPU.
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
    auto = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    with torch.no_grad():
        want = reference(ids[None]).logits[0]
    torch.testing.assert_close(logits(resolve_model(str(file)), ids, manager), want, atol=1e-4, rtol=0)


def test_rope_freqs(tmp_path: Path, manager: PluginManager) -> None:
    """The divisors of frequencies that Llama 3.1's files have give the logits of its rope_type llama3."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    checkpoint = tiny_checkpoint("llama", tmp_path / "c", rope_parameters=rope)
    plain, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        transformers.AutoConfig.from_pretrained(checkpoint), torch.device("cpu")
    )
    base = 1 / rope["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    file = tiny_gguf(checkpoint, tmp_path / "model.gguf", tensors={"rope_freqs.weight": (base / plain).numpy()})
    ids = torch.arange(5, 255)
    got = logits(resolve_model(str(file)), ids, manager)
    torch.testing.assert_close(got, Oracle(checkpoint, "float32").logits(ids), atol=1e-4, rtol=0)
    assert (got - logits(checkpoint, ids, manager)).abs().max() < 1e-4


@pytest.mark.parametrize("tokenizer", ["auto", "plain"])
def test_tokens_and_chats(tokenizer: str, tmp_path: Path) -> None:
    """Tokens, prompts of chats and ends of answers are those of the checkpoint from which the file was made."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "c", **TOKENIZED)
    (tmp_path / "folder").mkdir()
    tiny_gguf(checkpoint, tmp_path / "folder" / "model.gguf", "Q8_0")
    options = ["device=cpu", "num_pages=64", f"tokenizer={tokenizer}"]
    with LLM(str(checkpoint), overrides=options) as plain, LLM(str(tmp_path / "folder"), overrides=options) as llm:
        assert plain.tokenizer is not None and llm.tokenizer is not None
        for text in ("A page of the pool 123", " Wer zuerst kommt, mahlt\n\n zuerst 🙂", "<|end|> 前缀 <|bos|>x"):
            assert llm.tokenizer.encode(text) == plain.tokenizer.encode(text)
            assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == plain.tokenizer.decode(
                plain.tokenizer.encode(text)
            )
        text = "a <|eos|> b" if tokenizer == "auto" else "a b"  # the plain tokenizer refuses special tokens
        messages = [{"role": "user", "content": text}]
        assert llm.tokenizer.chat(messages) == plain.tokenizer.chat(messages)
        assert llm.tokenizer.eos_ids == plain.tokenizer.eos_ids == {1}
        (output,) = llm.generate([[0, 5, 6]], SamplingParams(max_tokens=5, ignore_eos=True, temperature=0))
        assert len(output.choices[0].token_ids) == 5


def test_the_file_of_a_llama_begins_texts_with_bos_only_if_asked(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "c", **TOKENIZED)
    for says, count in ((True, 1), (False, 0), (None, 0)):
        file = tiny_gguf(checkpoint, tmp_path / f"{says}.gguf", metadata={"tokenizer.ggml.add_bos_token": says})
        tokenizer = Tokenizer.from_dir(resolve_model(str(file)))
        assert tokenizer is not None and tokenizer.encode("page").count(0) == count


def test_sentence_piece(tmp_path: Path) -> None:
    """Text merges by score; spaces are part of tokens; text without a token becomes its bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab", "ba"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -0.5]
    vocabulary = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": None,
    }
    checkpoint = tiny_checkpoint("llama", tmp_path / "c", **TOKENIZED)
    file = tiny_gguf(
        checkpoint, tmp_path / "m.gguf", metadata={f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    )
    with LLM(str(file), overrides=["device=cpu", "num_pages=64"]) as llm:
        assert llm.tokenizer is not None
        ids = {text: i for i, text in enumerate(tokens)}
        assert llm.tokenizer.encode("ab") == [1, ids["▁ab"]]
        assert llm.tokenizer.encode("bab") == [1, ids["▁"], ids["ba"], ids["b"]]  # "ba" has the best score
        assert llm.tokenizer.encode("aé") == [1, ids["▁a"], ids["<0xC3>"], ids["<0xA9>"]]
        assert llm.tokenizer.decode(llm.tokenizer.encode("ab é b")) == "ab é b"
        assert llm.tokenizer.eos_ids == {2}


# ---- weights that stay quantised --------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama-q8", "llama-tied", "llama-biases", "qwen2-q4k", "qwen3-q6k", "qwen3-moe"])
def test_weights_stay_quantised(case: str, tmp_path: Path, manager: PluginManager) -> None:
    """Only activations are rounded: the logits differ little, also with two ranks. Experts alone are dequantised."""
    architecture, kind, overrides = CASES[case]
    view = resolve_model(
        str(tiny_gguf(tiny_checkpoint(architecture, tmp_path / "c", **overrides), tmp_path / "m.gguf", kind))
    )
    ids = torch.randint(0, 320, (20,), generator=torch.Generator().manual_seed(1))
    want = logits(view, ids, manager)
    options = manager.configs["quantization"]["gguf"](weights="quantized")
    model = PagedModel(view, manager=manager, quantization_options=options)
    assert all(p.dim() == 1 or "experts" in name or ".gate" in name for name, p in model.model.named_parameters())
    got = model.run([(0, 0, ids)])[0]
    error = 0.5 if case == "qwen3-moe" else 0.05  # another expert may be chosen
    assert 0 < (got - want).norm() < error * want.norm()
    for rank in run_ranks(
        2,
        lambda comm: PagedModel(view, comm=comm, manager=manager, quantization_options=options).run([(0, 0, ids)])[0],
        manager,
    ):
        assert (rank - want).norm() < error * want.norm()


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="memory: no /proc/self/smaps, which Linux has")
@pytest.mark.parametrize("quantised", [True, False])
def test_the_file_is_not_in_memory_beside_its_copy(quantised: bool, tmp_path: Path) -> None:
    """After a tensor is read, at most its first page of the mapped file, which may have others' bytes too, is kept."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "c", hidden_size=256, intermediate_size=2048)
    file = tiny_gguf(checkpoint, tmp_path / "m.gguf", "Q8_0")
    with GgufCheckpoint(file) as source:
        name, shape = "model.layers.0.mlp.gate_proj.weight", (2048, 256)
        shard = WeightShard.whole(name, torch.empty(shape, device="meta" if quantised else "cpu"))
        if quantised:
            source.grouped(shard)
        else:
            source.fill(shard)
        mapped = Path("/proc/self/smaps").read_text().split(f" {file}\n")[1]
        assert int(re.search(r"^Rss: +(\d+) kB", mapped, re.M)[1]) <= 128  # type: ignore[index]


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.05), ("int4", 0.4)])
def test_quantize_while_loading(quantize: str, error: float, tmp_path: Path, manager: PluginManager) -> None:
    """The logits are close to those before, for tied and own LM heads, and dummy weights are quantised too."""
    ids = torch.randint(0, 320, (20,), generator=torch.Generator().manual_seed(1))
    for tied in (False, True):
        path = tiny_checkpoint("qwen3", tmp_path / str(tied), tie_word_embeddings=tied)
        want = PagedModel(path, manager=manager).run([(0, 0, ids)])[0]
        model = PagedModel(path, manager=manager, quantize=quantize)
        assert all(p.dim() == 1 for p in model.model.parameters())
        got = model.run([(0, 0, ids)])[0]
        assert 0 < (got - want).norm() < error * want.norm()
    with LLM(str(path), overrides=["device=cpu", "num_pages=64", "load_format=dummy", f"quantize={quantize}"]) as llm:
        (output,) = llm.generate([[0, 5, 6]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(output.choices[0].token_ids) == 5


def test_answers_do_not_depend_on_other_requests(tmp_path: Path) -> None:
    """Promise 8 with weights that stay quantised: the log-probabilities are the same alone and in a batch."""
    file = tiny_gguf(tiny_checkpoint("qwen3", tmp_path / "c", tie_word_embeddings=True), tmp_path / "m.gguf", "Q4_0")
    prompts = [list(range(3, 50)), list(range(9, 12)), list(range(30, 90))]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(str(file), overrides=["device=cpu", "num_pages=64"]) as llm:
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = llm.generate([prompt], params)
            assert alone.choices[0].token_ids == output.choices[0].token_ids
            for one, other in zip(alone.choices[0].logprobs or [], output.choices[0].logprobs or [], strict=True):
                assert abs(one.chosen - other.chosen) < 1e-4


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    file = tiny_gguf(tiny_checkpoint("llama", tmp_path / "c"), tmp_path / "m.gguf", "Q8_0")
    for model, options, message in (
        (file, ["quantization=gguf", "quantization.weights=fast"], "weights=fast is unknown: use auto, quantized"),
        (file, ["quantize=int4"], "quantize can't be used with a GGUF file"),
        (tmp_path / "c", ["quantization=int8"], "the weights of .* are not quantised: leave it out, or use quantize"),
    ):
        with pytest.raises(ConfigError, match=message), LLM(str(model), overrides=["device=cpu", *options]):
            pass


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a small file."""
    folder = tmp_path_factory.mktemp("whole")
    return tiny_gguf(tiny_checkpoint("llama", folder / "c", **TOKENIZED), folder / "m.gguf", "Q8_0").read_bytes()


def test_truncated_files_are_refused(whole: bytes, tmp_path: Path) -> None:
    """A file that ends anywhere too early is refused by its name."""
    lengths = [0, 3, 4, 7, 8, 20, 24, *range(100, len(whole), len(whole) // 40), len(whole) - 1]
    for length in lengths:
        file = tmp_path / f"{length}.gguf"
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=f"{length}.gguf can't be read as GGUF"):
            resolve_model(str(file))


def test_damaged_headers_do_no_harm(whole: bytes, tmp_path: Path) -> None:
    """A header with any eight bytes set to ones is refused or understood: nothing crashes, nothing is allocated."""
    import resource

    begin = whole.rindex(b"output_norm.weight") + 60
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = understood = 0
    places = range(4, begin, 97)
    for at in places:
        file = tmp_path / f"{at}.gguf"
        file.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        try:
            resolve_model(str(file))
        except ConfigError as error:
            refused += file.name in str(error)
        else:
            understood += 1
    assert refused > 10
    assert refused + understood == len(places)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"llama.block_count": 3}, "it lacks the tensor blk.2."),
        ({"llama.block_count": 2**31}, "llama.block_count must be a number"),
        ({"llama.context_length": 2**31}, "llama.context_length must be a number"),
        ({"llama.embedding_length": 128}, "token_embd.weight has shape"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be"),
        ({"tokenizer.ggml.pre": "jina-v2"}, "tokenizer.ggml.pre is 'jina-v2'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 items"),
        ({"split.count": 2}, "--merge"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_understood_is_refused_by_name(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "c", **TOKENIZED)
    file = tiny_gguf(checkpoint, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model(str(file))
    assert "model.gguf" in str(error.value)


def test_types_that_are_not_supported_are_named(tmp_path: Path) -> None:
    file = tiny_gguf(tiny_checkpoint("llama", tmp_path / "c"), tmp_path / "model.gguf", "Q5_0")
    with pytest.raises(ConfigError, match=r"stored as Q5_0\. Only F32, F16, Q4_0"):
        resolve_model(str(file))


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files.*a\.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match="no such file"):
        resolve_model(str(tmp_path / "c.gguf"))


def test_a_replaced_file_gets_another_view(tmp_path: Path) -> None:
    """A view is made once for a file, and again when the file changes."""
    file = tiny_gguf(tiny_checkpoint("llama", tmp_path / "a"), tmp_path / "model.gguf")
    first = resolve_model(str(file))
    assert resolve_model(str(file)) == first
    tiny_gguf(tiny_checkpoint("llama", tmp_path / "b", num_hidden_layers=1), file)
    second = resolve_model(str(file))
    assert json.loads((second / "config.json").read_text("utf-8"))["num_hidden_layers"] == 1
    assert second != first
