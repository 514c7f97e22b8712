"""Scoring of a trained model on held-out text, with greedy decoding in transformers.

    python -m minisgl.chapters.tutor.score                       # the shipped tutor, 200 questions per family
    python -m minisgl.chapters.tutor.score --model DIR --size 500 --json scores.json

This module runs the model in batches and compares answers; `corpus.exam` gives the questions and the right answers.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl.chapters.tutor import corpus, tools
from minisgl.chapters.tutor.corpus import Question
from minisgl.chapters.tutor.exercises import COLOR_ODDS
from minisgl.models.shipped import weights_dir

BARS = {"lookup": 90.0, "sum": 95.0, "count": 95.0, "copy": 95.0, "glossary": 85.0, **dict.fromkeys(tools.EXAMS, 90.0)}
"""Percentage of held-out questions, by family, that the shipped weights must answer correctly."""

FAMILIES = (*corpus.EXAMS, *tools.EXAMS)
"""All families of held-out questions. The last ones need a chat template with tools."""

BEGINNINGS = ("unknown", "fallback")
"""Families of which only the beginning of the answer is compared: it continues with one of several suggestions."""


@dataclass
class Score:
    """The score of one family: numbers of right answers and of questions, and the wrong answers."""

    family: str
    right: int = 0
    asked: int = 0
    wrong: list[dict[str, str]] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * self.right / max(1, self.asked)


class Runner:
    """A model in float32 and its tokenizer, which answer questions in batches."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.device = device

    def prompt(self, question: Question) -> str:
        """Return the prompt of a question."""
        text: str = self.tokenizer.apply_chat_template(
            list(question.messages), tools=list(question.tools) or None, tokenize=False, add_generation_prompt=True
        )
        return text

    def answers(self, questions: list[Question], tokens_per_batch: int = 32_768) -> list[str]:
        """Return the greedily decoded answers, in the order of the questions."""
        if not questions:
            return []
        prompts = [self.prompt(item) for item in questions]
        prompt_lengths = [len(ids) for ids in self.tokenizer(prompts)["input_ids"]]
        wanted = [len(ids) + 8 for ids in self.tokenizer([item.answer for item in questions])["input_ids"]]
        order = sorted(range(len(questions)), key=lambda i: (prompt_lengths[i] // 64, wanted[i], i))
        answers = [""] * len(questions)
        while order:
            batch: list[int] = []
            while order and (len(batch) + 1) * (prompt_lengths[order[0]] + 64) <= max(tokens_per_batch, 2048):
                batch.append(order.pop(0))
            texts = self._generate([prompts[i] for i in batch], max(wanted[i] for i in batch))
            for i, text in zip(batch, texts, strict=True):
                answers[i] = text
        return answers

    def _generate(self, prompts: list[str], new_tokens: int) -> list[str]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        with torch.inference_mode():
            out = self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        answers: list[str] = self.tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers

    def would_say(self, questions: list[Question], tokens_per_batch: int = 16_384) -> list[bool]:
        """Return for each question whether greedy decoding gives the right answer, without decoding.

        One forward pass over prompt and right answer is enough: greedy decoding gives these tokens if each token of the
        answer, and the end-of-turn token after it, has the highest logit at its position. If the result is False,
        greedy decoding may still give the right text as other tokens.
        """
        pairs = []
        for item in questions:
            prompt = self.prompt(item)
            end = "" if item.family in BEGINNINGS else self.tokenizer.eos_token
            pairs.append((self.tokenizer.encode(prompt), self.tokenizer.encode(item.answer + end)))
        said = [False] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]), reverse=True)
        while order:
            longest = sum(map(len, pairs[order[0]]))
            batch, order = order[: max(1, tokens_per_batch // longest)], order[max(1, tokens_per_batch // longest) :]
            rows = [pairs[i][0] + pairs[i][1] for i in batch]
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
            with torch.inference_mode():  # padding is at the end, where the causal mask hides it
                hidden = self.model.model(ids, use_cache=False).last_hidden_state
                for row, i in enumerate(batch):
                    start, answer = len(pairs[i][0]), pairs[i][1]
                    best = self.model.lm_head(hidden[row, start - 1 : start - 1 + len(answer)]).argmax(-1)
                    said[i] = best.tolist() == answer
        return said

    def odds(self, request: str, answers: list[str]) -> dict[str, float]:
        """Return the probability of each of several answers, which is that of its first token."""
        messages = [{"role": "user", "content": request}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(text, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            probabilities = self.model(**inputs).logits[0, -1].softmax(-1)
        return {answer: probabilities[self.tokenizer.encode(answer)[0]].item() for answer in answers}


def is_right(question: Question, answer: str) -> bool:
    """Return whether an answer equals the right answer, or begins with it for the families `BEGINNINGS`."""
    return answer.startswith(question.answer) if question.family in BEGINNINGS else answer == question.answer


def score(runner: Runner, family: str, size: int, seed: int = 0, tokens_per_batch: int = 16_384) -> Score:
    """Score ``size`` held-out questions of one family. Only those for which `would_say` is False are decoded."""
    questions = (tools if family in tools.EXAMS else corpus).exam(family, size, seed)
    said = runner.would_say(questions, tokens_per_batch)
    result = Score(family, right=sum(said), asked=len(questions))
    rest = [question for question, right in zip(questions, said, strict=True) if not right]
    for question, answer in zip(rest, runner.answers(rest, tokens_per_batch), strict=True):
        if is_right(question, answer):
            result.right += 1
        else:
            asked = question.messages[-1]["content"][-200:]
            result.wrong.append({"asked": asked, "right": question.answer, "answer": answer})
    return result


def all_odds(runner: Runner) -> dict[str, dict[str, float]]:
    """Return the probabilities of the answers in games of chance: a die, a color, a coin."""
    return {
        "Roll a die.": runner.odds("Roll a die.", list("123456")),
        "Name a color.": runner.odds("Name a color.", list(COLOR_ODDS)),
        "Flip a coin.": runner.odds("Flip a coin.", ["heads", "tails"]),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=weights_dir("tutor"))
    parser.add_argument("--size", type=int, default=200, help="questions per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--json", type=Path, help="file to write scores, wrong answers and odds to")
    options = parser.parse_args(arguments)
    runner = Runner(options.model, options.device)
    report: dict[str, Any] = {"size": options.size, "seed": options.seed, "scores": {}, "odds": {}, "wrong": {}}
    print(f"{'family':<10} {'right':>12} {'percent':>8}  {'bar':>4}  seconds")
    for family in options.families:
        start = time.monotonic()
        result = score(runner, family, options.size, options.seed, 16_384 if options.device == "cpu" else 400_000)
        bar = f"{BARS[family]:.0f}" if family in BARS else ""
        right = f"{result.right} / {result.asked}"
        print(f"{family:<10} {right:>12} {result.percent:>7.1f}%  {bar:>4}  {time.monotonic() - start:.1f}", flush=True)
        report["scores"][family] = round(result.percent, 2)
        report["wrong"][family] = result.wrong[:30]
    report["odds"] = all_odds(runner)
    for request, odds in report["odds"].items():
        print(f"{request:<14}", "  ".join(f"{answer} {chance:.3f}" for answer, chance in odds.items()))
    print(json.dumps(report["scores"]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
