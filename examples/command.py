"""What the examples share: their command line, a run, the loop of a small model, and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels import pictures
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import FinetuneResult, finetune

DATA = Path(__file__).parent / "data"
TRAIN, HELD_OUT = DATA / "persuasion-train.txt", DATA / "persuasion-heldout.txt"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def call(main: Callable[..., object], description: str | None, model: bool = True) -> None:
    """Call an example's main with the model, the output folder and options of the command line.

    Args: description, the example's docstring; model, whether main takes one.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        epilog="More options, as in --max-steps 20, are the arguments of the example's main; those "
        "that train also take the options of `ligermodels finetune`.",
    )
    if model:
        parser.add_argument("model", help="hub id or local folder, such as build/smollm2")
    parser.add_argument("--output-dir", type=Path, required=True)
    given, words = parser.parse_known_args()
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        parser.error(f"{' '.join(words)}: expected pairs, as in --max-steps 20")
    names = (word[2:].replace("-", "_") for word in words[::2])
    main(**vars(given), **dict(zip(names, map(value_of, words[1::2]))))


def value_of(word: str) -> int | float | str:
    """Return a word of the command line as a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def tune(
    model: str, folder: Path, train: Path, held_out: Path | None, **options: Any
) -> FinetuneResult:
    """Fine-tune a model on a file into a folder, whose older run is removed.

    Args: options: those of `ligermodels finetune`.
    """
    usual: dict[str, Any] = {"save_steps": 0, "overwrite_output_dir": True}
    usual |= {"eval_fraction": 0} if held_out is None else {"eval_files": [str(held_out)]}
    return finetune(
        FinetuneConfig.from_options(
            model=str(model),
            train_files=[str(train)],
            output_dir=str(folder),
            **usual | options,
        )
    )


def write_lines(file: Path, records: Iterable[object]) -> Path:
    """Write records as JSON, one on a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return file


def windows(data: Tensor, batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Return random windows (batch, seq) of data (n,)."""
    return data[torch.randint(len(data) - seq, (batch, 1), generator=generator) + torch.arange(seq)]


def learn(
    model: nn.Module,
    loss_of: Callable[[torch.Generator], Tensor],
    steps: int,
    learning_rate: float = 3e-3,
    every: int = 50,
) -> list[float]:
    """Train a model with AdamW, and return the loss of each step. On a GPU, multiply in bfloat16.

    Args: loss_of: returns the loss of random examples, which it makes on the model's device by
        default; every: how many steps until one is printed.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    generator, history = torch.Generator(device).manual_seed(0), []
    for step in range(steps):
        with device, torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        if step % every == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    return history


@contextmanager
def picture(folder: Path, title: str = "", height: float = 3.2) -> Iterator[Any]:
    """Draw axes within the context, and save them as picture.png in the folder.

    The colours are those of all pictures of this project, for light and for dark pages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with pictures.picture(7.5, height) as figure:
        axes = figure.add_subplot()
        axes.set_title(title)
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        figure.savefig(folder / "picture.png", dpi=110)


def draw_losses(folder: Path, title: str, curves: dict[str, list[float]], label: str) -> None:
    """Draw a number of each step, by the name of its curve."""
    with picture(folder, title) as axes:
        for (name, values), colour, dash in zip(curves.items(), pictures.ORDER, ("-", "--", ":")):
            steps = range(1, len(values) + 1)
            axes.plot(steps, values, dash, color=colour, label=name)  # equal curves both show
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid()


def draw_bars(folder: Path, title: str, values: dict[str, float], form: str = "{:.2f}") -> None:
    """Draw a bar for each value, with its name and the number."""
    with picture(folder, title, height=0.9 + 0.45 * len(values)) as axes:
        bars = axes.barh([*values], [*values.values()], color=pictures.ORDER[: len(values)])
        axes.bar_label(bars, [form.format(value) for value in values.values()], padding=4)
        axes.margins(x=0.12)
        axes.invert_yaxis()


def draw_images(folder: Path, images: Tensor, titles: list[str]) -> None:
    """Draw images (n, height, width) in a row, each under its title."""
    with picture(folder, height=2.2) as axes:
        axes.axis("off")
        for index, (image, title) in enumerate(zip(images, titles)):
            inner = axes.inset_axes((index / len(titles), 0.0, 0.9 / len(titles), 0.85))
            inner.imshow(image, cmap="cividis")
            inner.set(title=title, xticks=[], yticks=[])
            inner.title.set_size(9)


def report(folder: Path, **numbers: float) -> dict[str, float]:
    """Print the numbers that an example found, write them to numbers.json, and return them.

    On a GPU, the peak of its memory is one of them.
    """
    if HERE.type == "cuda":
        numbers["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    for name, value in numbers.items():
        print(f"{name.replace('_', ' ')}: {value:.4g}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return numbers
