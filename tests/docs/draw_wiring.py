"""Draws docs/wiring-cpu-v2.svg: the picture of `workerkit wiring --html`, with the styles that it needs to stand alone.

Run it from the root of the repository when parts of cpu-v2 have changed: `python tests/docs/draw_wiring.py`.
"""

import re
import sys
import tempfile
from pathlib import Path

from workerkit.framework.cli.main import main

STYLE = """<style>
text{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
.key{font-weight:600;font-size:13px;fill:#0f172a}.part{font-size:11.5px;fill:#475569}
path{fill:none;stroke-width:1.4;stroke-opacity:.45}path.later{stroke-dasharray:5 4}
</style><rect width="100%" height="100%" fill="#f8fafc"/>
"""


def draw(config: Path) -> str:
    """The SVG of a config's wiring."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "wiring.html"
        if main(["wiring", str(config), "--html", str(page)]) != 0:
            sys.exit("workerkit wiring failed")
        found = re.search(r"(<svg[^>]*>)(.*?</svg>)", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, "the page has no SVG any more"
    return found[1] + STYLE + re.sub(r"(?=<path|<g )", "\n", found[2]) + "\n"


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    (root / "docs/wiring-cpu-v2.svg").write_text(draw(root / "configs/cpu-v2.yaml"), encoding="utf-8")
