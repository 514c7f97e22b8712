"""Greedy answers of tutor with attention=rowwise and with attention=torch, in float32 on a CPU: the same tokens."""

from minisgl import LLM, SamplingParams

prompts = ["What is a radix cache?", "Count from 5 to 9.", "What is 12 + 30?"]
params = SamplingParams(max_tokens=16, temperature=0.0)
answers = []
for attention in ("rowwise", "torch"):
    overrides = ["device=cpu", "plugins=rowwise.py", f"attention={attention}", "page_size=4"]
    with LLM("tutor", overrides=overrides) as llm:
        answers.append([output.token_ids for output in llm.generate(prompts, params)])
assert answers[0] == answers[1]
print(f"{len(prompts)} answers are the same")
