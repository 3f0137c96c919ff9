"""docs/vllm.md says what is refused under vLLM, all of it."""

from pathlib import Path

from workerkit.plugins.vllm import settings

PAGE = Path(__file__).resolve().parents[2] / "docs/vllm.md"


def test_every_option_that_is_refused_is_on_the_page():
    text = PAGE.read_text("utf-8")
    assert [option for option, _, _ in settings._REFUSED if option not in text] == []
