# ruff: noqa: E501 (phrasings)
"""Phrasings of the question what a term means.

A phrasing is a pattern with `{a}` for the term with its article, or `{n}` for the term alone. No training request
matches a pattern of `HELD_OUT`: these patterns are for scoring the model.
"""

from __future__ import annotations

import random
import re

from minisgl.chapters.tutor.words import Split, any_word, chance

TRAIN = (
    "What is {a}?", "What's {a}?", "What does {n} mean?", "What is meant by {n}?", "Explain {a}.", "Explain {n} to me.",
    "Explain what {a} is.", "Define {n}.", "Describe {a}.", "{n}?", "{n}", "Tell me about {n}.", "Tell me what {a} is.",
    "Give me a definition of {n}.", "I do not understand {n}.", "What do people mean by {n}?", "How does {a} work?",
    "In one sentence, what is {a}?", "What is the meaning of {n}?", "Can you explain {n}?", "What does {a} do?",
    "Can you explain what {a} is?", "Could you explain {n} to me?", "Do you know what {a} is?", "Help me with {n}.",
    "I want to know what {a} is.", "What is {a} in LLM serving?", "In LLM serving, what is {a}?", "Say what {a} is.",
    "Explain {n} in simple words.", "What is the definition of {n}?", "How would you define {a}?", "Glossary: {n}",
    "I read about {n}. What is that?", "Please define {a}.", "What is {a} good for?", "Who or what is {a}?", "define: {n}",
    "I have a question about {n}.", "what is {a} and why do we need it?", "meaning of {n}", "What are {n}s?", "Why {n}?",
)  # fmt: skip
HELD_OUT = (
    "What exactly is {a}?", "I keep hearing about {n}. What is it?", "Could you tell me what {n} means?",
    "Teach me about {n}.", "What should I know about {n}?", "Remind me what {a} is.", "Explain {n} to a beginner.",
    "Quick question: what is {a}?", "My teacher mentioned {n}. What does that mean?", "Would you describe {n} for me?",
    "What is the idea of {n}?", "How do you explain {a}?", "I would like to understand {n}.",
    "Give me a short explanation of {n}.",
)  # fmt: skip

