"""What a run tells while it trains: metrics for loggers, and samples."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ligermodels.models.base import DecoderModel
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.run_dir import Metrics, RunDir
from ligermodels.training.samples import Sampler


def logger_openers(names: list[str] | None) -> list[Any]:
    """Return what opens each of the loggers with these names.

    Raises:
        ConfigError: a package is not installed.
    """
    if not names:
        return []
    from ligermodels.integrations.loggers import loggers_by_name

    return loggers_by_name(names)


@contextlib.contextmanager
def logged(run_dir: RunDir, openers: list[Any], settings: Any, start: int) -> Iterator[None]:
    """Let loggers get each line of metrics within the context.

    Args: openers, of `logger_openers`; start, the step from which the run goes on.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(run_dir.listeners.clear)
        for open_logger in openers:
            logger = open_logger(run_dir.path, settings, start)
            stack.callback(logger.close)

            def listen(entry: Metrics, log: Callable[..., None] = logger.log) -> None:
                values = {name: value for name, value in entry.items() if name != "step"}
                log(int(entry["step"]), values)

            run_dir.listeners.append(listen)
        yield


def sampling(
    config: FinetuneConfig,
    run_dir: RunDir,
    model: DecoderModel,
    source: Path,
    *,
    last: int,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    progress: bool,
) -> Callable[[int], None]:
    """Return what writes the samples of a step into the run's folder, and shows them.

    Args: source, the folder of the tokenizer; last, the step from which the run goes on; autocast,
        the context of a forward pass.
    Raises:
        CheckpointError: a chat template is needed and is not there, or samples.jsonl is damaged.
    """
    if not config.sample_prompts:
        return lambda step: None
    done = run_dir.sampled_steps(last)
    sampler = Sampler(
        Tokenizer.from_hf(source),
        config.sample_prompts,
        max_new_tokens=config.sample_tokens,
        chat=config.sample_chat,
    )

    def sample(step: int) -> None:
        if step in done:
            return
        with autocast():
            samples = sampler(model)
        run_dir.log_samples(step, samples)
        for each in samples if progress else ():
            tqdm.write(f"step {step}: {each['prompt']} -> {each['text']}", file=sys.stderr)

    return sample
