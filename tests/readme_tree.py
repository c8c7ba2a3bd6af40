"""Writes the script and the tree of the README anew: `python tests/readme_tree.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "hgraph": "what things are",
    "passes": "transform graphs",
    "strategies": "decide",
    "runtime": "does",
    "examples": "",
    "benchmarks": "",
}


def tree() -> str:
    """Returns a table per package, a row per file with the first line of its docstring."""
    parts = []
    for package, what in PACKAGES.items():
        files = sorted((ROOT / package).rglob("*.py"))
        if not files:
            continue
        parts.append(f"**`{package}`**{': ' + what if what else ''}\n\n| file | |\n|---|---|")
        for path in files:
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            parts.append(f"| `{path.relative_to(ROOT)}` | {text.splitlines()[0] if text else ''} |")
        parts.append("")
    return "\n".join(parts) + "\n"


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    script = (ROOT / "examples" / "quickstart.py").read_text()
    text = re.sub(r"```python\n.*?```", lambda _: f"```python\n{script}```", text, count=1, flags=re.DOTALL)
    text = re.sub(r"## The tree\n.*?## License", lambda _: f"## The tree\n\n{tree()}## License", text, flags=re.DOTALL)
    readme.write_text(text)


if __name__ == "__main__":
    main()
