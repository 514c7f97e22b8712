"""Answers of tutor with and without drafts of tutor-draft, in float32 on a CPU: the same tokens, in fewer steps."""

from minisgl import LLM, SamplingParams

prompts = ["What is a radix cache?", "Count from 5 to 30.", "What is 12 + 30?", "Who are you?"]
params = SamplingParams(max_tokens=60, temperature=0.0)
answers, steps = [], []
for words in (["speculation=draft_model", "plugins=draft_model.py"], ["speculation=none"]):
    with LLM("tutor", overrides=["device=cpu", *words]) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        answers.append([output.token_ids for output in llm.chat(chats, params)])
        steps.append(llm.scheduler.stats()["steps"])
assert answers[0] == answers[1]
print(f"{len(prompts)} answers are the same, in {steps[0]} steps and in {steps[1]} steps")
