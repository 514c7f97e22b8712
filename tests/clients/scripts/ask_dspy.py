"""The package ``dspy``. It sends a schema to providers of which it knows that they take one: ``lm_studio`` is one."""

from typing import Any

import dspy
from cases import KEY, MODEL, QUESTION, URL, Person, case, run


def lm(provider: str = "openai") -> Any:
    return dspy.LM(f"{provider}/{MODEL}", api_base=URL, api_key=KEY, temperature=0, max_tokens=100, cache=False)


@case
def chat() -> Any:
    return lm()(QUESTION)[0]


@case
def schema() -> Any:
    class Describe(dspy.Signature):
        """Describe a person."""

        question: str = dspy.InputField()
        person: Person = dspy.OutputField()

    with dspy.context(lm=lm("lm_studio"), adapter=dspy.JSONAdapter()):
        return dspy.Predict(Describe)(question=QUESTION).person.model_dump()


run()