_SLOTS = {
    "you": "can you|could you|would you|will you|can someone|could somebody|please|now",
    "explain": "explain|describe|define|clarify|introduce|summarize|outline|illustrate|present|discuss|go over",
    "to": "to me|to us|to a child|to a student|to my friend|to someone new|to my grandmother|to a programmer|for me|for us|"
    "for an engineer|for the class|to my team|like I am five|for dummies|again|once more|briefly|in detail|in short|"
    "with an example|step by step|in plain English|in your own words|quickly|slowly|as simply as you can",
    "point": "purpose|role|point|job|use|concept|notion|principle|function|goal|benefit|advantage|reason|meaning|essence|"
    "task|value|importance|basics|definition|main idea|story|secret|theory",
    "must": "must|can|do|would|could|might|will",
    "know": "know|learn|say|remember|understand|read|need to know|have to know|keep in mind",
    "give": "give|write|send|show|offer|tell|get|make",
    "short": "short|brief|quick|simple|clear|long|precise|one-line|good|proper|nice|formal|basic|plain",
    "summary": "definition|description|summary|introduction|overview|answer|account|note|sketch|lesson",
    "wish": "would like to|want to|need to|have to|must|am trying to|am here to|wish to|came to|hope to|should",
    "grasp": "learn about|know more about|learn|study|read about|find out about|get|know|grasp|hear about|talk about",
    "think": "explain|describe|define|summarize|understand|picture|imagine|see|think of|use|recognize",
    "mate": "my friend|my boss|my colleague|our professor|someone|the book|the chapter|a paper|my brother|the lecture|"
    "the docs|an article|everybody|the course|a blog post|the teacher|my mentor|this page|the code",
    "said": "mentioned|talked about|uses|used|wrote about|speaks of|refers to|asked about|likes|explains|says|mentions",
    "what": "What is it?|What is that?|What does it mean?|What does this mean?|Can you explain it?|Please explain.|Meaning?|"
    "Tell me more.|I do not get it.|Help?|Explain.|What is meant?|Do you know it?|What are they talking about?|Huh?",
    "question": "short|simple|silly|another|next|one more|first|stupid|small|last|dumb|honest|serious",
    "so": "important|slow|fast|hard|useful|needed|so big|limited|good|bad|popular|expensive|necessary|so complicated|"
    "memory bound|difficult|special|better|interesting",
    "is": "is|was|makes|would be|could be",
    "teach": "tell|inform|educate|instruct|enlighten|brief|lecture",
    "about": "about|on|what you know about|something about|more about|all about|everything about",
    "hear": "often hear about|just heard about|am confused by|am lost with|am stuck at|have heard of|was asked about|"
    "am reading about|struggle with|forgot about|wonder about|am curious about|never understood|don't get",
}
_OPTIONS = {slot: tuple(words.split("|")) for slot, words in _SLOTS.items()}
_FRAMES = (
    "<you> <explain> {n}?", "<you> <explain> {a} <to>?", "<explain> {a} <to>.", "<explain> {n} <to>", "<explain> {a}",
    "what is the <point> of {n}?", "what's the <point> of {a}?", "the <point> of {n}", "what <is> the <point> of {a}?",
    "what <must> I <know> about {n}?", "what <must> we <know> about {n}?", "what <must> one <know> about {a}?",
    "<give> me a <short> <summary> of {n}.", "<you> <give> me a <short> <summary> of {n}?", "a <short> <summary> of {n}",
    "I <wish> <grasp> {n}.", "I <wish> <grasp> {n}. <what>", "we <wish> <grasp> {n}", "I <hear> {n}. <what>", "I <hear> {n}.",
    "how <must> you <think> {n}?", "how <must> I <think> {n}?", "how does one <think> {a}?", "how <must> we <think> {n}",
    "<mate> <said> {n}. <what>", "<mate> <said> {a}. <what>", "yesterday <mate> <said> {n}. <what>", "in class <mate> <said> {n}",
    "<question> question: what is {a}?", "<question> question about {n}", "<question> question: <explain> {n}", "<what> {n}",
    "why is {n} <so>?", "is {n} <so>?", "when is {n} <so>?", "do I need {n}?", "when do I use {a}?", "where is {n} used?",
    "who uses {n}?", "why do we need {a}?", "why do we use {n}?", "what happens in {n}?", "what happens without {n}?",
    "<teach> me <about> {n}.", "<teach> us <about> {n}", "<you> <teach> me <about> {n}?", "<about> {n}", "{n}: <what>",
    "<you> help me to <think> {n}?", "help me <think> {n}", "I am new. what is {a}?", "as a beginner, what is {a} to me?",
    "is there a <summary> of {n}?", "do you have a <summary> of {n}?", "what do you <know> about {n}?", "how does {n} help?",
    "what did <mate> mean by {n}?", "what does <mate> mean with {n}?", "{n}, what is that?", "{n} - <what>", "({n})", "\"{n}\"",
    "what is {a}, <to>?", "what is {a} <to>?", "{a}, <you> <explain> that?", "let us talk about {n}", "what about {n}?",
    "tell me the <point> of {n}", "I need a <short> <summary> of {n}", "what makes {n} <so>?", "how is {n} done?",
    "how is {n} different?", "what kind of thing is {a}?", "which part of the server is {a}?", "how big is {a}?",
)  # fmt: skip
_SLOT = re.compile(r"<(\w+)>")
_FORBIDDEN = re.compile(
    "|".join(re.escape(text.rstrip(".?")).replace(r"\{a\}", ".+").replace(r"\{n\}", ".+") for text in HELD_OUT),
    re.IGNORECASE | re.DOTALL,
)


def looks_held_out(request: str) -> bool:
    """Return whether a held-out pattern occurs in ``request``."""
    return _FORBIDDEN.search(request) is not None


def pattern(rng: random.Random, split: Split, loose: bool = False) -> str:
    """Return a pattern of the given split. With ``loose``, it is at times the term between random words."""
    if split == "heldout":
        return rng.choice(HELD_OUT)
    if loose and chance(rng, 6):
        before = " ".join(any_word(rng) for _ in range(rng.randint(0, 3)))
        after = " ".join(any_word(rng) for _ in range(rng.randint(0, 3)))
        return f"{before} {{n}} {after}".strip()
    if chance(rng, 45):
        return rng.choice(TRAIN)
    while True:
        text = rng.choice(_FRAMES)
        while "<" in text:
            text = _SLOT.sub(lambda slot: rng.choice(_OPTIONS[slot[1]]), text)
        if not looks_held_out(text):
            return text[0].upper() + text[1:] if chance(rng, 75) else text
