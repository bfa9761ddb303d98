"""The site's own part of MkDocs (`make docs`): pages made from the code and from files outside of docs/.

A link to a file of the repository that the site does not show, such as a test, becomes its path in code type. The
notebook is turned into Markdown here, in few lines: the known plugin loads scripts from the network.
"""

import importlib
import inspect
import json
import os
import re
import textwrap
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/LOG.md",
    "benchmarks/results/*.md",
    "src/mvm/models/*/README.md",
    "src/mvm/data/README.md",
)
NOTEBOOK = DOCS / "tutorials/quickstart.ipynb"
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)#\s]*)((?:#[^)\s]*)?)\)")  # [words](file#place)
API = {
    "Sampling": ("mvm", "mvm.model", "mvm.generate", "mvm.solver", "mvm.likelihood", "mvm.edit", "mvm.noise"),
    "Training": (
        "mvm.training.loop",
        "mvm.recipes",
        "mvm.recipes.estimate",
        "mvm.objective",
        "mvm.network",
        "mvm.data",
    ),
    "Mathematics": ("mvm.path", "mvm.oracle"),
    "Latents and figures": ("mvm.latent", "mvm.metrics.distances"),
    "Other libraries": (
        "mvm.bridge",
        "mvm.published",
        "mvm.integrations.diffusers",
        "mvm.integrations.comfyui",
        "mvm.integrations.onnx",
    ),
}
MODULES = [name for names in API.values() for name in names]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the modules of the API to the navigation, where `reference/api/` stands."""
    pages = [{group: [{name: f"reference/api/{name}.md"} for name in names]} for group, names in API.items()]
    for section in config.nav or []:
        for place, entry in enumerate(next(iter(section.values()))):
            if entry == {"Python API": "reference/api/"}:
                section["Reference"][place] = {"Python API": pages}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and those that lie outside of docs/."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    made = {
        "index.md": (ROOT / "README.md").read_text("utf-8"),
        "tutorials/quickstart.md": notebook_page(notebook),
        "reference/command-line.md": command_line(),
        "reference/recipe-options.md": recipe_options(),
        **api_pages(),
    }
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    for number, picture in enumerate(pictures(notebook)):
        files.append(File.generated(config, f"tutorials/quickstart-{number}.png", content=picture))
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        uri, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    files.remove(next(file for file in files if file.src_uri == "tutorials/quickstart.ipynb"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    source = "README.md" if page.file.src_uri == "index.md" else page.file.src_uri
    source = source if (ROOT / source).is_file() else f"docs/{source}"

    def link(found: re.Match[str]) -> str:
        whole, words, target, anchor = found[0], found[1], found[2], found[3]
        if "://" in target or not target or target.startswith("mailto:"):
            return whole
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        uri = "index.md" if path == "README.md" else path.removeprefix("docs/").replace(".ipynb", ".md")
        if files.get_file_from_path(uri) is not None:
            return f"{words}({os.path.relpath(uri, os.path.dirname(page.file.src_uri) or '.')}{anchor})"
        if (ROOT / path).exists():
            return f"`{path}`" if words.startswith("![") else words[1:-1]
        return whole  # MkDocs warns of it

    parts = re.split(r"(```.*?```|~~~.*?~~~)", markdown, flags=re.DOTALL)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def api_pages() -> dict[str, str]:
    """Return the pages of the modules by address: a docstring, then every public name, from where it is defined.

    Name by name, since a function called as its own file (mvm.solver.adams) would be taken for the file. What several
    modules name is described on the first page, and linked from the others.
    """
    pages, described = {}, {name: name for name in MODULES}
    for module in MODULES:
        text = inspect.cleandoc(importlib.import_module(module).__doc__ or "")
        parts = [f"# {module}", re.sub(r"(?m)((?:^ {4}.*\n?)+)", lambda code: f"```text\n{code[0]}\n```\n", text)]
        for name in public_names(module):
            value = getattr(importlib.import_module(module), name)
            known = inspect.isclass(value) or inspect.isfunction(value)
            where = f"{value.__module__}.{value.__qualname__}" if known else f"{module}.{name}"
            parts.append(f'<a id="{module}.{name}"></a>')
            if where in described:
                parts.append(
                    f"`{name}`: see [{where}]({described[where]}.md#{where if known else ''})".replace("#)", ")")
                )
            elif known:
                parts.append(f"::: {where}")
                described[where] = module
            else:  # a constant, or the name of a type
                parts.append(f"## {name}\n\n```python\n{name} = {textwrap.shorten(repr(value), 300)}\n```")
        pages[f"reference/api/{module}.md"] = "\n\n".join(parts) + "\n"
    return pages


def command_line() -> str:
    """Return the page of all commands, from their help: what each takes, by groups, then its examples."""
    from mvm.cli import app

    page = app.generate_docs(output_format="markdown", recursive=True, include_hidden=False)
    page = re.sub(r"## Table of Contents\n.*?(?=\*\*)", "", page, count=1, flags=re.DOTALL)  # the margin has one
    page = re.sub(r"^# .*", "# Command line\n\nMade from the commands' own help.", page, count=1)
    sections = []
    for part in re.split(r"(?m)^(?=#{2,3} mvm )", page):
        command = app
        for word in re.findall(r"\S+", part.split("\n")[0])[2:] if part.startswith("##") else ():
            command = command[word]
        examples = textwrap.dedent((command.help_epilogue or "").partition("\n")[2])
        sections.append(f"{part.rstrip()}\n\n**Examples**:\n\n```bash\n{examples}\n```\n\n")
    return "".join(sections)


def recipe_options() -> str:
    """Return the page of all options of a recipe, a table for each section."""
    from mvm.recipes import load_recipe
    from mvm.recipes.docs import as_typed, option_docs, table_docs

    lines = [
        "# Recipe options",
        "",
        "Every option is `--NAME VALUE` of `mvm train` and a key of a recipe's TOML file.",
        "`mvm options WORDS` searches them; `mvm recipes show NAME` explains a recipe's own values.",
    ]
    known: dict[str, Any] = {}
    kinds = (
        ("Models", "digits"),
        ("Networks of kind ddt, where they differ", "imagenette-ddt-clip"),
        ("Autoencoders (stage 1), where they differ", "imagenette-rae-s"),
    )
    for title, name in kinds:
        recipe = load_recipe(name)
        words, docs = table_docs(recipe), option_docs(recipe)
        docs = {option: doc for option, doc in docs.items() if doc != known.get(option)}
        known |= docs
        lines += ["", f"## {title}"]
        section = None
        for name, doc in docs.items():
            table = name.rpartition(".")[0]
            if table != section:
                section = table
                lines += ["", f"### {table or 'recipe'}", "", words.get(table, ""), ""]
                lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
            meaning = " ".join(doc.meaning.split()).replace("|", "\\|")
            lines.append(f"| `{name}` | {doc.type} | `{as_typed(doc.default)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def text_of(value: str | list[str]) -> str:
    """Return a text of a notebook, which may be kept line by line."""
    return value if isinstance(value, str) else "".join(value)


def pictures(notebook: dict[str, Any]) -> Iterator[bytes]:
    """Yield the pictures among a notebook's outputs, in order."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                yield b64decode(text_of(output["data"]["image/png"]))


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its texts, its code, what it printed and its pictures."""
    parts, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(text_of(cell["source"]))
            continue
        parts.append(f"```python\n{text_of(cell['source'])}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output](quickstart-{number}.png)")
                number += 1
            elif said := text_of(output.get("text", data.get("text/plain", ""))).strip():
                parts.append(f"```text\n{said}\n```")
    return "\n\n".join(parts) + "\n"


def public_names(name: str) -> list[str]:
    """Return the public names of a module: what `__all__` says, else the functions and classes that it defines."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if name != "__version__"]
    members = inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isfunction(value))
    return [name for name, value in members if not name.startswith("_") and value.__module__ == module.__name__]
