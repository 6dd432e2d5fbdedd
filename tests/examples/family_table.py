"""Check every family in examples/families, and write the table of its README.md.

python -m tests.examples.family_table
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch

from ligermodels.checks.check_family import CHECKS, FamilyReport, _randomize, check_family
from tests import outside
from tests.models.pairs import relative

PAGE = outside.FOLDER / "README.md"
START = "<!-- written by tests/examples/family_table.py -->\n"
END = "<!-- end of the table -->\n"
# The sizes of the models in bf16. Where each token takes every expert, rounding cannot choose
# others: such a change would hide the other errors.
WIDE = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
WIDE_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}


def bfloat16_ratios(name: str, device: str, draws: int = 8) -> list[float]:
    """For each input, return our bf16 logits' error over that of transformers' bf16 logits."""
    import transformers

    auto, cls = transformers.AutoModelForCausalLM, outside.family(name)
    config = cls.config_class.small(**WIDE, **(WIDE_EXPERTS if "moe" in name else {}))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ours = cls(config)
        ours.save_hf(folder)  # for its config.json
        random = auto.from_pretrained(folder, dtype=torch.float32)
        _randomize(random)
        random.to(torch.bfloat16).save_pretrained(folder)
        exact, theirs = (
            auto.from_pretrained(folder, dtype=dtype).to(device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        ours = cls.from_hf(folder, dtype=torch.bfloat16, device=device)
        ratios = []
        for seed in range(draws):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(3, config.vocab_size, (2, 200), generator=generator).to(device)
            expected = exact(ids).logits
            error = relative(ours.head.logits(ours(ids)), expected)
            ratios.append(error / relative(theirs(ids).logits, expected))
    return ratios


def lines_of(name: str) -> int:
    """Return the number of lines of a family's file."""
    return len((outside.FOLDER / f"{name}.py").read_text().splitlines())


def check(name: str) -> FamilyReport:
    return check_family(outside.family(name))


def main() -> None:
    """Print the reports, and write the table if all errors are within their bounds."""
    table = [f"| file | lines | {' | '.join(CHECKS)} |", "|---" * (2 + len(CHECKS)) + "|"]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, report in zip(outside.NAMES, pool.map(check, outside.NAMES)):
            print(report, flush=True)
            assert report.ok, name
            cells = (str(report.worst()[check]) for check in CHECKS)
            table.append(f"| `{name}.py` | {lines_of(name)} | {' | '.join(cells)} |")
    before, start, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + start + "\n".join(table) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
