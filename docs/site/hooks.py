"""What mkdocs runs while it builds the site: pages that are made from the code, and links.

A page of a family shows its sizes, its parity with transformers and what was measured. A page of
the reference shows the docstrings of a room. A link to a file outside docs/ leads to GitHub. The
gallery is a file, so that GitHub shows it, too: `python docs/site/hooks.py` writes it again.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # where the package is not installed

RESULTS = ROOT / "benchmarks" / "results"
BLOB = "https://github.com/ligermodels/ligermodels/blob/main/"
SITE = "https://ligermodels.github.io/ligermodels/"
GALLERY = """\
# Gallery

Each entry runs on a CPU in about a minute with a small model, and on a GPU with a large one: put
its name or folder in the place of `build/smollm2`. Type the commands in the folder of the
repository; `python examples/smollm2.py build/smollm2` makes the small model without the hub, and
`python -m examples.gallery build/smollm2 --output-dir runs/gallery` runs all entries.

Pictures and numbers are those of the commands as they stand here. Seconds are those of one CPU
core: user and system time of all processes, loading included.

The second command of an entry is for a GPU. In it, `big` is a larger model, such as
HuggingFaceTB/SmolLM2-1.7B-Instruct; its numbers are those of random weights of that size on one
{gpu}, while {beside}: the seconds from start to end, compilation
included, and the GPU memory that PyTorch had reserved at the peak.
"""
RECIPES = """\
A recipe holds the options of `ligermodels finetune` for one model on one GPU of 80 GB, without your
data: `ligermodels finetune --config examples/recipes/llama-3.1-8b-qlora.yaml --train-files my.jsonl
--output-dir runs/mine`. The numbers are from benchmarks with the same sizes and optimizer and
random weights, on the GPU in the table; the memory is what tensors take at the peak. Where memory
is to spare, a run keeps more and recomputes less. Where documents did not fill the rows, the table
says how many tokens of how many a step had. `python -m benchmarks.recipes` measures all recipes as
`finetune` runs them, here with `--budget 78GiB`.
"""
_LLAMA = {"layers": 32, "batch x seq": "1 x 8192", "AdamW": "ligermodels", "run": 2}
# Recipe -> the file, the list and the row of a benchmark with its model, sizes and optimizer. The
# other recipes have theirs in recipes.json, from `benchmarks.recipes`.
MEASURED = {
    "llama-3.1-8b": ("float8", "steps", _LLAMA | {"row": "bfloat16"}),
    "llama-3.1-8b-float8": ("float8", "steps", _LLAMA | {"row": "delayed"}),
    "llama-3.1-8b-lora": (
        "qlora_h100",
        "weights of five kinds, one run",
        {"row": "ligermodels bfloat16"},
    ),
    "llama-3.1-8b-qlora": ("qlora_h100", "rows", {"row": "ligermodels, --memory 12.5GiB"}),
    "qwen3-30b-a3b-qlora": (
        "expert_lora",
        "rows",
        {"layers": 48, "bits": 4, "recomputes": "nothing"},
    ),
}
# Parts of experts.json: the models of the layers by their width, and those of steps of decoding.
LAYERS = {2048: "qwen3-30b-a3b", 2880: "gpt-oss-20b", 4096: "mixtral-8x7b-v0.1"}
DECODING = {
    "decoding": ("qwen3-30b-a3b", "bf16"),
    "decoding, 4 bits": ("qwen3-30b-a3b", "4 bits"),
    "decoding, gpt-oss-20b": ("gpt-oss-20b", "bf16"),
    "decoding, gpt-oss-20b, 4 bits": ("gpt-oss-20b", "4 bits"),
}
# Pages that say what was measured or verified.
REPORTS = ("benchmarks.md", "devices.md", "parity.md", "parity_gpu.md", "testing.md")
REPORTS += ("trainers_matrix.md",)
# Title of a page of the reference -> the modules of the package whose public names it shows. A
# package stands for the names of its `__all__`.
REFERENCE = {
    "Package": [""],
    "Models": ["models.base:DecoderModel", "models.config:ModelConfig", "models.hf_model:HFModel"],
    "Layers": ["layers"],
    "Kernels": ["kernels"],
    "Heads": [
        "heads.classifier:LigerClassifier",
        "heads.embedding:EmbeddingModel",
        "heads.medusa:MedusaHeads",
    ],
    "Generation": [
        "generation.generate:generate",
        "generation.many:generate_many",
        "layers.kv_cache:KVCache",
    ],
    "Text": ["text"],
    "Memory": ["memory.plan:MemoryPlan LayerPlan Prediction", "models.planned:PlannedModel"],
    "float8": ["float8"],
    "Adapters": ["adapters"],
    "Losses": [
        "losses.preference",
        "losses.kto",
        "losses.policy",
        "losses.reward",
        "losses.contrastive",
        "losses.distillation",
        "losses.terms",
    ],
    "Training": [
        "training.config:FinetuneConfig ModelOptions DataOptions AdapterOptions ScheduleOptions "
        "OptimizerOptions MemoryOptions ParallelOptions OutputOptions",
        "training.losses:Loss SFT DPO",
        "training.objectives:Objective",
        "training.finetune:finetune",
        "training.reports:FinetuneResult",
    ],
    "Converters": [
        "converters.weight_map:Entry Span Towers WeightMap packed_entry",
        "converters.verify:verify compare Report",
        "converters.inspect:describe Description",
    ],
    "Other tools": [
        "integrations.hf_model:LigerForCausalLM",
        "integrations.peft_adapters:get_peft_model load_peft_model",
        "integrations.trl_trainers",
        "checks.check_family:check_family FamilyReport",
    ],
    "Errors": ["errors:LigerError ConfigError CheckpointError DataError SaveError"],
}


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation."""
    made: dict[str, list[str]] = {}
    for uri, _ in (*family_pages(), *reference_pages()):
        made.setdefault(uri.partition("/")[0], []).append(uri)
    for entry in config.nav:
        for title in [*entry] if isinstance(entry, dict) else ():
            if (folder := title.lower()) in made:
                index = f"{folder}/index.md"
                entry[title] = [index, *(uri for uri in made[folder] if uri != index)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of benchmarks/results and the pages that are made from the code."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.glob("*.png")):
        uri = f"results/{picture.name}"
        files.append(File.generated(config, uri, abs_src_path=str(picture)))
    for uri, text in (*family_pages(), *reference_pages()):
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links and pictures that leave docs/ lead to GitHub and to the copied pictures.

    The files in docs/ name pages that are made here by their address, for readers on GitHub. The
    search shows what was measured or verified after what tells how something is done.
    """
    if page.file.src_uri in REPORTS:
        page.meta["search"] = {"boost": 0.2}
    for folder in ("families", "reference"):
        markdown = markdown.replace(f"]({SITE}{folder}/)", f"]({folder}/index.md)")
    return outside_links(markdown, page.file.src_uri)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the link to the repository from asking GitHub for its stars."""
    return output.replace(' data-md-component="source"', "")


def outside_links(markdown: str, uri: str) -> str:
    """Return the text of the page `uri` with each link that leaves docs/ replaced."""

    def replace(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join("docs", os.path.dirname(uri), match[1]))
        anchor = match[2] or ""
        if path.startswith("docs" + os.sep):
            return match[0]
        if path.startswith("benchmarks/results/") and path.endswith(".png"):
            return f"](results/{os.path.basename(path)})"
        return f"]({BLOB}{path}{anchor})"

    return re.sub(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)", replace, markdown)


def family_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of a page for each family, and of their index."""
    from ligermodels.models.auto import families

    rows = []
    for name, cls in families().items():
        module = sys.modules[cls.__module__]
        what = (module.__doc__ or "").strip().split("\n")[0]
        title = cls.__name__.removeprefix("Liger").replace("_", ".")
        if cls.config_class.model_type != name:
            title += f" ({name})"
        rows.append(
            f"| [{title}]({name}.md) | `{name}` | {len(cls.config_class.presets)} | {what} |"
        )
        yield f"families/{name}.md", family_page(name, cls, title, module.__doc__ or "")
    head = "| family | model_type | sizes by name | |\n| --- | --- | --- | --- |\n"
    intro = (
        "# Families\n\nEach family is one file, which reads top to bottom. `ligermodels inspect "
        "NAME` tells whether a checkpoint can be loaded, and [a family of your "
        "own](../adding_a_family.md) is one file, too.\n\n"
    )
    yield "families/index.md", intro + head + "\n".join(rows) + "\n"


def family_page(name: str, cls: Any, title: str, doc: str) -> str:
    """Return the card of a family."""
    config = cls.config_class
    preset = next(iter(config.presets), None)
    lines = [f"# {title}", "", doc.strip(), ""]
    file = Path(sys.modules[cls.__module__].__file__ or "").relative_to(ROOT)
    lines += [f"The source is [{file}]({BLOB}{file}).", ""]
    if preset is not None:
        lines += [
            "```python",
            "import torch",
            f"from ligermodels import {cls.__name__}, {config.__name__}",
            "",
            f'config = {config.__name__}.preset("{preset}")',
            'with torch.device("meta"):  # takes no memory; from_hf(folder) loads a checkpoint',
            f"    model = {cls.__name__}(config)",
            "```",
            "",
        ]
    lines += ["## Sizes", "", *size_table(cls)]
    own = own_fields(config())
    if own:
        lines += ["", "## Its own config fields", "", "| field | default |", "| --- | --- |"]
        lines += [f"| `{field}` | `{value!r}` |" for field, value in own.items()]
    parity = [line for line in parity_rows() if line.split("|")[1].strip() == name]
    if parity:
        lines += ["", "## Parity with transformers", ""]
        lines += ["The largest errors of all rows of [parity](../parity.md), in float32.", ""]
        lines += ["| logits | loss | gradients | generation | round trip | compile |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += ["|" + "|".join(line.split("|")[2:]) for line in parity]
    return "\n".join([*lines, *measured_lines(config), *recipe_lines(cls)]) + "\n"


def size_table(cls: Any) -> Iterator[str]:
    """Yield a table of the published sizes of a family."""
    columns = "size, parameters, layers, hidden, query and key heads, vocabulary, positions"
    yield f"| {columns.replace(', ', ' | ')} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for preset in cls.config_class.presets:
        config = cls.config_class.preset(preset)
        count = sum(math.prod(entry.shape) for entry in cls.weight_map(config))
        yield (
            f"| `{preset}` | {count / 1e9:.2f}B | {config.num_hidden_layers} "
            f"| {config.hidden_size} | {config.num_attention_heads}, {config.num_key_value_heads} "
            f"| {config.vocab_size} | {config.max_position_embeddings} |"
        )


def own_fields(config: Any) -> dict[str, Any]:
    """Return the fields that not every family has, with their defaults."""
    from dataclasses import fields

    from ligermodels.models.config import ModelConfig

    shared = {each.name for each in fields(ModelConfig)}
    names = [each.name for each in fields(config) if each.name not in shared]
    return {name: getattr(config, name) for name in names}


def parity_rows() -> list[str]:
    """Return the rows of the first table of docs/parity.md."""
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    table = text.partition("## The largest error of each family")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ")]


def measured_lines(config: Any) -> list[str]:
    """Return the tables of what was measured on one H200: steps, layers of experts, decoding."""
    found = {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("families", "experts", "hybrid", "cards")
    }
    hybrid, layers, lines = found["hybrid"], found["experts"]["layers"], []
    others = [{"preset": name} | step for name, step in found["cards"]["steps"].items()]
    steps = [
        f"| {row['preset']}, {row['seq']} | {row['implementation']} | {row['ms']:.1f} "
        f"| {row['peak GiB']:.1f} |"
        for row in found["families"]["rows"]
        if row["preset"].partition(",")[0] in config.presets and "ms" in row
    ]
    steps += [
        f"| {step['preset']}, {step['layers']} layers, {step['tokens']} "
        f"| {row['implementation']} | {row['ms with AdamW']:.1f} "
        f"| {row['peak GiB with AdamW']:.1f} |"
        for step in (found["experts"]["step"], hybrid["step_h200"], *others)
        if step["preset"] in config.presets
        for row in step["rows"]
        if "ms with AdamW" in row
    ]
    if steps:
        lines += ["", "A training step in bfloat16 with AdamW on one H200.", ""]
        lines += ["| model, tokens | implementation | ms | peak GiB |", "| --- | --- | --- | --- |"]
        lines += steps
    rows = [
        f"| {sizes['rows']}{', one expert in all tokens' * sizes['skewed']} "
        f"| {row['implementation']} | {row['ms']:.2f} | {row['scratch GB']:.2f} |"
        for row in layers
        for sizes in [row["sizes"]]
        if LAYERS[sizes["hidden"]] in config.presets and "scratch GB" in row
    ]
    if rows:
        lines += ["", "Forward and backward of one layer of experts in bfloat16 on one H200, and"]
        lines += ['the memory beyond inputs, outputs and gradients. "eager" sorts the rows, and']
        lines += ["computes torch's grouped products of them.", ""]
        lines += ["| tokens | implementation | ms | GB |", "| --- | --- | --- | --- |", *rows]
    rows = [
        f"| {preset}, {weights} | {row['rows']} | {row['step']:.2f} | {row['GB']:.1f} |"
        for key, (preset, weights) in DECODING.items()
        for row in found["experts"][key]
        if preset in config.presets
    ]
    if rows:
        lines += ["", "A step of decoding after 512 tokens on one H200, and what it reads.", ""]
        lines += ["| model, weights | rows | ms | GB |", "| --- | --- | --- | --- |", *rows]
    return ["", "## Measured", *(lines or ["", "No step of this family has been timed on a GPU."])]


def gallery_page() -> str:
    """Return the text of docs/gallery.md: the entries, recipes for GPUs, and all files."""
    from examples.gallery import ENTRIES

    measured, on_gpu = (
        json.loads((RESULTS / f"gallery_{kind}.json").read_text(encoding="utf-8"))
        for kind in ("cpu", "gpu")
    )
    measured = measured["entries"]
    intro = GALLERY.format(gpu=on_gpu["environment"]["gpu"].split()[1], beside=on_gpu["beside"])
    lines = [*intro.splitlines(), "", "| entry | seconds | on a GPU |", "| --- | --- | --- |"]
    took = {
        name: f"{row['seconds']} s"
        + (f", {row['peak GiB']} GiB" if row["peak GiB"] else "")
        + (f", {row['gpus']} GPUs" if "gpus" in row else "")
        for name, row in on_gpu["entries"].items()
    }
    for entry in ENTRIES:
        link = f"#{anchor(entry.title)}"
        cells = [f"[{name}](#recipes-for-gpus)" for name in entry.recipes]
        cells += [f"[{took[entry.name]}]({link})"] if entry.name in took else []
        lines.append(
            f"| [{entry.title}]({link}) | {measured[entry.name]['seconds']} "
            f"| {', '.join(cells) or 'not measured'} |"
        )
    for entry in ENTRIES:
        more = ", ".join(f"[{page.replace('_', ' ')}]({page}.md)" for page in entry.pages)
        source = entry.run if entry.is_recipe else f"examples/{entry.run.split()[0]}.py"
        lines += ["", f"## {entry.title}", "", "```text"]
        lines += [entry.command("build/smollm2", f"runs/{entry.name}"), "```", ""]
        says = entry.says.format(**measured[entry.name]["numbers"])
        lines += [f"![{says}](gallery/{entry.name}.png)", "", f"*{says}*", ""]
        if entry.name in took:
            command = entry.command("big", f"runs/{entry.name}-gpu", on_gpu=True)
            lines += [f"On a GPU ({took[entry.name]}):", "", "```text", command, "```", ""]
        lines.append(f"The source is [{source}]({BLOB}{source}). Read on: {more}.")
    return "\n".join([*lines, *recipe_lines(), *file_lines()]) + "\n"


def anchor(title: str) -> str:
    """Return the name that GitHub and mkdocs both give a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def recipe_lines(family: Any = None) -> Iterator[str]:
    """Yield a table of the recipes for GPUs with what was measured, of one family or of all."""
    from benchmarks.recipes import preset_of
    from ligermodels.training.config import read_config

    rows = {}
    found = json.loads((RESULTS / "recipes.json").read_text(encoding="utf-8"))
    own = {row["recipe"]: ("recipes", "rows", row) for row in found["rows"] if "ms" in row}
    for recipe, (name, part, wanted) in (MEASURED | own).items():
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        row = next(row for row in found[part] if wanted.items() <= row.items())
        rows[recipe] = row | {"gpu": found["environment"]["gpu"].split()[1]}
    files = {
        file: preset_of(read_config(file)["model"])[0]
        for file in sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
    }
    files = {file: cls for file, cls in files.items() if family in (None, cls)}
    if files:
        yield from ("", "## Recipes for GPUs", "", *RECIPES.splitlines(), "")
        yield (
            "| recipe | what it trains | GPU | tokens a step | seconds a step | tokens/s "
            "| peak GiB |"
        )
        yield "| --- | --- | --- | --- | --- | --- | --- |"
    for file in files:
        what = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        options = read_config(file)
        whole = options["batch_size"] * options["seq_len"] * (1 + (options.get("loss") == "dpo"))
        numbers = f"not measured | {whole:,} | | |"
        if (row := rows.get(file.stem)) is not None:
            tokens = round(row["ms"] * row["tokens/s"] / 1e3)
            of = "" if tokens > 0.99 * whole else f" of {whole:,}"
            numbers = f"{row['gpu']} | {tokens:,}{of} | {row['ms'] / 1e3:.2f} "
            numbers += f"| {row['tokens/s']:,.0f} | {row['peak GiB']:.1f}"
        yield f"| [{file.stem}]({BLOB}{file.relative_to(ROOT)}) | {what} | {numbers} |"


def file_lines() -> Iterator[str]:
    """Yield tables of all example programs, from their docstrings."""
    titles = {
        "": "All programs",
        "families": "Families from outside of the package",
        "trainers": "Other trainers",
        "clusters": "Clusters",
    }
    for folder, title in titles.items():
        yield from ("", f"## {title}", "", "| file | what it shows | command |")
        yield "| --- | --- | --- |"
        files = (ROOT / "examples" / folder).glob("*.py")
        for file in sorted(file for file in files if file.name not in ("command.py", "rows.py")):
            doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            name = file.relative_to(ROOT)
            what = " ".join(doc.partition("\n\n")[0].split())
            found = re.search(
                r"^ *((?:python|accelerate|torchrun|pyflyte|make) [^\n]*?)(?=  |\n|$)", doc, re.M
            )
            runs = "" if folder == "families" else f"`{found[1] if found else f'python {name}'}`"
            yield f"| [{name.name}]({BLOB}{name}) | {what} | {runs} |"


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page of the reference, and of its index."""
    index = ["# Reference", "", "The public names, with the text of their docstrings.", ""]
    listed = {
        title: dict.fromkeys(each for place in places for each in public_objects(place))
        for title, places in REFERENCE.items()
    }
    page_of = {path: title for title, paths in listed.items() for path in paths}  # the last one
    for title, objects in listed.items():
        page = title.lower().replace(" ", "_") + ".md"
        lines = [f"# {title}", ""]
        elsewhere = [path for path in objects if page_of[path] != title]
        if elsewhere:
            links = (f"[{path.rpartition('.')[2]}][{path}]" for path in elsewhere)
            lines += [f"On other pages: {', '.join(links)}.", ""]
        lines += [f"::: {path}\n" for path in objects if page_of[path] == title]
        names = ", ".join(f"`{path.rpartition('.')[2]}`" for path in objects)
        index.append(f"- [{title}]({page}): {names}")
        yield f"reference/{page}", "\n".join(lines)
    yield "reference/index.md", "\n".join(index) + "\n"


def public_objects(place: str) -> Iterator[str]:
    """Yield where each public class and function of a module is defined, as `module.name`.

    Args: place: a module of the package, or `module:names`. A module without names and without
        `__all__` has its own classes and functions.
    """
    module_name, _, names = place.partition(":")
    module = importlib.import_module(f"ligermodels.{module_name}".rstrip("."))
    own = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    for name in names.split() or own:
        found = getattr(module, name)
        if callable(found):
            yield f"{found.__module__}.{getattr(found, '__qualname__', name)}"


if __name__ == "__main__":
    (ROOT / "docs" / "gallery.md").write_text(gallery_page(), encoding="utf-8")
