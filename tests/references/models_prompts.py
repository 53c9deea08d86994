"""What SmolLM2 is asked for its reference: 20 conversations and 30 raw texts of many kinds."""

from __future__ import annotations

Messages = list[dict[str, str]]


def _ask(*turns: str, system: str | None = None) -> Messages:
    """Turns alternate between user and assistant."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return [*messages, *({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))]


CHATS: list[Messages] = [
    _ask("Hello!"),
    _ask("What is the capital of France?"),
    _ask("Write a haiku about the sea."),
    _ask("Explain why the sky is blue to a child of five."),
    _ask("List three uses of a paper clip."),
    _ask("What is 17 + 25?"),
    _ask("Translate 'good morning' into Spanish, German and Japanese."),
    _ask("Write a Python function that reverses a string."),
    _ask("Who are you?", system="You are a pirate. Answer in pirate speech."),
    _ask("Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.", system="Answer in one sentence."),
    _ask("My name is Ada.", "Nice to meet you, Ada! How can I help?", "What is my name?"),
    _ask("Pick a colour.", "Blue.", "Why that one?", "It is calm.", "Pick another."),
    _ask("Give me a JSON object with the keys name and age."),
    _ask("What's the difference between TCP and UDP?"),
    _ask("你好，请介绍一下你自己。"),
    _ask("Pourquoi les chats ronronnent-ils ?"),
    _ask("Tell me a joke 😀"),
    _ask("  leading spaces, and trailing ones  "),
    _ask("Line one\nLine two\n\nLine four: continue the pattern."),
    _ask("Is this valid? <b>bold</b> & \"quoted\" 'text'", system=""),
]

TEXTS: list[str] = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "1, 2, 3, 4, 5,",
    "2 + 2 =",
    "The year 1969 is remembered for",
    "Q: How many legs does a spider have?\nA:",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "To be, or not to be, that is",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 1815, "fields": [',
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\n",
    "E = mc",
    "The three laws of robotics are:\n1.",
    "Il était une fois",
    "今天天气很好，",
    "Привет, как",
    "مرحبا",
    "def f(x):\n\treturn x\n\nclass A:\n\tdef __init__(self",
    "A",
    "\n",
    "    ",
    "Chapter 1\n\nIt was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it was checked by a",
    "ATGCGTACGTTAGC",
    "https://www.example.org/path?query=",
    "The mitochondrion is the",
    "Roses are red,\nViolets are blue,\n",
    "for (int i = 0; i < n; i++) {\n    sum +=",
]
