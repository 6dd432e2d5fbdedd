"""Teach a model to speak in short words, with GRPO and its own `generate_many` as the sampler.

    python -m examples.rewards build/smollm2 --output-dir runs/rewards

The reward of an answer is the share of its words that have at most four letters. The run prints the
mean reward of answers to other questions, before and after.
"""

from pathlib import Path

from examples.command import call, draw_losses, report, tune, write_lines
from ligermodels.training.finetune import FinetuneResult

THINGS = (
    "rain, snow, wind, a river, a lake, the sea, a hill, a wood, a farm, a town, a ship, a train, "
    "bread, milk, salt, tea, gold, iron, glass, paper, a clock, a lamp, a knife, a drum, a cat, "
    "a horse, a bee, a whale"
).split(", ")
QUESTIONS = ("What is {}?", "Why do people like {}?", "Tell me about {}.", "How old is {}?")


def short_words(completions: list, **_: object) -> list[float]:
    """Return the share of short words in each answer; 0 for an answer without words."""
    rewards = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        words = ["".join(filter(str.isalpha, word)) for word in text.split()]
        words = [word for word in words if word]
        rewards.append(sum(len(word) <= 4 for word in words) / max(1, len(words)))
    return rewards


def write_prompts(file: Path, things: list[str], chat: bool) -> None:
    """Write questions about things, as conversations or as plain texts."""
    questions = [each.format(thing) for thing in things for each in QUESTIONS]
    prompts: list = [[{"role": "user", "content": q}] for q in questions] if chat else questions
    write_lines(file, ({"prompt": prompt} for prompt in prompts))


def main(
    model: str, output_dir: Path, *, chat: bool = True, held_out: int = 4, **options: object
) -> FinetuneResult:
    train, heldout = output_dir / "train.jsonl", output_dir / "heldout.jsonl"
    write_prompts(train, THINGS[:-held_out], chat)
    write_prompts(heldout, THINGS[-held_out:], chat)
    settings: dict = {
        "batch_size": 16,
        "gradient_accumulation_steps": 4,
        "learning_rate": 5e-5,
        "num_generations": 8,
        "max_completion_length": 48,
        "seq_len": 256,
        "max_steps": 60,
        "eval_steps": 60,
    }
    settings |= {"loss": "grpo", "reward_function": f"{__file__}:short_words"} | options
    result = tune(model, output_dir / "run", train, heldout, **settings)
    before, after = (found["eval_reward"] for found in (result.eval_before, result.eval_after))
    rewards = [row["reward"] for row in result.metrics if "reward" in row]
    draw_losses(output_dir, "reward of the sampled answers", {"": rewards}, "share of short words")
    report(output_dir, before=before, after=after, steps=result.steps)
    return result


if __name__ == "__main__":
    call(main, __doc__)
