"""24 real prompts of 5 to 900 tokens: questions, instructions, code, several languages, and passages of the licence."""

from pathlib import Path

SHORT = (
    "The capital of France is",
    "What is the boiling point of water at sea level?",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "Translate to Spanish: Good morning, how are you today?",
    "List three prime numbers larger than 100.",
    "import torch\nimport torch.nn as nn\n\nclass Attention(nn.Module):",
    "Explain photosynthesis to a ten year old child in two sentences.",
    "Die Hauptstadt von Deutschland ist",
    "Q: If a train travels 60 km in 45 minutes, what is its speed in km/h?\nA:",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Roses are red, violets are blue,",
    "La photosynthèse est le processus par lequel les plantes",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)
CHARS = (300, 500, 700, 900, 1200, 1600, 2200, 2800, 3400, 4300)  # of the licence: about 70 to 900 tokens


def real_prompts() -> list[str]:
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    body = " ".join(text.split())
    return [*SHORT, *(body[200 * i : 200 * i + n] for i, n in enumerate(CHARS))]
